"""The generic kernels of smooth functions, softmax and norms as declarations; see catalog.py."""

from __future__ import annotations

import math

from ...plan.spec import Cost, StepContext
from . import ranges
from .costs import (
    SERIES_BITS,
    TERMS,
    comparison,
    fixed_product,
    masked,
    normalised,
    product,
    series_value,
    softmax_core,
    square,
    truncation,
)
from .ranges import INVERSE_SCALE
from .rows import (
    NORMALISED,
    Formula,
    Rows,
    bound_of,
    float_operand,
    is_public,
    is_weight,
    numel,
    precision_of,
    unit_of,
)

ROWS = Rows()

# -- activations

_SERIES = "PROTOCOLS: smooth functions from one opening, a Fourier extension"


def _gated(series: str, products: int) -> Formula:
    """A series inside [-T, T], the asymptote outside: one opening, one truncation, one product."""

    def cost(c: StepContext) -> Cost:
        p, n, f = c.parties, numel(c), precision_of(c)
        return (
            masked(p, n, compare=True, terms=TERMS[series])
            + truncation(p, n, SERIES_BITS - f)
            + comparison(p, 2 * n)
            + product(p, products * n, products * n, products * n)
        )

    return cost


def _gelu_cost(c: StepContext) -> Cost:
    return _gated("gelu_tanh" if c.node.attrs["approximate"] == "tanh" else "gelu", 2)(c)


ROWS.add("gelu", "gelu.series", float_operand, _gelu_cost, lambda c: 2 * unit_of(c) + 5e-6, _SERIES)
ROWS.add("silu", "silu.series", float_operand, _gated("silu", 2), lambda c: 2 * unit_of(c) + 3e-5, _SERIES)
ROWS.add("tanh", "tanh.series", float_operand, _gated("tanh", 1), lambda c: 2 * unit_of(c) + 2e-5, _SERIES)
ROWS.add(
    "sigmoid", "sigmoid.series", float_operand, _gated("tanh", 1), lambda c: 2 * unit_of(c) + 1e-5, _SERIES
)
ROWS.add("erf", "erf.series", float_operand, _gated("erf", 1), lambda c: 2 * unit_of(c) + 5e-6, _SERIES)

# -- softmax and norms


def _row_shape(c: StepContext) -> tuple[int, int]:
    n = c.inputs[0].shape[c.node.attrs["dim"]]
    return (c.inputs[0].numel // n if n else 0), n


def _softmax_accepts(c: StepContext) -> str | None:
    rows, n = _row_shape(c)
    if not 1 <= n <= 1 << 13:
        return f"softmax over {n} values; 1 to 8192 are supported"
    bound = c.inputs[0].bound
    if c.node.op == "masked_softmax" and bound is not None and bound > ranges.MASKED_SCORE / 2:
        return f"scores up to {bound:.3g} (with head-room) reach those of masked places"
    return float_operand(c)


def _softmax_cost(c: StepContext) -> Cost:
    rows, n = _row_shape(c)
    return softmax_core(c.parties, rows, n, precision_of(c), guard=False)


def _masked_softmax_cost(c: StepContext) -> Cost:
    rows, n = _row_shape(c)
    x, keep = c.inputs
    choose = Cost() if is_public(keep) else product(c.parties, x.numel, keep.numel, x.numel)
    return choose + softmax_core(c.parties, rows, n, precision_of(c), guard=True)


ROWS.add(
    "softmax", "softmax.series", _softmax_accepts, _softmax_cost, lambda c: 2 * unit_of(c) + 1e-5, _SERIES
)
ROWS.add("masked_softmax", "masked_softmax.series", _softmax_accepts, _masked_softmax_cost,
     lambda c: 2 * unit_of(c) + 1e-5, _SERIES + "; masked places leave by selection")  # fmt: skip


def _norm_rows(c: StepContext) -> tuple[int, int]:
    width = math.prod(c.node.attrs["normalized_shape"])
    return (c.inputs[0].numel // width if width else 0), width


def _norm_accepts(c: StepContext) -> str | None:
    for edge in c.inputs[1:]:
        if not (is_weight(edge) or is_public(edge)):
            return f"{edge.name} is neither a weight of the model owner nor public"
    return float_operand(c)


def _norm_cost(c: StepContext) -> Cost:
    p, f = c.parties, precision_of(c)
    rows, width = _norm_rows(c)
    n = rows * width
    guard = ranges.norm_guard(f, width, c.inputs[0])
    lowest, highest = ranges.variance_range(f + guard, width)
    has_weight = bool(c.node.attrs["has_weight"])
    total = (
        truncation(p, rows, 24 - guard)  # the mean
        + square(p, n)
        + normalised(p, rows, lowest, highest)
        + series_value(p, rows, TERMS["unit"], SERIES_BITS - INVERSE_SCALE)
        + product(p, rows, rows, rows)
        + truncation(p, rows, INVERSE_SCALE)
        + product(p, n, rows, n)
        + truncation(p, n, INVERSE_SCALE + guard - (4 if has_weight else 0))
    )
    if has_weight:
        gain = c.inputs[1]
        total = (
            total + (Cost() if is_public(gain) else fixed_product(p, n, n, gain)) + truncation(p, n, f + 4)
        )
    return total


def _norm_error(c: StepContext) -> float:
    """For rows whose standard deviation is at least 2**-6; below it grows as 1/sigma."""
    rows, width = _norm_rows(c)
    guard = ranges.norm_guard(precision_of(c), width, c.inputs[0])
    gain = bound_of(c.inputs[1]) if c.node.attrs["has_weight"] else 1.0
    return unit_of(c) * (2 + gain * (2.0 ** (7 - guard) + math.sqrt(width)))


ROWS.add("layer_norm", "layer_norm.series", _norm_accepts, _norm_cost, _norm_error, NORMALISED)
