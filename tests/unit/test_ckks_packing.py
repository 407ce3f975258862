"""Layouts and matrices over slots: every plan that the search proposes gives the product, and its layout says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from secureinfer.backends.ckks.layouts import NOTHING, Layout
from secureinfer.backends.ckks.matrices import (
    MatrixPlan,
    Placement,
    after_sums,
    diagonals,
    only_rows,
    pooled,
    simulate,
)
from secureinfer.backends.ckks.proposals import choose, fixed_rows, for_layout, for_packed, image_layout
from secureinfer.backends.ckks.server import Matrix

from .clear_ckks import ClearContext, arithmetic, values

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
EXACT = 1e-12

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])

# What matrices look like.


@st.composite
def masks(draw: st.DrawFn, rows: st.SearchStrategy[int], columns: int | None = None) -> Mask:
    """[m, n]: what may be other than zero."""
    m = draw(rows)
    n = columns or draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["dense", "sparse", "banded", "windows", "one a row", "hollow"]))
    r, c = np.arange(m)[:, None], np.arange(n)[None, :]
    if kind == "dense":
        return np.ones((m, n), dtype=bool)
    if kind == "sparse":
        mask = rng.random((m, n)) < 0.15
    elif kind == "banded":
        mask = np.abs(r * n / m - c) < 3
    elif kind == "windows":  # like a convolution's, with a stride
        mask = (c >= 2 * r % n) & (c < 2 * r % n + 3)
    elif kind == "one a row":
        mask = c == rng.integers(0, n, m)[:, None]
    else:
        mask = np.ones((m, n), dtype=bool)
        mask[rng.random(m) < 0.4] = False
        mask[:, rng.random(n) < 0.4] = False
    mask[0, 0] = True
    return mask


def matrix(mask: Mask, seed: int) -> Array:
    return np.where(mask, np.random.default_rng(seed).uniform(0.5, 1.5, mask.shape), 0.0)


def vector(n: int, seed: int) -> Array:
    return np.random.default_rng(seed + 1).uniform(-1, 1, n)


def holds(layout: Layout, slots: Array, wanted: Array) -> bool:
    """Whether every slot of which the layout says that it holds a value does, and every value stands somewhere."""
    shown = layout.where != NOTHING
    everywhere = bool((layout.places() != NOTHING).all())
    return (
        everywhere
        and layout.size == len(wanted)
        and bool(np.all(np.abs(slots - layout.pack(wanted))[shown] < EXACT * (1 + np.abs(wanted).sum())))
    )


def some(plans: list[MatrixPlan]) -> st.SearchStrategy[list[MatrixPlan]]:
    """The cheapest ones, those that keep images, and one more."""
    first = sorted(plans, key=lambda p: p.estimate_ms(8192, 4))[:2]
    return st.sampled_from(plans).map(lambda p: [*first, *[q for q in plans if q.target.grid][:3], p])


def covering(plans: list[MatrixPlan], mask: Mask) -> list[MatrixPlan]:
    return [p for p in plans if Placement(p).covers(mask)]


sizes = st.sampled_from([32, 64, 128])
seeds = st.integers(0, 10_000)


# One matrix.


@few
@given(sizes, masks(st.integers(1, 40)), seeds)
def test_every_plan_on_packed_inputs_gives_the_product(slots: int, mask: Mask, seed: int) -> None:
    m, x = matrix(mask, seed), vector(mask.shape[1], seed)
    plans = covering([*for_packed(mask, slots)], mask)
    assume(plans)
    for plan in plans:
        assert holds(plan.target, simulate(plan, m, plan.source.pack(x)), m @ x)


@few
@given(sizes, masks(st.integers(1, 31)), seeds)
def test_a_matrix_with_fewer_rows_than_slots_always_has_a_plan(slots: int, mask: Mask, seed: int) -> None:
    assert choose(for_packed(mask, slots), mask, 8192, 4, encrypts=True) is not None


@few
@given(masks(st.integers(1, 40)), seeds)
def test_a_mask_that_a_plan_does_not_cover_is_told(mask: Mask, seed: int) -> None:
    """`covers` is the guard of every choice: where it says no, making the diagonals fails, and else it does not."""
    full = matrix(np.ones_like(mask), seed)
    for plan in for_packed(mask, 64):
        if Placement(plan).covers(np.ones_like(mask)):
            diagonals(plan, full)
        else:
            with pytest.raises(ValueError, match="entries where the plan has none"):
                diagonals(plan, full)


# Chains.


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, list[Mask]]:
    slots = draw(sizes)
    first = draw(masks(st.integers(1, 40)))
    second = draw(masks(st.integers(1, 40), first.shape[0]))
    third = draw(masks(st.integers(1, 40), second.shape[0]))
    return slots, [first, second, third]


@few
@given(chains(), st.randoms(use_true_random=False), seeds)
def test_every_plan_on_what_an_earlier_matrix_left_gives_the_product(
    chain: tuple[int, list[Mask]], random: object, seed: int
) -> None:
    """Left-overs of a fold stand in the other slots then; not one may get into a value."""
    slots, (first, *rest) = chain
    pick = getattr(random, "choice")  # noqa: B009
    plans = covering([*for_packed(first, slots)], first)
    assume(plans)
    plan, m, x = pick(plans), matrix(first, seed), vector(first.shape[1], seed)
    held, x = simulate(plan, m, plan.source.pack(x)), m @ x
    for mask in rest:
        m = matrix(mask, seed)
        plans = covering([*for_layout(mask, plan.target, None)], mask)
        assert plans, "a matrix of 40 rows or fewer has a plan on any layout"
        for candidate in plans:
            assert holds(candidate.target, simulate(candidate, m, held), m @ x)
        plan = pick(plans)
        held, x = simulate(plan, m, held), m @ x


# The model owner's computation of a plan, without noise.


def computed(plan: MatrixPlan, m: Array, bias: Array | None, held: Array) -> tuple[Array, ClearContext]:
    """With Galois keys for the plan's rotations alone."""
    slots = plan.source.slots
    context = ClearContext(slots, 1)
    scale = context.parameters.scale
    work = Matrix(context, plan, m, bias, 1, scale, scale)  # type: ignore[arg-type]
    given = [context.encrypted(x) for x in held]
    out = work.apply(arithmetic(context, plan.steps()), given)
    assert all(x.level == 0 and abs(x.scale / scale - 1) < 1e-12 for x in out)
    return values(out), context


