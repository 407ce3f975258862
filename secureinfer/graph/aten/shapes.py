"""Shapes, joining, constants of a shape, and indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..draft import Value
from .call import Call, Number, Result, Unsupported, aten, dims_of

# What changes nothing.


@aten(
    "alias.default", "clone.default", "detach.default", "lift_fresh_copy.default", "lift_fresh.default",
    "contiguous.default", "dropout.default", "feature_dropout.default", "alpha_dropout.default",
    "positive.default",
)  # fmt: skip
def _same(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return x


@aten("native_dropout.default")
def _native_dropout(c: Call, x: Value, p: float, train: bool | None) -> Result:
    if train:
        raise Unsupported("dropout in training mode")
    return [x]


@aten("_to_copy.default", "to.dtype", "to.dtype_layout")
def _to_copy(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.draft.cast(x, c.dtype)


# Shapes.


@aten(
    "view.default", "_unsafe_view.default", "reshape.default", "squeeze.default", "squeeze.dim",
    "squeeze.dims",
    "unsqueeze.default", "flatten.using_ints", "unflatten.int", "view_copy.default", "squeeze_copy.dims",
)  # fmt: skip
def _reshape(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.draft.reshape(x, c.shape)


@aten("permute.default")
def _permute(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return c.draft.permute(x, dims)


@aten("transpose.int")
def _transpose(c: Call, x: Value, a: int, b: int) -> Value:
    dims = list(range(len(x.shape)))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return c.draft.permute(x, dims)


@aten("t.default")
def _t(c: Call, x: Value) -> Value:
    return c.draft.permute(x, list(range(len(x.shape)))[::-1])


@aten("expand.default", "expand_as.default", "broadcast_to.default")
def _expand(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.draft.expand(x, c.shape)


@aten("copy.default")
def _copy(c: Call, x: Value, source: Value, *_: Any) -> Value:
    return c.draft.expand(c.draft.cast(source, c.dtype), c.shape)


@aten("repeat.default")
def _repeat(c: Call, x: Value, repeats: Sequence[int]) -> Value:
    d = c.draft
    shape = (1,) * (len(repeats) - len(x.shape)) + x.shape
    x = d.reshape(x, [n for s in shape for n in (1, s)])
    x = d.expand(x, [n for r, s in zip(repeats, shape, strict=True) for n in (r, s)])
    return d.reshape(x, c.shape)


@aten("slice.Tensor")
def _slice(
    c: Call, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim %= len(x.shape)
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    return c.draft.slice(x, dim, begin, max(begin, stop), step)


@aten("narrow.default")
def _narrow(c: Call, x: Value, dim: int, start: int, length: int) -> Value:
    dim %= len(x.shape)
    start %= max(x.shape[dim], 1)
    return c.draft.slice(x, dim, start, start + length)


@aten("select.int")
def _select(c: Call, x: Value, dim: int, index: int) -> Value:
    dim %= len(x.shape)
    return c.draft.emit("select", [x], dim=dim, index=index % x.shape[dim])


@aten("split_with_sizes.default", "split.sizes")
def split_with_sizes(c: Call, x: Value, sizes: Sequence[int], dim: int = 0) -> Result:
    dim %= len(x.shape)
    parts, start = [], 0
    for size in sizes:
        parts.append(c.draft.slice(x, dim, start, start + size))
        start += size
    return parts


@aten("split.Tensor")
def split_even(c: Call, x: Value, size: int, dim: int = 0) -> Result:
    total = x.shape[dim]
    return split_with_sizes(c, x, [min(size, total - i) for i in range(0, total, size)], dim)


@aten("chunk.default")
def _chunk(c: Call, x: Value, chunks: int, dim: int = 0) -> Result:
    return split_even(c, x, max(1, math.ceil(x.shape[dim] / chunks)), dim)


@aten("unbind.int")
def _unbind(c: Call, x: Value, dim: int = 0) -> Result:
    dim %= len(x.shape)
    return [c.draft.emit("select", [x], dim=dim, index=i) for i in range(x.shape[dim])]


@aten("cat.default")
def concatenate(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    parts = [c.draft.cast(t, c.dtype) for t in tensors if t.shape != (0,) or len(c.shape) == 1]
    return parts[0] if len(parts) == 1 else c.draft.emit("cat", parts, dim=dim % len(c.shape))


@aten("stack.default")
def _stack(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(c.shape)
    rows = [c.draft.reshape(t, [*t.shape[:dim], 1, *t.shape[dim:]]) for t in tensors]
    return concatenate(c, rows, dim)


@aten("slice_scatter.default")
def _slice_scatter(
    c: Call,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    if step != 1:
        raise Unsupported("slice_scatter with a step")
    dim %= len(x.shape)
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    before, after = c.draft.slice(x, dim, 0, begin), c.draft.slice(x, dim, max(begin, stop), x.shape[dim])
    return concatenate(c, [v for v in (before, source, after) if v.shape[dim]], dim)


@aten("constant_pad_nd.default")
def _pad(c: Call, x: Value, pad: Sequence[int], value: float = 0.0) -> Value:
    return c.draft.emit("pad", [x], pad=list(pad), value=value)


@aten("flip.default")
def _flip(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return c.draft.emit("flip", [x], dims=dims_of(x, dims))


@aten("full_like.default")
def full_like(c: Call, x: Value, value: Number, **_: Any) -> Value:
    return c.draft.constant(torch.full((), value, dtype=c.dtype).expand(c.shape))


@aten("zeros_like.default", "new_zeros.default")
def _zeros_like(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return full_like(c, x, 0)


@aten("ones_like.default", "new_ones.default")
def _ones_like(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return full_like(c, x, 1)


@aten("new_full.default")
def _new_full(c: Call, x: Value, shape: Sequence[int], value: Number, **_: Any) -> Value:
    return full_like(c, x, value)


# Indexing. What is public or known is an index_select; a private index needs a look-up.


def select_flat(c: Call, x: Value, index: torch.Tensor, dim: int) -> Value:
    """x.index_select(dim, index) for a public 1-D index; nothing at all where the index is the identity."""
    if torch.equal(index, torch.arange(x.shape[dim])):
        return x
    return c.draft.emit("index_select", [x, c.draft.constant(index.long())], dim=dim)


@aten("index_select.default")
def _index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    if index.kind == "constant":
        return select_flat(c, x, index.known.long().cpu(), dim % len(x.shape))
    return look_up(c, x, index, dim % len(x.shape))


def look_up(c: Call, table: Value, index: Value, dim: int) -> Value:
    """Rows of a table by an index that somebody holds privately."""
    if table.tensor is None or dim != 0 or len(table.shape) not in (1, 2):
        raise Unsupported("a secret index into a tensor that is computed from inputs")
    rows = c.draft.reshape(table, [table.shape[0], -1 if len(table.shape) == 2 else 1])
    return c.draft.reshape(c.draft.emit("embedding", [index, rows]), c.shape)


@aten("index.Tensor")
def index_tensor(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    if len(given) == 1 and given[0][1].kind != "constant" and given[0][1].dtype != torch.bool:
        return look_up(c, x, given[0][1], given[0][0])
    if any(v.kind != "constant" for _, v in given):
        raise Unsupported("a secret index or a secret boolean mask that selects a number of elements")
    where: list[int] = []
    known: list[torch.Tensor] = []
    dim = 0
    for v in indices:
        if v is None:
            dim += 1
            continue
        t = v.known.cpu()
        for part in t.nonzero(as_tuple=True) if t.dtype == torch.bool else (t,):
            where.append(dim)
            known.append(part.long())
            dim += 1
    known = list(torch.broadcast_tensors(*known))  # type: ignore[no-untyped-call]
    rest = [i for i in range(len(x.shape)) if i not in where]
    flat = torch.zeros_like(known[0])
    for i, t in zip(where, known, strict=True):
        flat = flat * x.shape[i] + t % x.shape[i]
    moved = c.draft.permute(x, where + rest)
    moved = c.draft.reshape(moved, [math.prod(x.shape[i] for i in where), *(x.shape[i] for i in rest)])
    picked = select_flat(c, moved, flat.reshape(-1), 0)
    picked = c.draft.reshape(picked, [*flat.shape, *(x.shape[i] for i in rest)])
    if where == list(range(where[0], where[-1] + 1)) and where[0] > 0:
        # Neighbouring indices leave their result where they stood; others put it first, as in NumPy.
        n, lead = flat.dim(), where[0]
        picked = c.draft.permute(
            picked, [*range(n, n + lead), *range(n), *range(n + lead, len(picked.shape))]
        )
    return c.draft.reshape(picked, c.shape)


@aten("gather.default")
def _gather(c: Call, x: Value, dim: int, index: Value, **_: Any) -> Value:
    dim %= max(len(x.shape), 1)
    if index.kind != "constant":
        return c.draft.emit("gather", [x, index], dim=dim)
    grid = list(torch.meshgrid(*(torch.arange(n) for n in index.shape), indexing="ij"))
    grid[dim] = index.known.long().cpu()
    return index_tensor(c, x, [c.draft.constant(t) for t in grid])


@aten("one_hot.default")
def _one_hot(c: Call, x: Value, num_classes: int = -1) -> Value:
    if num_classes < 0:
        raise Unsupported("one_hot whose number of classes depends on the data; give num_classes")
    return c.draft.emit("one_hot", [x], num_classes=num_classes)


@aten("cumsum.default")
def _cumsum(c: Call, x: Value, dim: int, **_: Any) -> Value:
    return c.draft.emit("cumsum", [c.draft.cast(x, c.dtype)], dim=dim % max(len(x.shape), 1))
