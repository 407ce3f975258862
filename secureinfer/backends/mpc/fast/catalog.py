"""The fast MPC kernels as declarations, before the generic ones: windows, tables, one opening for a cut and a comparison.

Pure: no cryptography is imported. The building blocks' formulas are in costs.py; the conformance suite holds every kernel
to its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ....graph.ir import Edge
from ....plan.spec import Cost, Registry, StepContext
from .. import attention, curves, norms, ranges, windows
from ..attention import Attention
from ..catalog import CATALOG as GENERIC
from ..norms import Norm
from ..pieces import RELATIVE_ERROR
from ..rings import check_rings
from ..rows import (
    Accept,
    Formula,
    Rows,
    bound_of,
    float_operand,
    image,
    is_public,
    is_weight,
    no_error,
    numel,
    one_or_two_dimensions,
    private_ids,
    reduces_something,
    secret,
    unit_of,
    window_size,
)
from . import costs
from .indices import argmax_bits, argmax_fits, index_bits
from .lowering import can_be_exact, lower, product_scale

ROWS = Rows()

NORM_SIGMA_BITS = 6
"""The error of a layer norm is declared for rows whose sigma is 2**-6 or more."""

# -- cutting


def _cut(c: StepContext) -> int:
    return c.inputs[0].scale - c.outputs[0].scale


def _rescale(c: StepContext) -> str | None:
    return secret(c) or (None if _cut(c) >= 0 else "the result has more fraction bits than the operand")


def _rescale_cost(c: StepContext) -> Cost:
    k, cut = windows.window(c.inputs[0]), _cut(c)
    if c.node.attrs["exact"] and cut:
        return costs.window(c.parties, numel(c), k, cut=cut, compared=cut, thresholds=1, signed=False)
    return costs.window(c.parties, numel(c), k, cut=cut)


_TRUNCATION = "Escudero et al., CRYPTO 2020, section 4, in a window"
ROWS.add("rescale", "rescale.window", _rescale, _rescale_cost, unit_of, _TRUNCATION)

# -- comparisons and choices

_TABLES = "PROTOCOLS: comparison from one opening, by dealt tables"


def difference_bits(c: StepContext) -> int:
    """Window of the difference of two operands, at the greater scale of both."""
    left, right = c.inputs
    if left.bound is None or right.bound is None:
        return 64
    return windows.width_of(left.bound + right.bound + 1, max(left.scale, right.scale))


def _compare_cost(thresholds: int) -> Formula:
    def cost(c: StepContext) -> Cost:
        k = difference_bits(c)
        return costs.window(c.parties, numel(c), k, compared=k - 1, thresholds=thresholds)

    return cost


for _op, _thresholds in (("lt", 1), ("le", 1), ("gt", 1), ("ge", 1), ("eq", 2), ("ne", 2)):
    ROWS.add(_op, f"compare.window.{_op}", secret, _compare_cost(_thresholds), no_error, _TABLES)


def _gated_cost(c: StepContext, thresholds: int) -> Cost:
    k, cut = windows.window(c.inputs[0]), _cut(c)
    return costs.window(
        c.parties, numel(c), k, cut=cut, compared=k - 1 - cut, thresholds=thresholds, gate=thresholds > 0
    )


def _rectify(c: StepContext) -> str | None:
    return float_operand(c) or (
        None if _cut(c) >= 0 else "the result has more fraction bits than the operand"
    )


ROWS.add("relu", "relu.window", _rectify, lambda c: _gated_cost(c, 1), unit_of, _TABLES)
ROWS.add("abs", "abs.window", _rectify, lambda c: _gated_cost(c, 1), lambda c: 3 * unit_of(c), _TABLES)


def clamp_range(c: StepContext) -> tuple[int | None, int | None]:
    """(low, high) of a clamp in ring units; None where there is none, or where it lies beyond the operand's window."""
    low, high = ranges.clamp_limits(c.node.attrs, c.inputs[0].scale)
    most = 1 << (windows.window(c.inputs[0]) - 3)
    return None if low is None or low <= -most else low, None if high is None or high >= most else high


def clamp_thresholds(c: StepContext) -> list[int]:
    return [v for v in clamp_range(c) if v is not None]


def _clamp(c: StepContext) -> str | None:
    low, high = clamp_range(c)
    most = 1 << (windows.window(c.inputs[0]) - 3)
    if (low is not None and low > most) or (high is not None and high < -most):
        return "a limit lies beyond the operand's range, so that the result is constant"
    if low is None and high is None and not _cut(c) and c.inputs[0].ring_bits == 64:
        return "nothing is limited"
    low, high = c.node.attrs["min"], c.node.attrs["max"]
    if low is not None and high is not None and low > high:
        return "the lower limit is above the upper one"
    return _rectify(c)


