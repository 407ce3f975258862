"""Rules that recover what a model meant: biases and scales inside layers, GELU and SiLU, one rsqrt for a
normalisation."""

from __future__ import annotations

import math

import torch

from .draft import Draft, DraftNode, Value
from .masks import DROPPED

_AFFINE = ("linear", "convolution", "layer_norm", "embedding")
"""Layers whose output is linear in their weights (and bias), so that a factor behind them moves in there."""


def linear_shape(d: Draft, n: DraftNode) -> Value | None:
    """linear(reshape(x)) that only joins leading dimensions runs on x: the reshape moves behind it."""
    if n.op != "linear" or not n.inputs[0].made_by("reshape"):
        return None
    x = n.inputs[0].node.inputs[0] if n.inputs[0].node else None
    if x is None or not x.shape or x.shape[-1] != n.inputs[0].shape[-1] or len(x.shape) < 2:
        return None
    return d.reshape(d.emit("linear", [x, *n.inputs[1:]]), n.output.shape)


def _channel_vector(v: Value, layer: DraftNode, behind: tuple[int, ...]) -> torch.Tensor | None:
    """A known operand that has one value a channel (or one in all) of the layer's output, as a vector; else
    None.

    behind: shape of the value that the operand meets.
    """
    if v.tensor is None:
        return None
    t = v.tensor
    if t.numel() == 1:
        return t.reshape(1)
    if behind != layer.output.shape or len(t.shape) > len(behind):
        return None
    dim = len(behind) - 1 if layer.op != "convolution" else 1
    sizes = (1,) * (len(behind) - t.dim()) + tuple(t.shape)
    if any(s != 1 for i, s in enumerate(sizes) if i != dim):
        return None
    return t.reshape(-1)


def _chain(d: Draft, x: Value, through: tuple[str, ...]) -> tuple[DraftNode, list[DraftNode]] | None:
    """The affine layer behind x, and the shape work between, if each step is used only here."""
    path: list[DraftNode] = []
    while x.node is not None and d.used_once(x):
        if x.node.op in _AFFINE:
            return x.node, path
        if x.node.op not in through:
            return None
        path.append(x.node)
        x = x.node.inputs[0]
    return None


def _replay(d: Draft, x: Value, path: list[DraftNode]) -> Value:
    for n in reversed(path):
        with d.at(n.path, n.operator):
            x = d.emit(n.op, [x, *n.inputs[1:]], **n.attrs)
    return x


def _scaled(d: Draft, layer: DraftNode, factor: Value) -> Value | None:
    """The layer with its weights times a factor: one number, or one a channel of its output."""
    vector = _channel_vector(factor, layer, layer.output.shape)
    weights = layer.inputs[1:]
    has_weight = layer.op != "layer_norm" or layer.attrs["has_weight"]
    if vector is None or not has_weight or any(v.tensor is None for v in weights):
        return None
    scaled = []
    for w in weights:
        t = w.known.double()
        rows = vector.double()
        if layer.op in (
            "linear",
            "convolution",
        ):  # output channels come first in these weights, last in the others
            rows = rows.reshape(-1, *(1 for _ in t.shape[1:]))
        new = d.known(t * rows, [w, factor])
        new.int8 = w.int8.times(rows) if w.int8 is not None else None
        scaled.append(new)
    with d.at(layer.path, layer.operator):
        return d.emit(layer.op, [layer.inputs[0], *scaled], **layer.attrs)


def fold_scale(d: Draft, n: DraftNode) -> Value | None:
    """x · s or x / s behind a layer, through shape work, a matmul's operands too, moves into the layer's
    weights."""
    if n.op not in ("mul", "div"):
        return None
    pairs = [n.inputs, n.inputs[::-1]] if n.op == "mul" else [n.inputs]
    for x, s in pairs:
        if s.tensor is None or x.tensor is not None or x.shape != n.output.shape:
            continue
        factor = s if n.op == "mul" else d.known(s.known.double().reciprocal(), [s])
        new = _push(d, x, factor)
        if new is not None:
            return new
    return None


def _push(d: Draft, x: Value, factor: Value) -> Value | None:
    one_number = factor.known.numel() == 1
    found = _chain(d, x, ("reshape", "permute", "slice", "select", "expand") if one_number else ())
    if found is not None:
        layer, path = found
        if not one_number and path:
            return None
        scaled = _scaled(d, layer, factor)
        return None if scaled is None else _replay(d, scaled, path)
    if one_number and x.node is not None and x.node.op in ("matmul", "reshape", "permute") and d.used_once(x):
        for i, operand in enumerate(x.node.inputs):
            inner = _push(d, operand, factor)
            if inner is not None:
                operands = list(x.node.inputs)
                operands[i] = inner
                with d.at(x.node.path, x.node.operator):
                    return d.emit(x.node.op, operands, **x.node.attrs)
    return None


