"""Attention masks: softmax(scores + bias) becomes masked_softmax(scores, keep), whatever form the mask was
written in.

An additive mask cannot survive fixed point (field reports 10 to 12). It is recognised only where the graph
proves that it is 0 where a place is kept and at most -1e4 where it is not; any other bias stays what it is.
"""

from __future__ import annotations

import math

import torch

from .draft import Draft, DraftNode, Value

DROPPED = -1e4
"""An additive mask of this or less drops a place: exp(-1e4) is 0 in every format."""

_SHAPE_OPS = ("expand", "reshape", "slice", "select", "permute", "index_select", "flip")


def keep_of(d: Draft, bias: Value) -> Value | None:
    """A boolean value that is true exactly where this bias is 0, if the bias is a mask; else None."""
    if bias.kind == "constant":
        t = bias.known
        if t.is_floating_point() and bool(((t == 0) | (t <= DROPPED)).all()):
            return d.constant(t == 0)
        return None
    n = bias.node
    if n is None:
        return None
    if n.op == "cast":
        return keep_of(d, n.inputs[0])
    if n.op in _SHAPE_OPS:
        inner = keep_of(d, n.inputs[0])
        return None if inner is None else d.emit(n.op, [inner, *n.inputs[1:]], **n.attrs)
    if n.op == "add":
        a, b = keep_of(d, n.inputs[0]), keep_of(d, n.inputs[1])
        return None if a is None or b is None else d.emit("logical_and", [a, b])
    if n.op == "where":
        return _keep_of_where(d, *n.inputs)
    if n.op == "mul":
        for flag, factor in (n.inputs, n.inputs[::-1]):
            if factor.kind == "constant" and _finite_drop(factor.known):
                present = _is_zero(d, flag)
                if present is not None:
                    return present
    return None


def _finite_drop(t: torch.Tensor) -> bool:
    return t.numel() > 0 and bool(((t <= DROPPED) & torch.isfinite(t)).all())


def _is_zero(d: Draft, flag: Value) -> Value | None:
    """Where an indicator (0 or 1) is 0. Only a cast boolean or 1 − indicator counts as one."""
    n = flag.node
    if n is None:
        return None
    if n.op == "cast" and n.inputs[0].dtype == torch.bool:
        return d.emit("logical_not", [n.inputs[0]])
    if n.op == "sub" and n.inputs[0].kind == "constant" and bool((n.inputs[0].known == 1).all()):
        return d.emit("eq", [flag, d.scalar(0, flag.dtype)])
    if n.op in _SHAPE_OPS or n.op == "cast":
        inner = _is_zero(d, n.inputs[0])
        if inner is None or n.op == "cast":
            return inner
        return d.emit(n.op, [inner, *n.inputs[1:]], **n.attrs)
    return None


def _keep_of_where(d: Draft, condition: Value, a: Value, b: Value) -> Value | None:
    """where(c, a, b): kept where the chosen branch is. A branch that is an indicator (masked_fill(1 − m, 1
    − m, NEG)) is kept where it is 0."""
    sides = []
    for branch in (a, b):
        kept = keep_of(d, branch)
        if kept is None and branch is b and _same_flag(condition, b):
            kept = d.constant(torch.tensor(True))
        if kept is None:
            return None
        sides.append(kept)
    when_true, when_false = sides
    false_only = _all(when_false, False)
    if _all(when_true, True) and false_only:
        return condition
    if _all(when_true, False):
        return d.emit("logical_and", [d.emit("logical_not", [condition]), when_false])
    if false_only:
        return d.emit("logical_and", [condition, when_true])
    return d.emit("where", [condition, *sides])


def _same_flag(condition: Value, flag: Value) -> bool:
    """condition is `flag.bool()` (or `flag != 0`): where it is false, the flag is 0."""
    n = condition.node
    if n is None:
        return False
    if n.op == "cast":
        return n.inputs[0] is flag
    return (
        n.op == "ne" and n.inputs[0] is flag and n.inputs[1].kind == "constant" and _all_equal(n.inputs[1], 0)
    )


def _all_equal(v: Value, number: float) -> bool:
    return v.kind == "constant" and v.known.numel() > 0 and bool((v.known == number).all())


def _all(v: Value, truth: bool) -> bool:
    return v.kind == "constant" and v.known.numel() > 0 and bool((v.known == truth).all())


def _dropping(v: Value) -> bool:
    return v.kind == "constant" and v.known.numel() > 0 and bool((v.known <= DROPPED).all())


