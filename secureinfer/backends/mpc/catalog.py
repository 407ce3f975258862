"""The MPC kernels as declarations: what each accepts, its rounds and bytes as closed formulas, its error, its source.

Pure: no cryptography is imported. Formulas are for p compute parties, 64-bit words and frames with HEADER_BYTES of header;
the building blocks are in costs.py. The conformance suite holds every kernel to its row.
"""

from __future__ import annotations

import math

from ...graph.ir import Edge, Visibility
from ...graph.ops import OPS
from ...plan.spec import Cost, Registry, StepContext
from ...transport.base import HEADER_BYTES
from . import ranges, windows
from .catalog_functions import ROWS as FUNCTIONS
from .costs import (
    SERIES_BITS,
    TERMS,
    comparison,
    fixed_product,
    greatest_index,
    masked,
    maximum,
    normalised,
    product,
    series_value,
    square,
    to_one,
    truncation,
)
from .ranges import INVERSE_SCALE
from .rings import check_rings
from .rows import (
    NORMALISED,
    Formula,
    Rows,
    anything,
    bound_of,
    fits,
    float_operand,
    image,
    is_int8,
    is_public,
    is_weight,
    no_error,
    numel,
    one_or_two_dimensions,
    precision_of,
    private_ids,
    reduces_something,
    secret,
    secret_product,
    unit_of,
    window_size,
)

ROWS = Rows()

# -- the frame of an inference


def _begin(c: StepContext) -> Cost:
    p = c.parties
    seeds = (2 * p + p * (p - 1)) * (32 + HEADER_BYTES)
    start = Cost("b", (p - 1) * HEADER_BYTES, dealt_bytes=2 * p * HEADER_BYTES, parties=p)
    return start + Cost(setup=frozenset({("seeds", seeds)}))


def _reveal(c: StepContext) -> Cost:
    """For each receiver, a frame from every other party with the outputs that the receiver does not hold in plain."""
    total = Cost()
    for rank in c.node.attrs["ranks"]:
        opened = [
            e for e, owner in zip(c.inputs, c.node.attrs["owners"], strict=True) if _opened_to(e, owner, rank)
        ]
        if opened:
            sizes = (windows.packed_bytes(e.numel, e.ring_bits) for e in opened)
            total = total + to_one(c.parties, sum(sizes), rank)
    return total


def _opened_to(edge: Edge, owner: int | None, rank: int) -> bool:
    return not is_public(edge) and owner != rank


ROWS.add(
    "begin", "begin", anything, _begin, no_error, "DESIGN section 5: the index is burnt on both sides first"
)
ROWS.add(
    "reveal",
    "reveal",
    anything,
    _reveal,
    no_error,
    "PROTOCOLS R5: only declared outputs, only to their receiver",
)

# -- operands of one owner, and shapes: no communication


def _one_owner(c: StepContext) -> str | None:
    return None if c.outputs[0].visibility is Visibility.PRIVATE else "not all operands belong to one owner"


NEVER_PRIVATE = ("rescale", "attention", "polynomial")  # lowering makes two; compiling takes the third apart
PRIVATE_OPS = tuple(op for op in OPS if op not in NEVER_PRIVATE)
for _op in PRIVATE_OPS:
    ROWS.add(_op, f"private.{_op}", _one_owner, lambda c: Cost(), no_error, "its owner computes it in plain")

SHAPE_OPS = ("reshape", "permute", "expand", "slice", "select", "cat", "pad", "flip")
for _op in SHAPE_OPS:
    ROWS.add(_op, f"shape.{_op}", secret, lambda c: Cost(), no_error, "linear in the shares")


def _index(c: StepContext) -> str | None:
    return secret(c) or (None if is_public(c.inputs[1]) else "the index is not public")


ROWS.add("index_select", "shape.index_select", _index, lambda c: Cost(), no_error, "linear in the shares")


def _cast(c: StepContext) -> str | None:
    source, target = c.inputs[0].dtype, c.outputs[0].dtype
    if target == "bool" and source != "bool":
        return f"a cast of a shared {source} to bool would need a comparison; compare explicitly"
    if source.startswith("float") and not target.startswith("float"):
        return "a shared float cannot be cast to an integer type"
    return secret(c)


