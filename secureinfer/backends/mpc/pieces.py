"""Zones and pieces of functions of a positive value of any magnitude; plain numbers, no cryptography.

A value X, in ring units, lies in one of several zones, each RATIO times as wide as the one below. In each the function is a
cubic on PIECES equal pieces, so that its relative error is the same in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

RATIO_BITS = 2
"""log2 of how many times a zone's end is its beginning."""

PIECES_BITS = 6
"""log2 of the pieces of a zone, which reach twice as far as it does: for values that pass its end by a compared unit."""

DEGREE = 3
SLOPE_BITS = 12
"""Fraction bits of the public place within a piece."""

VALUE_BITS = 24
"""Fraction bits of dealt coefficients."""

RELATIVE_ERROR = 2.0**-13
"""Of the cubics, a compared unit before the beginning of a zone; a test evaluates them."""

FUNCTIONS: MappingProxyType[str, Callable[[float], float]] = MappingProxyType({
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
})  # fmt: skip


@dataclass(frozen=True)
class Pieces:
    """function of X in [2**low, 2**high) ring units, in a window of `bits`. Below it is function(2**low), or less.

    scale: log2 of what the function's argument is in ring units. gain: the function's values are multiplied by it.
    """

    function: str
    low: int
    high: int
    scale: int
    gain: float = 1.0

    @property
    def zones(self) -> int:
        return max(1, math.ceil((self.high - self.low) / RATIO_BITS))

    @property
    def bits(self) -> int:
        return min(64, 8 * math.ceil((self.high + 2) / 8))

    def begin(self, zone: int) -> int:
        """log2 of where a zone begins."""
        return self.low + RATIO_BITS * zone

    def piece_bits(self, zone: int) -> int:
        """log2 of the width of a zone's pieces; at least 1."""
        return self.begin(zone) + RATIO_BITS + 1 - PIECES_BITS

    @property
    def compared_low(self) -> int:
        """Comparisons with the zones' beginnings leave out so many bits: a quarter of the second zone's."""
        return max(0, self.begin(1) - 2)

    @property
    def thresholds(self) -> list[int]:
        return [1 << self.begin(z) for z in range(1, self.zones)]

    def fits(self) -> bool:
        return self.piece_bits(0) >= 1 and self.high <= 62
