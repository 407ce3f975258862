"""Strategies for the fast kernels: windows from the least that holds the values to the whole ring."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from secureinfer.backends.mpc import windows

from .cases import Case, Draw, bits, broadcast_pair, case, shapes, values
from .harness import Operand, exact_grid


def raw(draw: Draw, shape: tuple[int, ...], size: float, scale: int = 32) -> Operand:
    """A raw operand within +-size, on the grid of `scale` bits as float64, in the least window or in a wider one."""
    x = values(draw, shape, -size, size).double()
    x = x + torch.rand(shape, dtype=torch.float64) * 2.0**-16 * draw(st.sampled_from([0, 1]))
    x = exact_grid(x.clamp(-size, size), scale)
    ring = draw(st.sampled_from([windows.width_of(size, scale), 64]))
    return Operand(x, bound=size, scale=scale, ring_bits=ring)


@case("rescale.window")
def _rescale(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([1.0, 1000.0, 2.0**25]))
    scale = draw(st.sampled_from([16, 24, 32]))
    return Case("rescale", [raw(draw, shapes(draw), size, scale)], {"exact": draw(st.booleans())})


@case("relu.window", "abs.window")
def _rectify(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([2.0**-10, 1.0, 100.0, 2.0**25]))
    scale = draw(st.sampled_from([16, 19, 32]))
    return Case(kernel.split(".")[0], [raw(draw, shapes(draw), size, scale)])


@case("clamp.window")
def _clamp(draw: Draw, kernel: str) -> Case:
    low, high = draw(st.sampled_from([(-1.0, 2.0), (None, 2.0), (0.5, None), (0.0, 6.0), (1.0, 1.0)]))
    operand = raw(draw, shapes(draw), 16.0, draw(st.sampled_from([16, 32])))
    return Case("clamp", [operand], {"min": low, "max": high})


@case(*(f"compare.window.{op}" for op in ("lt", "le", "gt", "ge", "eq", "ne")))
def _compare(draw: Draw, kernel: str) -> Case:
    a, b = broadcast_pair(draw)
    size = draw(st.sampled_from([2.0, 100.0, 2.0**40]))
    x, y = values(draw, a, -size, size), values(draw, b, -size, size)
    if size == 2.0:
        x, y = x.round(), y.round()
    bound = size if size < 2.0**30 else None
    other = draw(st.sampled_from(["shared", "public"]))
    op = kernel.rpartition(".")[2]
    return Case(op, [Operand(x, bound=bound), Operand(y, other, bound)], {}, "bool")


@case("amax.window")
def _amax(draw: Draw, kernel: str) -> Case:
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 9)))
    bound = draw(st.sampled_from([9.0, None]))
    attrs = {"dims": [draw(st.sampled_from([1, -1]))], "keepdim": draw(st.booleans())}
    return Case("amax", [Operand(values(draw, shape, -9, 9), bound=bound)], attrs)


@case("argmax.window")
def _argmax(draw: Draw, kernel: str) -> Case:
    n = draw(st.sampled_from([1, 2, 3, 9, 16, 17, 40]))
    size = draw(st.sampled_from([2.0**-15, 9.0]))
    x = values(draw, (draw(st.integers(0, 3)), n, 2), -size, size)
    x = x.round() if draw(st.booleans()) else x  # ties: the first of them
    bound = 9.0 if n > 16 else draw(st.sampled_from([9.0, None]))
    attrs = {"dim": draw(st.sampled_from([1, -2])), "keepdim": draw(st.booleans())}
    return Case("argmax", [Operand(x, bound=bound)], attrs, "int64")


@case("sign.window")
def _sign(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([2.0**-15, 4.0, 2.0**25]))
    bound = draw(st.sampled_from([size, None]))
    return Case("sign", [Operand(values(draw, shapes(draw), -size, size), bound=bound)])


@case("max_pool2d.window")
def _max_pool(draw: Draw, kernel: str) -> Case:
    bound = draw(st.sampled_from([9.0, None]))
    return Case(
        "max_pool2d",
        [Operand(values(draw, (draw(st.integers(0, 2)), 2, 6, 5), -9, 9), bound=bound)],
        {
            "kernel_size": [3, 2],
            "stride": [2, draw(st.integers(1, 2))],
            "padding": [1, 0],
            "dilation": [1, 1],
            "ceil_mode": draw(st.booleans()),
        },
    )


_RIGHT = {"weight": "weight", "public": "public", "beaver": "shared"}


def _product(draw: Draw, op: str, operands: list[Operand], attrs: dict[str, Any], inner: int) -> Case:
    """A raw product of factors within +-4, in the least window or in the whole ring."""
    bound = 16.0 * inner + 16
    ring = draw(st.sampled_from([windows.width_of(bound, 32), 64]))
    return Case(op, operands, attrs, "float32", bound, 32, ring)


def _left(draw: Draw, kernel: str, shape: tuple[int, ...]) -> Operand:
    """What the data owner holds needs no sharing where the weight is masked."""
    kind = draw(st.sampled_from(["shared", "data"])) if kernel.endswith("weight") else "shared"
    return Operand(values(draw, shape, -4, 4), kind, 4.0)


def _int8(
    op: str, x: Operand, shape: tuple[int, ...], bias: list[Operand], attrs: dict[str, Any], channels: int
) -> Case:
    """A quantised layer whose scales have 11 bits, so that their integer factors are exact."""
    e = 12
    scale = torch.randint(1, 2048, (channels,)).double() / 2**e
    attrs = {**attrs, "quantized": True} | ({} if op == "embedding" else {"has_bias": bool(bias)})
    bound = 4.0 * 64 * math.prod(shape) + 16
    raw_scale = e if op == "embedding" else 16 + e
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    operands = [x, Operand(weight, "weight", 128.0), *bias, Operand(scale.float(), "weight", 1.0, e)]
    return Case(op, operands, attrs, "float32", bound, raw_scale, windows.width_of(bound, raw_scale))


@case("linear.window.weight", "linear.window.public", "linear.window.beaver")
def _linear(draw: Draw, kernel: str) -> Case:
    kind = _RIGHT[kernel.rpartition(".")[2]]
    inner = draw(st.integers(1, 9))
    rows = draw(st.sampled_from([(3,), (2, 2), (0,)])) if kind != "shared" else (3,)
    x, bias = _left(draw, kernel, (*rows, inner)), []
    if draw(st.booleans()):
        bias = [Operand(values(draw, (4,), -9, 9), draw(st.sampled_from([kind, "public"])), 16.0)]
    if kind == "weight" and draw(st.booleans()):
        return _int8("linear", x, (4, inner), bias, {}, 4)
    operands = [x, Operand(values(draw, (4, inner), -4, 4), kind, 4.0), *bias]
    return _product(draw, "linear", operands, {}, inner)


@case("matmul.window.weight", "matmul.window.public", "matmul.window.beaver")
def _matmul(draw: Draw, kernel: str) -> Case:
    kind = _RIGHT[kernel.rpartition(".")[2]]
    inner = draw(st.integers(1, 9))
    batch = draw(st.sampled_from([(), (2,)]))
    right = batch if kind == "shared" else ()
    operands = [
        _left(draw, kernel, (*batch, 3, inner)),
        Operand(values(draw, (*right, inner, 2), -4, 4), kind, 4.0),
    ]
    return _product(draw, "matmul", operands, {}, inner)


@case("convolution.window.weight", "convolution.window.public", "convolution.window.beaver")
def _convolution(draw: Draw, kernel: str) -> Case:
    kind = _RIGHT[kernel.rpartition(".")[2]]
    groups, dims = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    size, taps = ((6, 5), (3, 2)) if dims == 2 else ((7,), (3,))
    attrs = {
        "stride": [draw(st.integers(1, 2))] * dims,
        "padding": [draw(st.integers(0, 1))] * dims,
        "dilation": [draw(st.integers(1, 2))] * dims,
        "groups": groups,
        "transposed": False,
        "output_padding": [0] * dims,
    }
    x, bias = _left(draw, kernel, (draw(st.integers(1, 2)), 2 * groups, *size)), []
    if draw(st.booleans()):
        bias = [Operand(values(draw, (2 * groups,), -9, 9), kind, 16.0)]
    if kind == "weight" and draw(st.booleans()):
        return _int8("convolution", x, (2 * groups, 2, *taps), bias, attrs, 2 * groups)
    operands = [x, Operand(values(draw, (2 * groups, 2, *taps), -4, 4), kind, 4.0), *bias]
    return _product(draw, "convolution", operands, attrs, 2 * math.prod(taps))


@case("embedding.window.one_hot")
def _embedding(draw: Draw, kernel: str) -> Case:
    ids = torch.randint(0, 11, draw(st.sampled_from([(5,), (2, 3), (0,)])))
    if draw(st.booleans()):
        return _int8("embedding", Operand(ids, "data", 11.0), (11, 3), [], {}, 3)
    table = Operand(values(draw, (11, 3), -4, 4), "weight", 4.0)
    ring = draw(st.sampled_from([windows.width_of(4.0, 16), 64]))
    return Case("embedding", [Operand(ids, "data", 11.0), table], {}, "float32", 4.0, 16, ring)


@case("gelu.window", "silu.window", "tanh.window", "sigmoid.window", "erf.window")
def _curve(draw: Draw, kernel: str) -> Case:
    size = draw(st.sampled_from([16.0, 64.0, 2.0**10]))
    scale = draw(st.sampled_from([16, 20, 32]))
    x = raw(draw, shapes(draw), size, scale)
    if draw(st.booleans()):  # around the zone, not at the ends of the range
        x.value = exact_grid(x.value * (16.0 / size), scale)
    attrs = {"approximate": draw(st.sampled_from(["none", "tanh"]))} if kernel.startswith("gelu") else {}
    return Case(kernel.split(".")[0], [x], attrs)


@case("layer_norm.window")
def _layer_norm(draw: Draw, kernel: str) -> Case:
    width = draw(st.sampled_from([4, 33, 48, 256]))
    rows = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread, size = draw(st.sampled_from([(0.02, 16.0), (1.0, 16.0), (30.0, 256.0)]))
    scale = draw(st.sampled_from([16, 24, 32])) if width != 33 else 16
    x = torch.randn((rows, width), generator=generator, dtype=torch.float64) * spread + 1
    operands = [Operand(exact_grid(x.clamp(-size, size), scale), bound=size, scale=scale)]
    has_weight, has_bias = draw(st.booleans()), draw(st.booleans())
    if has_weight:
        kind = draw(st.sampled_from(["weight", "public"]))
        operands.append(Operand(values(draw, (width,), -2, 2), kind, 2.0))
    if has_bias:
        operands.append(Operand(values(draw, (width,), -2, 2), "weight"))
    eps = draw(st.sampled_from([1e-5, 1e-12]))
    attrs = {"normalized_shape": [width], "eps": eps, "has_weight": has_weight, "has_bias": has_bias}
    return Case("layer_norm", operands, attrs, output_bound=64.0)


@case("attention.window")
def _attention(draw: Draw, kernel: str) -> Case:
    heads, rows, width, inner = (draw(st.integers(1, 3)) for _ in range(4))
    width = draw(st.sampled_from([width, 17]))
    size = draw(st.sampled_from([1.0, 3.0, 6.0]))
    q = raw(draw, (heads, rows, inner), size, draw(st.sampled_from([16, 32])))
    k = raw(draw, (heads, inner, width), size, draw(st.sampled_from([16, 36])))
    q.ring_bits = k.ring_bits = 64
    v = Operand(values(draw, (heads, width, draw(st.integers(1, 3))), -4, 4), bound=4.0)
    operands = [q, k, v]
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["public", "data", "shared"]))
        operands.append(Operand(bits(draw, (1, 1, width)), kind))
    scores = float((q.value @ k.value).abs().max()) if q.value.numel() else 1.0
    return Case("attention", operands, {"scores": max(16.0, 16 * scores)}, output_bound=4.0)