@few
@given(chains(), seeds)
def test_babies_and_giants_compute_the_plan_with_the_rotations_that_it_declares(
    chain: tuple[int, list[Mask]], seed: int
) -> None:
    slots, chained = chain
    x, held, plan = vector(chained[0].shape[1], seed), None, None
    for mask in chained[:2]:
        m, bias = matrix(mask, seed), vector(len(mask), seed + 1)
        proposed = for_packed(mask, slots) if plan is None else for_layout(mask, plan.target, None)
        plan = choose(proposed, mask, 8192, 4, encrypts=held is None)
        assume(plan is not None)
        assert plan is not None
        out, context = computed(plan, m, bias, plan.source.pack(x) if held is None else held)
        held, x = out, m @ x + bias
        assert holds(plan.target, held, x)
        calls = context.evaluator.calls
        assert calls["rotate"] <= plan.rotations and calls["multiply_plain"] <= plan.products
        if len(diagonals(plan, m)) == plan.products:  # no diagonal is zero throughout
            assert (calls["rotate"], calls["multiply_plain"]) == (plan.rotations, plan.products)


# Several matrices whose products are added up: rows stand in the same slots.


@few
@given(sizes, st.lists(masks(st.just(12)), min_size=2, max_size=3), masks(st.integers(1, 30)), seeds)
def test_products_of_several_vectors_meet_in_the_same_slots(
    slots: int, first: list[Mask], before: Mask, seed: int
) -> None:
    """The first vector as it was packed, the others as an earlier matrix left them, or side by side."""
    plan = choose(for_packed(first[0], slots), first[0], 8192, 4, encrypts=True)
    assert plan is not None
    x, m = vector(first[0].shape[1], seed), matrix(first[0], seed)
    total, wanted = simulate(plan, m, plan.source.pack(x)), m @ x
    for i, mask in enumerate(first[1:]):
        n = mask.shape[1]
        if i:
            source = layout_of(n, slots)
            held, x = source.pack(vector(n, i)), vector(n, i)
        else:
            earlier = np.ones((n, before.shape[1]), dtype=bool)
            earlier_plan = choose(for_packed(earlier, slots), earlier, 8192, 4, encrypts=True)
            assume(earlier_plan is not None)
            assert earlier_plan is not None
            m, x = matrix(earlier, seed), vector(before.shape[1], seed)
            source, held = earlier_plan.target, simulate(earlier_plan, m, earlier_plan.source.pack(x))
            x = m @ x
        fixed = fixed_rows(mask, source, plan.rows)
        assert fixed is not None and np.array_equal(fixed.rows, plan.rows)
        assert Placement(fixed).covers(mask)
        m = matrix(mask, seed)
        total, wanted = total + simulate(fixed, m, held), wanted + m @ x
    assert holds(only_rows(plan), total, wanted)


