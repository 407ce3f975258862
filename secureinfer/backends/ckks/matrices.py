"""Matrix times packed vector: hybrid diagonals with baby steps, giant steps and folds.

A row r of the matrix is computed in the slots rows[r] + k·stride, k < blocks, of one ciphertext: slot s takes the
values that stand at s + d for the offsets d, each times its entry of the matrix, and the fold adds the blocks up.
Rotations by d are split as d = g·babies + b: the input is rotated by every b once, and each sum of products by its g.
Small matrices in many slots thus need few offsets, as in the hybrid method of Gazelle (Juvekar et al., USENIX Security
2018, section 4) with the baby-step giant-step split of Halevi and Shoup (CRYPTO 2018); an offset where every entry is
zero costs nothing.

Which rows, stride, blocks and offsets do is searched for: see proposals.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .layouts import NOTHING, Indices, Layout

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]
Diagonals = dict[tuple[int, int, int], Array]
"""(target ciphertext, source ciphertext, offset) -> [slots]."""

ENCRYPTION_PRIMES_MS = 1.0
TRANSFER_PRIMES_MS = 0.3


def rotation_ms(degree: int, primes: int) -> float:
    """Estimated time of one rotation, or relinearisation, of a ciphertext of that many primes, on one core.

    Fitted to 1.1, 1.9, 2.7, 3.8, 5.2, 6.5 ms at degree 8192 and 1 to 6 primes.
    """
    return (degree / 8192) * math.log2(degree) / 13 * (0.11 * primes * primes + 0.3 * primes + 0.7)


def product_ms(degree: int, primes: int) -> float:
    """Estimated time of one plaintext product and its addition."""
    return (degree / 8192) * 0.075 * primes


def encryption_ms(degree: int, primes: int) -> float:
    """Estimated time to encrypt, send and load one ciphertext."""
    return (degree / 8192) * (ENCRYPTION_PRIMES_MS + TRANSFER_PRIMES_MS) * primes


@dataclass(frozen=True, eq=False)
class MatrixPlan:
    """source, target: layouts of the vector and of the product. rows: [m], ciphertext * slots + slot where row r stands.
    offsets: for each source ciphertext, the rotations d that are looked at, each in -slots/2..slots. babies: see above.
    sums: (count, step) pairs; before all else each source ciphertext becomes the sum of its rotations by 0, step, ...,
    (count - 1)·step. This is how poolings are computed, without a level. whole: the layout before them.
    """

    source: Layout
    target: Layout
    rows: Indices
    stride: int
    blocks: int
    offsets: tuple[tuple[int, ...], ...]
    babies: int
    sums: tuple[tuple[int, int], ...] = ()
    whole: Layout | None = None

    def turns(self, d: int) -> tuple[int, int]:
        """Giant and baby step of an offset, modulo the slots: a whole turn is none."""
        slots = self.source.slots
        return d // self.babies * self.babies % slots, d % self.babies % slots

    @property
    def sum_steps(self) -> tuple[int, ...]:
        return tuple(i * step for count, step in self.sums for i in range(1, count))

    @property
    def baby_steps(self) -> tuple[tuple[int, ...], ...]:
        """For each source ciphertext, the rotations of it that are needed, without 0."""
        return tuple(tuple(sorted({self.turns(d)[1] for d in o} - {0})) for o in self.offsets)

    @property
    def giant_steps(self) -> tuple[int, ...]:
        """Rotations of the sums, without 0; in each target ciphertext."""
        return tuple(sorted({self.turns(d)[0] for o in self.offsets for d in o} - {0}))

    @property
    def fold_steps(self) -> tuple[int, ...]:
        return tuple(self.stride << i for i in range(self.blocks.bit_length() - 1))

    @property
    def products(self) -> int:
        return self.target.ciphertexts * sum(len(o) for o in self.offsets)

    @property
    def rotations(self) -> int:
        each = len(self.giant_steps) + len(self.fold_steps)
        sums = self.source.ciphertexts * len(self.sum_steps)
        return sums + sum(len(b) for b in self.baby_steps) + self.target.ciphertexts * each

    def steps(self) -> set[int]:
        """Every rotation, modulo the slots."""
        slots = self.source.slots
        babies = {b for steps in self.baby_steps for b in steps}
        return {s % slots for s in (*babies, *self.giant_steps, *self.fold_steps, *self.sum_steps)} - {0}

    def estimate_ms(self, degree: int, primes: int) -> float:
        """On one core, the rescaling included."""
        outs = self.target.ciphertexts
        before = self.rotations - outs * len(self.fold_steps)
        return (
            before * rotation_ms(degree, primes)
            + outs * len(self.fold_steps) * rotation_ms(degree, primes - 1)
            + self.products * product_ms(degree, primes)
            + outs * (degree / 8192) * 0.3 * primes
        )


class Placement:
    """Which pair of offset and block gives each entry (r, c) of the matrix its place.

    code: [m, n], index of (source ciphertext, offset, block) in `pairs`, or NOTHING where no pair reaches column c
    from row r.
    """

    def __init__(self, plan: MatrixPlan) -> None:
        source, slots = plan.source, plan.source.slots
        m = len(plan.rows)
        self.pairs: list[tuple[int, int, int]] = []
        self.code = np.full((m, source.size), NOTHING, dtype=np.int32)
        at, row = plan.rows % slots, np.arange(m)
        for i, offsets in enumerate(plan.offsets):
            for d in offsets:
                for k in range(plan.blocks):
                    column = source.where[i, (at + k * plan.stride + d) % slots]
                    new = column != NOTHING
                    new[new] = self.code[row[new], column[new]] == NOTHING
                    if new.any():
                        self.code[row[new], column[new]] = len(self.pairs)
                        self.pairs.append((i, d, k))

    def covers(self, mask: Mask) -> bool:
        """Whether every entry that may be other than zero has a place."""
        return bool((self.code[mask] != NOTHING).all())


def diagonals(plan: MatrixPlan, matrix: Array) -> Diagonals:
    """Those that are not zero throughout, by the slots of the product.

    Raises ValueError for an entry that the plan does not reach.
    """
    placement, slots = Placement(plan), plan.source.slots
    r, c = np.nonzero(matrix)
    if not len(r):
        return {}
    code = placement.code[r, c]
    if (code == NOTHING).any():
        raise ValueError("the matrix has entries where the plan has none")
    found: Diagonals = {}
    order = np.argsort(code, kind="stable")
    bounds = np.flatnonzero(np.diff(code[order], prepend=NOTHING - 1))
    for start, end in zip(bounds, [*bounds[1:], len(order)], strict=True):
        chosen = order[start:end]
        i, d, k = placement.pairs[code[chosen[0]]]
        out, at = plan.rows[r[chosen]] // slots, (plan.rows[r[chosen]] + k * plan.stride) % slots
        for target in np.unique(out):
            here = out == target
            vector = found.setdefault((int(target), i, d), np.zeros(slots))
            vector[at[here]] = matrix[r[chosen][here], c[chosen][here]]
    return found


def split(offsets: Sequence[Sequence[int]], outs: int, slots: int) -> int:
    """Baby steps (a power of two, or the whole range) that make the fewest rotations."""
    alike = Counter(tuple(o) for o in offsets if o)  # most ciphertexts have the same ones
    if not alike:
        return 1
    arrays = [(np.array(o), count) for o, count in alike.items()]
    every = np.unique(np.concatenate([o for o, _ in arrays]))
    terms = sum(len(o) * count for o, count in arrays)
    span = int(np.abs(every).max()) + 1
    candidates = {1 << i for i in range(span.bit_length() + 1)} | {
        abs(d) for d in every.tolist() if 0 < abs(d) <= 256
    }
    if terms > 4:
        root = math.isqrt(terms)
        candidates |= set(range(max(1, root // 2), 2 * root + 2))

    def rotations(steps: Indices) -> int:
        return int(np.count_nonzero(np.bincount(steps % slots, minlength=1)[1:]))

    def cost(n: int) -> tuple[int, int]:
        babies = sum(count * rotations(o % n) for o, count in arrays)
        giants = rotations(every // n * n)
        return babies + outs * giants, giants

    return min(sorted(candidates), key=cost)


def _folded(
    rows: Indices, stride: int, blocks: int, slots: int, outs: int, size: int, **image: object
) -> Layout:
    """What the slots hold after the fold: rows[r], and all of its blocks where the fold goes round."""
    where = np.full((outs, slots), NOTHING, dtype=np.int64)
    cyclic = blocks > 1 and stride * blocks % slots == 0
    for k in range(blocks if cyclic else 1):
        where[rows // slots, (rows % slots + k * stride) % slots] = np.arange(len(rows))
    return replace(Layout(where, size), **image)  # type: ignore[arg-type]


def make(
    source: Layout,
    rows: Indices,
    offsets: Sequence[Sequence[int]],
    *,
    stride: int = 0,
    blocks: int = 1,
    grid: tuple[int, int, int] | None = None,
    block: int = 0,
) -> MatrixPlan | None:
    """A plan of a proposal; None where two rows, or blocks of two rows, would share a slot."""
    slots = source.slots
    outs = int(rows.max()) // slots + 1
    taken = (rows % slots)[:, None] + np.arange(blocks)[None, :] * stride
    flat = (rows // slots)[:, None] * slots + taken % slots
    if len(np.unique(flat)) != flat.size:
        return None
    tuples = tuple(tuple(o) for o in offsets)
    target = _folded(rows, stride, blocks, slots, outs, len(rows), grid=grid, block=block)
    return MatrixPlan(source, target, rows, stride, blocks, tuples, split(tuples, outs, slots))


def pooled(source: Layout, window: tuple[int, int]) -> tuple[Layout, tuple[tuple[int, int], ...]] | None:
    """What a layout holds once each image is summed over windows of that height and width: the layout and the sums.

    None where neighbouring pixels do not stand at the same distance everywhere.
    """
    if source.grid is None:
        return None
    channels, height, width = source.grid
    tall, wide = window
    if height % tall or width % wide:
        return None
    places = source.places().reshape(channels, height, width)
    sums = []
    for count, axis in ((wide, 2), (tall, 1)):
        if count > 1:
            steps = np.unique(np.diff(places, axis=axis))
            if len(steps) != 1 or (places < 0).any() or steps[0] <= 0:
                return None
            sums.append((count, int(steps[0])))
    ciphertexts = places // source.slots
    if bool(np.any(ciphertexts.max((1, 2)) > ciphertexts.min((1, 2)))):
        return None
    kept = places[:, ::tall, ::wide]
    where = np.full(source.where.size, NOTHING, dtype=np.int64)
    where[kept.reshape(-1)] = np.arange(kept.size)
    grid = (channels, height // tall, width // wide)
    return Layout(where.reshape(source.where.shape), int(kept.size), grid, source.block), tuple(sums)


def after_sums(plan: MatrixPlan, whole: Layout, sums: tuple[tuple[int, int], ...]) -> MatrixPlan:
    """A plan on a pooled layout, as one on the layout before."""
    return replace(plan, sums=sums, whole=whole)


def target_of(plans: Sequence[MatrixPlan]) -> Layout:
    """Of the sum of a stage's products."""
    return plans[0].target if len(plans) == 1 else only_rows(plans[0])