ROWS.add("cast", "shape.cast", _cast, lambda c: Cost(), no_error, "a change of scale")

# -- arithmetic

for _op in ("add", "sub", "neg"):
    ROWS.add(_op, f"linear.{_op}", secret, lambda c: Cost(), no_error, "additive sharing is linear")
ROWS.add("sum", "linear.sum", secret, lambda c: Cost(), no_error, "additive sharing is linear")
ROWS.add("cumsum", "linear.cumsum", secret, lambda c: Cost(), no_error, "additive sharing is linear")


def _bits_cut(c: StepContext) -> int:
    """Bits to cut after a product of the first two operands."""
    a, b = c.inputs[0], c.inputs[1]
    return precision_of(c) if a.scale and (b.scale or is_int8(b)) else 0


def _has_public(c: StepContext) -> str | None:
    return secret_product(c) or (None if any(is_public(e) for e in c.inputs[:2]) else "no operand is public")


def _times_public(c: StepContext) -> Cost:
    constant = next(e for e in c.inputs if is_public(e))
    bits = ranges.constant_scale(precision_of(c), c.outputs[0]) if constant.scale else 0
    return truncation(c.parties, numel(c), bits)


def _constant_error(c: StepContext) -> float:
    scale = ranges.constant_scale(precision_of(c), c.outputs[0])
    secret = next((e for e in c.inputs if not is_public(e)), c.inputs[0])
    return unit_of(c) + 2.0 ** -(scale + 1) * bound_of(secret)


def _has_weight(c: StepContext) -> str | None:
    if reason := secret_product(c):
        return reason
    kinds = [is_weight(e) for e in c.inputs[:2]]
    return None if any(kinds) else "no operand is a weight of the model owner"


def _times_weight(c: StepContext) -> Cost:
    left, weight = (c.inputs[1], c.inputs[0]) if is_weight(c.inputs[0]) else c.inputs[:2]
    return fixed_product(c.parties, left.numel, numel(c), weight) + truncation(
        c.parties, numel(c), _bits_cut(c)
    )


def _is_square(c: StepContext) -> str | None:
    return secret_product(c) or (None if c.node.inputs[0] == c.node.inputs[1] else "the operands differ")


def _square_cost(c: StepContext) -> Cost:
    return square(c.parties, numel(c)) + truncation(c.parties, numel(c), _bits_cut(c))


def _beaver_cost(c: StepContext) -> Cost:
    a, b = c.inputs[0], c.inputs[1]
    return product(c.parties, a.numel, b.numel, numel(c)) + truncation(c.parties, numel(c), _bits_cut(c))


_BEAVER = "Beaver, CRYPTO 1991, with exact truncation"
_FIXED = "PROTOCOLS: linear layer, weights known to S, for any number of parties"
ROWS.add("mul", "mul.public", _has_public, _times_public, _constant_error, "local product, exact truncation")
ROWS.add("mul", "mul.weight", _has_weight, _times_weight, unit_of, _FIXED)
ROWS.add("mul", "mul.square", _is_square, _square_cost, unit_of, "Beaver square, exact truncation")
ROWS.add("mul", "mul.beaver", secret_product, _beaver_cost, unit_of, _BEAVER)


def _divisor_public(c: StepContext) -> str | None:
    return secret(c) or (None if is_public(c.inputs[1]) else "the divisor is not public")


def _divide_public(c: StepContext) -> Cost:
    return truncation(c.parties, numel(c), ranges.constant_scale(precision_of(c), c.outputs[0]))


def _divisor_private(c: StepContext) -> str | None:
    return secret(c) or (
        None if c.inputs[1].visibility is Visibility.PRIVATE else "the divisor does not belong to one owner"
    )


def _divide_private(c: StepContext) -> Cost:
    scale = ranges.constant_scale(precision_of(c), c.outputs[0])
    a, b = c.inputs
    return product(c.parties, a.numel, b.numel, numel(c)) + truncation(c.parties, numel(c), scale)


