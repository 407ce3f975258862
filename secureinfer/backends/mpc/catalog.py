"""The MPC kernels as declarations: what each accepts, its rounds and bytes as closed formulas, its error, its source.

Pure: no cryptography is imported. Formulas are for p compute parties, 64-bit words and frames with HEADER_BYTES of header;
the building blocks are in costs.py. The conformance suite holds every kernel to its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ...graph.ir import MODEL_OWNER, Edge, Visibility
from ...graph.ops import OPS
from ...plan.spec import Cost, KernelSpec, Registry, StepContext
from ...transport.base import HEADER_BYTES
from . import ranges, windows
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
    softmax_core,
    square,
    to_one,
    truncation,
)
from .ranges import INVERSE_SCALE
from .rings import check_rings

# -- looking at a step


def _shared(edge: Edge) -> bool:
    return edge.visibility is Visibility.SHARED


def _public(edge: Edge) -> bool:
    return edge.visibility is Visibility.PUBLIC


def _weight(edge: Edge) -> bool:
    return edge.visibility is Visibility.PRIVATE and edge.owner == MODEL_OWNER


def _data(edge: Edge) -> bool:
    return edge.visibility is Visibility.PRIVATE and edge.owner != MODEL_OWNER


def _int8(edge: Edge) -> bool:
    """Whether it is a weight with scales beside it, which these kernels take as a float."""
    return edge.dtype == "int8" and _weight(edge)


def _precision(c: StepContext) -> int:
    return int(c.options["precision_bits"])


def _unit(c: StepContext) -> float:
    return 2.0 ** -_precision(c)


def _n(c: StepContext) -> int:
    return c.outputs[0].numel


def _bound(edge: Edge) -> float:
    return edge.bound if edge.bound is not None else 2.0**10


Formula = Callable[[StepContext], Cost]
Bound = Callable[[StepContext], float]
Accept = Callable[[StepContext], str | None]


def _any(c: StepContext) -> str | None:
    return None


def _secret(c: StepContext) -> str | None:
    return None if _shared(c.outputs[0]) else "the result is not shared"


def _fits(c: StepContext) -> str | None:
    """A product carries twice the fraction bits; with them its bound must stay below 2**62, or it would wrap in silence."""
    edge, f = c.outputs[0], _precision(c)
    if edge.bound is not None and edge.scale and edge.bound * 2.0 ** (2 * f) > 2.0**62:
        fitting = int(62 - math.log2(edge.bound)) // 2
        return (
            f"values up to {edge.bound:.3g} (with head-room) do not fit into 64 bits beside {2 * f} fraction bits; "
            + (f"compile with precision_bits={fitting}" if fitting >= 8 else "scale the model's values down")
        )
    return None


def _secret_product(c: StepContext) -> str | None:
    return _secret(c) or _fits(c)


def _is_float(c: StepContext) -> str | None:
    if not c.inputs[0].dtype.startswith("float"):
        return f"the operand is {c.inputs[0].dtype}; this kernel takes floats"
    return _secret(c)


def _all_private(c: StepContext) -> str | None:
    return None if c.outputs[0].visibility is Visibility.PRIVATE else "not all operands belong to one owner"


def _one_unit(c: StepContext) -> float:
    return _unit(c)


def _exact(c: StepContext) -> float:
    return 0.0


_ROWS: list[KernelSpec] = []


def _row(op: str, name: str, accepts: Accept, cost: Formula, error: Bound, source: str) -> None:
    _ROWS.append(KernelSpec(op, name, "mpc", accepts, cost, error, source))


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
    return not _public(edge) and owner != rank


_row("begin", "begin", _any, _begin, _exact, "DESIGN section 5: the index is burnt on both sides first")
_row("reveal", "reveal", _any, _reveal, _exact, "PROTOCOLS R5: only declared outputs, only to their receiver")

# -- operands of one owner, and shapes: no communication

PRIVATE_OPS = tuple(op for op in OPS if op != "rescale")
for _op in PRIVATE_OPS:
    _row(_op, f"private.{_op}", _all_private, lambda c: Cost(), _exact, "its owner computes it in plain")

SHAPE_OPS = ("reshape", "permute", "expand", "slice", "select", "cat", "pad", "flip")
for _op in SHAPE_OPS:
    _row(_op, f"shape.{_op}", _secret, lambda c: Cost(), _exact, "linear in the shares")


def _index(c: StepContext) -> str | None:
    return _secret(c) or (None if _public(c.inputs[1]) else "the index is not public")


_row("index_select", "shape.index_select", _index, lambda c: Cost(), _exact, "linear in the shares")


def _cast(c: StepContext) -> str | None:
    source, target = c.inputs[0].dtype, c.outputs[0].dtype
    if target == "bool" and source != "bool":
        return f"a cast of a shared {source} to bool would need a comparison; compare explicitly"
    if source.startswith("float") and not target.startswith("float"):
        return "a shared float cannot be cast to an integer type"
    return _secret(c)


_row("cast", "shape.cast", _cast, lambda c: Cost(), _exact, "a change of scale")

# -- arithmetic

for _op in ("add", "sub", "neg"):
    _row(_op, f"linear.{_op}", _secret, lambda c: Cost(), _exact, "additive sharing is linear")
_row("sum", "linear.sum", _secret, lambda c: Cost(), _exact, "additive sharing is linear")
_row("cumsum", "linear.cumsum", _secret, lambda c: Cost(), _exact, "additive sharing is linear")


def _bits_cut(c: StepContext) -> int:
    """Bits to cut after a product of the first two operands."""
    a, b = c.inputs[0], c.inputs[1]
    return _precision(c) if a.scale and (b.scale or _int8(b)) else 0


def _has_public(c: StepContext) -> str | None:
    return _secret_product(c) or (None if any(_public(e) for e in c.inputs[:2]) else "no operand is public")


def _times_public(c: StepContext) -> Cost:
    constant = next(e for e in c.inputs if _public(e))
    bits = ranges.constant_scale(_precision(c), c.outputs[0]) if constant.scale else 0
    return truncation(c.parties, _n(c), bits)


def _constant_error(c: StepContext) -> float:
    scale = ranges.constant_scale(_precision(c), c.outputs[0])
    secret = next((e for e in c.inputs if not _public(e)), c.inputs[0])
    return _unit(c) + 2.0 ** -(scale + 1) * _bound(secret)


def _has_weight(c: StepContext) -> str | None:
    if reason := _secret_product(c):
        return reason
    kinds = [_weight(e) for e in c.inputs[:2]]
    return None if any(kinds) else "no operand is a weight of the model owner"


def _times_weight(c: StepContext) -> Cost:
    left, weight = (c.inputs[1], c.inputs[0]) if _weight(c.inputs[0]) else c.inputs[:2]
    return fixed_product(c.parties, left.numel, _n(c), weight) + truncation(c.parties, _n(c), _bits_cut(c))


def _is_square(c: StepContext) -> str | None:
    return _secret_product(c) or (None if c.node.inputs[0] == c.node.inputs[1] else "the operands differ")


def _square_cost(c: StepContext) -> Cost:
    return square(c.parties, _n(c)) + truncation(c.parties, _n(c), _bits_cut(c))


def _beaver_cost(c: StepContext) -> Cost:
    a, b = c.inputs[0], c.inputs[1]
    return product(c.parties, a.numel, b.numel, _n(c)) + truncation(c.parties, _n(c), _bits_cut(c))


_BEAVER = "Beaver, CRYPTO 1991, with exact truncation"
_FIXED = "PROTOCOLS: linear layer, weights known to S, for any number of parties"
_row("mul", "mul.public", _has_public, _times_public, _constant_error, "local product, exact truncation")
_row("mul", "mul.weight", _has_weight, _times_weight, _one_unit, _FIXED)
_row("mul", "mul.square", _is_square, _square_cost, _one_unit, "Beaver square, exact truncation")
_row("mul", "mul.beaver", _secret_product, _beaver_cost, _one_unit, _BEAVER)


def _divisor_public(c: StepContext) -> str | None:
    return _secret(c) or (None if _public(c.inputs[1]) else "the divisor is not public")


def _divide_public(c: StepContext) -> Cost:
    return truncation(c.parties, _n(c), ranges.constant_scale(_precision(c), c.outputs[0]))


def _divisor_private(c: StepContext) -> str | None:
    return _secret(c) or (
        None if c.inputs[1].visibility is Visibility.PRIVATE else "the divisor does not belong to one owner"
    )


def _divide_private(c: StepContext) -> Cost:
    scale = ranges.constant_scale(_precision(c), c.outputs[0])
    a, b = c.inputs
    return product(c.parties, a.numel, b.numel, _n(c)) + truncation(c.parties, _n(c), scale)


def _reciprocal_of(c: StepContext, edge: Edge) -> Cost:
    p, n, f = c.parties, edge.numel, _precision(c)
    lowest, highest = ranges.magnitude_range(f, edge)
    absolute = masked(p, n, compare=True) + comparison(p, n) + product(p, n, n, n)
    inverse = series_value(p, n, TERMS["unit"], SERIES_BITS - 20) + product(p, n, n, n)
    scale = 20 + highest - f  # of 1/x before it is truncated to f bits
    back = truncation(p, n, scale - f) if scale > f else Cost()
    return absolute + normalised(p, n, lowest, highest) + inverse + back + product(p, n, n, n)


def _divide_shared(c: StepContext) -> Cost:
    a, b = c.inputs
    f = _precision(c)
    return (
        _reciprocal_of(c, b)
        + product(c.parties, a.numel, b.numel, _n(c))
        + truncation(c.parties, _n(c), f if a.scale else 0)
    )


def _reciprocal_error(c: StepContext) -> float:
    return 2 * _unit(c) + 2.0**-17 * _bound(c.outputs[0])


def _division_error(c: StepContext) -> float:
    return _unit(c) * (2 + _bound(c.inputs[0])) + 2.0**-17 * _bound(c.outputs[0])


_NORMALISED = "normalisation by comparisons, then a series from one opening"
_row("div", "div.public", _divisor_public, _divide_public, _constant_error, "product with the reciprocal")
_row("div", "div.private", _divisor_private, _divide_private, _constant_error, "its owner inverts in plain")
_row("div", "div.shared", _secret, _divide_shared, _division_error, _NORMALISED)
_row(
    "reciprocal", "reciprocal.series", _is_float, lambda c: _reciprocal_of(c, c.inputs[0]),
    _reciprocal_error, _NORMALISED,
)  # fmt: skip


def _root_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, _n(c), _precision(c)
    lowest, highest = ranges.magnitude_range(f, c.inputs[0])
    return (
        normalised(p, n, lowest, highest)
        + series_value(p, n, TERMS["unit"], SERIES_BITS - INVERSE_SCALE)
        + product(p, n, n, n)
        + truncation(p, n, INVERSE_SCALE + 20 - f)
    )


def _root_error(c: StepContext) -> float:
    return 2 * _unit(c) + 2.0**-17 * _bound(c.outputs[0])


def _log_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, _n(c), _precision(c)
    lowest, highest = ranges.magnitude_range(f, c.inputs[0])
    return normalised(p, n, lowest, highest) + series_value(p, n, TERMS["unit"], SERIES_BITS - f)


_row("sqrt", "sqrt.series", _is_float, _root_cost, _root_error, _NORMALISED)
_row("rsqrt", "rsqrt.series", _is_float, _root_cost, _root_error, _NORMALISED)
_row("log", "log.series", _is_float, _log_cost, lambda c: 3 * _unit(c), _NORMALISED)


def _exp_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, _n(c), _precision(c)
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
        2 * _unit(c) + _bound(c.outputs[0]) * 2.0**-18 + 2.0**-power + math.exp(highest) * 2.0 ** -(unit - 2)
    )


_row(
    "exp",
    "exp.series",
    _is_float,
    _exp_cost,
    _exp_error,
    "integer part by comparisons, unit part by a series",
)


def _power(c: StepContext) -> str | None:
    if c.node.attrs["exponent"] not in (2, 3, 4):
        return f"exponent {c.node.attrs['exponent']} is not one of 2, 3, 4"
    return _is_float(c) or _fits(c)


def _power_cost(c: StepContext) -> Cost:
    p, n, f = c.parties, _n(c), _precision(c)
    once = square(p, n) + truncation(p, n, f)
    exponent = c.node.attrs["exponent"]
    if exponent == 2:
        return once
    return once + (once if exponent == 4 else product(p, n, n, n) + truncation(p, n, f))


def _power_error(c: StepContext) -> float:
    x = _bound(c.inputs[0])
    return _unit(c) * {2: 1.0, 3: 1 + x, 4: 2 + 2 * x * x}[c.node.attrs["exponent"]]


_row("pow", "pow.square", _power, _power_cost, _power_error, "Beaver squares, exact truncation")

# -- comparisons and choices

_COMPARE = "Catrina and de Hoogh, SCN 2010, from one masked opening"


def _compare_cost(thresholds: int) -> Formula:
    def cost(c: StepContext) -> Cost:
        return masked(c.parties, _n(c), compare=True) + comparison(c.parties, thresholds * _n(c))

    return cost


for _op in ("lt", "le", "gt", "ge"):
    _row(_op, f"compare.{_op}", _secret, _compare_cost(1), _exact, _COMPARE)
for _op in ("eq", "ne"):
    _row(_op, f"compare.{_op}", _secret, _compare_cost(2), _exact, _COMPARE)
_row("any", "compare.any", _secret, _compare_cost(1), _exact, _COMPARE)
_row("logical_not", "logic.not", _secret, lambda c: Cost(), _exact, "1 - x")


def _logic_cost(c: StepContext) -> Cost:
    if any(_public(e) for e in c.inputs):
        return Cost()
    return product(c.parties, c.inputs[0].numel, c.inputs[1].numel, _n(c))


for _op in ("logical_and", "logical_or"):
    _row(_op, f"logic.{_op[8:]}", _secret, _logic_cost, _exact, "Beaver, CRYPTO 1991")


def _where_cost(c: StepContext) -> Cost:
    if _public(c.inputs[0]):
        return Cost()
    return product(c.parties, c.inputs[0].numel, _n(c), _n(c))


_row("where", "select.where", _secret, _where_cost, _exact, "b + c (a - b)")


def _choice_cost(thresholds: int) -> Formula:
    def cost(c: StepContext) -> Cost:
        n = _n(c)
        m = thresholds * n
        return masked(c.parties, n, compare=True) + comparison(c.parties, m) + product(c.parties, m, m, m)

    return cost


_row("relu", "relu.compare", _secret, _choice_cost(1), _exact, _COMPARE)
_row("abs", "abs.compare", _secret, _choice_cost(1), _exact, _COMPARE)


def _clamp(c: StepContext) -> str | None:
    scale = c.inputs[0].scale
    low, high = ranges.clamp_limits(c.node.attrs, scale)
    if (low or 0) >= ranges.LARGEST or (high or 0) <= -ranges.LARGEST:
        return "it gives a value that does not fit into the ring"
    return _secret(c)


def _clamp_cost(c: StepContext) -> Cost:
    thresholds = sum(v is not None for v in ranges.clamp_limits(c.node.attrs, c.inputs[0].scale))
    return _choice_cost(thresholds)(c) if thresholds else Cost()


_row("clamp", "clamp.compare", _clamp, _clamp_cost, _one_unit, _COMPARE)


def _amax_cost(c: StepContext) -> Cost:
    rows = _n(c)
    return maximum(c.parties, rows, c.inputs[0].numel // rows) if rows else Cost()


def _amax(c: StepContext) -> str | None:
    if _n(c) and c.inputs[0].numel == 0:
        return "a maximum over nothing"
    return _secret(c)


_row("amax", "amax.tournament", _amax, _amax_cost, _exact, "a tournament of comparisons")


def places(c: StepContext) -> int:
    """How many values an argmax chooses from."""
    shape = c.inputs[0].shape
    return shape[c.node.attrs["dim"]] if shape else 1


def _argmax(c: StepContext) -> str | None:
    if _n(c) and not places(c):
        return "a maximum over nothing"
    return _secret(c)


def _argmax_cost(c: StepContext) -> Cost:
    return greatest_index(c.parties, _n(c), places(c)) if _n(c) else Cost()


_row("argmax", "argmax.tournament", _argmax, _argmax_cost, _exact, "a tournament of comparisons")
_row("sign", "sign.compare", _secret, _compare_cost(2), _exact, _COMPARE)


def _window(c: StepContext) -> int:
    size = c.node.attrs["kernel_size"]
    return int(size[0]) * int(size[1])


def _image(c: StepContext) -> str | None:
    if len(c.inputs[0].shape) != 4:
        return f"the operand has {len(c.inputs[0].shape)} dimensions; this kernel takes [N, C, H, W]"
    return _secret(c)


_row(
    "max_pool2d", "max_pool2d.tournament", _image,
    lambda c: maximum(c.parties, _n(c), _window(c)), _exact, "a tournament over each window",
)  # fmt: skip


def _mean_cost(c: StepContext) -> Cost:
    return truncation(c.parties, _n(c), ranges.constant_scale(_precision(c), c.outputs[0]))


def _mean_error(c: StepContext) -> float:
    return _unit(c) + 2.0 ** -(ranges.constant_scale(_precision(c), c.outputs[0]) + 1) * _bound(
        c.inputs[0]
    ) * (c.inputs[0].numel / max(1, _n(c)))


_row("mean", "mean.public", _is_float, _mean_cost, _mean_error, "a sum and a public factor")
_row("avg_pool2d", "avg_pool2d.public", _image, _mean_cost, _mean_error, "a sum and a public factor")

# -- products with matrices

_row("matmul", "matmul.public", _has_public, lambda c: truncation(c.parties, _n(c), _precision(c)),
     _one_unit, "local product, exact truncation")  # fmt: skip


def _matmul_weight(c: StepContext) -> str | None:
    if not _weight(c.inputs[1]):
        return "the right operand is not a weight of the model owner"
    return _secret_product(c)


def _matmul_weight_cost(c: StepContext) -> Cost:
    return fixed_product(c.parties, c.inputs[0].numel, _n(c), c.inputs[1]) + truncation(
        c.parties, _n(c), _bits_cut(c)
    )


_row("matmul", "matmul.weight", _matmul_weight, _matmul_weight_cost, _one_unit, _FIXED)
_row("matmul", "matmul.beaver", _secret_product, _beaver_cost, _one_unit, _BEAVER)


def _operator_shared(c: StepContext) -> str | None:
    return _secret_product(c) or ("the weight is int8" if _int8(c.inputs[1]) else None)


def _operator_public(c: StepContext) -> str | None:
    return _secret_product(c) or (None if _public(c.inputs[1]) else "the weight is not public")


_row("linear", "linear.weight", _matmul_weight, _matmul_weight_cost, _one_unit, _FIXED)
_row("linear", "linear.public", _operator_public, lambda c: truncation(c.parties, _n(c), _bits_cut(c)),
     _one_unit, "local product, exact truncation")  # fmt: skip
_row("linear", "linear.beaver", _operator_shared, _beaver_cost, _one_unit, _BEAVER)


def _convolution(accepts: Accept) -> Accept:
    def check(c: StepContext) -> str | None:
        if len(c.inputs[0].shape) not in (3, 4):
            return (
                f"{len(c.inputs[0].shape) - 2} spatial dimensions; convolutions of one or two are supported"
            )
        return accepts(c)

    return check


_row(
    "convolution", "convolution.weight", _convolution(_matmul_weight), _matmul_weight_cost, _one_unit, _FIXED
)
_row("convolution", "convolution.public", _convolution(_operator_public),
     lambda c: truncation(c.parties, _n(c), _bits_cut(c)), _one_unit, "local product, exact truncation")  # fmt: skip
_row("convolution", "convolution.beaver", _convolution(_operator_shared), _beaver_cost, _one_unit, _BEAVER)


def _private_ids(c: StepContext) -> str | None:
    ids, table = c.inputs[:2]
    if not _data(ids):
        return (
            "the ids do not belong to a data owner, so a one-hot vector cannot be made without opening them"
        )
    return None if _weight(table) else "the table is not a weight of the model owner"


def _one_hot_cost(c: StepContext) -> Cost:
    ids, table = c.inputs[:2]
    return fixed_product(c.parties, ids.numel * table.shape[0], _n(c), table)


_row("embedding", "embedding.one_hot", _private_ids, _one_hot_cost, lambda c: _unit(c) / 2,
     "PROTOCOLS: private embedding, one-hot times table; the ids are never opened")  # fmt: skip

# -- activations

_SERIES = "PROTOCOLS: smooth functions from one opening, a Fourier extension"


def _gated(series: str, products: int) -> Formula:
    """A series inside [-T, T], the asymptote outside: one opening, one truncation, one product."""

    def cost(c: StepContext) -> Cost:
        p, n, f = c.parties, _n(c), _precision(c)
        return (
            masked(p, n, compare=True, terms=TERMS[series])
            + truncation(p, n, SERIES_BITS - f)
            + comparison(p, 2 * n)
            + product(p, products * n, products * n, products * n)
        )

    return cost


def _gelu_cost(c: StepContext) -> Cost:
    return _gated("gelu_tanh" if c.node.attrs["approximate"] == "tanh" else "gelu", 2)(c)


_row("gelu", "gelu.series", _is_float, _gelu_cost, lambda c: 2 * _unit(c) + 5e-6, _SERIES)
_row("silu", "silu.series", _is_float, _gated("silu", 2), lambda c: 2 * _unit(c) + 3e-5, _SERIES)
_row("tanh", "tanh.series", _is_float, _gated("tanh", 1), lambda c: 2 * _unit(c) + 2e-5, _SERIES)
_row("sigmoid", "sigmoid.series", _is_float, _gated("tanh", 1), lambda c: 2 * _unit(c) + 1e-5, _SERIES)
_row("erf", "erf.series", _is_float, _gated("erf", 1), lambda c: 2 * _unit(c) + 5e-6, _SERIES)

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
    return _is_float(c)


def _softmax_cost(c: StepContext) -> Cost:
    rows, n = _row_shape(c)
    return softmax_core(c.parties, rows, n, _precision(c), guard=False)


def _masked_softmax_cost(c: StepContext) -> Cost:
    rows, n = _row_shape(c)
    x, keep = c.inputs
    choose = Cost() if _public(keep) else product(c.parties, x.numel, keep.numel, x.numel)
    return choose + softmax_core(c.parties, rows, n, _precision(c), guard=True)


_row("softmax", "softmax.series", _softmax_accepts, _softmax_cost, lambda c: 2 * _unit(c) + 1e-5, _SERIES)
_row("masked_softmax", "masked_softmax.series", _softmax_accepts, _masked_softmax_cost,
     lambda c: 2 * _unit(c) + 1e-5, _SERIES + "; masked places leave by selection")  # fmt: skip


def _norm_rows(c: StepContext) -> tuple[int, int]:
    width = math.prod(c.node.attrs["normalized_shape"])
    return (c.inputs[0].numel // width if width else 0), width


def _norm_accepts(c: StepContext) -> str | None:
    for edge in c.inputs[1:]:
        if not (_weight(edge) or _public(edge)):
            return f"{edge.name} is neither a weight of the model owner nor public"
    return _is_float(c)


def _norm_cost(c: StepContext) -> Cost:
    p, f = c.parties, _precision(c)
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
        total = total + (Cost() if _public(gain) else fixed_product(p, n, n, gain)) + truncation(p, n, f + 4)
    return total


def _norm_error(c: StepContext) -> float:
    """For rows whose standard deviation is at least 2**-6; below it grows as 1/sigma."""
    rows, width = _norm_rows(c)
    guard = ranges.norm_guard(_precision(c), width, c.inputs[0])
    gain = _bound(c.inputs[1]) if c.node.attrs["has_weight"] else 1.0
    return _unit(c) * (2 + gain * (2.0 ** (7 - guard) + math.sqrt(width)))


_row("layer_norm", "layer_norm.series", _norm_accepts, _norm_cost, _norm_error, _NORMALISED)


def rows() -> Iterable[KernelSpec]:
    return tuple(_ROWS)


CATALOG = Registry("mpc", _ROWS, check=check_rings)