def layout_of(n: int, slots: int) -> Layout:
    cts = -(-n // slots)
    where = np.full(cts * slots, NOTHING, dtype=np.int64)
    where[:n] = np.arange(n)
    return Layout(where.reshape(cts, slots), n)


def test_copies_that_a_fold_makes_are_no_place_where_sums_meet() -> None:
    """The twin: the other summands' rows stand only once, so that a layout with copies would be untrue."""
    mask = np.ones((1, 64), dtype=bool)
    plan = choose(for_packed(mask, 32), mask, 8192, 4, encrypts=True)
    assert plan is not None and (plan.target.where == 0).sum() > 1
    x, m = vector(64, 0), matrix(mask, 0)
    fixed = fixed_rows(mask, layout_of(64, 32), plan.rows)
    assert fixed is not None
    total = simulate(plan, m, plan.source.pack(x)) + simulate(fixed, m, layout_of(64, 32).pack(x))
    assert holds(only_rows(plan), total, 2 * m @ x) and not holds(plan.target, total, 2 * m @ x)


# Images.


def convolution(
    shape: tuple[int, int, int], operation: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Array, tuple[int, int, int]]:
    """[m, n] of an operation on images, and the shape of what it gives."""
    n = int(np.prod(shape))
    images = operation(torch.eye(n, dtype=torch.float64).reshape(n, *shape))
    return images.reshape(n, -1).T.numpy().copy(), tuple(images.shape[1:])  # type: ignore[return-value]


@st.composite
def convolutions(
    draw: st.DrawFn, channels: int | None = None
) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """Channels in, and a convolution, batch-norm scale and maybe average pooling of it."""
    inside, out = channels or draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    pool = draw(st.sampled_from([0, 0, 2]))
    generator = torch.Generator().manual_seed(draw(seeds))
    weight = torch.rand(out, inside, size, size, generator=generator, dtype=torch.float64) + 0.5

    def run(x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, weight, stride=stride, padding=padding)
        return F.avg_pool2d(y, pool) if pool and min(y.shape[-2:]) >= pool else y

    return inside, run


@settings(max_examples=10, deadline=None)
@given(st.data(), st.sampled_from([64, 128]), st.integers(4, 7), st.integers(4, 7), seeds)
def test_convolutions_one_after_the_other_are_right_wherever_the_pixels_stand(
    data: st.DataObject, slots: int, height: int, width: int, seed: int
) -> None:
    channels, first = data.draw(convolutions())
    m, grid = convolution((channels, height, width), first)
    mask, x = m != 0, vector(m.shape[1], seed)
    packed = [*for_packed(mask, slots, grid)]
    images = image_layout((channels, height, width), slots)
    if images is not None:
        packed += for_layout(mask, images, grid)
    plans = covering(packed, mask)
    assume(plans)
    for candidate in data.draw(some(plans)):
        assert holds(candidate.target, simulate(candidate, m, candidate.source.pack(x)), m @ x)
    chosen = choose(plans, mask, 8192, 4, encrypts=True, images=True)
    assert chosen is not None
    held, x = simulate(chosen, m, chosen.source.pack(x)), m @ x
    for _ in range(2):
        _, later = data.draw(convolutions(grid[0]))
        assume(min(grid[1:]) >= 3)
        m, grid = convolution(grid, later)
        mask = m != 0
        plans = covering([*for_layout(mask, chosen.target, grid)], mask)
        assert plans
        for candidate in data.draw(some(plans)):
            assert holds(candidate.target, simulate(candidate, m, held), m @ x)
        chosen = choose(plans, mask, 8192, 4, encrypts=False, images=True)
        assert chosen is not None
        held, x = simulate(chosen, m, held), m @ x


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from([32, 64, 128]), seeds,
)  # fmt: skip
def test_pooled_images_are_sums_of_rotations(
    channels: int, tall: int, wide: int, rows: int, columns: int, slots: int, seed: int
) -> None:
    grid = (channels, tall * rows, wide * columns)
    whole = image_layout(grid, slots)
    assume(whole is not None)
    assert whole is not None
    shrunk = pooled(whole, (tall, wide))
    assert shrunk is not None
    layout, sums = shrunk
    assert layout.grid == (channels, rows, columns)
    x = vector(whole.size, seed)
    summed = F.avg_pool2d(torch.from_numpy(x).reshape(1, *grid), (tall, wide), divisor_override=1).reshape(-1)
    mask = np.ones((5, layout.size), dtype=bool)
    m = matrix(mask, seed)
    plan = choose(for_layout(mask, layout, None), mask, 8192, 4, encrypts=False)
    assert plan is not None
    both = after_sums(plan, whole, sums)
    assert holds(both.target, simulate(both, m, whole.pack(x)), m @ summed.numpy())
    out, context = computed(both, m, None, whole.pack(x))
    assert holds(both.target, out, m @ summed.numpy())
    rotated = context.evaluator.calls["rotate"]
    assert (
        rotated == both.rotations if len(diagonals(both, m)) == both.products else rotated <= both.rotations
    )
    assert both.rotations - plan.rotations == whole.ciphertexts * (tall + wide - 2)