def _reciprocal_of(c: StepContext, edge: Edge) -> Cost:
    p, n, f = c.parties, edge.numel, precision_of(c)
    lowest, highest = ranges.magnitude_range(f, edge)
    absolute = masked(p, n, compare=True) + comparison(p, n) + product(p, n, n, n)
    inverse = series_value(p, n, TERMS["unit"], SERIES_BITS - 20) + product(p, n, n, n)
    scale = 20 + highest - f  # of 1/x before it is truncated to f bits
    back = truncation(p, n, scale - f) if scale > f else Cost()
    return absolute + normalised(p, n, lowest, highest) + inverse + back + product(p, n, n, n)


def _divide_shared(c: StepContext) -> Cost:
    a, b = c.inputs
    f = precision_of(c)
    return (
        _reciprocal_of(c, b)
        + product(c.parties, a.numel, b.numel, numel(c))
        + truncation(c.parties, numel(c), f if a.scale else 0)
    )


def _reciprocal_error(c: StepContext) -> float:
    return 2 * unit_of(c) + 2.0**-17 * bound_of(c.outputs[0])


def _division_error(c: StepContext) -> float:
    return unit_of(c) * (2 + bound_of(c.inputs[0])) + 2.0**-17 * bound_of(c.outputs[0])


ROWS.add("div", "div.public", _divisor_public, _divide_public, _constant_error, "product with the reciprocal")
ROWS.add(
    "div", "div.private", _divisor_private, _divide_private, _constant_error, "its owner inverts in plain"
)
ROWS.add("div", "div.shared", secret, _divide_shared, _division_error, NORMALISED)
ROWS.add(
    "reciprocal", "reciprocal.series", float_operand, lambda c: _reciprocal_of(c, c.inputs[0]),
    _reciprocal_error, NORMALISED,
)  # fmt: skip


def _root_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, numel(c), precision_of(c)
    lowest, highest = ranges.magnitude_range(f, c.inputs[0])
    return (
        normalised(p, n, lowest, highest)
        + series_value(p, n, TERMS["unit"], SERIES_BITS - INVERSE_SCALE)
        + product(p, n, n, n)
        + truncation(p, n, INVERSE_SCALE + 20 - f)
    )


def _root_error(c: StepContext) -> float:
    return 2 * unit_of(c) + 2.0**-17 * bound_of(c.outputs[0])


def _log_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, numel(c), precision_of(c)
    lowest, highest = ranges.magnitude_range(f, c.inputs[0])
    return normalised(p, n, lowest, highest) + series_value(p, n, TERMS["unit"], SERIES_BITS - f)


ROWS.add("sqrt", "sqrt.series", float_operand, _root_cost, _root_error, NORMALISED)
ROWS.add("rsqrt", "rsqrt.series", float_operand, _root_cost, _root_error, NORMALISED)
ROWS.add("log", "log.series", float_operand, _log_cost, lambda c: 3 * unit_of(c), NORMALISED)


def _exp_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, numel(c), precision_of(c)
    lowest, highest = ranges.exp_range(c.outputs[0])
    unit, power = ranges.exp_scales(highest)
    return (
        masked(p, n, compare=True)
        + comparison(p, (highest - lowest + 1) * n)
        + series_value(p, n, TERMS["exp_unit"], SERIES_BITS - unit)
        + product(p, n, n, n)
        + truncation(p, n, unit + power - f)
    )


def _exp_error(c: StepContext) -> float:
    _, highest = ranges.exp_range(c.outputs[0])
    unit, power = ranges.exp_scales(highest)
    return (
        2 * unit_of(c)
        + bound_of(c.outputs[0]) * 2.0**-18
        + 2.0**-power
        + math.exp(highest) * 2.0 ** -(unit - 2)
    )


ROWS.add(
    "exp",
    "exp.series",
    float_operand,
    _exp_cost,
    _exp_error,
    "integer part by comparisons, unit part by a series",
)


