"""Ring elements of k bits as bytes, and back: what a k-bit window costs on the wire is k bits an element.

k is 1 (bits, eight a byte) or a multiple of 8; elements are int64 in memory, and only their low k bits count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import WireError
from .windows import packed_bytes

__all__ = ["pack", "packed_bytes", "unpack"]

_TYPES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.int64}


def _planes(bits: int) -> list[tuple[int, int]]:
    """(lowest bit, bits) of the planes of a word: 40 bits are 32 and 8, so that each is a type that processors copy fast."""
    planes, low = [], 0
    for size in (64, 32, 16, 8):
        if bits - low >= size:
            planes.append((low, size))
            low += size
    return planes


def pack(x: torch.Tensor, bits: int) -> bytes | memoryview:
    """The low `bits` bits of each element, in little-endian planes. x: int64, or uint8 for at most 8 bits; any shape."""
    flat: np.ndarray[Any, Any] = x.detach().contiguous().cpu().numpy().reshape(-1)
    if bits == 1:
        return np.packbits((flat & 1).astype(np.uint8, copy=False), bitorder="little").tobytes()
    if flat.dtype.itemsize * 8 == bits:
        return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]
    if bits in _TYPES:
        return memoryview(flat.astype(_TYPES[bits]).view(np.uint8))  # type: ignore[arg-type]
    out, at = np.empty(flat.size * bits // 8, dtype=np.uint8), 0
    for low, size in _planes(bits):
        end = at + flat.size * size // 8
        np.copyto(out[at:end].view(_TYPES[size]), flat >> low if low else flat, casting="unsafe")
        at = end
    return memoryview(out)  # type: ignore[arg-type]


def unpack(
    payload: memoryview | bytes, shape: Sequence[int], bits: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """The tensor that `pack` made bytes of, its elements in [0, 2**bits) (64 bits: signed). dtype: int64 or uint8.

    It may share the payload's memory. Raises WireError unless the payload has exactly the bytes of that shape.
    """
    count = math.prod(shape)
    if len(payload) != packed_bytes(count, bits):
        raise WireError(f"{len(payload)} bytes for {count} elements of {bits} bits")
    raw = np.frombuffer(payload, dtype=np.uint8)
    if bits == 1:
        flat = np.unpackbits(raw, count=count, bitorder="little")
    elif bits in _TYPES:
        flat = raw.view(_TYPES[bits])
    else:
        flat, at = np.empty(0, dtype=np.int64), 0
        for low, size in _planes(bits):
            end = at + count * size // 8
            plane = raw[at:end].view(_TYPES[size])
            if low:
                high = plane.astype(np.int64)
                high <<= low
                flat |= high
            else:
                flat = plane.astype(np.int64)
            at = end
    wanted: Any = np.uint8 if dtype == torch.uint8 else np.int64
    flat = flat.astype(wanted) if flat.dtype != wanted or not flat.flags.writeable else flat
    return torch.from_numpy(flat).reshape(tuple(shape))
