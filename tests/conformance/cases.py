"""Strategies that draw a step for each kernel: operands on the fixed-point grid, attributes, and what float64 says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from secureinfer.backends.mpc.fast.catalog import CATALOG
from secureinfer.graph.int8 import CHANNEL_DIM
from secureinfer.graph.ops import OPS

from .harness import Operand, exact_grid


@dataclass
class Case:
    """One step. The expected value is the operator's reference function in float64."""

    op: str
    operands: list[Operand]
    attrs: dict[str, Any] = field(default_factory=dict)
    output_dtype: str = "float32"
    output_bound: float | None = None
    output_scale: int | None = None
    output_ring_bits: int = 64

    def expected(self) -> torch.Tensor:
        values = [o.value.double() if o.value.dtype.is_floating_point else o.value for o in self.operands]
        return OPS[self.op](self.attrs, values)


Draw = Callable[..., Any]
CASES: dict[str, Callable[[Draw], Case]] = {}


def case(*kernels: str) -> Callable[[Callable[[Draw, str], Case]], Callable[[Draw, str], Case]]:
    def register(function: Callable[[Draw, str], Case]) -> Callable[[Draw, str], Case]:
        for kernel in kernels:
            CASES[kernel] = lambda draw, kernel=kernel: function(draw, kernel)
        return function

    return register


def values(draw: Draw, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    """Floats on the grid in [low, high]; now and then all at one end of the range, or zero."""
    kind = draw(st.sampled_from(["uniform", "uniform", "uniform", "low", "high", "zero"]))
    if kind in ("low", "high", "zero"):
        end = {"low": low, "high": high, "zero": min(max(0.0, low), high)}[kind]
        return exact_grid(torch.full(shape, end)).float()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return exact_grid(x).float()


def bits(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))


def shapes(draw: Draw, least: int = 0, most_dims: int = 3, dims: int | None = None) -> tuple[int, ...]:
    count = dims if dims is not None else draw(st.integers(0, most_dims))
    return tuple(draw(st.integers(least, 5)) for _ in range(count))