def _power(c: StepContext) -> str | None:
    if c.node.attrs["exponent"] not in (2, 3, 4):
        return f"exponent {c.node.attrs['exponent']} is not one of 2, 3, 4"
    return float_operand(c) or fits(c)


def _power_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, numel(c), precision_of(c)
    once = square(p, n) + truncation(p, n, f)
    exponent = c.node.attrs["exponent"]
    if exponent == 2:
        return once
    return once + (once if exponent == 4 else product(p, n, n, n) + truncation(p, n, f))


def _power_error(c: StepContext) -> float:
    x = bound_of(c.inputs[0])
    return unit_of(c) * {2: 1.0, 3: 1 + x, 4: 2 + 2 * x * x}[c.node.attrs["exponent"]]


ROWS.add("pow", "pow.square", _power, _power_cost, _power_error, "Beaver squares, exact truncation")

# -- comparisons and choices

_COMPARE = "Catrina and de Hoogh, SCN 2010, from one masked opening"


def _compare_cost(thresholds: int) -> Formula:
    def cost(c: StepContext) -> Cost:
        return masked(c.parties, numel(c), compare=True) + comparison(c.parties, thresholds * numel(c))

    return cost


for _op in ("lt", "le", "gt", "ge"):
    ROWS.add(_op, f"compare.{_op}", secret, _compare_cost(1), no_error, _COMPARE)
for _op in ("eq", "ne"):
    ROWS.add(_op, f"compare.{_op}", secret, _compare_cost(2), no_error, _COMPARE)
ROWS.add("any", "compare.any", secret, _compare_cost(1), no_error, _COMPARE)
ROWS.add("logical_not", "logic.not", secret, lambda c: Cost(), no_error, "1 - x")


def _logic_cost(c: StepContext) -> Cost:
    if any(is_public(e) for e in c.inputs):
        return Cost()
    return product(c.parties, c.inputs[0].numel, c.inputs[1].numel, numel(c))


for _op in ("logical_and", "logical_or"):
    ROWS.add(_op, f"logic.{_op[8:]}", secret, _logic_cost, no_error, "Beaver, CRYPTO 1991")


def _where_cost(c: StepContext) -> Cost:
    if is_public(c.inputs[0]):
        return Cost()
    return product(c.parties, c.inputs[0].numel, numel(c), numel(c))


ROWS.add("where", "select.where", secret, _where_cost, no_error, "b + c (a - b)")


def _choice_cost(thresholds: int) -> Formula:
    def cost(c: StepContext) -> Cost:
        n = numel(c)
        m = thresholds * n
        return masked(c.parties, n, compare=True) + comparison(c.parties, m) + product(c.parties, m, m, m)

    return cost


ROWS.add("relu", "relu.compare", secret, _choice_cost(1), no_error, _COMPARE)
ROWS.add("abs", "abs.compare", secret, _choice_cost(1), no_error, _COMPARE)


def _clamp(c: StepContext) -> str | None:
    scale = c.inputs[0].scale
    low, high = ranges.clamp_limits(c.node.attrs, scale)
    if (low or 0) >= ranges.LARGEST or (high or 0) <= -ranges.LARGEST:
        return "it gives a value that does not fit into the ring"
    return secret(c)


def _clamp_cost(c: StepContext) -> Cost:
    thresholds = sum(v is not None for v in ranges.clamp_limits(c.node.attrs, c.inputs[0].scale))
    return _choice_cost(thresholds)(c) if thresholds else Cost()


ROWS.add("clamp", "clamp.compare", _clamp, _clamp_cost, unit_of, _COMPARE)