def steps_of(plans: Iterable[MatrixPlan]) -> set[int]:
    """Every rotation in use, modulo the slots."""
    return set().union(*(p.steps() for p in plans))


def only_rows(plan: MatrixPlan) -> Layout:
    """The target without further copies of a row: what several plans with the same rows have in common."""
    target = plan.target
    return _folded(
        plan.rows, 0, 1, target.slots, target.ciphertexts, target.size, grid=target.grid, block=target.block
    )


def rolled_sum(slots: Array, count: int, step: int) -> Array:
    """[..., slots]: the sum of rotations by 0, step, ..., (count - 1)·step."""
    total: Array = np.sum([np.roll(slots, -i * step, axis=-1) for i in range(count)], axis=0)
    return total


def follow(plan: MatrixPlan, products: Diagonals, slots: Array) -> Array:
    """What the slots hold after the product, left-overs too: [..., source ciphertexts, slots] to [..., target ciphertexts,
    slots]. products: the matrix's diagonals.
    """
    for count, step in plan.sums:
        slots = rolled_sum(slots, count, step)
    out = np.zeros((*slots.shape[:-2], plan.target.ciphertexts, plan.source.slots))
    for (target, i, d), vector in products.items():
        out[..., target, :] += vector * np.roll(slots[..., i, :], -d, axis=-1)
    for step in plan.fold_steps:
        out = out + np.roll(out, -step, axis=-1)
    return out


def simulate(plan: MatrixPlan, matrix: Array, slots: Array) -> Array:
    """What the slots hold after the product with a matrix: see follow."""
    return follow(plan, diagonals(plan, matrix), slots)
