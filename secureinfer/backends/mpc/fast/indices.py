"""Widths of an argmax: how many values it chooses from, and the bits in which it compares them; plain integers."""

from __future__ import annotations

from ....graph.ir import Edge
from .. import windows
from ..ranges import places

MOST_PAIRED = 16
"""Values of which every two are compared at once: 120 comparisons in the rounds of one."""


def index_bits(edge: Edge, dim: int) -> int:
    """Bits below each value in which its index is carried; none where all are compared with all."""
    n = places(edge, dim)
    return 0 if n <= MOST_PAIRED else (n - 1).bit_length()


def argmax_bits(edge: Edge, dim: int) -> int:
    """Window of the difference of two values, the bits of their indices included."""
    if edge.bound is None:
        return 64
    return windows.width_of(2 * edge.bound + 1, edge.scale + index_bits(edge, dim))


def argmax_fits(edge: Edge, dim: int, scale: int) -> bool:
    """Whether some window holds what is compared at `scale` fraction bits."""
    return edge.bound is not None and windows.fits(2 * edge.bound + 1, scale + index_bits(edge, dim))
