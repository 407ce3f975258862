"""Polynomials for activations: the fits against known minimax values, their structure, and the canonical operator."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from secureinfer.errors import SettingsError
from secureinfer.graph.ops import OPS
from secureinfer.graph.polynomials import KINDS, Fit, choose, derivative, evaluate, fit, multiplicative_depth

FUNCTIONS = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "abs": torch.abs, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf, "exp": torch.exp,
}  # fmt: skip

kinds = st.sampled_from(KINDS)
radii = st.floats(0.05, 12.0)


def greatest_error(found: Fit, points: int = 5_001) -> float:
    """Against torch, on a grid that is not the module's own."""
    x = torch.linspace(-found.radius, found.radius, points, dtype=torch.float64)
    return float((found(x) - FUNCTIONS[found.kind](x)).abs().max())


# The fits.

KNOWN = [  # |x| on [-1, 1]: 1/2, 1/8; Bernstein's constant 0.28017 is the limit of n · E_n. exp, degree 1: Bernstein too.
    ("abs", 1.0, 1, 0.5),
    ("abs", 1.0, 2, 1 / 8),
    ("abs", 1.0, 3, 1 / 8),
    ("abs", 8.0, 2, 1.0),
    ("relu", 1.0, 2, 1 / 16),
    ("relu", 10.0, 3, 10 / 16),
    ("abs", 1.0, 20, 0.28017 / 20),
    ("exp", 1.0, 1, 0.278801),
    ("exp", 1.0, 2, 0.045017),
]


@pytest.mark.parametrize(("kind", "radius", "degree", "error"), KNOWN)
def test_known_minimax_errors(kind: str, radius: float, degree: int, error: float) -> None:
    found = fit(kind, radius, degree)
    assert found.error == pytest.approx(error, rel=1e-2 if degree == 20 else 1e-4)


@settings(max_examples=60, deadline=None)
@given(kinds, radii, st.integers(1, 20))
def test_the_stated_error_is_that_of_the_range(kind: str, radius: float, degree: int) -> None:
    found = fit(kind, radius, degree)
    assert found.degree <= degree and found.check() is None
    assert greatest_error(found) <= found.error * (1 + 1e-3) + 1e-13 * math.exp(radius)


@settings(max_examples=40, deadline=None)
@given(kinds, radii, st.integers(1, 15))
def test_no_polynomial_is_much_better(kind: str, radius: float, degree: int) -> None:
    """de la Vallée-Poussin: where p - f alternates n + 2 times with at least e, no other of degree n is better than e."""
    found = fit(kind, radius, degree)
    x = torch.linspace(-1, 1, 8_001, dtype=torch.float64).asin() * (2 / math.pi) * radius
    x = torch.cat([x, torch.linspace(-radius, radius, 8_001, dtype=torch.float64)]).unique()
    difference = (found(x) - FUNCTIONS[kind](x)).numpy()
    if found.error < 1e-11 * max(1.0, float(np.abs(difference).max())) or found.error < 1e-12:
        return  # digits, no swings
    level = found.error * 0.95
    swings = np.sign(difference[np.abs(difference) >= level])
    assert 1 + int((swings[1:] != swings[:-1]).sum()) >= found.degree + 2


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["relu", "gelu", "silu", "sigmoid", "tanh", "erf", "abs"]), radii, st.integers(1, 31))
def test_coefficients_that_symmetry_rules_out_are_exactly_zero(kind: str, radius: float, degree: int) -> None:
    found = fit(kind, radius, degree).coefficients
    if kind in ("relu", "gelu", "silu"):
        assert found[1] == radius / 2 and not any(found[3::2])
    elif kind == "abs":
        assert not any(found[1::2])
    else:
        assert found[0] == (0.5 if kind == "sigmoid" else 0.0) and not any(found[2::2])
    assert found[-1] != 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_higher_degree_is_never_worse(kind: str) -> None:
    errors = [fit(kind, 5.0, d).error for d in range(1, 64, 3)]
    assert all(b <= a * (1 + 1e-6) + 1e-12 for a, b in zip(errors, errors[1:], strict=False))


def test_a_steep_function_on_a_wide_range_has_its_error_seen() -> None:
    found = fit("sigmoid", 1e5, 3)
    x = torch.tensor([10.0, -10.0], dtype=torch.float64)
    assert found.error > 0.4 and float((found(x) - torch.sigmoid(x)).abs().max()) <= found.error


# Choosing.


def test_the_least_degree_that_meets_the_target_is_chosen() -> None:
    found = choose("silu", 2.0, 5e-3, 15)
    lower = [fit("silu", 2.0, d) for d in range(1, found.degree)]
    assert found.error <= 5e-3 and all(f.error > 5e-3 for f in lower)
    assert found.depth == min(f.depth for d in range(1, 16) if (f := fit("silu", 2.0, d)).error <= 5e-3)


