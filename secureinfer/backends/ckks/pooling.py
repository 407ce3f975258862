"""Poolings at the beginning of matrices: rotations sum windows without a product and without a level."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .stages import Stage, windows_of

POOLS = (2, 3, 4, 5, 6, 7, 8)
EQUAL = 1e-11
"""Of an entry, relative to the greatest of its matrix."""


def find_pooling(stage: Stage, images: Mapping[str, tuple[int, int, int] | None]) -> None:
    """Find matrices that begin with a pooling: equal columns over each window. Rotations sum those without a product."""
    for i, ((base, matrix), generic) in enumerate(zip(stage.parts, stage.generic, strict=True)):
        image, window = images.get(base), (1, 1)
        if image is not None:
            for axis in (0, 1):
                for size in reversed(POOLS):
                    tried = (size, window[1]) if axis == 0 else (window[0], size)
                    if (
                        image[1] % tried[0] == 0
                        and image[2] % tried[1] == 0
                        and _equal(generic, image, tried)
                    ):
                        window = tried
                        break
            if not _equal(matrix, image, window):  # other weights than any that were drawn
                window = (1, 1)
        stage.windows.append(window)
        stage.shapes.append(image)
        if window != (1, 1) and image is not None:
            generic = _kept(generic, image, window)
            stage.parts[i] = (base, _kept(matrix, image, window))
        stage.masks.append(generic != 0)
    stage.generic = []


def _equal(matrix: torch.Tensor, image: tuple[int, int, int], window: tuple[int, int]) -> bool:
    parts = windows_of(matrix, image, window)
    first = parts[:, :, :, :1, :, :1].expand_as(parts)
    return bool(torch.allclose(parts, first, rtol=0, atol=EQUAL * float(matrix.abs().max())))


def _kept(matrix: torch.Tensor, image: tuple[int, int, int], window: tuple[int, int]) -> torch.Tensor:
    return windows_of(matrix, image, window)[:, :, :, 0, :, 0].reshape(matrix.shape[0], -1).contiguous()
