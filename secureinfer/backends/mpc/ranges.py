"""Scales and ranges that kernels and their cost formulas both need; plain integers, no cryptography."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...graph.ir import Edge

MASKED_SCORE = 1 << 20
"""What a masked score becomes before the row maximum: -2**20. Real scores must stay below 2**19."""

EXP_SCALE = 20
"""Fraction bits of exponentials inside softmax."""

INVERSE_SCALE = 24
"""Fraction bits of 1/u, 1/sqrt(u) and the like, u in [1, 2)."""

EXP_LOWEST = -14
"""Below this exp is 0: exp(-14) = 8e-7 is less than a unit at 20 fraction bits."""


def log2_ceil(x: float) -> int:
    """Least n >= 0 with 2**n >= x."""
    return max(0, math.ceil(math.log2(x))) if x > 1 else 0


def bound_bits(edge: Edge, default: int = 10) -> int:
    """log2 of the edge's bound, rounded up; `default` where it is unknown."""
    return default if edge.bound is None else log2_ceil(edge.bound)


def constant_scale(precision: int, output: Edge) -> int:
    """Fraction bits of a public constant that multiplies a value: as many as the product's range leaves, at most 28."""
    return max(precision, min(28, 59 - precision - bound_bits(output)))


def places(edge: Edge, dim: int) -> int:
    """How many values an argmax over a dimension chooses from."""
    return edge.shape[dim] if edge.shape else 1


def tournament(n: int) -> list[int]:
    """Number of pairs at each level of a maximum over n values."""
    pairs = []
    while n > 1:
        pairs.append(n // 2)
        n -= n // 2
    return pairs


def norm_guard(precision: int, width: int, operand: Edge) -> int:
    """Extra fraction bits of a layer norm's centred values, at most 6: what the sum of their squares leaves below 2**60.

    They matter where a row's spread is small: an error of one unit in the mean is 1/sigma units in the result.
    """
    room = 59 - log2_ceil(width) - 2 * bound_bits(operand, 6)
    return max(0, min(6, room // 2 - precision))


def variance_range(scale: int, width: int) -> tuple[int, int]:
    """(lowest, highest) exponent of the sum of squares of a layer norm whose centred values have `scale` fraction bits.

    At the lowest 1/sigma is 2**13 (sigma about 1e-4); the highest leaves room for the product with the normaliser.
    """
    return max(1, 2 * scale + log2_ceil(width) - 26), 59


def magnitude_range(scale: int, edge: Edge) -> tuple[int, int]:
    """(0, highest) exponent of a value's integer, for reciprocal, sqrt and log: at most 2**38."""
    return 0, min(38, max(scale, scale + bound_bits(edge)))


def exp_range(output: Edge) -> tuple[int, int]:
    """(lowest, highest) integer part of the exponent that exp takes, from the bound of its result."""
    bound = output.bound if output.bound is not None else 1.0
    return EXP_LOWEST, max(1, min(20, math.ceil(math.log(max(bound, 1.0)))))


def exp_scales(highest: int) -> tuple[int, int]:
    """Fraction bits of exp's unit part and of its power table, whose product must stay below 2**60."""
    room = 58 - math.ceil((highest + 1) / math.log(2))
    unit = min(24, room // 2 + 3)
    return unit, room - unit


LARGEST = 1 << 61
"""Comparisons hold below twice this: a limit beyond it limits nothing that the ring can hold."""


def clamp_limits(attrs: Mapping[str, Any], scale: int) -> tuple[int | None, int | None]:
    """(low, high) of a clamp in ring units; None where there is none, or where it lies beyond every value (infinity too)."""
    low, high = attrs["min"], attrs["max"]
    return (
        None if low is None or low * 2.0**scale <= -LARGEST else round(min(low * 2.0**scale, LARGEST)),
        None if high is None or high * 2.0**scale >= LARGEST else round(max(high * 2.0**scale, -LARGEST)),
    )
