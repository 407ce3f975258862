"""Patches of images, as the rows of a matrix product: convolution without a convolution for integers.

Images are [N, H, W, C] here, so that a patch is a few runs of contiguous memory, and limbs of images [S, N, H, W, C]:
unfolding bytes takes an eighth of the memory traffic of unfolding int64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError

# Patches and int32 sums of one block: 4 MB, which a second-level cache nearly holds, is faster than 1 or 16.
BLOCK_BYTES = 1 << 22

Block = tuple[slice, slice, slice, slice]


@dataclass(frozen=True)
class Window:
    """Geometry of a 2-d convolution; a 1-d one has height 1. out: rows and columns of the result."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    out: tuple[int, int]


def window(shape: Sequence[int], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Window:
    """For images [N, C, H, W] or [N, C, L]. Raises InputError where no patch fits into the padded image."""

    def pair(value: Any, one: int, least: int) -> tuple[int, int]:
        values = (value,) * len(kernel) if isinstance(value, int) else tuple(value)
        if len(values) != len(kernel) or not all(isinstance(v, int) and v >= least for v in values):
            raise InputError(f"{value} is no stride, padding or dilation of a {len(kernel)}-d convolution")
        return (one, values[0]) if len(values) == 1 else (values[0], values[1])

    size, extent = ((1, s[0]) if len(s) == 1 else (s[0], s[1]) for s in (kernel, shape[2:]))
    steps, pad, spread = pair(stride, 1, 1), pair(padding, 0, 0), pair(dilation, 1, 1)
    rest = [extent[i] + 2 * pad[i] - spread[i] * (size[i] - 1) - 1 for i in (0, 1)]
    if min(rest) < 0 or min(size) < 1:
        raise InputError(
            f"a kernel of {tuple(kernel)} at dilation {dilation} does not fit into {tuple(shape)}"
        )
    return Window(size, steps, pad, spread, (rest[0] // steps[0] + 1, rest[1] // steps[1] + 1))


def padded(x: torch.Tensor, window: Window) -> torch.Tensor:
    """x [N, C, H, W] as [N, H, W, C] with zeros around it."""
    (ph, pw), (n, channels, height, width) = window.padding, x.shape
    x = x.permute(0, 2, 3, 1)
    if not (ph or pw):
        return x.contiguous()
    out = x.new_zeros((n, height + 2 * ph, width + 2 * pw, channels))
    out[:, ph : ph + height, pw : pw + width] = x
    return out


def blocks(
    limbs: torch.Tensor, groups: int, window: Window, row_bytes: int
) -> Iterator[tuple[Block, torch.Tensor]]:
    """(place in a result [N, groups, channels, oh, ow], patches [S, groups, rows, kh * kw * C / groups]), block by block.

    Rows are (image, row, column), columns of a patch (row, column, channel) of the kernel. row_bytes: what the caller
    keeps for each row and group. A 1x1 kernel with stride 1 and one group makes no copy.
    """
    count, images, _, _, channels = limbs.shape
    (kh, kw), (sh, sw), (dh, dw), (oh, ow) = window.kernel, window.stride, window.dilation, window.out
    s, b, h, w, c = limbs.stride()
    view = limbs.as_strided(
        (count, groups, images, oh, ow, kh, kw, channels // groups),
        (s, c * (channels // groups), b, h * sh, w * sw, h * dh, w * dw, c),
        limbs.storage_offset(),
    )
    line = ow * (count * limbs.element_size() * kh * kw * channels + groups * row_bytes)
    lines = max(1, BLOCK_BYTES // line)
    many, tall = max(1, lines // oh), min(lines, oh)
    for i in range(0, images, many):
        for j in range(0, oh, tall):
            part = view[:, :, i : i + many, j : j + tall]
            place = (slice(i, i + many), slice(None), slice(None), slice(j, j + tall))
            yield place, part.reshape(count, groups, -1, kh * kw * (channels // groups))


def depthwise(x: torch.Tensor, w: torch.Tensor, window: Window) -> torch.Tensor:
    """x [N, G, H, W] with w [G, kh * kw, M], one input channel a group, as [N, G, M, oh, ow]: tap by tap, no product.

    A matrix product of one group has kh * kw inner places only, too few to pay for its call.
    """
    (kh, kw), (sh, sw), (dh, dw), (oh, ow) = window.kernel, window.stride, window.dilation, window.out
    ph, pw = window.padding
    if ph or pw:
        x = torch.nn.functional.pad(x, (pw, pw, ph, ph))
    out = x.new_zeros((x.shape[0], w.shape[0], w.shape[2], oh, ow))
    for i in range(kh):
        for j in range(kw):
            rows = slice(i * dh, i * dh + (oh - 1) * sh + 1, sh)
            columns = slice(j * dw, j * dw + (ow - 1) * sw + 1, sw)
            out.addcmul_(x[:, :, None, rows, columns], w[:, i * kw + j, :, None, None])
    return out