def broadcast_pair(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that broadcast: one may lack leading dimensions or have ones."""
    whole = shapes(draw)
    other = tuple(1 if draw(st.booleans()) else n for n in whole)[draw(st.integers(0, len(whole))) :]
    return (whole, other) if draw(st.booleans()) else (other, whole)


def dim_of(draw: Draw, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


# -- private operands: the owner computes in plain


@case("private.add", "private.sub", "private.mul", "private.eq", "private.ne", "private.lt", "private.le")
def _private_binary(draw: Draw, kernel: str) -> Case:
    op = kernel.removeprefix("private.")
    a, b = broadcast_pair(draw)
    dtype = "bool" if op in ("eq", "ne", "lt", "le") else "float32"
    return Case(
        op, [Operand(values(draw, a, -9, 9), "data"), Operand(values(draw, b, -9, 9), "data")], {}, dtype
    )


@case("private.gt", "private.ge")
def _private_compare(draw: Draw, kernel: str) -> Case:
    return Case(
        kernel.removeprefix("private."),
        [Operand(values(draw, (3,), -9, 9), "data"), Operand(torch.tensor(0.5), "public")],
        {},
        "bool",
    )


@case("private.div")
def _private_div(draw: Draw, kernel: str) -> Case:
    return Case(
        "div", [Operand(values(draw, (3,), -9, 9), "data"), Operand(values(draw, (3,), 1, 9), "data")]
    )


@case("private.logical_and", "private.logical_or")
def _private_logic(draw: Draw, kernel: str) -> Case:
    return Case(
        kernel.removeprefix("private."),
        [Operand(bits(draw, (4,)), "data"), Operand(bits(draw, (4,)), "data")],
        {},
        "bool",
    )


@case("private.logical_not")
def _private_not(draw: Draw, kernel: str) -> Case:
    return Case("logical_not", [Operand(bits(draw, shapes(draw)), "data")], {}, "bool")


@case("private.where")
def _private_where(draw: Draw, kernel: str) -> Case:
    return Case(
        "where",
        [
            Operand(bits(draw, (4,)), "data"),
            Operand(values(draw, (4,), -9, 9), "data"),
            Operand(values(draw, (4,), -9, 9), "data"),
        ],
    )


@case("private.one_hot")
def _private_one_hot(draw: Draw, kernel: str) -> Case:
    ids = torch.tensor(draw(st.lists(st.integers(0, 6), max_size=4)), dtype=torch.int64)
    return Case("one_hot", [Operand(ids, "data")], {"num_classes": 7}, "int64")


_UNARY = ("neg", "relu", "sigmoid", "tanh", "exp", "reciprocal", "abs", "log", "sqrt", "rsqrt")


@case(*(f"private.{op}" for op in _UNARY))
def _private_unary(draw: Draw, kernel: str) -> Case:
    return Case(kernel.removeprefix("private."), [Operand(values(draw, shapes(draw), 0.5, 6), "data")])


@case("private.clamp")
def _private_clamp(draw: Draw, kernel: str) -> Case:
    return Case("clamp", [Operand(values(draw, (4,), -9, 9), "data")], {"min": -1.0, "max": 2.0})


@case("private.pow")
def _private_pow(draw: Draw, kernel: str) -> Case:
    return Case("pow", [Operand(values(draw, (4,), -3, 3), "data")], {"exponent": 2})


@case("private.cast")
def _private_cast(draw: Draw, kernel: str) -> Case:
    return Case("cast", [Operand(bits(draw, shapes(draw)), "data")], {"dtype": "float32"})


@case("private.any")
def _private_any(draw: Draw, kernel: str) -> Case:
    return Case("any", [Operand(bits(draw, (3, 4)), "data")], {"dims": [-1], "keepdim": True}, "bool")


@case("private.sum", "private.mean", "private.amax")
def _private_reduce(draw: Draw, kernel: str) -> Case:
    return Case(
        kernel.removeprefix("private."),
        [Operand(values(draw, (3, 4), -9, 9), "data")],
        {"dims": [draw(st.sampled_from([0, 1, -1, -2]))], "keepdim": draw(st.booleans())},
    )


@case("private.cumsum", "linear.cumsum")
def _cumsum(draw: Draw, kernel: str) -> Case:
    kind = "data" if kernel.startswith("private") else "shared"
    return Case("cumsum", [Operand(values(draw, (3, 4), -9, 9), kind)], {"dim": dim_of(draw, 2)})


# -- shapes


def _kind(kernel: str) -> str:
    return "data" if kernel.startswith("private") else "shared"


@case("private.reshape", "shape.reshape")
def _reshape(draw: Draw, kernel: str) -> Case:
    shape = shapes(draw, dims=2)
    target = draw(st.sampled_from([[shape[1], shape[0]], [shape[0] * shape[1]], [1, shape[0], shape[1]]]))
    return Case("reshape", [Operand(values(draw, shape, -9, 9), _kind(kernel))], {"shape": target})


@case("private.permute", "shape.permute")
def _permute(draw: Draw, kernel: str) -> Case:
    shape = shapes(draw, dims=3)
    return Case(
        "permute",
        [Operand(values(draw, shape, -9, 9), _kind(kernel))],
        {"dims": draw(st.permutations([0, 1, 2]))},
    )


@case("private.expand", "shape.expand")
def _expand(draw: Draw, kernel: str) -> Case:
    n = draw(st.integers(0, 4))
    return Case(
        "expand",
        [Operand(values(draw, (1, n), -9, 9), _kind(kernel))],
        {"shape": [draw(st.integers(1, 3)), 3, n]},
    )


@case("private.slice", "shape.slice")
def _slice(draw: Draw, kernel: str) -> Case:
    return Case(
        "slice",
        [Operand(values(draw, (6, 4), -9, 9), _kind(kernel))],
        {
            "dim": draw(st.sampled_from([0, -2])),
            "start": draw(st.integers(0, 3)),
            "end": 6,
            "step": draw(st.integers(1, 3)),
        },
    )


@case("private.select", "shape.select")
def _select(draw: Draw, kernel: str) -> Case:
    return Case(
        "select",
        [Operand(values(draw, (3, 4), -9, 9), _kind(kernel))],
        {"dim": dim_of(draw, 2), "index": draw(st.integers(-3, 2))},
    )


@case("private.cat", "shape.cat")
def _cat(draw: Draw, kernel: str) -> Case:
    second = "public" if kernel == "shape.cat" and draw(st.booleans()) else _kind(kernel)
    return Case(
        "cat",
        [
            Operand(values(draw, (2, draw(st.integers(0, 3))), -9, 9), _kind(kernel)),
            Operand(values(draw, (2, 3), -9, 9), second),
        ],
        {"dim": draw(st.sampled_from([1, -1]))},
    )


@case("private.index_select", "shape.index_select")
def _index_select(draw: Draw, kernel: str) -> Case:
    index = torch.tensor(draw(st.lists(st.integers(0, 3), max_size=5)), dtype=torch.int64)
    return Case(
        "index_select",
        [Operand(values(draw, (3, 4), -9, 9), _kind(kernel)), Operand(index, "public")],
        {"dim": draw(st.sampled_from([1, -1]))},
    )


@case("private.pad", "shape.pad")
def _pad(draw: Draw, kernel: str) -> Case:
    return Case(
        "pad",
        [Operand(values(draw, (2, 3), -9, 9), _kind(kernel))],
        {"pad": [1, draw(st.integers(0, 2)), 0, 1], "value": draw(st.sampled_from([0.0, -1.5]))},
    )


@case("private.flip", "shape.flip")
def _flip(draw: Draw, kernel: str) -> Case:
    return Case("flip", [Operand(values(draw, (2, 3), -9, 9), _kind(kernel))], {"dims": [dim_of(draw, 2)]})


@case("shape.cast")
def _cast(draw: Draw, kernel: str) -> Case:
    return Case("cast", [Operand(bits(draw, shapes(draw)), "shared")], {"dtype": "float32"})


# -- arithmetic


@case("linear.add", "linear.sub")
def _add(draw: Draw, kernel: str) -> Case:
    a, b = broadcast_pair(draw)
    other = draw(st.sampled_from(["shared", "public", "weight"]))
    pair = [Operand(values(draw, a, -9, 9)), Operand(values(draw, b, -9, 9), other)]
    return Case(kernel.removeprefix("linear."), pair if draw(st.booleans()) else pair[::-1])


@case("linear.neg")
def _neg(draw: Draw, kernel: str) -> Case:
    return Case("neg", [Operand(values(draw, shapes(draw), -9, 9))])


@case("linear.sum")
def _sum(draw: Draw, kernel: str) -> Case:
    return Case(
        "sum",
        [Operand(values(draw, (3, 4), -9, 9))],
        {"dims": [dim_of(draw, 2)], "keepdim": draw(st.booleans())},
    )


LARGE = 2.0**12
"""Extremes for products: their square stays below 2**30 at 32 fraction bits."""


@case("mul.public", "mul.weight", "mul.beaver")
def _mul(draw: Draw, kernel: str) -> Case:
    a, b = broadcast_pair(draw)
    kind = {"mul.public": "public", "mul.weight": "weight", "mul.beaver": "shared"}[kernel]
    size = draw(st.sampled_from([4.0, LARGE])) if kernel != "mul.public" else 16.0
    pair = [
        Operand(values(draw, a, -size, size), bound=size),
        Operand(values(draw, b, -size, size), kind, size),
    ]
    return Case("mul", pair if draw(st.booleans()) else pair[::-1], output_bound=size * size)


@case("div.public", "div.private", "div.shared")
def _div(draw: Draw, kernel: str) -> Case:
    a, b = broadcast_pair(draw)
    kind = {"div.public": "public", "div.private": "data", "div.shared": "shared"}[kernel]
    divisor = values(draw, b, 0.5, 64.0)
    if kernel != "div.public":
        divisor = divisor * draw(st.sampled_from([1.0, -1.0]))
    return Case(
        "div",
        [Operand(values(draw, a, -16, 16), bound=16.0), Operand(divisor, kind, 64.0)],
        output_bound=32.0,
    )


@case("reciprocal.series")
def _reciprocal(draw: Draw, kernel: str) -> Case:
    sign = draw(st.sampled_from([1.0, -1.0]))
    return Case(
        "reciprocal",
        [Operand(values(draw, shapes(draw), 0.01, 1000.0) * sign, bound=1024.0)],
        output_bound=128.0,
    )


@case("sqrt.series", "rsqrt.series", "log.series")
def _root(draw: Draw, kernel: str) -> Case:
    op = kernel.split(".")[0]
    return Case(op, [Operand(values(draw, shapes(draw), 0.01, 1000.0), bound=1024.0)], output_bound=32.0)


@case("exp.series")
def _exp(draw: Draw, kernel: str) -> Case:
    high = draw(st.sampled_from([0.5, 4.0, 8.0]))
    return Case(
        "exp", [Operand(values(draw, shapes(draw), -13.9, high), bound=16.0)], output_bound=math.exp(high)
    )


@case("pow.square")
def _pow(draw: Draw, kernel: str) -> Case:
    return Case(
        "pow",
        [Operand(values(draw, shapes(draw), -8, 8), bound=8.0)],
        {"exponent": draw(st.sampled_from([2, 3, 4]))},
    )


# -- comparisons and choices


@case(*(f"compare.{op}" for op in ("lt", "le", "gt", "ge", "eq", "ne")))
def _compare(draw: Draw, kernel: str) -> Case:
    a, b = broadcast_pair(draw)
    size = draw(st.sampled_from([2.0, 2.0**40]))  # near each other with ties; and the far ends of the ring
    x, y = values(draw, a, -size, size), values(draw, b, -size, size)
    if size == 2.0:
        x, y = x.round(), y.round()
    other = draw(st.sampled_from(["shared", "public"]))
    return Case(kernel.removeprefix("compare."), [Operand(x), Operand(y, other)], {}, "bool")


@case("compare.any")
def _any(draw: Draw, kernel: str) -> Case:
    return Case(
        "any",
        [Operand(bits(draw, (3, 4)))],
        {"dims": [dim_of(draw, 2)], "keepdim": draw(st.booleans())},
        "bool",
    )


@case("logic.not")
def _not(draw: Draw, kernel: str) -> Case:
    return Case("logical_not", [Operand(bits(draw, shapes(draw)))], {}, "bool")


@case("logic.and", "logic.or")
def _logic(draw: Draw, kernel: str) -> Case:
    other = draw(st.sampled_from(["shared", "public"]))
    return Case(
        f"logical_{kernel[6:]}", [Operand(bits(draw, (2, 3))), Operand(bits(draw, (3,)), other)], {}, "bool"
    )


@case("select.where")
def _where(draw: Draw, kernel: str) -> Case:
    kind = draw(st.sampled_from(["shared", "public", "data"]))
    return Case(
        "where",
        [
            Operand(bits(draw, (3, 1)), kind),
            Operand(values(draw, (3, 4), -9, 9)),
            Operand(values(draw, (4,), -9, 9), draw(st.sampled_from(["shared", "public"]))),
        ],
    )


@case("relu.compare", "abs.compare")
def _relu(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([4.0, 2.0**40]))
    return Case(kernel.split(".")[0], [Operand(values(draw, shapes(draw), -size, size))])


@case("clamp.compare")
def _clamp(draw: Draw, kernel: str) -> Case:
    low, high = draw(st.sampled_from([(-1.0, 2.0), (None, 2.0), (0.5, None), (3.0, 1.0), (0.0, 6.0)]))
    return Case("clamp", [Operand(values(draw, shapes(draw), -9, 9))], {"min": low, "max": high})


@case("amax.tournament")
def _amax(draw: Draw, kernel: str) -> Case:
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 9)))
    return Case(
        "amax",
        [Operand(values(draw, shape, -9, 9))],
        {"dims": [draw(st.sampled_from([1, -1]))], "keepdim": draw(st.booleans())},
    )


@case("argmax.tournament", "private.argmax")
def _argmax(draw: Draw, kernel: str) -> Case:
    shape = (draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 3, 9, 16])), 2)
    x = values(draw, shape, -9, 9)
    x = x.round() if draw(st.booleans()) else x  # ties: the first of them
    kind = "data" if kernel.startswith("private") else "shared"
    attrs = {"dim": draw(st.sampled_from([1, -2])), "keepdim": draw(st.booleans())}
    return Case("argmax", [Operand(x, kind)], attrs, "int64")


@case("sign.compare", "private.sign")
def _sign(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([2.0**-15, 4.0, 2.0**40]))
    kind = "data" if kernel.startswith("private") else "shared"
    return Case("sign", [Operand(values(draw, shapes(draw), -size, size), kind)])


@case("max_pool2d.tournament")
def _max_pool(draw: Draw, kernel: str) -> Case:
    return Case(
        "max_pool2d",
        [Operand(values(draw, (draw(st.integers(0, 2)), 2, 6, 5), -9, 9))],
        {
            "kernel_size": [3, 2],
            "stride": [2, draw(st.integers(1, 2))],
            "padding": [1, 0],
            "dilation": [1, 1],
            "ceil_mode": draw(st.booleans()),
        },
    )


@case("avg_pool2d.public")
def _avg_pool(draw: Draw, kernel: str) -> Case:
    return Case(
        "avg_pool2d",
        [Operand(values(draw, (draw(st.integers(0, 2)), 2, 7, 6), -9, 9), bound=16.0)],
        {
            "kernel_size": [3, 3],
            "stride": [2, 2],
            "padding": [1, 1],
            "ceil_mode": draw(st.booleans()),
            "count_include_pad": draw(st.booleans()),
            "divisor_override": None,
        },
        output_bound=16.0,
    )


@case("mean.public")
def _mean(draw: Draw, kernel: str) -> Case:
    return Case(
        "mean",
        [Operand(values(draw, (3, 7), -9, 9), bound=16.0)],
        {"dims": [dim_of(draw, 2)], "keepdim": draw(st.booleans())},
        output_bound=16.0,
    )


# -- matrices


@case("matmul.public", "matmul.weight", "matmul.beaver")
def _matmul(draw: Draw, kernel: str) -> Case:
    kind = {"matmul.public": "public", "matmul.weight": "weight", "matmul.beaver": "shared"}[kernel]
    rows, inner, cols = (draw(st.integers(0, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4)))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    right = (inner, cols) if kind != "shared" or not batch else (*batch, inner, cols)
    return Case(
        "matmul",
        [
            Operand(values(draw, (*batch, rows, inner), -4, 4)),
            Operand(values(draw, right, -4, 4), kind),
        ],
    )


@case("linear.weight", "linear.public", "linear.beaver")
def _linear(draw: Draw, kernel: str) -> Case:
    kind = {"linear.weight": "weight", "linear.public": "public", "linear.beaver": "shared"}[kernel]
    rows, inner, cols = (draw(st.integers(0, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4)))
    operands = [
        Operand(values(draw, (rows, inner), -4, 4)),
        Operand(values(draw, (cols, inner), -4, 4), kind),
    ]
    if draw(st.booleans()):
        operands.append(Operand(values(draw, (cols,), -4, 4), kind))
    return Case("linear", operands)


@case("convolution.weight", "convolution.public", "convolution.beaver")
def _convolution(draw: Draw, kernel: str) -> Case:
    kind = {"weight": "weight", "public": "public", "beaver": "shared"}[kernel.split(".")[1]]
    groups = draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        image, patch, two = (2, 4, 6, 5), (3, 2), 2
    else:
        image, patch, two = (2, 4, 9), (3,), 1
    attrs = {
        "stride": [draw(st.integers(1, 2)) for _ in range(two)],
        "padding": [draw(st.integers(0, 1)) for _ in range(two)],
        "dilation": [draw(st.integers(1, 2)) for _ in range(two)],
        "groups": groups,
    }
    operands = [
        Operand(values(draw, image, -2, 2)),
        Operand(values(draw, (2, 4 // groups, *patch), -2, 2), kind),
    ]
    if draw(st.booleans()):
        operands.append(Operand(values(draw, (2,), -2, 2), kind))
    return Case("convolution", operands, attrs)


@case("embedding.one_hot")
def _embedding(draw: Draw, kernel: str) -> Case:
    shape = shapes(draw, dims=2)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.randint(0, 11, shape, generator=generator)
    return Case("embedding", [Operand(ids, "data"), Operand(values(draw, (11, 4), -4, 4), "weight")])


# -- the same with int8 weights


INT8_CASES: dict[str, Callable[[Draw], Case]] = {}
"""Kernel -> a step whose weight is int8, with its scales in the last place."""


def quantized(draw: Draw, drawn: Case) -> Case:
    """The case with int8 weights, the extremes among them, and scales on the grid, so that their product is exact."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x, weight, *bias = drawn.operands
    shape = weight.value.shape
    values = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    if draw(st.booleans()):
        values = torch.full(shape, draw(st.sampled_from([-128, -127, 0, 127])), dtype=torch.int8)
    channels = shape[CHANNEL_DIM[drawn.op]]
    # A factor of a batch norm that moved in may be negative, and a channel may be small beside the greatest.
    scales = torch.randint(-2047, 2048, (channels,), generator=generator)
    scales[0] = draw(st.sampled_from([1, 1024, 2047]))
    bits = draw(st.integers(11, 16))
    attrs = {**drawn.attrs, "quantized": True}
    if drawn.op != "embedding":
        attrs["has_bias"] = bool(bias)
    operands = [x, Operand(values, "weight", 128.0), *bias, Operand(scales.float() / 2**bits, "weight")]
    return Case(drawn.op, operands, attrs, drawn.output_dtype, drawn.output_bound)


for _kernel in ("linear.weight", "convolution.weight", "embedding.one_hot"):
    INT8_CASES[_kernel] = lambda draw, kernel=_kernel: quantized(draw, CASES[kernel](draw))


# -- activations, softmax, norms


@case("gelu.series")
def _gelu(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([6.0, 10.0, 1000.0]))
    return Case(
        "gelu",
        [Operand(values(draw, shapes(draw), -size, size))],
        {"approximate": draw(st.sampled_from(["none", "tanh"]))},
    )


@case("silu.series", "tanh.series", "sigmoid.series", "erf.series")
def _activation(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([3.0, 16.0, 1000.0]))
    return Case(kernel.split(".")[0], [Operand(values(draw, shapes(draw), -size, size))])


@case("softmax.series")
def _softmax(draw: Draw, kernel: str) -> Case:
    shape = (draw(st.integers(0, 2)), draw(st.sampled_from([1, 2, 7, 33])))
    size = draw(st.sampled_from([1.0, 10.0, 500.0]))
    return Case(
        "softmax", [Operand(values(draw, shape, -size, size))], {"dim": draw(st.sampled_from([1, -1]))}
    )


@case("masked_softmax.series")
def _masked_softmax(draw: Draw, kernel: str) -> Case:
    rows, n = draw(st.integers(0, 3)), draw(st.sampled_from([1, 5, 16]))
    keep = bits(draw, (n,) if draw(st.booleans()) else (rows, n))
    kind = draw(st.sampled_from(["data", "public", "shared"]))
    return Case(
        "masked_softmax",
        [Operand(values(draw, (rows, n), -30, 30)), Operand(keep, kind)],
        {"dim": -1},
    )


@case("layer_norm.series")
def _layer_norm(draw: Draw, kernel: str) -> Case:
    width = draw(st.sampled_from([4, 33]))
    rows = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.02, 1.0, 30.0]))
    x = exact_grid(torch.randn((rows, width), generator=generator, dtype=torch.float64) * spread + 1).float()
    operands = [Operand(x)]
    has_weight, has_bias = draw(st.booleans()), draw(st.booleans())
    if has_weight:
        operands.append(
            Operand(values(draw, (width,), -2, 2), draw(st.sampled_from(["weight", "public"])), 2.0)
        )
    if has_bias:
        operands.append(Operand(values(draw, (width,), -2, 2), "weight"))
    return Case(
        "layer_norm",
        operands,
        {
            "normalized_shape": [width],
            "eps": draw(st.sampled_from([1e-5, 1e-12])),
            "has_weight": has_weight,
            "has_bias": has_bias,
        },
    )


