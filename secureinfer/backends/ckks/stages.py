"""Stages: a model as matrices and polynomials in turn, and what it gives in plaintext, with noise or without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...graph.polynomials import SQUARE, Fit, evaluate, multiplicative_depth

INPUTS = "inputs"


@dataclass
class Stage:
    """One activation or the output: values = the affine maps, and what is done with them.

    parts: (base, matrix [m, n]) pairs; where a window is not (1, 1), of the base's images summed over such windows. shapes:
    of each base's images, if it is such.
    kind: "polynomial" or "output". coefficients: ascending, of a polynomial. image: channels, height and width of the rows,
    if they are images. generic: the same matrices of other weights, until masks (where they may have an entry) and windows
    are taken from them. outside: values of the calibration beyond the fit's range. middle, reach: of that range.
    """

    name: str
    kind: str
    parts: list[tuple[str, torch.Tensor]]
    bias: torch.Tensor
    path: str = ""
    coefficients: tuple[float, ...] = ()
    label: str = ""
    fit: Fit | None = None
    image: tuple[int, int, int] | None = None
    source_image: tuple[int, int, int] | None = None
    generic: list[torch.Tensor] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    shapes: list[tuple[int, int, int] | None] = field(default_factory=list)
    outside: int = 0
    middle: float = 0.0
    reach: float = math.inf

    @property
    def rows(self) -> int:
        return int(self.bias.shape[0])

    def without_window(self, i: int) -> None:
        """Make a matrix on sums one on the images themselves, for a layout on which rotations do not sum windows."""
        tall, wide = self.windows[i]
        c, h, w = self.shapes[i] or (1, tall, wide)
        h, w = h // tall, w // wide

        def spread(m: torch.Tensor) -> torch.Tensor:
            each = m.reshape(-1, c, h, 1, w, 1).expand(-1, c, h, tall, w, wide)
            return each.reshape(m.shape[0], -1).contiguous()

        self.parts[i] = (self.parts[i][0], spread(self.parts[i][1]))
        self.masks[i] = spread(self.masks[i])
        self.windows[i] = (1, 1)


@dataclass
class Stages:
    """In the order in which they run; the last is the output. sizes: values of each base. outputs: (edge, first row,
    rows)."""

    stages: list[Stage]
    sizes: dict[str, int]
    outputs: list[tuple[str, int, int]]


def windows_of(matrix: torch.Tensor, image: tuple[int, int, int], window: tuple[int, int]) -> torch.Tensor:
    """[m, values of images] to [m, channel, row of windows, row in it, column of windows, column in it]."""
    c, h, w = image
    return matrix.reshape(matrix.shape[0], c, h // window[0], window[0], w // window[1], window[1])


def summed(values: torch.Tensor, image: tuple[int, int, int], window: tuple[int, int]) -> torch.Tensor:
    """[s, values] of images, summed over windows: [s, values of a pooled image]."""
    return windows_of(values, image, window).sum((3, 5)).reshape(values.shape[0], -1)


def depth_of(stage: Stage) -> int:
    """Levels that what follows the matrix takes."""
    if stage.kind == "output":
        return 0
    if stage.coefficients == SQUARE:
        return 1
    return multiplicative_depth(len(stage.coefficients) - 1)


class Noise(Protocol):
    """Values with what computing on ciphertexts adds to them."""

    def rescaled(self, x: torch.Tensor) -> torch.Tensor: ...

    def computed(self, x: torch.Tensor, stage: Stage) -> torch.Tensor:
        """What a stage's matrices give."""


def run_stages(
    stages: Stages, inputs: torch.Tensor, noise: Noise | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs [s, m] for inputs [s, n], and by stage the values before its activation."""
    bases: dict[str, torch.Tensor] = {INPUTS: inputs}
    before: dict[str, torch.Tensor] = {}
    for stage in stages.stages:
        value = stage.bias[None].expand(inputs.shape[0], -1)
        for (base, matrix), window, image in zip(stage.parts, stage.windows, stage.shapes, strict=True):
            x = bases[base]
            if window != (1, 1) and image is not None:
                x = summed(x, image, window)
            value = value + x @ matrix.T
        if noise is not None:
            value = noise.computed(value, stage)
        before[stage.name] = bases[stage.name] = value
        if stage.kind == "polynomial":
            bases[stage.name] = _evaluated(stage.coefficients, value, noise)
    return bases[stages.stages[-1].name], before


def _evaluated(coefficients: Sequence[float], x: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """A polynomial; with noise, as the model owner computes it: each product of values or with a coefficient is rescaled."""
    if noise is None:
        return evaluate(coefficients, 1.0, x)
    powers = [x]
    for _ in range(multiplicative_depth(len(coefficients) - 1) - 1):
        powers.append(noise.rescaled(powers[-1] * powers[-1]))
    return _terms(list(coefficients), powers, noise)


def _terms(c: list[float], powers: list[torch.Tensor], noise: Noise) -> torch.Tensor:
    if len(powers) == 1:
        constant, slope = [*c, 0.0, 0.0][:2]
        return constant + (noise.rescaled(slope * powers[0]) if slope else torch.zeros_like(powers[0]))
    half = 1 << (len(powers) - 1)
    low = _terms(c[:half], powers[:-1], noise)
    if not any(c[half:]):
        return low
    return low + noise.rescaled(_terms(c[half:], powers[:-1], noise) * powers[-1])
