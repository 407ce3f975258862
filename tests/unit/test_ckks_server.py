"""What the model owner computes, on an evaluator in the clear: values, levels and scales, and what SEAL would refuse."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secureinfer.backends.ckks.layouts import NOTHING, Layout
from secureinfer.backends.ckks.proposals import choose, for_layout, for_packed
from secureinfer.backends.ckks.schedule import activation_ms
from secureinfer.backends.ckks.server import Matrix, Polynomial, SpreadMatrix
from secureinfer.graph.polynomials import multiplicative_depth

from .clear_ckks import ClearContext, arithmetic, values

Array = npt.NDArray[np.float64]
SLOTS = 64

# Matrices of which much, or all, is zero or next to it: SEAL refuses a product with what is encoded as zero.


@st.composite
def weights(draw: st.DrawFn) -> Array:
    """Entries of every size, most of them zero or tiny."""
    m, n = draw(st.integers(1, 10)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = rng.choice([0.0, 0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1.0], (m, n)) * draw(st.sampled_from([0, 1, 1]))
    size[rng.random(m) < 0.3] = 0.0
    return np.asarray(size * rng.choice([-1, 1], (m, n)), dtype=np.float64)


@settings(max_examples=80, deadline=None)
@given(weights(), st.sampled_from([26, 40]), st.booleans())
def test_a_matrix_with_entries_next_to_zero_is_computed(
    matrix: Array, scale_bits: int, on_layout: bool
) -> None:
    """A single entry of 2^-17 at scale 2^28 in 4096 slots has no coefficient of 1/2."""
    context = ClearContext(SLOTS, 1, scale_bits=scale_bits)
    mask, scale = np.ones(matrix.shape, dtype=bool), context.parameters.scale
    n = matrix.shape[1]
    source = Layout(np.append(np.arange(n), np.full(SLOTS - n, NOTHING))[None], n)
    proposed = for_layout(mask, source, None) if on_layout else for_packed(mask, SLOTS)
    plan = choose(proposed, mask, 8192, 2, encrypts=not on_layout)
    assert plan is not None
    x = np.linspace(-1, 1, n)
    work = Matrix(context, plan, matrix, None, 1, scale, scale)  # type: ignore[arg-type]
    a = arithmetic(context, plan.steps())
    slots = values(work.apply(a, [context.encrypted(v) for v in plan.source.pack(x)]))
    unit = 1 / scale
    assert np.abs(plan.target.unpack(slots) - matrix @ x).max() < SLOTS * n * unit
    assert context.evaluator.calls["multiply_plain"] <= plan.products


@settings(max_examples=60, deadline=None)
@given(weights(), st.sampled_from([26, 40]))
def test_a_matrix_on_a_sample_a_slot_leaves_out_what_is_zero(matrix: Array, scale_bits: int) -> None:
    context = ClearContext(SLOTS, 2, scale_bits=scale_bits)
    m, n = matrix.shape
    scale, bias = context.parameters.scale, np.linspace(-2, 2, m)
    x = np.random.default_rng(0).uniform(-1, 1, (n, SLOTS))
    work = SpreadMatrix(context, matrix, bias, 1, scale, scale)  # type: ignore[arg-type]
    given = zip([context.encrypted(v) for v in x], repeat(None), strict=False)
    out = work.apply(arithmetic(context, ()), given)
    assert np.abs(values(out) - matrix @ x - bias[:, None]).max() < 3 * n / scale
    assert all(y.level == 0 and abs(y.scale / scale - 1) < 1e-12 for y in out)
    empty = int((np.abs(matrix) * scale < 0.99).all(1).sum())
    assert context.evaluator.calls["multiply_plain"] <= np.count_nonzero(matrix) + empty
    assert context.evaluator.calls["rotate"] == 0


def test_the_scale_of_a_result_does_not_depend_on_the_operands() -> None:
    """After a square the scale is another one at each level; the diagonals are encoded so that it is made up for."""
    context = ClearContext(SLOTS, 3)
    mask, scale = np.ones((4, 6), dtype=bool), context.parameters.scale
    plan = choose(for_packed(mask, SLOTS), mask, 8192, 2, encrypts=True)
    assert plan is not None
    a = arithmetic(context, plan.steps())
    x = np.linspace(0.5, 1, 6)
    squares = [a.times(y, y) for y in (context.encrypted(v) for v in plan.source.pack(x))]
    operand = Polynomial([0.0, 0.0, 1.0], 1).result_scale(context, 3, scale)  # type: ignore[arg-type]
    assert squares[0].scale == operand != scale
    for late in (False, True):
        work = Matrix(context, plan, mask * 0.5, None, 2, scale, operand, late=late)  # type: ignore[arg-type]
        out = work.apply(a, squares)
        assert all(y.level == 1 and abs(y.scale / scale - 1) < 1e-15 for y in out)
        assert np.abs(plan.target.unpack(values(out)) - 0.5 * (x**2).sum()).max() < 1e-12


# Polynomials.

DEGREES = [*range(2, 16), 16, 17, 31, 32, 63]


def of_kind(kind: str, degree: int) -> list[float]:
    rng = np.random.default_rng(degree)
    c = rng.uniform(0.25, 1.0, degree + 1) * rng.choice([-1, 1], degree + 1)
    i = np.arange(degree + 1)
    if kind == "even, and x":  # what relu, gelu and silu are like
        c[(i % 2 == 1) & (i > 1)] = 0
    elif kind == "odd":
        c[i % 2 == 0] = 0
    elif kind == "power":
        c[:-1] = 0
    elif kind == "tiny top":
        c[-1] = 1e-14
    elif kind == "tiny slope":
        c[1] = -1e-14
    elif kind == "two ends":
        c[2:-1] = 0
    c[-1] = c[-1] or 0.75
    return [float(v) for v in c]


@pytest.mark.parametrize(
    "kind", ["full", "even, and x", "odd", "power", "tiny top", "tiny slope", "two ends"]
)
@pytest.mark.parametrize("degree", DEGREES)
def test_a_polynomial_takes_exactly_its_levels_and_keeps_the_scale(degree: int, kind: str) -> None:
    c, depth = of_kind(kind, degree), multiplicative_depth(degree)
    for spare in (0, 2):
        context = ClearContext(SLOTS, depth + spare)
        x = np.linspace(-1, 1, SLOTS)
        operand = context.encrypted(x)
        operand.scale *= 1 + 2.0**-20  # whatever it is
        polynomial, a = Polynomial(c, depth), arithmetic(context, ())
        (out,) = polynomial.apply(a, [operand])
        wanted = np.polynomial.polynomial.polyval(x, c)
        assert np.abs(out.values - wanted).max() < 1e-10
        square = c == [0.0, 0.0, 1.0]
        assert out.level == (spare + depth - 1 if square else spare)
        assert out.parts == 2
        expected = polynomial.result_scale(context, depth + spare, operand.scale)  # type: ignore[arg-type]
        assert abs(out.scale / expected - 1) < 1e-12
        products = context.evaluator.calls["multiply"]
        assert products == context.evaluator.calls["relinearize"]
        counted = activation_ms(depth, c, 8192, 3) / activation_ms(1, (0.0, 0.0, 1.0), 8192, 3)
        assert products <= round(counted)


def test_a_square_alone_takes_one_level() -> None:
    context = ClearContext(SLOTS, 1)
    x = np.linspace(-1, 1, SLOTS)
    (out,) = Polynomial([0.0, 0.0, 1.0], 1).apply(arithmetic(context, ()), [context.encrypted(x)])
    assert np.allclose(out.values, x**2) and out.level == 0
    assert out.scale == context.parameters.scale**2 / context.primes[1]


def test_a_polynomial_without_a_variable_part_is_none() -> None:
    context = ClearContext(SLOTS, 2)
    with pytest.raises(ValueError, match="without a variable part"):
        Polynomial([1.0, 0.0, 0.0], 2).apply(arithmetic(context, ()), [context.encrypted(np.ones(SLOTS))])


def test_a_level_too_few_is_seen() -> None:
    """The twin: a chain that is one level short ends before the polynomial does."""
    for degree in (2, 3, 7, 8):
        depth = multiplicative_depth(degree)
        context = ClearContext(SLOTS, depth - 1)
        with pytest.raises((RuntimeError, KeyError)):
            Polynomial(of_kind("full", degree), depth).apply(
                arithmetic(context, ()), [context.encrypted(np.ones(SLOTS))]
            )
