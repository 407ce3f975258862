"""Convolutional networks on images: digits small and as LeNet takes them, and ResNet-18 at its full size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..classifiers import DIGITS, Data, check_installed
from .subject import AGREEMENT, Built, Subject, agreement, finished, repeatable, settled, top1, turns
from .tabular import classifier, fitted

RESNET_SIDE = 224
RESNET_KNOWN, RESNET_ASKED = 16, 16
"""Images that its statistics and calibration are taken from, and those that it is asked about."""


def _classifier(
    make: Callable[[], nn.Module], load: Callable[[], Data], epochs: int
) -> Callable[[int, Path | None], Built]:
    def build(batch: int, state: Path | None) -> Built:
        check_installed("sklearn")
        data = load()
        module = make() if state else fitted(make, data, epochs=epochs)
        return classifier(finished(module, state), data, batch, "top-1 of labels", top1)

    return build


def _enlarged() -> Data:
    """Digits of 8 x 8 pixels drawn on 28 x 28."""
    data = DIGITS.load()
    x, held_x = (
        nn.functional.interpolate(part, size=(28, 28), mode="bilinear", align_corners=False)
        for part in (data.x, data.held_x)
    )
    return Data(x, data.y, held_x, data.held_y)


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def pictures(count: int, side: int, seed: int) -> Tensor:
    """(count, 3, side, side), standardised: patches of many sizes and strengths, as unlike each other as photographs are.

    Of plain noise a deep network makes the same features each time, and its decisions would say nothing.
    """
    g = torch.Generator().manual_seed(seed)
    image = torch.zeros(count, 3, side, side)
    for cells in (2, 4, 8, 16, 32):
        strength = torch.rand(count, 3, 1, 1, generator=g) * (32 / cells) ** 0.5
        patches = torch.randn(count, 3, cells, cells, generator=g)
        image += strength * nn.functional.interpolate(patches, size=(side, side), mode="bicubic")
    mean, std = image.mean((1, 2, 3), keepdim=True), image.std((1, 2, 3), keepdim=True)
    return (image - mean) / std + 0.5 * torch.randn(count, 3, 1, 1, generator=g)


def _resnet(known: Tensor) -> nn.Module:
    """Random weights, with the batch norms' statistics of these images and classes that are all decided for."""
    import torchvision  # type: ignore[import-untyped]

    with repeatable():
        model: nn.Module = torchvision.models.resnet18(weights=None)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over all batches, none of which counts more
    with torch.no_grad():
        model.train()
        for part in known.split(8):  # type: ignore[no-untyped-call]
            model(part)
        model.eval()
        settled(model.get_submodule("fc"), model(known))
    for norm in norms:
        norm.momentum = 0.1
    return model


def _resnet18(batch: int, state: Path | None) -> Built:
    import torchvision

    known = pictures(max(RESNET_KNOWN, batch), RESNET_SIDE, seed=1)
    asked = pictures(max(RESNET_ASKED, 2 * batch), RESNET_SIDE, seed=2)
    module = torchvision.models.resnet18(weights=None) if state else _resnet(known[:RESNET_KNOWN])
    return Built(
        finished(module, state),
        examples=turns(1, batch, known)[0],
        calibration=turns(max(1, 4 // batch), batch, known),
        held_out=turns(len(asked) // batch, batch, asked),
        tokens=None,
        metric=AGREEMENT,
        score=agreement,
    )


SUBJECTS = (
    Subject(
        "digits-cnn",
        "CNN of two convolutions on 8×8 digits, trained",
        "trained",
        "8×8 pixels",
        _classifier(DIGITS.build, DIGITS.load, epochs=40),
    ),
    Subject(
        "lenet",
        "LeNet-5 with ReLU on 28×28 digits, trained",
        "trained",
        "28×28 pixels",
        _classifier(_lenet, _enlarged, epochs=10),
    ),
    Subject("resnet18", "ResNet-18 at 224×224, random weights", "random", "3×224×224 pixels", _resnet18),
)