def test_without_a_fit_that_meets_the_target_the_best_is_chosen_with_fewest_coefficients() -> None:
    found = choose("relu", 10.0, 1e-3, 7)
    assert found == fit("relu", 10.0, 7) and found.degree == 6 and found.error > 0.2
    assert choose("tanh", 3.0, 1e-9, 8).degree == 7


def test_levels() -> None:
    assert [multiplicative_depth(d) for d in (1, 2, 3, 4, 7, 8, 15, 16)] == [1, 2, 2, 3, 3, 4, 4, 5]
    assert all(multiplicative_depth(d) == math.ceil(math.log2(d + 1)) for d in range(1, 64))


@pytest.mark.parametrize(
    ("kind", "radius", "degree", "match"),
    [
        ("softmax", 1.0, 3, "there are relu, gelu"),
        ("relu", 0.0, 3, "radius 0.0"),
        ("relu", -1.0, 3, "positive"),
        ("relu", math.inf, 3, "finite"),
        ("relu", math.nan, 3, "finite"),
        ("relu", True, 3, "radius True"),
        ("relu", 1.0, 0, "degree 0"),
        ("relu", 1.0, 64, "1 to 63"),
        ("relu", 1.0, 3.0, "integer"),
        ("exp", 1e3, 3, "does not fit into floats"),
        ("relu", 1e-300, 3, "does not fit into floats"),
    ],
)
def test_what_no_fit_can_be_made_of_is_refused(kind: str, radius: float, degree: int, match: str) -> None:
    for call in (lambda: fit(kind, radius, degree), lambda: choose(kind, radius, 0.1, degree)):
        with pytest.raises(SettingsError, match=match):
            call()


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf, "small"])
def test_a_target_that_is_no_error_is_refused(target: float) -> None:
    with pytest.raises(SettingsError, match="positive number"):
        choose("relu", 1.0, target, 3)


# What a stated fit is worth.


def test_a_fit_that_states_too_small_an_error_is_found() -> None:
    found = fit("gelu", 4.0, 6)
    assert found.check() is None
    assert "greatest error is 0.0304" in str(dataclasses.replace(found, error=found.error * 0.99).check())
    for planted in (
        dataclasses.replace(found, kind="silu"),
        dataclasses.replace(found, kind="softmax"),
        dataclasses.replace(found, radius=5.0),
        dataclasses.replace(found, radius=math.nan),
        dataclasses.replace(found, coefficients=()),
        dataclasses.replace(found, coefficients=(*found.coefficients[:-1], math.nan)),
        dataclasses.replace(found, coefficients=found.coefficients[:-1]),
        dataclasses.replace(found, error=math.nan),
    ):
        assert planted.check() is not None, planted


# Evaluation.

coefficients = st.lists(st.floats(-9, 9), min_size=1, max_size=9)


@settings(deadline=None)
@given(coefficients, st.floats(0.1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_the_operator_evaluates_in_the_type_of_its_operand(
    found: list[float], radius: float, dtype: torch.dtype
) -> None:
    x = torch.linspace(-radius, radius, 11, dtype=dtype)
    attrs = {"kind": "relu", "radius": radius, "coefficients": found, "error": 0.0}
    came = OPS["polynomial"](attrs, [x])
    expected = np.polynomial.polynomial.polyval(x.double().numpy() / radius, found)
    assert came.dtype == dtype and came.shape == x.shape
    np.testing.assert_allclose(
        came.double().numpy(), expected, atol=1e-4 if dtype == torch.float32 else 1e-12
    )


def test_half_precision_operands_lose_nothing_on_the_way() -> None:
    found = fit("gelu", 4.0, 7)
    x = torch.linspace(-4, 4, 101).bfloat16()
    assert torch.equal(found(x), found(x.float()).bfloat16())


@settings(deadline=None)
@given(st.lists(st.floats(-9, 9), min_size=2, max_size=9), st.floats(0.1, 9))
def test_the_derivative(found: list[float], radius: float) -> None:
    x = torch.linspace(-radius, radius, 7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(evaluate(found, radius, x).sum(), x)
    assert torch.allclose(gradient, evaluate(derivative(found, radius), radius, x.detach()), atol=1e-9)


@pytest.mark.parametrize("change", [{"coefficients": []}, {"radius": 0.0}, {"coefficients": [math.inf]}])
def test_attributes_that_are_no_polynomial_do_not_run(change: dict[str, object]) -> None:
    attrs = {**fit("relu", 1.0, 2).attrs(), **change}
    with pytest.raises(ValueError, match="polynomial"):
        OPS["polynomial"](attrs, [torch.empty(2, device="meta")])
