"""The models of the CKKS benchmark: plain torch, fixed weights, squares as activations, inputs within [0, 1].

Weights of the two image models are torch's initial ones: they cost what trained ones cost. The layers of `square_mlp` and
`lola`, and their names, are those of benchmarks/peers/orion.py, which takes their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

Case = tuple[nn.Module, torch.Tensor]


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def _fixed(shape: Sequence[int], make: Callable[[], list[nn.Module]]) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*make()).eval(), torch.rand(*shape)


def matvec() -> Case:
    """One linear layer 784-128."""
    return _fixed((1, 784), lambda: [nn.Linear(784, 128)])


def square_mlp() -> Case:
    """784-128-128-10, the MLP of Orion's examples without batch norms, which it folds anyway."""
    return _fixed(
        (1, 784),
        lambda: [nn.Linear(784, 128), Square(), nn.Linear(128, 128), Square(), nn.Linear(128, 10)],
    )


def lola() -> Case:
    """LoLA as in Orion's examples: five maps of 14 x 14 from windows of 2 x 2, then 980-100-10.

    The network of the paper (Brutzkus et al., ICML 2019) has windows of 5 x 5 and 845-100-10.
    """
    return _fixed(
        (1, 1, 28, 28),
        lambda: [
            nn.Conv2d(1, 5, 2, stride=2), Square(), nn.Flatten(), nn.Linear(980, 100), Square(), nn.Linear(100, 10)
        ],
    )  # fmt: skip


def digits_mlp(batch: int = 1) -> Case:
    """64-32-10 trained on scikit-learn's digits; so many of them, over and over."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model, _ = _fixed((1, 64), lambda: [nn.Linear(64, 32), Square(), nn.Linear(32, 10)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.requires_grad_(False), images[torch.arange(batch) % len(images)]
