"""Stages → schedule: levels, layouts and matrix plans of every stage at one polynomial degree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import UnsupportedModelError, UnsupportedNode
from ...graph.polynomials import SQUARE
from .layouts import Layout
from .matrices import (
    Diagonals,
    Mask,
    MatrixPlan,
    after_sums,
    diagonals,
    encryption_ms,
    pooled,
    product_ms,
    rotation_ms,
    steps_of,
    target_of,
)
from .proposals import choose, fixed_rows, for_layout, for_packed, holding, image_layout
from .stages import INPUTS, Stage, Stages, depth_of


@dataclass(frozen=True, eq=False)
class PartPlan:
    """One matrix of a stage: from a base's layout, at a level."""

    base: str
    plan: MatrixPlan


@dataclass(frozen=True, eq=False)
class StagePlan:
    """level: at which its products are computed; the values after the matrix are one below. layout: of those values."""

    stage: str
    parts: tuple[PartPlan, ...]
    level: int
    layout: Layout
    coefficients: tuple[float, ...]
    depth: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """One sample over the slots of its ciphertexts. levels: of a fresh ciphertext."""

    stages: tuple[StagePlan, ...]
    levels: int
    inputs: Layout

    @property
    def outputs(self) -> Layout:
        return self.stages[-1].layout

    def steps(self) -> set[int]:
        """Every rotation in use."""
        return steps_of(p.plan for s in self.stages for p in s.parts)


@dataclass(frozen=True, eq=False)
class Made:
    """A schedule, and by stage and base the diagonals of each matrix."""

    schedule: Schedule
    products: Mapping[tuple[str, str], Diagonals]

    @classmethod
    def of(cls, stages: Stages, schedule: Schedule) -> Made:
        plans = {(s.stage, p.base): p.plan for s in schedule.stages for p in s.parts}
        return cls(
            schedule,
            {
                (stage.name, base): diagonals(plans[stage.name, base], matrix.numpy())
                for stage in stages.stages
                for base, matrix in stage.parts
            },
        )


def levels_of(stages: Stages) -> tuple[int, dict[str, int]]:
    """Levels of a fresh ciphertext, and of each stage the level at which its matrices run."""
    used: dict[str, int] = {INPUTS: 0}
    before: dict[str, int] = {}
    for stage in stages.stages:
        before[stage.name] = max(used[base] for base, _ in stage.parts)
        used[stage.name] = before[stage.name] + 1 + depth_of(stage)
    levels = used[stages.stages[-1].name]
    return levels, {name: levels - n for name, n in before.items()}


def make_schedule(stages: Stages, degree: int, split: int, *, private: bool = False) -> Schedule:
    """The fastest layouts that the search finds, stage by stage. Raises UnsupportedModelError where a stage has none.

    private: the slots of a result that hold no output hold nothing else either (rule K3): a fold would leave sums of some of
    a row's products there, and no mask that fits below the modulus hides those.
    """
    slots = degree // 2
    levels, at = levels_of(stages)
    layouts: dict[str, Layout] = {}
    made: list[StagePlan] = []
    looked_at = {  # as images, by a later stage
        base
        for later in stages.stages
        for (base, _), window in zip(later.parts, later.windows, strict=True)
        if later.image is not None or window != (1, 1)
    }
    needed = np.zeros(stages.sizes[INPUTS], dtype=bool)
    for stage in stages.stages:
        for (base, _), mask in zip(stage.parts, stage.masks, strict=True):
            if base == INPUTS:
                needed |= mask.numpy().any(0)
    for stage in stages.stages:
        level = at[stage.name]
        primes = (level + 1) * split
        clean = private and stage.kind == "output"
        parts = _parts(stage, layouts, slots, degree, primes, stage.name in looked_at, clean, needed)
        layout = target_of([part.plan for part in parts])
        for part in parts:
            layouts.setdefault(part.base, part.plan.whole or part.plan.source)
        layouts[stage.name] = layout
        made.append(StagePlan(stage.name, tuple(parts), level, layout, stage.coefficients, depth_of(stage)))
    return Schedule(tuple(made), levels, layouts[INPUTS])


