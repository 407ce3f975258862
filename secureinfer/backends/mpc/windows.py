"""Widths of the rings in which the fast kernels open values; plain integers, no cryptography.

A window is a ring Z_2^k with k a multiple of 8: a value x with |x| < 2**(k - 2) is opened there as (x + r) mod 2**k under a
mask that is uniform modulo 2**k, so that what an opening costs follows from how large values can get (their edge's bound,
which has calibration's head-room) and not from the ring that shares live in.
"""

from __future__ import annotations

import math

from ...graph.ir import Edge

CHUNK_BITS = 4
WIDEST_CHUNK = 10
"""Bits of a chunk: 2**10 entries in each of two tables, 256 bytes, four times for each comparison."""

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


def chunk_bits(bits: int, direct: bool) -> int:
    """Width of a comparison's chunks: 4, or as wide as it takes for one merge to be enough, where tables may be large."""
    wide = math.ceil(bits / MOST_MERGED)
    return wide if direct and CHUNK_BITS < wide <= WIDEST_CHUNK else CHUNK_BITS


def chunks(bits: int, direct: bool = False) -> int:
    """Chunks of a comparison of that many bits."""
    return math.ceil(bits / chunk_bits(bits, direct))


def table_words(width: int) -> int:
    """64-bit words of one bit table of a chunk wider than 4 bits."""
    return max(1, (1 << width) // 64)


def group_shape(count: int) -> tuple[int, int]:
    """(groups, chunks in each) when `count` chunks are merged once: as few groups as can be, of nearly equal size."""
    groups = math.ceil(count / MOST_MERGED)
    return groups, math.ceil(count / groups)


DIRECT_BYTES = 4 << 20
"""Dealt tables of a comparison whose last merge gives additive shares at once, up to which a round is worth more."""


def last_merge(count: int) -> int:
    """Chunks that the last merge of `count` chunks takes."""
    while count > MOST_MERGED:
        count = group_shape(count)[0]
    return count


def direct_entries(bits: int) -> int:
    """Entries of the last merge's table with additive shares: one index bit more than the carry's."""
    return 1 << (2 * last_merge(chunks(bits, direct=True)) - 1)


def is_direct(count: int, bits: int, gate: bool) -> bool:
    """Whether `count` comparisons of `bits` bits get additive shares from their last merge, and no opening of the bit."""
    return bits > 0 and count * direct_entries(bits) * 8 * (3 if gate else 1) <= DIRECT_BYTES