def split(d: Draft, scores: Value) -> tuple[Value, list[Value]]:
    """The scores without their masks, and the masks as booleans."""
    n = scores.node
    if n is None:
        return scores, []
    if n.op == "add":
        for x, bias in (n.inputs, n.inputs[::-1]):
            keep = keep_of(d, bias)
            if keep is not None:
                inner, more = split(d, x)
                return d.expand(inner, scores.shape), [*more, keep]
        a, left = split(d, n.inputs[0])
        b, right = split(d, n.inputs[1])
        return (d.emit("add", [a, b]), left + right) if left or right else (scores, [])
    if n.op == "where":
        condition, a, b = n.inputs
        if _dropping(b):
            inner, more = split(d, a)
            return d.expand(inner, scores.shape), [*more, condition]
        if _dropping(a):
            inner, more = split(d, b)
            return d.expand(inner, scores.shape), [*more, d.emit("logical_not", [condition])]
    return scores, []


def _unexpanded(d: Draft, keep: Value, shape: tuple[int, ...]) -> Value:
    """A mask need only broadcast to the scores."""
    while keep.node is not None and keep.node.op == "expand" and len(keep.node.inputs[0].shape) == len(shape):
        keep = keep.node.inputs[0]
    return keep


def mask_softmax(d: Draft, n: DraftNode) -> Value | None:
    """softmax over masked scores; and a masked softmax whose mask keeps everything is a softmax."""
    if n.op == "masked_softmax":
        x, keep = n.inputs
        if _all(keep, True):
            return d.emit("softmax", [x], dim=n.attrs["dim"])
        small = _unexpanded(d, keep, x.shape)
        return None if small is keep else d.emit("masked_softmax", [x, small], dim=n.attrs["dim"])
    if n.op != "softmax":
        return None
    x, keeps = split(d, n.inputs[0])
    if not keeps:
        return None
    keep = keeps[0]
    for other in keeps[1:]:
        keep = d.emit("logical_and", [keep, other])
    return d.emit("masked_softmax", [x, keep], dim=n.attrs["dim"])


def minus_infinity(d: Draft, n: DraftNode) -> Value | None:
    """scores == -inf asks where the mask dropped; fixed point has no infinity to compare with."""
    if n.op != "eq":
        return None
    for x, other in (n.inputs, n.inputs[::-1]):
        if other.kind == "constant" and _all_equal(other, -math.inf) and x.is_float and x.tensor is None:
            _, keeps = split(d, x)
            if not keeps:
                return d.constant(torch.tensor(False).expand(n.output.shape)) if _computed(x) else None
            keep = keeps[0]
            for more in keeps[1:]:
                keep = d.emit("logical_and", [keep, more])
            return d.expand(d.emit("logical_not", [keep]), n.output.shape)
    return None


def _computed(x: Value) -> bool:
    """True for scores: a product of data, never an input that may hold infinities itself."""
    n = x.node
    while n is not None and n.op in (*_SHAPE_OPS, "mul", "add", "div"):
        n = n.inputs[0].node
    return n is not None and n.op in ("matmul", "linear", "convolution", "layer_norm")


def safe_tail(d: Draft, n: DraftNode) -> Value | None:
    """where(not any(keep), 0, masked_softmax(x, keep)): the masked softmax already gives 0 for such a row."""
    if n.op != "where" or not (n.inputs[2].made_by("masked_softmax") and _all_equal(n.inputs[1], 0)):
        return None
    condition, soft = n.inputs[0].node, n.inputs[2].node
    if soft is None:
        return None
    if n.inputs[0].kind == soft.inputs[1].kind == "constant":
        keep = soft.inputs[1].known.expand(soft.output.shape)
        empty = ~keep.any(soft.attrs["dim"], keepdim=True).expand(n.output.shape)
        return soft.output if torch.equal(empty, n.inputs[0].known.expand(n.output.shape)) else None
    if condition is None or condition.op != "logical_not":
        return None
    kept = condition.inputs[0].node
    if (
        kept is None
        or kept.op != "any"
        or kept.attrs["dims"] != [soft.attrs["dim"]]
        or not kept.attrs["keepdim"]
    ):
        return None
    a, b = (_unexpanded(d, v, soft.output.shape) for v in (kept.inputs[0], soft.inputs[1]))
    return soft.output if _equal(a, b) else None


def _equal(a: Value, b: Value) -> bool:
    """The same value, or two known tensors that agree."""
    if a is b:
        return True
    return a.kind == b.kind == "constant" and a.shape == b.shape and bool(torch.equal(a.known, b.known))


RULES = (minus_infinity, safe_tail, mask_softmax)
