"""Arithmetic on int64 tensors as elements of Z_2^64: products, convolutions, logical shifts, fixed-point encoding.

Everything is plain torch on the device of its arguments and wraps around. Convolutions are products of unfolded
patches, because torch has no integer convolution on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import RangeError

RING_BITS = 64


def logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits without copying the sign; 0 <= bits <= 63."""
    if bits == 0:
        return x
    return (x >> bits) & ((1 << (RING_BITS - bits)) - 1)


def reverse_bits(x: torch.Tensor) -> torch.Tensor:
    """Bit i of each 64-bit word to place 63 - (63 - rev) ..: the 6-bit index of every bit is reversed.

    The index 2j + h (h the lowest bit) goes to place 32 h + reverse(j): the pairs of neighbours that a carry tree joins
    become the two halves of the word, and again at each level, so that a level is a reinterpretation and not a shuffle.
    """
    if x.is_meta:
        return torch.empty_like(x)
    out = x
    # swap index bit k with index bit 5 - k, k = 0, 1, 2
    for low, high in ((0, 5), (1, 4), (2, 3)):
        shift = (1 << high) - (1 << low)
        places = [i for i in range(64) if (i >> low) & 1 and not (i >> high) & 1]
        mask = sum(1 << i for i in places)
        mask = mask - (1 << 64) if mask >= 1 << 63 else mask
        swap = (logical_shift(out, shift) ^ out) & mask
        out = out ^ swap ^ (swap << shift)
    return out


def count_wraps(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """How often the running sum of signed shares leaves the signed 64-bit range, with sign."""
    wraps = torch.zeros_like(shares[0])
    total = shares[0]
    for share in shares[1:]:
        following = total + share
        wraps = wraps - ((total < 0) & (share < 0) & (following >= 0)).long()
        wraps = wraps + ((total >= 0) & (share >= 0) & (following < 0)).long()
        total = following
    return wraps


def encode(x: torch.Tensor, scale: int, what: str = "value") -> torch.Tensor:
    """round(x * 2**scale) as int64. Raises RangeError unless every value is finite and below 2**62 after scaling."""
    if x.is_meta:
        return torch.empty(x.shape, dtype=torch.int64, device="meta")
    if not x.dtype.is_floating_point:
        return x.long() << scale
    scaled = x.double() * float(1 << scale)
    if not bool(torch.isfinite(scaled).all()) or (scaled.numel() and float(scaled.abs().max()) >= 2.0**62):
        raise RangeError(
            f"{what} has values that are not finite or do not fit into the ring at 2**-{scale}; "
            "scale the model's values down or compile with fewer precision_bits"
        )
    return torch.round(scaled).long()


def decode(x: torch.Tensor, scale: int) -> torch.Tensor:
    """x / 2**scale as float64."""
    return x.double() / float(1 << scale)


def apply(op: str, a: torch.Tensor, b: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """op(a, b) in the ring. op: mul, matmul, conv1d, conv2d, conv_transpose1d, conv_transpose2d or linear (a @ b.T)."""
    if op == "mul":
        return a * b
    if op == "matmul":
        return torch.matmul(a, b)
    if op == "linear":
        return torch.matmul(a, b.t())
    if op == "conv2d":
        return conv2d(a, b, **options)
    if op == "conv1d":
        return conv1d(a, b, **options)
    if a.is_meta:
        shaped: torch.Tensor = getattr(torch, op)(a.float(), b.float(), **options).long()
        return shaped
    result: torch.Tensor = getattr(torch, op)(a, b, **options)
    return result


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """2-d cross-correlation of x [N, C, H, W] with w [O, C / groups, kh, kw], exact modulo 2**64."""
    (sh, sw), (ph, pw), (dh, dw) = _pair(stride), _pair(padding), _pair(dilation)
    n, channels, _, _ = x.shape
    out_channels, in_group, kh, kw = w.shape
    if ph or pw:
        x = torch.nn.functional.pad(x, (pw, pw, ph, ph))
    height, width = x.shape[2], x.shape[3]
    oh = (height - dh * (kh - 1) - 1) // sh + 1
    ow = (width - dw * (kw - 1) - 1) // sw + 1
    rows = (torch.arange(oh, device=x.device) * sh)[:, None] + (torch.arange(kh, device=x.device) * dh)[
        None, :
    ]
    cols = (torch.arange(ow, device=x.device) * sw)[:, None] + (torch.arange(kw, device=x.device) * dw)[
        None, :
    ]
    if x.is_meta:
        return torch.empty((n, out_channels, oh, ow), dtype=torch.int64, device="meta")
    patches = x[:, :, rows[:, None, :, None], cols[None, :, None, :]]  # [N, C, oh, ow, kh, kw]
    patches = patches.reshape(n, groups, channels // groups, oh * ow, kh * kw)
    patches = patches.permute(1, 0, 3, 2, 4).reshape(groups, n * oh * ow, in_group * kh * kw)
    kernel = w.reshape(groups, out_channels // groups, in_group * kh * kw).transpose(1, 2)
    out = torch.matmul(patches, kernel)  # [groups, N * oh * ow, O / groups]
    out = out.reshape(groups, n, oh, ow, out_channels // groups).permute(1, 0, 4, 2, 3)
    return out.reshape(n, out_channels, oh, ow)


def conv1d(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """1-d cross-correlation of x [N, C, L] with w [O, C / groups, k], exact modulo 2**64."""

    def single(value: Any) -> int:
        return value if isinstance(value, int) else int(value[0])

    out = conv2d(
        x.unsqueeze(2),
        w.unsqueeze(2),
        (1, single(stride)),
        (0, single(padding)),
        (1, single(dilation)),
        groups,
    )
    return out.squeeze(2)
