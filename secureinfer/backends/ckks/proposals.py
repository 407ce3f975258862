"""Proposals of how a matrix is computed on slots: each is checked entry by entry, and the one estimated fastest is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .layouts import NOTHING, Indices, Layout
from .matrices import Mask, MatrixPlan, Placement, encryption_ms, make

MOST_INPUTS = 64
"""Ciphertexts that a data owner may be asked to send for one inference."""
MOST_FOLDS = 1024

# --- proposals where the data owner packs as it is asked to ---


def for_packed(mask: Mask, slots: int, grid: tuple[int, int, int] | None = None) -> Iterator[MatrixPlan]:
    """Plans for the first matrix: the layout of the input is theirs to choose. mask: [m, n], what may be other than zero.

    grid: of the rows, if they are images, which a later matrix may look at; the plans then lay them out as such too.
    """
    m, n = mask.shape
    apart = None if grid is None else image_layout(grid, slots)
    for blocks in _powers(slots):
        width = slots // blocks
        if m <= width:
            yield from _dense_packed(m, n, slots, blocks, width)
        if m <= width or blocks == 1:
            rows = np.arange(m) // width * slots + np.arange(m) % width if m > width else np.arange(m)
            yield from _gathered(mask, slots, blocks, width, rows)
        if apart is not None and (blocks == 1 or apart.ciphertexts == 1 and apart.places().max() < width):
            yield from _gathered(mask, slots, blocks, width, apart.places(), grid, apart.block)


def _powers(slots: int) -> Iterator[int]:
    blocks = 1
    while blocks <= min(slots, MOST_FOLDS):
        yield blocks
        blocks *= 2


def _dense_packed(m: int, n: int, slots: int, blocks: int, width: int) -> Iterator[MatrixPlan]:
    """Block k of ciphertext i holds m + depth - 1 values from its own place on: offsets 0 to depth - 1 reach all."""
    for cts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        depth = -(-n // (blocks * cts))
        if m + depth - 1 > width:
            continue
        j = np.arange(width)
        first = (np.arange(cts)[:, None] * blocks + np.arange(blocks)[None, :]) * depth
        index = (first[:, :, None] + j[None, None, :]) % (cts * blocks * depth)
        index = np.where((j < m + depth - 1)[None, None, :] & (index < n), index, NOTHING)
        source = Layout(index.reshape(cts, slots), n)
        plan = make(source, np.arange(m), [range(depth)] * cts, stride=width, blocks=blocks)
        if plan is not None:
            yield plan
        if depth == 1:
            return


def _gathered(
    mask: Mask,
    slots: int,
    blocks: int,
    width: int,
    rows: Indices,
    grid: tuple[int, int, int] | None = None,
    block: int = 0,
) -> Iterator[MatrixPlan]:
    """The data owner sends each row's values, one after the other (im2col): no rotation but the fold's."""
    m, n = mask.shape
    counts = mask.sum(1)
    depth = int(counts.max(initial=1))
    outs = int(rows.max()) // slots + 1
    each = -(-depth // blocks)
    if each * outs > MOST_INPUTS or not depth:
        return
    columns = np.full((m, depth), NOTHING, dtype=np.int64)
    r, c = np.nonzero(mask)
    columns[r, np.arange(len(r)) - np.repeat(np.cumsum(counts) - counts, counts)] = c
    where = np.full((each * outs, slots), NOTHING, dtype=np.int64)
    for t in range(depth):
        where[rows // slots * each + t // blocks, rows % slots + t % blocks * width] = columns[:, t]
    plan = make(
        Layout(where, n), rows, [(0,)] * (each * outs), stride=width, blocks=blocks, grid=grid, block=block
    )
    if plan is not None:
        yield plan


def holding(plan: MatrixPlan, needed: Mask) -> MatrixPlan:
    """The plan, with ciphertexts more for what it leaves out of the input although a later matrix needs it. needed: [n]."""
    left_out = np.flatnonzero(needed & (plan.source.places() == NOTHING))
    if not len(left_out):
        return plan
    source, slots = plan.source, plan.source.slots
    where = np.full(-(-len(left_out) // slots) * slots, NOTHING, dtype=np.int64)
    where[: len(left_out)] = left_out
    more = where.reshape(-1, slots)
    return replace(
        plan,
        source=replace(source, where=np.concatenate([source.where, more]), grid=None, block=0),
        offsets=(*plan.offsets, *[()] * len(more)),
    )


# --- proposals for a layout that is given ---


def for_layout(
    mask: Mask, source: Layout, grid: tuple[int, int, int] | None, *, whole: bool = False
) -> Iterator[MatrixPlan]:
    """Plans for a matrix on a layout as an earlier step left it. grid: of the rows, if they are images. whole: of blocks,
    only those that go round all slots.
    """
    yield from _dense(mask, source, whole)
    if grid is not None and source.grid is not None:
        yield from _images(mask, source, grid)
    yield from _sparse(mask, source)


def _next(source: Layout, i: int) -> tuple[Indices, npt.NDArray[np.int32]]:
    """The values that ciphertext i holds, and for each the distance from every slot to the next slot that holds it."""
    where, slots = source.where[i], source.slots
    values = np.unique(where[where != NOTHING])
    distance = np.zeros((len(values), slots), dtype=np.int32)
    at = np.arange(slots)
    for row, value in enumerate(values):
        held = np.flatnonzero(where == value)
        following = np.searchsorted(held, at)
        distance[row] = np.append(held, held[0] + slots)[following] - at
    return values, distance


def _dense(mask: Mask, source: Layout, whole: bool) -> Iterator[MatrixPlan]:
    """Rows side by side, blocks a stride apart: the smallest range of offsets that reaches every column."""
    m, slots = mask.shape[0], source.slots
    if m > slots:
        return
    needed: Mask = np.any(mask, axis=0).reshape(-1)
    tables = [_next(source, i) for i in range(source.ciphertexts)]
    held = [(v[needed[v]], d[needed[v]]) for v, d in tables]
    rows = np.arange(m)
    sample = rows if m <= 64 else np.unique(np.linspace(0, m - 1, 64).astype(np.int64))
    found: list[tuple[int, int, int, int, int]] = []
    for blocks in _powers(slots):
        for stride in _strides(m, slots, blocks):
            if whole and blocks > 1 and blocks * stride != slots:
                continue
            for low in (0, -stride):
                ranges = []
                for _, distance in held:
                    if not len(distance):
                        ranges.append(0)
                        continue
                    reach = np.full((len(distance), len(sample)), slots, dtype=np.int32)
                    for k in range(blocks):
                        np.minimum(reach, distance[:, (sample + k * stride + low) % slots], out=reach)
                    ranges.append(int(reach.max()) + 1)
                depth = max(ranges)
                score = 2 * math.isqrt(max(depth, 1)) + blocks.bit_length() - 1
                found.append((score, depth, blocks, stride, low))
    for _, depth, blocks, stride, low in sorted(found)[:4]:
        offsets = [range(low, low + depth) if len(v) else () for v, _ in held]
        plan = make(source, rows, offsets, stride=stride, blocks=blocks)
        if plan is not None:
            yield plan


def _strides(m: int, slots: int, blocks: int) -> Iterable[int]:
    if blocks == 1:
        return (m,)
    most = slots // blocks
    if most < m:
        return ()
    near = {m, most} | {s for s in range(m, most + 1) if s % 8 == 0 and s <= 4 * m}
    near |= {1 << i for i in range(slots.bit_length()) if m <= 1 << i <= most}
    return sorted(near)


def _sparse(mask: Mask, source: Layout) -> Iterator[MatrixPlan]:
    """Rows side by side and whatever offsets that takes."""
    rows = np.arange(mask.shape[0])
    plan = _with_needed_offsets(mask, source, rows, None, 0)
    if plan is not None:
        yield plan


def _images(mask: Mask, source: Layout, grid: tuple[int, int, int]) -> Iterator[MatrixPlan]:
    """Each output pixel where the input pixel stands that it comes from: offsets are those of a kernel's window."""
    channels, height, width = grid
    if source.grid is None or not source.block:
        return
    _, tall, wide = source.grid
    places = source.places()
    slots, block = source.slots, source.block
    per = max(1, slots // block)
    o, y, x = np.unravel_index(np.arange(channels * height * width), grid)
    for step in range(1, 9):
        if (height - 1) * step >= tall or (width - 1) * step >= wide:
            break
        at = places[(y * step) * wide + x * step]
        if (at == NOTHING).any():
            continue
        rows = o // per * slots + (at % slots + o % per * block) % slots
        plan = _with_needed_offsets(mask, source, rows, grid, block)
        if plan is not None:
            yield plan


MOST_OFFSETS = 4096


def _with_needed_offsets(
    mask: Mask, source: Layout, rows: Indices, grid: tuple[int, int, int] | None, block: int
) -> MatrixPlan | None:
    slots, places = source.slots, source.places()
    r, c = np.nonzero(mask)
    if (places[c] == NOTHING).any():
        return None
    difference = (places[c] - rows[r]) % slots
    difference = np.where(difference > slots // 2, difference - slots, difference)
    offsets = [np.unique(difference[places[c] // slots == i]).tolist() for i in range(source.ciphertexts)]
    if sum(map(len, offsets)) > MOST_OFFSETS:
        return None
    return make(source, rows, offsets, grid=grid, block=block)


def image_layout(grid: tuple[int, int, int], slots: int) -> Layout | None:
    """Images as a data owner packs them: a channel a block of slots, as many blocks as fit a ciphertext. None if one
    does not fit."""
    channels, height, width = grid
    block = 1 << (height * width - 1).bit_length()
    if block > slots:
        return None
    per = slots // block
    cts = -(-channels // per)
    where = np.full((cts, slots), NOTHING, dtype=np.int64)
    o, p = np.divmod(np.arange(channels * height * width), height * width)
    where[o // per, o % per * block + p] = np.arange(channels * height * width)
    return Layout(where, channels * height * width, grid, block)


def fixed_rows(mask: Mask, source: Layout, rows: Indices) -> MatrixPlan | None:
    """A plan whose rows stand where another one's do."""
    return _with_needed_offsets(mask, source, rows, None, 0)


def choose(
    plans: Iterable[MatrixPlan], mask: Mask, degree: int, primes: int, *, encrypts: bool, images: bool = False
) -> MatrixPlan | None:
    """Of the plans that reach every entry of the mask the one that is estimated fastest.

    encrypts: the source has to be encrypted for it. images: those that leave images come first, for what looks at them next.
    """

    def cost(plan: MatrixPlan) -> float:
        extra = plan.source.ciphertexts * encryption_ms(degree, primes) if encrypts else 0.0
        return plan.estimate_ms(degree, primes) + extra

    for plan in sorted(plans, key=lambda plan: (images and plan.target.grid is None, cost(plan))):
        if Placement(plan).covers(mask):
            return plan
    return None