def _parts(
    stage: Stage,
    layouts: Mapping[str, Layout],
    slots: int,
    degree: int,
    primes: int,
    as_image: bool,
    clean: bool,
    needed: Mask,
) -> list[PartPlan]:
    def allowed(plans: Iterable[MatrixPlan]) -> Iterator[MatrixPlan]:
        return (p for p in plans if not clean or _leaves_nothing(p, alone=len(stage.parts) == 1))

    order = sorted(range(len(stage.parts)), key=lambda i: -int(stage.masks[i].sum()))
    rows, found = None, {}
    for i in order:
        base, _ = stage.parts[i]
        mask, window = stage.masks[i].numpy(), stage.windows[i]
        sums: tuple[tuple[int, int], ...] = ()
        whole = layouts.get(base)
        if window != (1, 1):
            shrunk = None if whole is None else pooled(whole, window)
            if shrunk is not None:
                layouts = {**layouts, base: shrunk[0]}
                sums = shrunk[1]
            else:
                stage.without_window(i)
                mask = stage.masks[i].numpy()
        plan = None
        if rows is not None:
            source = layouts.get(base) or _plain(mask.shape[1], slots)
            plan = None if source is None else fixed_rows(mask, source, rows)
        elif base in layouts:
            plan = choose(
                allowed(for_layout(mask, layouts[base], stage.image, whole=clean)),
                mask,
                degree,
                primes,
                encrypts=False,
                images=as_image,
            )
        else:
            packed = [*for_packed(mask, slots, stage.image)]
            source = image_layout(stage.source_image, slots) if stage.source_image else None
            if source is not None and stage.image is not None:
                packed += [*for_layout(mask, source, stage.image, whole=clean)]
            whole_inputs = (holding(p, needed) for p in allowed(packed))
            plan = choose(whole_inputs, mask, degree, primes, encrypts=True, images=as_image)
        if plan is None:
            raise UnsupportedModelError(
                [UnsupportedNode(stage.name, stage.label or stage.kind, stage.path, _wide(mask, slots))]
            )
        layouts = {base: plan.source, **layouts}
        if sums and whole is not None:
            plan = after_sums(plan, whole, sums)
        rows = plan.rows if rows is None else rows
        found[i] = PartPlan(base, plan)
    return [found[i] for i in order]


def _leaves_nothing(plan: MatrixPlan, *, alone: bool) -> bool:
    """Whether every slot of the result that is not read holds zero, or another copy of all that is read. alone: no other
    matrix is added to it.
    """
    return plan.blocks == 1 or alone and plan.stride * plan.blocks % plan.source.slots == 0


def _wide(mask: np.ndarray, slots: int) -> str:
    m, n = mask.shape
    return (
        f"too wide for CKKS: no packing of its {m:,} x {n:,} matrix into ciphertexts of {slots:,} slots was found; take "
        "smaller images, fewer channels or fewer features, or backend='mpc'"
    )


def _plain(size: int, slots: int) -> Layout | None:
    cts = -(-size // slots)
    where = np.full(cts * slots, -1, dtype=np.int64)
    where[:size] = np.arange(size)
    return Layout(where.reshape(cts, slots), size)


# --- time ---


def activation_ms(depth: int, coefficients: Sequence[float], degree: int, primes: int) -> float:
    """Estimated time of a polynomial on one ciphertext of that many primes."""
    if not depth:
        return 0.0
    products = 1 if coefficients == SQUARE else len(coefficients) // 2 + depth - 1
    each = rotation_ms(degree, primes) + (degree / 8192) * 0.45 * primes
    return products * each


def estimate_ms(schedule: Schedule, degree: int, split: int) -> float:
    """Of one sample, on one core at each party, encryption included."""
    total = schedule.inputs.ciphertexts * encryption_ms(degree, (schedule.levels + 1) * split)
    for s in schedule.stages:
        primes = (s.level + 1) * split
        total += sum(p.plan.estimate_ms(degree, primes) for p in s.parts)
        total += s.layout.ciphertexts * activation_ms(s.depth, s.coefficients, degree, primes - split)
    return total


def batch_estimate_ms(stages: Stages, degree: int, split: int) -> float:
    """Of one batch with a sample a slot, a ciphertext a value."""
    levels, at = levels_of(stages)
    total = stages.sizes[INPUTS] * encryption_ms(degree, (levels + 1) * split)
    for stage in stages.stages:
        primes = (at[stage.name] + 1) * split
        entries = sum(
            int(mask.sum()) for mask in stage.masks
        )  # and not of the weights' zeros, which are private
        total += entries * product_ms(degree, primes)
        total += stage.rows * activation_ms(depth_of(stage), stage.coefficients, degree, primes - split)
    return total