def _amax_cost(c: StepContext) -> Cost:
    rows = numel(c)
    return maximum(c.parties, rows, c.inputs[0].numel // rows) if rows else Cost()


ROWS.add("amax", "amax.tournament", reduces_something, _amax_cost, no_error, "a tournament of comparisons")


def _argmax(c: StepContext) -> str | None:
    if numel(c) and not ranges.places(c.inputs[0], c.node.attrs["dim"]):
        return "a maximum over nothing"
    return secret(c)


def _argmax_cost(c: StepContext) -> Cost:
    n = ranges.places(c.inputs[0], c.node.attrs["dim"])
    return greatest_index(c.parties, numel(c), n) if numel(c) else Cost()


ROWS.add("argmax", "argmax.tournament", _argmax, _argmax_cost, no_error, "a tournament of comparisons")
ROWS.add("sign", "sign.compare", secret, _compare_cost(2), no_error, _COMPARE)


ROWS.add(
    "max_pool2d", "max_pool2d.tournament", image,
    lambda c: maximum(c.parties, numel(c), window_size(c)), no_error, "a tournament over each window",
)  # fmt: skip


def _mean_cost(c: StepContext) -> Cost:
    return truncation(c.parties, numel(c), ranges.constant_scale(precision_of(c), c.outputs[0]))


def _mean_error(c: StepContext) -> float:
    return unit_of(c) + 2.0 ** -(ranges.constant_scale(precision_of(c), c.outputs[0]) + 1) * bound_of(
        c.inputs[0]
    ) * (c.inputs[0].numel / max(1, numel(c)))


ROWS.add("mean", "mean.public", float_operand, _mean_cost, _mean_error, "a sum and a public factor")
ROWS.add("avg_pool2d", "avg_pool2d.public", image, _mean_cost, _mean_error, "a sum and a public factor")

# -- products with matrices

ROWS.add("matmul", "matmul.public", _has_public, lambda c: truncation(c.parties, numel(c), precision_of(c)),
     unit_of, "local product, exact truncation")  # fmt: skip


def _matmul_weight(c: StepContext) -> str | None:
    if not is_weight(c.inputs[1]):
        return "the right operand is not a weight of the model owner"
    return secret_product(c)


def _matmul_weight_cost(c: StepContext) -> Cost:
    return fixed_product(c.parties, c.inputs[0].numel, numel(c), c.inputs[1]) + truncation(
        c.parties, numel(c), _bits_cut(c)
    )


ROWS.add("matmul", "matmul.weight", _matmul_weight, _matmul_weight_cost, unit_of, _FIXED)
ROWS.add("matmul", "matmul.beaver", secret_product, _beaver_cost, unit_of, _BEAVER)


def _operator_shared(c: StepContext) -> str | None:
    return secret_product(c) or ("the weight is int8" if is_int8(c.inputs[1]) else None)


def _operator_public(c: StepContext) -> str | None:
    return secret_product(c) or (None if is_public(c.inputs[1]) else "the weight is not public")


ROWS.add("linear", "linear.weight", _matmul_weight, _matmul_weight_cost, unit_of, _FIXED)
ROWS.add("linear", "linear.public", _operator_public, lambda c: truncation(c.parties, numel(c), _bits_cut(c)),
     unit_of, "local product, exact truncation")  # fmt: skip
ROWS.add("linear", "linear.beaver", _operator_shared, _beaver_cost, unit_of, _BEAVER)


ROWS.add(
    "convolution",
    "convolution.weight",
    one_or_two_dimensions(_matmul_weight),
    _matmul_weight_cost,
    unit_of,
    _FIXED,
)
ROWS.add("convolution", "convolution.public", one_or_two_dimensions(_operator_public),
     lambda c: truncation(c.parties, numel(c), _bits_cut(c)), unit_of, "local product, exact truncation")  # fmt: skip
ROWS.add(
    "convolution",
    "convolution.beaver",
    one_or_two_dimensions(_operator_shared),
    _beaver_cost,
    unit_of,
    _BEAVER,
)


def _one_hot_cost(c: StepContext) -> Cost:
    ids, table = c.inputs[:2]
    return fixed_product(c.parties, ids.numel * table.shape[0], numel(c), table)


ROWS.add("embedding", "embedding.one_hot", private_ids, _one_hot_cost, lambda c: unit_of(c) / 2,
     "PROTOCOLS: private embedding, one-hot times table; the ids are never opened")  # fmt: skip

CATALOG = Registry("mpc", [*ROWS, *FUNCTIONS], check=check_rings)