ROWS.add("clamp", "clamp.window", _clamp, lambda c: _gated_cost(c, len(clamp_thresholds(c))),
     lambda c: 4 * unit_of(c), _TABLES)  # fmt: skip


def maximum_bits(edge: Edge) -> int:
    """Window of the difference of two values of one edge, or of one and a padded place."""
    return 64 if edge.bound is None else windows.width_of(2 * edge.bound + 1, edge.scale)


def _amax_cost(c: StepContext) -> Cost:
    rows = numel(c)
    if not rows:
        return Cost()
    pairs = ranges.tournament(c.inputs[0].numel // rows)
    return costs.maximum(c.parties, rows, pairs, maximum_bits(c.inputs[0]))


def _max_pool_cost(c: StepContext) -> Cost:
    pairs = ranges.tournament(window_size(c))
    return costs.maximum(c.parties, numel(c), pairs, maximum_bits(c.inputs[0]))


def _argmax(c: StepContext) -> str | None:
    edge, dim = c.inputs[0], c.node.attrs["dim"]
    if numel(c) and not ranges.places(edge, dim):
        return "a maximum over nothing"
    if index_bits(edge, dim) and not argmax_fits(edge, dim, edge.scale):
        return "no window holds its values with their indices"
    return secret(c)


def _argmax_cost(c: StepContext) -> Cost:
    edge, dim = c.inputs[0], c.node.attrs["dim"]
    rows, n, k, low = numel(c), ranges.places(edge, dim), argmax_bits(edge, dim), index_bits(edge, dim)
    if not rows or n == 1:
        return Cost()
    if low:
        chosen = costs.maximum(c.parties, rows, ranges.tournament(n), k)
        return chosen + costs.window(c.parties, rows, k, cut=low, compared=low, thresholds=1, signed=False)
    pairs = costs.window(c.parties, rows * n * (n - 1) // 2, k, compared=k - 1, thresholds=1)
    if n == 2:
        return pairs
    return pairs + costs.window(c.parties, rows * n, 8, compared=7, thresholds=1)


ROWS.add("argmax", "argmax.window", _argmax, _argmax_cost, no_error,
     "all pairs at once, or a tournament of values with their indices; " + _TABLES)  # fmt: skip


def _sign_cost(c: StepContext) -> Cost:
    k = windows.window(c.inputs[0])
    return costs.window(c.parties, numel(c), k, compared=k - 1, thresholds=2)


ROWS.add("sign", "sign.window", secret, _sign_cost, no_error, _TABLES)
ROWS.add("amax", "amax.window", reduces_something, _amax_cost, no_error, "a tournament; " + _TABLES)
ROWS.add("max_pool2d", "max_pool2d.window", image, _max_pool_cost, no_error, "a tournament; " + _TABLES)

# -- smooth functions


def _curved(c: StepContext) -> str | None:
    return float_operand(c) or curves.refusal(c.node, c.inputs[0], c.outputs[0].scale)


def _curve_cost(c: StepContext) -> Cost:
    return costs.curve(c.parties, numel(c), curves.curve_of(c.node, c.inputs[0], c.outputs[0].scale))


def _curve_error(c: StepContext) -> float:
    """The series, its rounded factors and angles, what lies beyond the zone, and the units of four roundings."""
    zone = curves.ZONES[curves.name_of(c.node)]
    factors = (zone.terms + 1) * 2.0**-curves.FACTOR_BITS + zone.slope * math.pi * 2.0**-curves.ANGLE_BITS
    return zone.beyond + factors + (2 + c.parties) * unit_of(c)


for _op in ("gelu", "silu", "tanh", "sigmoid", "erf"):
    ROWS.add(_op, f"{_op}.window", _curved, _curve_cost, _curve_error,
         "PROTOCOLS: smooth functions from one opening, beside two comparisons of it")  # fmt: skip


def _norm(c: StepContext) -> Norm | str:
    return norms.norm(c.node, c.inputs, c.outputs[0])


def _planned(plan_of: Callable[[StepContext], object]) -> Accept:
    """Accepts the steps of which there is a plan, and not the reason why there is none."""

    def accepts(c: StepContext) -> str | None:
        plan = plan_of(c)
        return secret(c) or (plan if isinstance(plan, str) else None)

    return accepts


def _norm_cost(c: StepContext) -> Cost:
    plan = _norm(c)
    if isinstance(plan, str):
        return Cost()
    gain = c.inputs[1] if c.node.attrs["has_weight"] and not is_public(c.inputs[1]) else None
    return costs.layer_norm(c.parties, numel(c), plan, gain)


def _norm_error(c: StepContext) -> float:
    """Of values up to sqrt(width): 1/sigma's pieces, and what rounding the centred values is beside the least sigma."""
    plan = _norm(c)
    if isinstance(plan, str):
        return 0.0
    gain = bound_of(c.inputs[1]) if c.node.attrs["has_weight"] else 1.0
    normal = math.sqrt(plan.width)
    rounded = 2 * c.parties * 2.0**-plan.centred * 2.0**NORM_SIGMA_BITS
    return gain * (
        normal * RELATIVE_ERROR + 2 * rounded + 2.0 ** (1 - plan.normal) * c.parties
    ) + 4 * unit_of(c)


ROWS.add("layer_norm", "layer_norm.window", _planned(_norm), _norm_cost, _norm_error,
     "PROTOCOLS: one opening for squares and product; 1/sigma by pieces, zones by comparisons")  # fmt: skip


def _attention(c: StepContext) -> Attention | str:
    return attention.attention(c.node, c.inputs, c.outputs[0], c.parties)


def _attention_cost(c: StepContext) -> Cost:
    plan = _attention(c)
    if isinstance(plan, str):
        return Cost()
    q, k, v = c.inputs[:3]
    return costs.attention(c.parties, plan, q, k, v, c.outputs[0])


def _attention_error(c: StepContext) -> float:
    """What rounding does to scores, to exponentials beside the least sum of a row, and to the inverse; times the values."""
    plan = _attention(c)
    if isinstance(plan, str):
        return 0.0
    q, k, v = c.inputs[:3]
    rounded = 2.0**-plan.query_bits * bound_of(k) + 2.0**-plan.key_bits * bound_of(q)
    score: float = c.parties * math.sqrt(q.shape[-1]) * rounded
    least = 2.0 ** (plan.pieces.low - plan.value_bits)
    value = (c.parties + 1) * 2.0**-plan.value_bits / least * math.sqrt(plan.width)
    return bound_of(v) * (2 * score + value + 2 * RELATIVE_ERROR + 2.0**-10) + 4 * unit_of(c)


ROWS.add("attention", "attention.window", _planned(_attention), _attention_cost, _attention_error,
     "PROTOCOLS: attention; the maximum by counts, separable exponentials from one opening, division last")  # fmt: skip

# -- products, raw


def _raw(c: StepContext) -> str | None:
    """The result keeps the scale of both factors."""
    if c.outputs[0].scale != product_scale(c.node, list(c.inputs)):
        return "the result is not raw"
    return secret(c)


def _weight(c: StepContext) -> str | None:
    if reason := _raw(c):
        return reason
    return None if is_weight(c.inputs[1]) else "the right operand is not a weight of the model owner"


def _public(c: StepContext) -> str | None:
    if reason := _raw(c):
        return reason
    public = any(map(is_public, c.inputs[:2]))
    return None if public else "no operand is public"


def _ring(c: StepContext) -> int:
    return c.outputs[0].ring_bits


def _weight_cost(c: StepContext) -> Cost:
    return costs.fixed_product(c.parties, c.inputs[0].numel, numel(c), c.inputs[1], _ring(c))


def _beaver_cost(c: StepContext) -> Cost:
    return costs.product(c.parties, c.inputs[0].numel, c.inputs[1].numel, numel(c), _ring(c))


def _product_error(c: StepContext) -> float:
    """Exact, but that a quantised weight's scale is rounded to an 11-bit factor: a part in 1024 of the weight."""
    if not c.node.attrs.get("quantized"):
        return 2.0 ** -c.outputs[0].scale
    return (c.outputs[0].bound or 0.0) * 2.0**-9


_FIXED = "PROTOCOLS: linear layer, weights known to S, in a window, for any number of parties"
for _op in ("linear", "matmul", "convolution"):
    _check = one_or_two_dimensions if _op == "convolution" else lambda accepts: accepts
    ROWS.add(_op, f"{_op}.window.weight", _check(_weight), _weight_cost, _product_error, _FIXED)
    ROWS.add(_op, f"{_op}.window.public", _check(_public), lambda c: Cost(), _product_error, "local product")
    ROWS.add(
        _op,
        f"{_op}.window.beaver",
        _check(_raw),
        _beaver_cost,
        _product_error,
        "Beaver, CRYPTO 1991, in a window",
    )


def _ids(c: StepContext) -> str | None:
    return private_ids(c) or _raw(c)


def _embedding_cost(c: StepContext) -> Cost:
    ids, table = c.inputs[:2]
    return costs.fixed_product(c.parties, ids.numel * table.shape[0], numel(c), table, _ring(c))


ROWS.add("embedding", "embedding.window.one_hot", _ids, _embedding_cost, lambda c: unit_of(c) / 2 + _product_error(c),
     "PROTOCOLS: private embedding in the table's ring; the ids are never opened")  # fmt: skip

CATALOG = Registry("mpc", [*ROWS, *GENERIC.specs.values()], lower, check_rings, can_be_exact)