def test_images_that_a_strided_convolution_left_are_pooled_where_they_stand() -> None:
    def strided(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, torch.ones(2, 1, 3, 3, dtype=torch.float64), stride=2, padding=1)

    m, grid = convolution((1, 8, 8), strided)
    images = image_layout((1, 8, 8), 256)
    assert images is not None and grid == (2, 4, 4)
    plans = [p for p in for_layout(m != 0, images, grid) if p.target.grid is not None]
    plan = min(plans, key=lambda p: p.products)
    shrunk = pooled(plan.target, (2, 2))
    assert shrunk is not None
    layout, sums = shrunk
    # A pixel stands where the middle of its window stood: two slots from the next one, and two rows of eight.
    assert plan.products == 9 * 2 and sums == ((2, 2), (2, 16))
    x = vector(64, 0)
    held, wanted = simulate(plan, m, images.pack(x)), torch.from_numpy(m @ x).reshape(1, 2, 4, 4)
    for count, step in sums:
        held = sum(np.roll(held, -i * step, axis=1) for i in range(count))  # type: ignore[assignment]
    assert holds(layout, held, (F.avg_pool2d(wanted, 2) * 4).reshape(-1).numpy())


def test_only_images_that_stand_evenly_and_windows_that_divide_them_are_pooled() -> None:
    images = image_layout((2, 4, 6), 64)
    assert images is not None
    assert pooled(images, (2, 3)) is not None
    assert pooled(images, (3, 2)) is None and pooled(images, (2, 4)) is None
    assert pooled(replace(images, grid=None), (2, 2)) is None
    moved = images.where.copy()
    moved[0, [3, 50]] = moved[0, [50, 3]]
    assert pooled(replace(images, where=moved), (2, 2)) is None
    apart = np.full((2, 64), NOTHING, dtype=np.int64)  # half an image in another ciphertext
    apart[0, :12], apart[1, :12] = np.arange(12), np.arange(12, 24)
    assert pooled(Layout(apart, 24, (1, 4, 6), 32), (2, 2)) is None


