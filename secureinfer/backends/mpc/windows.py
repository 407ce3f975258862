"""Widths of the rings in which the fast kernels open values; plain integers, no cryptography.

A window is a ring Z_2^k with k a multiple of 8: a value x with |x| < 2**(k - 2) is opened there as (x + r) mod 2**k under a
mask that is uniform modulo 2**k, so that what an opening costs follows from how large values can get (their edge's bound,
which has calibration's head-room) and not from the ring that shares live in.
"""

from __future__ import annotations

import math

from ...graph.ir import Edge

CHUNK_BITS = 4
MOST_MERGED = 4
"""Chunks that one truth table merges: 64 entries. A fifth would need 256."""


def packed_bytes(count: int, bits: int) -> int:
    """Size on the wire of `count` elements of `bits` bits."""
    return (count * bits + 7) // 8


def width_of(bound: float, scale: int) -> int:
    """Bits of the least window for |x| <= bound at `scale` fraction bits."""
    return min(64, 8 * math.ceil(_needed(bound, scale) / 8))


def fits(bound: float, scale: int) -> bool:
    """Whether some window holds |x| <= bound at `scale` fraction bits."""
    return _needed(bound, scale) <= 64


def _needed(bound: float, scale: int) -> int:
    return scale + max(0, math.ceil(math.log2(bound)) if bound > 0 else 0) + 3


def window(edge: Edge) -> int:
    """Bits of the window for an edge's values: its own ring, if that is smaller than the shares'; 64 if nothing is known."""
    if edge.ring_bits < 64:
        return edge.ring_bits
    return 64 if edge.bound is None else width_of(edge.bound, edge.scale)


def chunks(bits: int) -> int:
    """Chunks of a comparison of that many bits."""
    return math.ceil(bits / CHUNK_BITS)


def group_shape(count: int) -> tuple[int, int]:
    """(groups, chunks in each) when `count` chunks are merged once: as few groups as can be, of nearly equal size."""
    groups = math.ceil(count / MOST_MERGED)
    return groups, math.ceil(count / groups)
