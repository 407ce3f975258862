"""Arithmetic, comparisons, logic and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..draft import Value
from .call import Call, Number, Result, Unsupported, aten, dims_of, operand
from .shapes import full_like

# Arithmetic.


def binary(c: Call, op: str, a: Value | Number, b: Value | Number) -> Value:
    return c.draft.emit(op, [operand(c, a, c.dtype), operand(c, b, c.dtype)])


@aten("add.Tensor", "add.Scalar")
def _add(c: Call, a: Value | Number, b: Value | Number, alpha: Number = 1) -> Value:
    return binary(c, "add", a, b if alpha == 1 else binary(c, "mul", b, alpha))


@aten("sub.Tensor", "sub.Scalar")
def subtract(c: Call, a: Value | Number, b: Value | Number, alpha: Number = 1) -> Value:
    return binary(c, "sub", a, b if alpha == 1 else binary(c, "mul", b, alpha))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Call, a: Value | Number, b: Value | Number, alpha: Number = 1) -> Value:
    return subtract(c, b, a, alpha)


@aten("mul.Tensor", "mul.Scalar")
def _mul(c: Call, a: Value | Number, b: Value | Number) -> Value:
    return binary(c, "mul", a, b)


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def _div(c: Call, a: Value | Number, b: Value | Number) -> Value:
    return binary(c, "div", a, b)


@aten("neg.default")
def _neg(c: Call, x: Value) -> Value:
    return c.draft.emit("neg", [x])


@aten("sign.default", "sgn.default")
def _sign(c: Call, x: Value) -> Value:
    return c.draft.emit("sign", [x])


@aten("pow.Tensor_Scalar")
def power(c: Call, x: Value, exponent: Number) -> Value:
    d = c.draft
    x = d.cast(x, c.dtype)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in named:
        return d.emit(named[exponent], [x])
    if exponent != int(exponent) or not 0 <= exponent <= 64:
        raise Unsupported(f"power {exponent}; powers are 0 to 64, 0.5, -0.5 and -1")
    if exponent == 0:
        return full_like(c, x, 1)
    return x if exponent == 1 else d.emit("pow", [x], exponent=int(exponent))


@aten("square.default")
def _square(c: Call, x: Value) -> Value:
    return power(c, x, 2)


@aten("maximum.default")
def maximum(c: Call, a: Value, b: Value) -> Value:
    """b + relu(a - b): one comparison, whatever the backend."""
    return binary(c, "add", b, c.draft.emit("relu", [binary(c, "sub", a, b)]))


@aten("minimum.default")
def minimum(c: Call, a: Value, b: Value) -> Value:
    return binary(c, "sub", a, c.draft.emit("relu", [binary(c, "sub", a, b)]))


@aten("clamp.default", "clamp_min.default", "hardtanh.default")
def clamp(c: Call, x: Value, low: Number | None = None, high: Number | None = None) -> Value:
    return c.draft.emit("clamp", [c.draft.cast(x, c.dtype)], min=low, max=high)


@aten("clamp_max.default")
def _clamp_max(c: Call, x: Value, high: Number) -> Value:
    return clamp(c, x, None, high)


@aten("clamp.Tensor", "clamp_min.Tensor")
def _clamp_tensor(c: Call, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    bounds = [b for b in (low, high) if b is not None]
    if all(b.kind == "constant" and b.known.numel() == 1 for b in bounds):
        limits = [None if b is None else b.known.item() for b in (low, high)]
        return clamp(c, c.draft.expand(x, c.shape), *limits)
    if low is not None:
        x = maximum(c, x, low)
    return x if high is None else minimum(c, x, high)


# Comparisons and logic.


def _comparison(op: str) -> Callable[..., Value]:
    def compare(c: Call, a: Value, b: Value | Number) -> Value:
        scalars = torch.empty(a.shape, dtype=a.dtype, device="meta")
        other = torch.empty(b.shape, dtype=b.dtype, device="meta") if isinstance(b, Value) else b
        common = torch.result_type(scalars, other)
        return c.draft.emit(op, [operand(c, a, common), operand(c, b, common)])

    return compare


for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    aten(f"{_op}.Tensor", f"{_op}.Scalar")(_comparison(_op))


def truth(c: Call, x: Value) -> Value:
    return c.draft.cast(x, torch.bool)


@aten("logical_not.default", "bitwise_not.default")
def negate(c: Call, x: Value) -> Value:
    if c.dtype != torch.bool:
        raise Unsupported("bitwise not of integers")
    return c.draft.emit("logical_not", [truth(c, x)])


def _logical(op: str) -> Callable[..., Value]:
    def combine(c: Call, a: Value, b: Value | Number) -> Value:
        if c.dtype != torch.bool:
            raise Unsupported("bitwise arithmetic of integers")
        return c.draft.emit(op, [truth(c, a), operand(c, b, torch.bool)])

    return combine


for _op, _canonical in (("and", "logical_and"), ("or", "logical_or"), ("xor", "ne")):
    aten(f"logical_{_op}.default", f"bitwise_{_op}.Tensor", f"bitwise_{_op}.Scalar")(_logical(_canonical))


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(c: Call, condition: Value, a: Value | Number, b: Value | Number) -> Value:
    return c.draft.emit("where", [truth(c, condition), operand(c, a, c.dtype), operand(c, b, c.dtype)])


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Call, x: Value, mask: Value, value: Value | Number) -> Value:
    return where(c, mask, value, x)


# Reductions.


@aten("any.default", "any.dim", "any.dims")
def _any(c: Call, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Value:
    return c.draft.emit("any", [truth(c, x)], dims=dims_of(x, dim), keepdim=keepdim)


@aten("all.default", "all.dim", "all.dims")
def _all(c: Call, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Value:
    some_false = c.draft.emit("any", [negate(c, x)], dims=dims_of(x, dim), keepdim=keepdim)
    return c.draft.emit("logical_not", [some_false])


def _reduction(op: str) -> Callable[..., Value]:
    def reduce(
        c: Call, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, **_: Any
    ) -> Value:
        return c.draft.emit(op, [c.draft.cast(x, c.dtype)], dims=dims_of(x, dim), keepdim=keepdim)

    return reduce


aten("sum.default", "sum.dim_IntList")(_reduction("sum"))
aten("mean.default", "mean.dim")(_reduction("mean"))
aten("amax.default", "max.default")(_reduction("amax"))


@aten("amin.default", "min.default")
def _amin(c: Call, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Value:
    return c.draft.emit("neg", [_reduction("amax")(c, c.draft.emit("neg", [x]), dim, keepdim)])


def _argmax(c: Call, x: Value, dim: int | None, keepdim: bool) -> Value:
    if dim is None or not x.shape:
        flat = c.draft.reshape(x, [math.prod(x.shape)])
        return c.draft.reshape(c.draft.emit("argmax", [flat], dim=0, keepdim=False), c.shape)
    return c.draft.emit("argmax", [x], dim=dim % len(x.shape), keepdim=keepdim)


@aten("argmax.default")
def argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _argmax(c, x, dim, keepdim)


@aten("argmin.default")
def _argmin(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _argmax(c, c.draft.emit("neg", [x]), dim, keepdim)


@aten("max.dim")
def _max_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> Result:
    """Values and indices; what nobody uses is not computed."""
    return _greatest(c, x, dim, keepdim)


def _greatest(c: Call, x: Value, dim: int, keepdim: bool) -> list[Value]:
    return [_reduction("amax")(c, x, dim, keepdim), _argmax(c, x, dim, keepdim)]


@aten("min.dim")
def _min_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> Result:
    values, indices = _greatest(c, c.draft.emit("neg", [x]), dim, keepdim)
    return [c.draft.emit("neg", [values]), indices]


def _variance(
    c: Call, x: Value, dim: int | Sequence[int] | None, correction: Number | None, keepdim: bool
) -> tuple[Value, Value]:
    d, dims = c.draft, dims_of(x, dim)
    mean = d.emit("mean", [x], dims=dims, keepdim=True)
    square = d.emit("pow", [d.emit("sub", [x, mean])], exponent=2)
    count = math.prod(x.shape[i] for i in dims) - (1 if correction is None else correction)
    total = d.emit("sum", [square], dims=dims, keepdim=keepdim)
    if count <= 0:
        raise Unsupported("a variance of too few elements")
    return d.emit("mul", [total, d.scalar(1.0 / count, c.dtype)]), mean


@aten("var.correction")
def _var(
    c: Call, x: Value, dim: Any = None, *, correction: Number | None = None, keepdim: bool = False
) -> Value:
    return _variance(c, x, dim, correction, keepdim)[0]


@aten("std.correction")
def _std(
    c: Call, x: Value, dim: Any = None, *, correction: Number | None = None, keepdim: bool = False
) -> Value:
    return c.draft.emit("sqrt", [_variance(c, x, dim, correction, keepdim)[0]])


@aten("var_mean.correction")
def _var_mean(
    c: Call, x: Value, dim: Any = None, *, correction: Number | None = None, keepdim: bool = False
) -> Result:
    variance, mean = _variance(c, x, dim, correction, keepdim)
    return [variance, c.draft.reshape(mean, variance.shape)]


@aten("linalg_vector_norm.default")
def _norm(c: Call, x: Value, order: Number = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    d, dims = c.draft, dims_of(x, dim)
    if order == 1:
        return d.emit("sum", [d.emit("abs", [x])], dims=dims, keepdim=keepdim)
    if order != 2:
        raise Unsupported(f"a vector norm of order {order}; 1 and 2 are supported")
    square = d.emit("pow", [x], exponent=2)
    return d.emit("sqrt", [d.emit("sum", [square], dims=dims, keepdim=keepdim)])
