"""Layers: products, attention, normalisation, activations, pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..draft import Value
from .arithmetic import binary
from .call import Call, Number, Result, Unsupported, aten, dims_of

# Products. A weight on the right makes a linear layer; everything else is a matmul.


def matmul(c: Call, a: Value, b: Value) -> Value:
    d = c.draft
    if len(a.shape) == 1:
        out = matmul(c, d.reshape(a, [1, a.shape[0]]), b)
        return d.reshape(out, [*out.shape[:-2], out.shape[-1]] if len(b.shape) > 1 else out.shape[:-1])
    if len(b.shape) == 1:
        out = matmul(c, a, d.reshape(b, [b.shape[0], 1]))
        return d.reshape(out, out.shape[:-1])
    if b.kind == "weight" and a.tensor is None:
        flat = b.known.reshape(-1, *b.shape[-2:])
        if all(torch.equal(flat[0], flat[i]) for i in range(1, len(flat))):
            right = d.moved(b, lambda t: t.reshape(-1, *t.shape[-2:])[0].t())
            out = d.emit("linear", [a, right])
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
            return d.expand(out, [*batch, *out.shape[-2:]])
    if a.kind == "weight" and b.tensor is None and len(a.shape) == 2:
        return d.transpose(d.emit("linear", [d.transpose(b), a]))
    return d.emit("matmul", [a, b])


@aten("matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default")
def _matmul(c: Call, a: Value, b: Value, *_: Any) -> Value:
    return matmul(c, a, b)


@aten("addmm.default", "baddbmm.default", "addmv.default")
def _addmm(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    product = matmul(c, a, b)
    if alpha != 1:
        product = binary(c, "mul", product, alpha)
    if beta == 0:
        return product
    if product.made_by("linear") and product.node is not None and beta == alpha == 1:
        x, weight = product.node.inputs
        return linear(c, x, weight, bias)
    return binary(c, "add", product, bias if beta == 1 else binary(c, "mul", bias, beta))


@aten("linear.default")
def linear(c: Call, x: Value, weight: Value, bias: Value | None = None, /) -> Value:
    d = c.draft
    if weight.tensor is None or len(weight.shape) != 2:
        out = matmul(c, x, d.transpose(weight) if len(weight.shape) > 1 else weight)
        return out if bias is None else binary(c, "add", out, bias)
    if bias is None:
        return d.emit("linear", [x, weight])
    if bias.tensor is None or bias.shape != (weight.shape[0],):
        return binary(c, "add", d.emit("linear", [x, weight]), bias)
    return d.emit("linear", [x, weight, bias])


@aten("convolution.default", "_convolution.default")
def _convolution(
    c: Call, x: Value, weight: Value, bias: Value | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, *_: Any,
) -> Value:  # fmt: skip
    if transposed:
        raise Unsupported("transposed convolution")
    d, n = c.draft, len(weight.shape) - 2
    stride, padding, dilation = ([*v] * n if len(v) == 1 else [*v] for v in (stride, padding, dilation))
    if len(x.shape) == n + 1:
        x = d.reshape(x, [1, *x.shape])
    if n == 1:  # one kind of convolution is enough for the backends: lines are images of height 1
        x = d.reshape(x, [*x.shape[:2], 1, x.shape[2]])
        weight = d.reshape(weight, [*weight.shape[:2], 1, weight.shape[2]])
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    operands = [x, weight] if bias is None else [x, weight, bias]
    out = d.emit("convolution", operands, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return d.reshape(out, c.shape)


# Attention.


def softmax(c: Call, x: Value, dim: int) -> Value:
    return c.draft.emit("softmax", [c.draft.cast(x, c.dtype)], dim=dim % max(len(x.shape), 1))


@aten("_softmax.default", "softmax.int", "_safe_softmax.default")
def _softmax(c: Call, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    return softmax(c, x, dim)


@aten("log_softmax.int", "_log_softmax.default")
def _log_softmax(c: Call, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    d, dims = c.draft, dims_of(x, dim)
    x = binary(c, "sub", x, d.emit("amax", [x], dims=dims, keepdim=True))
    total = d.emit("sum", [d.emit("exp", [x])], dims=dims, keepdim=True)
    return binary(c, "sub", x, d.emit("log", [total]))


@aten("scaled_dot_product_attention.default")
def _attention(
    c: Call, q: Value, k: Value, v: Value, mask: Value | None = None, dropout: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    """Scale the queries, where it folds into their layer; a boolean mask becomes a masked softmax at once."""
    d = c.draft
    if dropout:
        raise Unsupported("attention with dropout")
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (_repeat_heads(c, t, q.shape[-3] // t.shape[-3]) for t in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = matmul(c, binary(c, "mul", q, factor), d.transpose(k))
    if is_causal:
        mask = d.constant(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril())
    if mask is None:
        weights = softmax(c, scores, -1)
    elif mask.dtype == torch.bool:
        weights = d.emit("masked_softmax", [scores, mask], dim=len(scores.shape) - 1)
    else:
        weights = softmax(c, binary(c, "add", scores, mask), -1)
    return matmul(c, weights, v)


def _repeat_heads(c: Call, x: Value, times: int) -> Value:
    d, (heads, *tail) = c.draft, x.shape[-3:]
    lead = x.shape[:-3]
    x = d.expand(d.reshape(x, [*lead, heads, 1, *tail]), [*lead, heads, times, *tail])
    return d.reshape(x, [*lead, heads * times, *tail])


@aten("embedding.default")
def _embedding(c: Call, table: Value, ids: Value, *_: Any, **__: Any) -> Value:
    return c.draft.emit("embedding", [ids, table])


# Normalisation.


def layer_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> Value:
    operands = [v for v in (x, weight, bias) if v is not None]
    return c.draft.emit(
        "layer_norm", operands, normalized_shape=list(shape), eps=eps,
        has_weight=weight is not None, has_bias=bias is not None,
    )  # fmt: skip


@aten("layer_norm.default")
def _layer_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    return layer_norm(c, x, shape, weight, bias, eps)


@aten("native_layer_norm.default")
def _native_layer_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> Result:
    return [layer_norm(c, x, shape, weight, bias, eps)]


@aten("rms_norm.default")
def _rms_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    d, dims = c.draft, list(range(len(x.shape) - len(shape), len(x.shape)))
    mean = d.emit("mean", [d.emit("pow", [x], exponent=2)], dims=dims, keepdim=True)
    eps = torch.finfo(c.dtype).eps if eps is None else eps
    out = binary(c, "mul", x, d.emit("rsqrt", [binary(c, "add", mean, eps)]))
    return out if weight is None else binary(c, "mul", out, weight)


def group_norm(c: Call, x: Value, groups: int, weight: Value | None, bias: Value | None, eps: float) -> Value:
    d, (n, channels, *space) = c.draft, x.shape
    rows = d.reshape(x, [n, groups, math.prod(x.shape[1:]) // groups])
    out = d.reshape(layer_norm(c, rows, rows.shape[2:], None, None, eps), x.shape)
    per_channel = [1, channels, *(1 for _ in space)]
    if weight is not None:
        out = binary(c, "mul", out, d.reshape(weight, per_channel))
    return out if bias is None else binary(c, "add", out, d.reshape(bias, per_channel))


@aten("group_norm.default")
def _group_norm(
    c: Call,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    return group_norm(c, x, groups, weight, bias, eps)


@aten("native_group_norm.default")
def _native_group_norm(
    c: Call, x: Value, weight: Value | None, bias: Value | None, n: int, channels: int, area: int,
    groups: int, eps: float,
) -> Result:  # fmt: skip
    return [group_norm(c, x, groups, weight, bias, eps)]


@aten("_native_batch_norm_legit_no_training.default")
def _batch_norm(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> Result:
    """x · s + t with one s and t a channel; passes.py moves them into the layer before."""
    d = c.draft
    if mean.tensor is None or var.tensor is None:
        raise Unsupported("batch norm whose statistics depend on the inputs")
    scale = d.known((var.known.double() + eps).rsqrt(), [var])
    if weight is not None:
        scale = binary(c, "mul", weight, scale)
    shift = d.emit("neg", [binary(c, "mul", mean, scale)])
    if bias is not None:
        shift = binary(c, "add", shift, bias)
    per_channel = [1, x.shape[1], *(1 for _ in x.shape[2:])]
    scaled = binary(c, "mul", x, d.reshape(scale, per_channel))
    return [binary(c, "add", scaled, d.reshape(shift, per_channel))]


# Activations.


@aten("relu.default")
def relu(c: Call, x: Value) -> Value:
    return c.draft.emit("relu", [x])


@aten("gelu.default")
def _gelu(c: Call, x: Value, *, approximate: str = "none") -> Value:
    return c.draft.emit("gelu", [x], approximate=approximate)


for _name in ("sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "erf", "silu"):

    def _unary(c: Call, x: Value, _op: str = _name) -> Value:
        return c.draft.emit(_op, [c.draft.cast(x, c.dtype)])

    aten(f"{_name}.default")(_unary)


@aten("secureinfer.polynomial.default")
def _polynomial(
    c: Call, x: Value, coefficients: Sequence[float], radius: float, kind: str, error: float
) -> Value:
    """What compression put in place of an activation."""
    return c.draft.emit(
        "polynomial", [x], kind=kind, radius=radius, coefficients=list(coefficients), error=error
    )


@aten("leaky_relu.default")
def _leaky_relu(c: Call, x: Value, slope: float = 0.01) -> Value:
    return binary(c, "add", binary(c, "mul", x, slope), binary(c, "mul", relu(c, x), 1 - slope))


@aten("relu6.default")
def _relu6(c: Call, x: Value) -> Value:
    return c.draft.emit("clamp", [x], min=0, max=6)


@aten("elu.default")
def _elu(c: Call, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    """relu(x) + alpha · (exp(min(x, 0)) − 1), so that exp never sees a positive value."""
    negative = c.draft.emit("clamp", [binary(c, "mul", x, input_scale)], min=None, max=0)
    low = binary(c, "sub", c.draft.emit("exp", [negative]), 1.0)
    return binary(c, "mul", binary(c, "add", relu(c, x), binary(c, "mul", low, alpha)), scale)


@aten("softplus.default")
def softplus(c: Call, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """relu(y) + log(1 + exp(−|y|)), y = beta · x: the same function without a large exponential."""
    d, y = c.draft, binary(c, "mul", x, beta)
    small = d.emit("exp", [d.emit("neg", [d.emit("abs", [y])])])
    total = binary(c, "add", relu(c, y), d.emit("log", [binary(c, "add", small, 1.0)]))
    return binary(c, "mul", total, 1 / beta)


@aten("mish.default")
def _mish(c: Call, x: Value) -> Value:
    return binary(c, "mul", x, c.draft.emit("tanh", [softplus(c, x)]))


@aten("hardsigmoid.default")
def hardsigmoid(c: Call, x: Value) -> Value:
    return binary(c, "mul", c.draft.emit("clamp", [binary(c, "add", x, 3.0)], min=0, max=6), 1 / 6)


@aten("hardswish.default")
def _hardswish(c: Call, x: Value) -> Value:
    return binary(c, "mul", x, hardsigmoid(c, x))


@aten("prelu.default", "_prelu_kernel.default")
def _prelu(c: Call, x: Value, slope: Value) -> Value:
    if len(x.shape) > 1 and len(slope.shape) == 1:
        slope = c.draft.reshape(slope, [1, -1, *(1 for _ in x.shape[2:])])
    return binary(c, "add", relu(c, x), binary(c, "mul", binary(c, "sub", x, relu(c, x)), slope))


# Pooling. Lines are images of height 1 here too.


def _pair(values: int | Sequence[int]) -> list[int]:
    listed = [values] if isinstance(values, int) else list(values)
    return listed * 2 if len(listed) == 1 else listed


def max_pool(
    c: Call,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Value:
    return c.draft.emit(
        "max_pool2d", [x], kernel_size=_pair(kernel), stride=_pair(stride or kernel), padding=_pair(padding),
        dilation=_pair(dilation), ceil_mode=ceil_mode,
    )  # fmt: skip


@aten("max_pool2d.default")
def _max_pool2d(c: Call, x: Value, *args: Any) -> Value:
    return max_pool(c, x, *args)


@aten("max_pool2d_with_indices.default")
def _max_pool2d_with_indices(c: Call, x: Value, *args: Any) -> Result:
    return [max_pool(c, x, *args)]


@aten("max_pool1d.default")
def _max_pool1d(
    c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> Value:  # fmt: skip
    image = c.draft.reshape(x, [*x.shape[:-1], 1, x.shape[-1]])
    step = stride or kernel
    out = max_pool(c, image, [1, *kernel], [1, *step], [0, *padding], [1, *dilation], ceil_mode)
    return c.draft.reshape(out, c.shape)


def avg_pool(
    c: Call, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    return c.draft.emit(
        "avg_pool2d", [x], kernel_size=_pair(kernel), stride=_pair(stride or kernel), padding=_pair(padding),
        ceil_mode=ceil_mode, count_include_pad=count_include_pad, divisor_override=divisor_override,
    )  # fmt: skip


@aten("avg_pool2d.default")
def _avg_pool2d(c: Call, x: Value, *args: Any) -> Value:
    return avg_pool(c, x, *args)


@aten("avg_pool1d.default")
def _avg_pool1d(
    c: Call,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    *rest: Any,
) -> Value:
    image = c.draft.reshape(x, [*x.shape[:-1], 1, x.shape[-1]])
    out = avg_pool(c, image, [1, *kernel], [1, *(stride or kernel)], [0, *padding], *rest)
    return c.draft.reshape(out, c.shape)


def _adaptive(c: Call, x: Value, sizes: Sequence[int | None], op: str) -> Value:
    """Adaptive pooling. Windows of one size are ordinary pooling; others are reduced one by one."""
    d, first = c.draft, len(x.shape) - len(sizes)
    space = x.shape[first:]
    wanted = [n if s is None else s for n, s in zip(space, sizes, strict=True)]
    if all(s and n % s == 0 for n, s in zip(space, wanted, strict=True)):
        windows = [1] * (2 - len(sizes)) + [n // s for n, s in zip(space, wanted, strict=True)]
        if all(w == 1 for w in windows):
            return x
        image = x if len(sizes) == 2 else d.reshape(x, [*x.shape[:-1], 1, x.shape[-1]])
        return d.reshape(
            avg_pool(c, image, windows) if op == "mean" else max_pool(c, image, windows), c.shape
        )
    for dim, (n, s) in enumerate(zip(space, wanted, strict=True), first):
        parts = [d.slice(x, dim, i * n // s, -(-(i + 1) * n // s)) for i in range(s)]
        x = d.emit("cat", [d.emit(op, [p], dims=[dim], keepdim=True) for p in parts], dim=dim)
    return x


@aten("adaptive_avg_pool2d.default", "_adaptive_avg_pool2d.default", "adaptive_avg_pool1d.default")
def _adaptive_avg_pool(c: Call, x: Value, sizes: Sequence[int]) -> Value:
    return _adaptive(c, x, sizes, "mean")


@aten("adaptive_max_pool2d.default")
def _adaptive_max_pool2d(c: Call, x: Value, sizes: Sequence[int]) -> Result:
    return [_adaptive(c, x, sizes, "amax")]


@aten("upsample_nearest2d.vec", "upsample_nearest2d.default")
def _upsample_nearest2d(c: Call, x: Value, *_: Any) -> Value:
    d, ratios = c.draft, [o / i for o, i in zip(c.shape[-2:], x.shape[-2:], strict=True)]
    if any(r != int(r) for r in ratios):
        raise Unsupported("nearest up-sampling by a factor that is not whole")
    (n, channels, h, w), (a, b) = x.shape, (int(r) for r in ratios)
    x = d.expand(d.reshape(x, [n, channels, h, 1, w, 1]), [n, channels, h, a, w, b])
    return d.reshape(x, c.shape)
