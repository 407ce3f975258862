"""Ten small models of the kinds that people have, for figures that do not depend on a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn

import secureinfer as si

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]
INT8 = si.Quantize(weights="int8", granularity="channel")


class Hidden(nn.Module):
    """What a Hugging Face model calls its answer, as a tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self.model(*inputs), self.name)
        return out


class Of(nn.Module):
    """A function of some layers, as a model."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *x: torch.Tensor) -> Any:
        return self._function(self, *x)


def logistic() -> Built:
    return nn.Sequential(nn.Linear(30, 1), nn.Sigmoid()), (torch.randn(8, 30),)


def fraud_mlp() -> Built:
    layers = [nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)]
    return nn.Sequential(*layers), (torch.randn(8, 30),)


def lenet() -> Built:
    layers = [
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(1, 1, 28, 28),)


def resnet18() -> Built:
    return torchvision.models.resnet18(), (torch.randn(1, 3, 32, 32),)


def bert() -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return Hidden(BertModel(config), "last_hidden_state"), (torch.randint(0, 100, (1, 8)),)


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False)
    return Hidden(GPT2Model(config), "last_hidden_state"), (torch.randint(0, 100, (1, 8)),)


def vit() -> Built:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
    )  # fmt: skip
    return Hidden(ViTModel(config), "last_hidden_state"), (torch.randn(1, 3, 16, 16),)


def int8(build: Callable[[], Built]) -> Callable[[], Built]:
    def quantised() -> Built:
        model, inputs = build()
        return si.compress(model, [INT8])[0], inputs

    return quantised


MODELS: dict[str, Callable[[], Built]] = {
    "logistic": logistic,
    "fraud_mlp": fraud_mlp,
    "fraud_mlp_int8": int8(fraud_mlp),
    "lenet": lenet,
    "lenet_int8": int8(lenet),
    "resnet18": resnet18,
    "bert": bert,
    "bert_int8": int8(bert),
    "gpt2": gpt2,
    "vit": vit,
}


def compiled(name: str) -> tuple[Any, nn.Module, tuple[torch.Tensor, ...]]:
    """(program, model, inputs), the same weights and inputs at each call."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    return si.compile(model, inputs), model, inputs