@case("mul.square")
def _square(draw: Draw, kernel: str) -> Case:
    operand = Operand(values(draw, shapes(draw), -LARGE, LARGE))
    return Case("mul", [operand, operand])


@case("private.masked_softmax", "private.softmax", "private.gelu", "private.silu", "private.erf", "private.matmul",
      "private.linear", "private.convolution", "private.layer_norm", "private.max_pool2d", "private.avg_pool2d")  # fmt: skip
def _private_whole(draw: Draw, kernel: str) -> Case:
    """What a shared kernel takes, on one owner's operands alone."""
    op = kernel.removeprefix("private.")
    shared = next(row.name for row in CATALOG.for_op(op) if row.name != kernel)
    drawn = CASES[shared](draw)
    return Case(op, [Operand(o.value, "data") for o in drawn.operands], drawn.attrs, drawn.output_dtype)


@case("private.embedding")
def _private_embedding(draw: Draw, kernel: str) -> Case:
    ids = torch.tensor(draw(st.lists(st.integers(0, 6), max_size=4)), dtype=torch.int64)
    return Case("embedding", [Operand(ids, "data"), Operand(values(draw, (7, 3), -4, 4), "public")])


@case("private.gather")
def _private_gather(draw: Draw, kernel: str) -> Case:
    index = torch.tensor([[0, 1, 1], [2, 0, 3]])
    return Case("gather", [Operand(values(draw, (2, 4), -9, 9), "data"), Operand(index, "data")], {"dim": 1})
