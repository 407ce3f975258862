"""Rules that make the draft smaller without changing a value: shape work merged, neutral elements and double
negations gone."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from .draft import UNSUPPORTED, Draft, DraftNode, Rule, Value


def _producer(value: Value, op: str) -> DraftNode | None:
    return value.node if value.node is not None and value.node.op == op else None


def fold(d: Draft, n: DraftNode) -> Value | None:
    """All operands became known after other rules: compute it now."""
    if n.op != UNSUPPORTED and all(v.tensor is not None for v in n.inputs):
        return d.emit(n.op, n.inputs, **n.attrs)
    return None


def shapes(d: Draft, n: DraftNode) -> Value | None:
    """Identity shape work disappears; neighbours of one kind merge."""
    if n.op not in ("reshape", "expand", "permute"):
        return None
    x = n.inputs[0]
    if n.op == "reshape":
        if (inner := _producer(x, "reshape")) is not None:
            x = inner.inputs[0]
        return d.reshape(x, n.output.shape) if x is not n.inputs[0] or x.shape == n.output.shape else None
    if n.op == "expand":
        if (inner := _producer(x, "expand")) is not None and len(inner.inputs[0].shape) == len(x.shape):
            return d.expand(inner.inputs[0], n.output.shape)
        return x if x.shape == n.output.shape else None
    dims = n.attrs["dims"]
    if (inner := _producer(x, "permute")) is not None:
        return d.permute(inner.inputs[0], [inner.attrs["dims"][i] for i in dims])
    if dims == list(range(len(dims))):
        return x
    moved = [i for i in dims if x.shape[i] != 1]
    if moved == sorted(moved):  # only dimensions of size 1 move
        return d.reshape(x, n.output.shape)
    return None


def _uniform(value: Value) -> float | bool | None:
    """The one number that a public value is full of."""
    if value.kind != "constant" or value.known.numel() == 0:
        return None
    t = value.known
    first = t[(0,) * t.dim()]
    small = t[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())]  # expanded dimensions once
    return first.item() if bool((small == first).all()) else None


_NEUTRAL: dict[str, tuple[bool, float]] = {  # operator -> (commutes, neutral element on the right)
    "add": (True, 0),
    "sub": (False, 0),
    "mul": (True, 1),
    "div": (False, 1),
    "logical_and": (True, True),
    "logical_or": (True, False),
}


def neutral(d: Draft, n: DraftNode) -> Value | None:
    """x + 0, x · 1, x and True, and what absorbs: x · 0, x and False, x or True."""
    if n.op not in _NEUTRAL:
        return None
    commutes, element = _NEUTRAL[n.op]
    a, b = n.inputs
    for x, other in ((a, b), (b, a)) if commutes else ((a, b),):
        number = _uniform(other)
        if number is None:
            continue
        if number == element:
            return d.expand(x, n.output.shape)
        if n.op in ("logical_and", "logical_or") or (n.op == "mul" and number == 0):
            return d.constant(torch.tensor(number).expand(n.output.shape))
    return None


def logic(d: Draft, n: DraftNode) -> Value | None:
    """Double negation, casts that come back, uniform conditions and tables."""
    x = n.inputs[0] if n.inputs else None
    if x is None:
        return None
    if n.op in ("logical_not", "neg") and (inner := _producer(x, n.op)) is not None:
        return inner.inputs[0]
    if n.op == "logical_not" and (inner := _producer(x, "expand")) is not None:
        return d.expand(d.emit("logical_not", inner.inputs), n.output.shape)
    if n.op == "cast" and n.attrs["dtype"] == "bool" and (inner := _producer(x, "cast")) is not None:
        return inner.inputs[0] if inner.inputs[0].dtype == torch.bool else None
    if n.op == "where" and (choice := _uniform(x)) is not None:
        return d.expand(n.inputs[1 if choice else 2], n.output.shape)
    if n.op == "gather" and (number := _uniform(x)) is not None:
        return d.constant(torch.tensor(number).expand(n.output.shape))
    if n.op == "mul" and n.inputs[0] is n.inputs[1]:
        return d.emit("pow", [n.inputs[0]], exponent=2)
    return None


def slices(d: Draft, n: DraftNode) -> Value | None:
    if n.op == "slice" and n.inputs[0].shape == n.output.shape and n.attrs["step"] == 1:
        return n.inputs[0]
    return None


_BROADCASTS = (
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "where",
)


def narrow_known(d: Draft, n: DraftNode) -> Value | None:
    """A known operand that is an expansion is used unexpanded, where others give the full shape."""
    if n.op not in _BROADCASTS:
        return None
    small = [_collapsed(v) if v.tensor is not None else v for v in n.inputs]
    if all(a is b for a, b in zip(small, n.inputs, strict=True)):
        return None
    if torch.broadcast_shapes(*(v.shape for v in small)) != n.output.shape:  # type: ignore[no-untyped-call]
        return None
    return d.emit(n.op, small, **n.attrs)


def _collapsed(value: Value) -> Value:
    t = value.known
    index = tuple(
        slice(0, 1) if s == 0 and k > 1 else slice(None) for s, k in zip(t.stride(), t.shape, strict=True)
    )
    if all(i == slice(None) for i in index):
        return value
    return Value(value.kind, t[index].shape, value.dtype, name=value.name, tensor=t[index])


def add_chains(d: Draft, n: DraftNode) -> Value | None:
    """(x + known) + known: the known ones are added once, at compile time."""
    if n.op != "add":
        return None
    for x, b in (n.inputs, n.inputs[::-1]):
        inner = _producer(x, "add")
        if b.tensor is None or inner is None or not d.used_once(x):
            continue
        for y, a in (inner.inputs, inner.inputs[::-1]):
            if a.tensor is not None and y.tensor is None:
                return d.emit("add", [y, d.emit("add", [a, b])])
    return None


def batched(d: Draft, n: DraftNode) -> Value | None:
    """matmul(reshape(a), reshape(b)) whose reshapes only join batch dimensions runs on a and b themselves."""
    if n.op != "matmul":
        return None
    a, b = (_producer(v, "reshape") for v in n.inputs)
    if a is None or b is None:
        return None
    x, y = a.inputs[0], b.inputs[0]
    same_tail = x.shape[-2:] == n.inputs[0].shape[-2:] and y.shape[-2:] == n.inputs[1].shape[-2:]
    if len(x.shape) > 2 and x.shape[:-2] == y.shape[:-2] and same_tail:
        return d.reshape(d.emit("matmul", [x, y]), n.output.shape)
    return None


def deduplicate() -> Rule:
    """One node for each (operator, operands, attributes); equal known operands count as one."""
    seen: dict[str, Value] = {}
    known: dict[object, Value] = {}

    def canonical(v: Value) -> Value:
        if v.tensor is None:
            return v
        t = v.tensor
        key: object = (v.kind, t.data_ptr(), t.shape, t.stride(), t.dtype)
        if v.kind == "constant" and t.numel() <= 4096:
            key = (t.dtype, t.shape, t.cpu().contiguous().numpy().tobytes())
        return known.setdefault(key, v)

    def rule(d: Draft, n: DraftNode) -> Value | None:
        n.inputs = [canonical(v) for v in n.inputs]
        if n.op == UNSUPPORTED:
            return None
        key = json.dumps([n.op, [id(v) for v in n.inputs], n.attrs])
        return seen.setdefault(key, n.output)

    return rule


RULES: tuple[Callable[[Draft, DraftNode], Value | None], ...] = (
    fold, shapes, slices, neutral, logic, narrow_known, add_chains, batched,
)  # fmt: skip
