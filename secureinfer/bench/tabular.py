"""Perceptrons on rows of numbers: fraud, a diagnosis, and a ladder of widths.

Data are scikit-learn's, made or packaged with it, in halves: one is trained on, the other is asked about.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..classifiers import BREAST_CANCER, SPREAD, Data, check_installed
from ..compression.approximate import Approximate
from ..compression.tune import FineTune
from .subject import (
    AGREEMENT,
    Built,
    Score,
    Subject,
    agreement,
    balanced,
    finished,
    repeatable,
    top1,
    turns,
    turns_to_use,
)

TRAIN_BATCH = 64
TUNING_STEPS = 900
"""Of the weights, to polynomials: seconds, and more gain nothing here."""
FRAUDS = 0.03
"""The part of all transactions that is fraud."""


def shuffled(count: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Indices of all rows in a random order, in batches to train on."""
    order = torch.randperm(count, generator=generator)
    return [order[start : start + TRAIN_BATCH] for start in range(0, count, TRAIN_BATCH)]


def fitted(
    make: Callable[[], nn.Module], data: Data, *, epochs: int, rate: float = 2e-2, weigh: bool = False
) -> nn.Module:
    """Trained on the first half, with fixed seeds, on one thread: in layers this small more would wait for each other.

    weigh: each class counts as much as any other, however rare it is.
    """
    with repeatable(threads=1), torch.enable_grad():
        model = make()
        weights = len(data.y) / data.y.bincount().float() if weigh else None
        loss = nn.CrossEntropyLoss(weight=weights)
        steps = epochs * -(-len(data.x) // TRAIN_BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        for _ in range(epochs):
            for rows in shuffled(len(data.x)):
                optimizer.zero_grad()
                loss(model(data.x[rows]), data.y[rows]).backward()
                optimizer.step()
                schedule.step()
    return model


def tuned(module: nn.Module, x: Tensor, *, degree: int = 2, epochs: int, rate: float = 3e-3) -> Approximate:
    """Polynomials with weights tuned to them, on the half that was trained on, towards the float model's logits.

    Its softened logits say more than labels do (secureinfer/classifiers.py does the same).
    """
    with torch.no_grad():
        answers = (module(x) / 2.0).softmax(1)
    batches = [(x[rows], answers[rows]) for rows in shuffled(len(x), torch.Generator().manual_seed(0))]
    tune = FineTune(batches, nn.functional.cross_entropy, epochs=epochs, learning_rate=rate)
    return Approximate(greatest_degree=degree, fine_tune=tune)


def classifier(
    module: nn.Module, data: Data, batch: int, metric: str, score: Callable[[Sequence[Tensor]], Score]
) -> Built:
    """A trained classifier with the held-out half in turns. score: top1 or balanced, of labels."""
    held = turns(turns_to_use(len(data.held_x), batch), batch, data.held_x, data.held_y)
    return Built(
        module,
        examples=turns(1, batch, data.x)[0],
        calibration=turns(max(1, 256 // batch), batch, data.x),
        held_out=tuple((x,) for x, _ in held),
        tokens=None,
        metric=metric,
        score=score([y for _, y in held]),
        approximate=tuned(module, data.x, epochs=max(1, TUNING_STEPS * TRAIN_BATCH // len(data.x))),
    )


def transactions() -> Data:
    """Made-up transactions of 30 measurements, of which few are fraud, cut at SPREAD standard deviations.

    Those asked about are half fraud, one by one in turn, so that each run of a few answers tells of both classes; balanced
    accuracy is the same whatever their parts are.
    """
    from sklearn.datasets import make_classification

    found, labels = make_classification(
        n_samples=16000, n_features=30, n_informative=10, n_redundant=6, n_clusters_per_class=3,
        weights=[1 - FRAUDS], flip_y=0.002, class_sep=1.2, random_state=0,
    )  # fmt: skip
    x, y = torch.tensor(found, dtype=torch.float32), torch.tensor(labels)
    train, held = slice(0, 8000), slice(8000, None)
    mean, std = x[train].mean(0), x[train].std(0)
    x = ((x - mean) / std).clamp(-SPREAD, SPREAD)
    held_x, held_y = x[held], y[held]
    fraud, honest = held_x[held_y == 1], held_x[held_y == 0]
    count = len(fraud)
    asked = torch.stack([honest[:count], fraud], 1).flatten(0, 1)
    return Data(x[train], y[train], asked, torch.tensor([0, 1]).repeat(count))


def _fraud_network() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def _fraud(batch: int, state: Path | None) -> Built:
    check_installed("sklearn")
    data = transactions()
    module = _fraud_network() if state else fitted(_fraud_network, data, epochs=12, rate=1e-2, weigh=True)
    return classifier(finished(module, state), data, batch, "balanced accuracy", balanced)


def _patients(make: Callable[[], nn.Module]) -> Callable[[int, Path | None], Built]:
    def build(batch: int, state: Path | None) -> Built:
        check_installed("sklearn")
        data = BREAST_CANCER.load()
        module = make() if state else fitted(make, data, epochs=40)
        return classifier(finished(module, state), data, batch, "top-1 of labels", top1)

    return build


def perceptron(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them. He's initial weights: values keep their size at any width, and so do ranges."""
    layers: list[nn.Module] = []
    with repeatable():
        for before, after in itertools.pairwise(widths):
            linear = nn.Linear(before, after)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _ladder(width: int) -> Subject:
    def build(batch: int, state: Path | None) -> Built:
        known, asked = (
            torch.randn(256, width, generator=torch.Generator().manual_seed(seed)).clamp(-SPREAD, SPREAD)
            for seed in (1, 2)
        )
        return Built(
            finished(perceptron(width, width, width, 10), state),
            examples=turns(1, batch, known)[0],
            calibration=turns(max(1, 256 // batch), batch, known),
            held_out=turns(turns_to_use(256, batch), batch, asked),
            tokens=None,
            metric=AGREEMENT,
            score=agreement,
        )

    title = f"three-layer perceptron {width}-{width}-{width}-10, random weights"
    return Subject(f"mlp-{width}", title, "random", f"{width} features", build)


SUBJECTS = (
    Subject(
        "logistic",
        "logistic regression on breast cancer, trained",
        "trained",
        "30 features",
        _patients(lambda: nn.Linear(30, 2)),
    ),
    Subject("fraud-mlp", "fraud MLP 30-64-32-2, trained", "trained", "30 features", _fraud),
    Subject(
        "breast-cancer",
        "breast-cancer MLP 30-16-2, trained",
        "trained",
        "30 features",
        _patients(BREAST_CANCER.build),
    ),
    *(_ladder(width) for width in (64, 256, 1024)),
)