def test_an_image_that_no_ciphertext_holds_has_no_layout() -> None:
    assert image_layout((1, 8, 9), 64) is None
    fits = image_layout((5, 8, 8), 128)
    assert fits is not None and fits.ciphertexts == 3 and fits.block == 64


# Layouts.


@few
@given(st.integers(1, 20), st.integers(1, 3), st.integers(8, 40), seeds)
def test_what_is_packed_is_unpacked(size: int, cts: int, slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    where = rng.integers(NOTHING, size, (cts, slots))
    where.reshape(-1)[rng.permutation(cts * slots)[: min(size, cts * slots)]] = np.arange(
        min(size, cts * slots)
    )
    layout, x = Layout(where, size), vector(size, seed)
    places = layout.places()
    for value in range(size):
        held = np.flatnonzero(where.reshape(-1) == value)
        assert places[value] == (held[0] if len(held) else NOTHING)
    packed = layout.pack(x)
    assert np.array_equal(packed == 0, (where == NOTHING) | (packed == 0))
    assume((places != NOTHING).all())
    assert np.array_equal(layout.unpack(packed), x)


# Twins: the checks above see what they are for.


def example() -> tuple[MatrixPlan, Array, Array]:
    mask = np.ones((6, 30), dtype=bool)
    plan = next(
        p for p in for_packed(mask, 64) if p.blocks > 1 and len(p.offsets[0]) > 4 and len(p.giant_steps) > 0
    )
    assert Placement(plan).covers(mask)
    return plan, matrix(mask, 3), vector(30, 3)


def test_a_diagonal_left_out_is_seen() -> None:
    plan, m, x = example()
    fewer = replace(plan, offsets=(plan.offsets[0][:-1], *plan.offsets[1:]))
    assert not Placement(fewer).covers(m != 0)
    with pytest.raises(ValueError, match="entries where the plan has none"):
        diagonals(fewer, m)
    forgotten = m * (Placement(fewer).code != NOTHING)
    assert not holds(plan.target, simulate(fewer, forgotten, plan.source.pack(x)), m @ x)


def test_a_fold_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, m, x = example()
    held = plan.source.pack(x)
    assert holds(plan.target, simulate(plan, m, held), m @ x)
    monkeypatch.setattr(MatrixPlan, "fold_steps", property(lambda p: ()))
    assert not holds(plan.target, simulate(plan, m, held), m @ x)
    assert not holds(plan.target, computed(plan, m, None, held)[0], m @ x)


def test_other_babies_than_the_plan_says_need_keys_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, m, x = example()
    steps = plan.steps()
    monkeypatch.setattr(MatrixPlan, "steps", lambda p: steps)
    assert holds(plan.target, computed(plan, m, None, plan.source.pack(x))[0], m @ x)
    with pytest.raises(RuntimeError, match="Galois key not present"):
        computed(replace(plan, babies=plan.babies + 1), m, None, plan.source.pack(x))


def test_a_row_that_stands_elsewhere_is_seen() -> None:
    plan, m, x = example()
    rows = plan.rows.copy()
    rows[[0, 1]] = rows[[1, 0]]
    moved = replace(plan, rows=rows)
    assert not holds(plan.target, simulate(moved, m, plan.source.pack(x)), m @ x)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([16, 32]), st.data(), seeds)
def test_a_matrix_as_wide_as_a_ciphertext_turns_nothing_around_once(
    slots: int, data: st.DataObject, seed: int
) -> None:
    """A rotation by all slots is none, and no key is made for it: every plan does without."""
    mask = data.draw(masks(st.sampled_from([slots - 1, slots, slots + 1, 3 * slots])))
    m, x, source = matrix(mask, seed), vector(mask.shape[1], seed), layout_of(mask.shape[1], slots)
    plans = covering([*for_layout(mask, source, None)], mask)
    assert plans
    for plan in plans:
        out, context = computed(plan, m, None, source.pack(x))
        assert holds(plan.target, out, m @ x)
        assert context.evaluator.calls["rotate"] <= plan.rotations
        assert 0 not in {*plan.giant_steps, *plan.fold_steps}.union(*plan.baby_steps)
