"""Arithmetic on int64 tensors as elements of Z_2^64: logical shifts, fixed-point encoding, operations by name.

Everything is plain torch on the device of its arguments and wraps around. Products are those of products.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import RangeError
from . import products

RING_BITS = 64


def logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits without copying the sign; 0 <= bits <= 63."""
    if bits == 0:
        return x
    return (x >> bits) & ((1 << (RING_BITS - bits)) - 1)


def signed(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The element of Z_2^bits in the low bits of each word, as a signed number."""
    return x if bits == RING_BITS else (x << (RING_BITS - bits)) >> (RING_BITS - bits)


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


def apply(
    op: str, a: torch.Tensor, b: torch.Tensor, options: Mapping[str, Any], ring_bits: int = RING_BITS
) -> torch.Tensor:
    """op(a, b) in the ring. op: mul, matmul, conv1d, conv2d, conv_transpose1d, conv_transpose2d or linear (a @ b.T).

    ring_bits: a product of matrices is right modulo 2**ring_bits at least.

    On meta tensors torch itself gives the shape, and refuses with RuntimeError what cannot be.
    """
    if op == "mul":
        return a * b
    if op == "linear":
        op, b = "matmul", b.t()
    if op == "matmul":
        return torch.matmul(a, b) if a.is_meta or b.dim() < 2 else products.matmul(a, b, ring_bits)
    if a.is_meta:
        shaped: torch.Tensor = getattr(torch, op)(a.float(), b.float(), **options).long()
        return shaped
    if op == "conv2d":
        return products.conv2d(a, b, **options)
    if op == "conv1d":
        return products.conv1d(a, b, **options)
    result: torch.Tensor = getattr(torch, op)(a, b, **options)
    return result