def fold_bias(d: Draft, n: DraftNode) -> Value | None:
    """layer(x) + b with one known value a channel becomes the layer's bias (or adds to it)."""
    if n.op not in ("add", "sub"):
        return None
    pairs = [n.inputs, n.inputs[::-1]] if n.op == "add" else [n.inputs]
    for x, b in pairs:
        layer = x.node
        path: list[DraftNode] = []
        if layer is not None and layer.op == "reshape" and d.used_once(x):
            inner = layer.inputs[0].node
            last = layer.inputs[0].shape[-1:] == x.shape[-1:]
            if inner is not None and inner.op == "linear" and last and d.used_once(layer.inputs[0]):
                path, layer = [layer], inner
        if layer is None or layer.op not in ("linear", "convolution") or b.tensor is None:
            continue
        behind = layer.output.shape if not path else x.shape
        trailing = b.tensor.dim() == 0 or all(s == 1 for s in b.tensor.shape[:-1])
        if path and not trailing:
            continue
        vector = b.tensor.reshape(-1) if path else _channel_vector(b, layer, behind)
        if vector is None or x.shape != n.output.shape or not d.used_once(x):
            continue
        if b.kind == "constant" and not bool((vector.abs() < -DROPPED).all()):
            continue  # a mask, which masks.py must see
        outputs = layer.inputs[1].shape[0]
        total = vector.double().expand(outputs) * (1 if n.op == "add" else -1)
        sources = [b]
        if len(layer.inputs) > 2:
            if layer.inputs[2].tensor is None:
                continue
            total = total + layer.inputs[2].known.double()
            sources.insert(0, layer.inputs[2])
        with d.at(layer.path, layer.operator):
            new = d.emit(layer.op, [*layer.inputs[:2], d.known(total, sources)], **layer.attrs)
        return _replay(d, new, path)
    return None


# Patterns of hand-written activations. Each helper matches one shape of expression, in either order of
# operands.


def _number(v: Value) -> float | None:
    return float(v.known.item()) if v.kind == "constant" and v.known.numel() == 1 else None


def _times(v: Value, number: float) -> Value | None:
    """x, where v is x · number (or x / (1 / number))."""
    n = v.node
    if n is None or n.op not in ("mul", "div"):
        return None
    for x, c in (n.inputs, n.inputs[::-1]) if n.op == "mul" else (n.inputs,):
        found = _number(c)
        if found is not None and math.isclose(found if n.op == "mul" else 1 / found, number, rel_tol=1e-6):
            return x
    return None


def _plus_one(v: Value) -> Value | None:
    n = v.node
    if n is None or n.op != "add":
        return None
    for x, c in (n.inputs, n.inputs[::-1]):
        if _number(c) == 1:
            return x
    return None


def _factors(v: Value) -> list[Value]:
    n = v.node
    return [*_factors(n.inputs[0]), *_factors(n.inputs[1])] if n is not None and n.op == "mul" else [v]


def gelu(d: Draft, n: DraftNode) -> Value | None:
    """0.5 · x · (1 + erf(x / √2)) and 0.5 · x · (1 + tanh(√(2/π) (x + 0.044715 x³))), factors any order."""
    if n.op != "mul":
        return None
    factors = _factors(n.output)
    if len(factors) != 3:
        return None
    for i, gate in enumerate(factors):
        inner = _plus_one(gate)
        rest = [f for j, f in enumerate(factors) if j != i]
        half = [f for f in rest if _number(f) == 0.5]
        if inner is None or inner.node is None or len(half) != 1:
            continue
        x = rest[1 - rest.index(half[0])]
        if inner.made_by("erf") and _times(inner.node.inputs[0], math.sqrt(0.5)) is x:
            return d.emit("gelu", [x], approximate="none")
        if inner.made_by("tanh") and _is_cubic(inner.node.inputs[0], x):
            return d.emit("gelu", [x], approximate="tanh")
    return None


def _is_cubic(v: Value, x: Value) -> bool:
    polynomial = _times(v, math.sqrt(2 / math.pi))
    if polynomial is None or not polynomial.made_by("add") or polynomial.node is None:
        return False
    for y, cube in (polynomial.node.inputs, polynomial.node.inputs[::-1]):
        power = _times(cube, 0.044715)
        if y is x and power is not None and power.node is not None and power.made_by("pow"):
            return power.node.attrs["exponent"] == 3 and power.node.inputs[0] is x
    return False


def silu(d: Draft, n: DraftNode) -> Value | None:
    """x · sigmoid(x)."""
    if n.op != "mul":
        return None
    for x, gate in (n.inputs, n.inputs[::-1]):
        if gate.node is not None and gate.made_by("sigmoid") and gate.node.inputs[0] is x:
            return d.emit("silu", [x])
    return None


TINY = 1e-6
"""A floor of this or less under a norm only guards the division by zero (torch's own is 1e-12). Adding its square guards
as well, changes a norm above 1e-3 by less than 1e-6 of it, and spares a comparison."""


def normalise(d: Draft, n: DraftNode) -> Value | None:
    """x / √s becomes x · rsqrt(s), and x / max(√s, e) becomes x · rsqrt(max(s, e²)), or s + e²: one protocol in place of
    two."""
    if n.op not in ("div", "reciprocal"):
        return None
    below = n.inputs[-1]
    stretch: tuple[int, ...] | None = None
    if below.made_by("expand") and below.node is not None:
        stretch, below = below.shape, below.node.inputs[0]
    low = 0.0
    if below.made_by("clamp") and below.node is not None:
        if below.node.attrs["max"] is not None or below.node.attrs["min"] < 0:
            return None
        low, below = float(below.node.attrs["min"]), below.node.inputs[0]
    if not below.made_by("sqrt") or below.node is None:
        return None
    square = below.node.inputs[0]
    if low > TINY:
        square = d.emit("clamp", [square], min=low * low, max=None)
    elif low:
        square = d.emit("add", [square, d.scalar(low * low, square.dtype)])
    inverse = d.emit("rsqrt", [square])
    if n.op == "div":
        return d.emit("mul", [n.inputs[0], inverse])
    return inverse if stretch is None else d.expand(inverse, stretch)


RULES = (linear_shape, fold_bias, gelu, silu, normalise, fold_scale)
