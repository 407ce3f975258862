"""The classifiers of `secureinfer demo --backend ckks`: ordinary networks, trained here on one half of scikit-learn's data.

`breast_cancer` and `digits` are references for `secureinfer compile secureinfer.classifiers:digits --backend ckks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from .compression.approximate import Approximate
from .compression.report import CompressionReport
from .compression.transform import run
from .compression.tune import FineTune
from .errors import UsageError

SPREAD = 4.0
"""Standardised measurements are cut at this many standard deviations: a range that everybody knows."""
SOFTNESS = 2.0
"""Tuning aims at the float model's logits over this, through a softmax: they say more than labels do."""
BATCH = 64
DEGREE = 2
"""Of the polynomials: a square takes one level. Higher ones gain nothing here, once weights are tuned."""


PACKAGES = {"sklearn": "scikit-learn", "tenseal": "tenseal"}
"""Module -> package, of the extra `he`."""


def check_installed(*modules: str) -> None:
    """Raises UsageError where one of the extra `he` is not installed."""
    missing = [PACKAGES[module] for module in modules if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"this needs {' and '.join(missing)}, which is not installed: pip install 'secureinfer[he]'. TenSEAL has no "
            "wheel for some platforms; backend mpc needs none"
        )


@dataclass(frozen=True)
class Data:
    """Two halves, drawn at random: what the model owner trains on, and what a data owner asks about."""

    x: torch.Tensor
    y: torch.Tensor
    held_x: torch.Tensor
    held_y: torch.Tensor


@dataclass(frozen=True)
class Task:
    """What is learnt, and by which network, in words too. sample: a word for one of them."""

    name: str
    sample: str
    network: str
    load: Callable[[], Data]
    build: Callable[[], nn.Module]


@dataclass(frozen=True)
class Classifier:
    """A trained network and the same with polynomials. report: of what became of its activations."""

    float_model: nn.Module
    polynomial: nn.Module
    report: CompressionReport


def train(task: Task, data: Data) -> Classifier:
    """Train on one half, put polynomials in place of activations, and tune the weights to them, in seconds.

    The same in every run on one machine.
    """
    with _repeatable():
        model = task.build()
        _fit(model, data)
        with torch.no_grad():
            answers = (model(data.x) / SOFTNESS).softmax(1)
        batches = [(data.x[i], answers[i]) for i in _batches(len(data.x))]
        tune = FineTune(batches, nn.functional.cross_entropy, epochs=60, learning_rate=3e-3)
        approximate = Approximate(greatest_degree=DEGREE, fine_tune=tune, check=[data.held_x])
        polynomial, report = run(model, [approximate], [data.x])
    return Classifier(model.requires_grad_(False), polynomial.requires_grad_(False), report)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Fixed seeds, one thread (of layers this small threads only wait for each other); both come back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def _fit(model: nn.Module, data: Data, epochs: int = 40, rate: float = 2e-2) -> None:
    steps = epochs * -(-len(data.x) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for i in _batches(len(data.x)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[i]), data.y[i]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()


def _batches(count: int) -> Iterator[torch.Tensor]:
    """Indices of all, in a random order."""
    order = torch.randperm(count)
    for start in range(0, count, BATCH):
        yield order[start : start + BATCH]


def _halves(found: Any) -> Data:
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, kept = order[: len(x) // 2], order[len(x) // 2 :]
    return Data(x[kept], y[kept], x[held], y[held])


def _patients() -> Data:
    """Measurements in standard deviations of the training half, which are public."""
    from sklearn.datasets import load_breast_cancer

    data = _halves(load_breast_cancer())
    mean, std = data.x.mean(0), data.x.std(0)
    x, held_x = (((part - mean) / std).clamp(-SPREAD, SPREAD) for part in (data.x, data.held_x))
    return Data(x, data.y, held_x, data.held_y)


def _images() -> Data:
    """8 x 8 pixels from 0 to 1."""
    from sklearn.datasets import load_digits

    data = _halves(load_digits())
    x, held_x = (part.reshape(-1, 1, 8, 8) / 16 for part in (data.x, data.held_x))
    return Data(x, data.y, held_x, data.held_y)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 16), nn.SiLU(), nn.Linear(16, 2))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.SiLU(), nn.Flatten(), nn.Linear(108, 10),
    )  # fmt: skip


BREAST_CANCER = Task("breast cancer", "patient", "a 30-16-2 perceptron", _patients, _perceptron)
DIGITS = Task(
    "digits",
    "image",
    "convolutions of 8 and 12 channels with batch norms and average pooling",
    _images,
    _convolutions,
)
TASKS = (BREAST_CANCER, DIGITS)


def breast_cancer() -> tuple[nn.Module, tuple[torch.Tensor], list[torch.Tensor]]:
    """(model with polynomials, one patient, calibration): benign or malignant from 30 measurements."""
    return _reference(BREAST_CANCER)


def digits() -> tuple[nn.Module, tuple[torch.Tensor], list[torch.Tensor]]:
    """(model with polynomials, one image, calibration): which digit an 8 x 8 image shows."""
    return _reference(DIGITS)


def _reference(task: Task) -> tuple[nn.Module, tuple[torch.Tensor], list[torch.Tensor]]:
    check_installed("sklearn")
    data = task.load()
    return train(task, data).polynomial, (data.x[:1],), [data.x]
