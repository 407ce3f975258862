"""Fraction bits and rings of a layer norm, for its kernel and its cost formula; plain numbers, no cryptography.

z = odd (x - mean), with width = odd 2**even, needs no division: the mean's is a shift. z has `centred` fraction bits and is
opened in WINDOW bits. 1/sigma has `inverse`, the normalised value `normal` before the gain, which is applied in `ring` bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...graph.ir import Edge, Node
from . import windows
from .pieces import SLOPE_BITS, VALUE_BITS, Pieces
from .ranges import log2_ceil
from .rows import is_public, is_weight

WINDOW = 32
LEAST_SIGMA = 8
"""Rows whose sigma is below 2**-8 are normalised less than they should be; below the fraction bits it means nothing."""

MOST_CENTRED, LEAST_CENTRED, LEAST_NORMAL = 18, 9, 12


@dataclass(frozen=True)
class Norm:
    width: int
    odd: int
    even: int
    centred: int
    pieces: Pieces
    inverse: int
    normal: int
    ring: int
    cut: int


def norm(node: Node, inputs: Sequence[Edge], output: Edge) -> Norm | str:
    """The plan of a layer norm, or why these rings hold none."""
    if reason := _odd(node, inputs):
        return reason
    x, width = inputs[0], math.prod(node.attrs["normalized_shape"])
    if x.bound is None or output.bound is None:
        return "the ranges of operand and result are not known"
    if x.ring_bits != 64 or not width:
        return "the operand is not in the whole ring"
    even = (width & -width).bit_length() - 1
    odd, count = width >> even, log2_ceil(width)
    size = log2_ceil(x.bound) + log2_ceil(odd)
    centred = min(MOST_CENTRED, WINDOW - 3 - size, (61 - count) // 2 - size)
    if centred < max(LEAST_CENTRED, x.scale + even - WINDOW):
        return "no window holds its centred values"
    low = 2 * (centred + odd.bit_length() - 1 - LEAST_SIGMA) + width.bit_length() - 1
    gain = math.sqrt(width) * 2.0**centred
    pieces = Pieces("rsqrt", max(low, 4), 2 * (centred + size) + count, 0, gain)
    reach = log2_ceil(output.bound)
    if not node.attrs["has_weight"]:
        inverse = min(24, 59 - reach - centred)
        ring = windows.width_of(output.bound, centred + inverse)
        return Norm(
            width,
            odd,
            even,
            centred,
            pieces,
            inverse,
            centred + inverse,
            ring,
            centred + inverse - output.scale,
        )
    scale = inputs[1].scale
    for ring in (40, 48, 56):
        normal = ring - 3 - scale - reach
        inverse = min(64 - ring + normal - centred, VALUE_BITS + SLOPE_BITS)
        if (
            normal >= LEAST_NORMAL
            and inverse >= 14
            and centred + inverse >= normal
            and normal + scale >= output.scale
        ):
            return Norm(
                width, odd, even, centred, pieces, inverse, normal, ring, normal + scale - output.scale
            )
    return "no ring holds the gain's product"


def _odd(node: Node, inputs: Sequence[Edge]) -> str | None:
    """What a step from a file has that compiling never gives it, or an eps that no window has room for."""
    shape, eps = list(node.attrs["normalized_shape"]), node.attrs["eps"]
    has_weight, has_bias = node.attrs["has_weight"], node.attrs["has_bias"]
    if not shape or list(inputs[0].shape[-len(shape) :]) != shape:
        return f"a row of {shape} in an operand of shape {list(inputs[0].shape)}"
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        return "eps is no number"
    if not 0 <= eps <= max(inputs[0].bound or 0.0, 1.0) ** 2:
        return "eps is negative, or greater than any square of the operand"
    if not isinstance(has_weight, bool) or not isinstance(has_bias, bool):
        return "whether there are gain and bias is neither true nor false"
    if len(inputs) != 1 + has_weight + has_bias:
        return f"{len(inputs)} operands"
    known = not has_weight or is_public(inputs[1]) or is_weight(inputs[1])
    return None if known else "the gain is neither a weight of the model owner nor public"
