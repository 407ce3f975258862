"""Polynomials in place of activation functions: minimax fits on a symmetric range, for backends that only add and multiply.

A fit is written in t = x / radius, so that powers stay in [-1, 1] whatever the range, and 1 / radius can go into the layer
before. What is known of a function holds exactly: relu, gelu and silu are x / 2 and an even part, sigmoid is 1 / 2 and an
odd one. The other coefficients are 0 then, and cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import SettingsError

MOST_DEGREE = 63
"""So that the coefficients fit into an attribute of a program's manifest."""

SQUARE = (0.0, 0.0, 1.0)
"""Coefficients of x², which takes one product, and one level of encryption where a polynomial of degree two takes two."""

_SURE_DEGREE = 32
"""Powers of t are a poor basis: from a degree of about 40 on, the digits of float64 run out, and a lower one is better."""

_FINE, _COARSE = 2048, 512
"""Points of the grid on which errors are measured, and of the one on which fits are made."""

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Kind:
    """A function of which constant + linear · x is split off exactly; the rest is even, odd or neither ("full")."""

    function: Function
    parity: Literal["even", "odd", "full"]
    constant: float = 0.0
    linear: float = 0.0


_KINDS: Mapping[str, _Kind] = MappingProxyType({
    "relu": _Kind(torch.relu, "even", linear=0.5),
    "gelu": _Kind(F.gelu, "even", linear=0.5),
    "gelu_tanh": _Kind(functools.partial(F.gelu, approximate="tanh"), "even", linear=0.5),
    "silu": _Kind(F.silu, "even", linear=0.5),
    "abs": _Kind(torch.abs, "even"),
    "sigmoid": _Kind(torch.sigmoid, "odd", constant=0.5),
    "tanh": _Kind(torch.tanh, "odd"),
    "erf": _Kind(torch.erf, "odd"),
    "exp": _Kind(torch.exp, "full"),
})  # fmt: skip

KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class Fit:
    """p(x) = sum of coefficients[i] · (x / radius)**i, in place of the function `kind` where |x| <= radius.

    error: the greatest |p - f| there, on a fine grid with both ends. Outside the range p says nothing, and grows fast.
    """

    kind: str
    radius: float
    coefficients: tuple[float, ...]
    error: float

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    @property
    def depth(self) -> int:
        """Levels of multiplications that evaluating it takes."""
        return multiplicative_depth(self.degree)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return evaluate(self.coefficients, self.radius, x)

    def attrs(self) -> dict[str, Any]:
        """Of a node "polynomial"."""
        return {
            "kind": self.kind, "radius": self.radius, "coefficients": list(self.coefficients), "error": self.error
        }  # fmt: skip

    def check(self) -> str | None:
        """Why this is no fit of its kind with the error that it states, or None."""
        if self.kind not in _KINDS:
            return f"the function {self.kind!r} is not known"
        if not 1 <= len(self.coefficients) <= MOST_DEGREE + 1 or not all(
            map(math.isfinite, self.coefficients)
        ):
            return f"it does not have 1 to {MOST_DEGREE + 1} finite coefficients"
        if not (math.isfinite(self.radius) and self.radius > 0):
            return f"its radius is {self.radius}"
        came = _greatest_error(self.kind, self.radius, self.coefficients)
        slack = 1e-9 * self.error + 1e-12 * max(1.0, self.radius)
        if not came <= self.error + slack:
            return f"its greatest error is {came:.3g}, not {self.error:.3g}"
        return None


def evaluate(coefficients: Sequence[float], radius: float, x: torch.Tensor) -> torch.Tensor:
    """sum of coefficients[i] · (x / radius)**i by Horner's rule, in the type of x.

    Raises ValueError for what is no polynomial: the attributes of a node may come from a file.
    """
    if not coefficients or not all(map(math.isfinite, coefficients)) or not 0 < radius < math.inf:
        raise ValueError("a polynomial has finite coefficients, at least one, and a positive radius")
    t = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x) / radius
    total = torch.full_like(t, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * t + c
    return total.to(x.dtype) if x.is_floating_point() else total


def derivative(coefficients: Sequence[float], radius: float) -> list[float]:
    """Coefficients of the derivative by x, in the same variable; at least one."""
    return [i * c / radius for i, c in enumerate(coefficients)][1:] or [0.0]


def multiplicative_depth(degree: int) -> int:
    """Levels of a polynomial: products on the longest chain, the one with a coefficient included: ceil(log2(degree + 1))."""
    return degree.bit_length()


def fit(kind: str, radius: float, degree: int) -> Fit:
    """The polynomial of at most this degree whose greatest error on [-radius, radius] is least.

    kind: one of KINDS. degree: 1 to 63. The result has no more coefficients than help: relu has even powers and x alone.
    Source: Remez's exchange of one point at a time; Cheney, Introduction to Approximation Theory, chapter 3.
    Raises SettingsError for a kind, a radius or a degree that does not exist.
    """
    _check_range(kind, radius)
    if type(degree) is not int or not 1 <= degree <= MOST_DEGREE:
        raise SettingsError(f"the degree {degree!r} of a polynomial is an integer from 1 to {MOST_DEGREE}")
    degrees = dict.fromkeys(_useful(kind, d) for d in range(min(degree, _SURE_DEGREE), degree + 1))
    return min((_fit(kind, float(radius), d) for d in degrees), key=lambda found: found.error)


def choose(kind: str, radius: float, target: float, greatest_degree: int) -> Fit:
    """The fit of least degree, and so of fewest levels, whose error is at most the target; else the best of those allowed.

    Whether the target was met, its `error` says. Raises SettingsError as fit does, and for a target that is not positive.
    """
    if not (isinstance(target, int | float) and 0 < target < math.inf):
        raise SettingsError(f"the greatest error {target!r} of a fit is a positive number")
    best = fit(kind, radius, greatest_degree)
    for degree in dict.fromkeys(_useful(kind, d) for d in range(1, greatest_degree)):
        if best.error > target:
            break
        found = fit(kind, radius, degree)
        if found.error <= target:
            return found
    return best


def _check_range(kind: str, radius: float) -> None:
    if kind not in _KINDS:
        raise SettingsError(f"no polynomial is known for {kind!r}; there are {', '.join(KINDS)}")
    number = isinstance(radius, int | float) and not isinstance(radius, bool)
    if not number or not 0 < radius < math.inf:
        raise SettingsError(f"the radius {radius!r} of a polynomial's range is a positive, finite number")
    ends = _KINDS[kind].function(torch.tensor([-radius, radius], dtype=torch.float64))
    if not bool(torch.isfinite(ends).all()) or radius * radius == 0.0:
        raise SettingsError(f"{kind} on a range of radius {radius:g} does not fit into floats")


def _useful(kind: str, degree: int) -> int:
    """The least degree with the powers that this degree has of the function's."""
    shape = _KINDS[kind]
    if shape.parity == "even":
        return max(degree - degree % 2, 1 if shape.linear else 0)
    return degree - (degree + 1) % 2 if shape.parity == "odd" else degree


def _half_grid(n: int) -> torch.Tensor:
    """Of [0, 1]: both ends, uniform, dense at 1 where polynomials swing, and dense at 0 where steep functions turn."""
    i = torch.arange(n + 1, dtype=torch.float64) / n
    steep = torch.logspace(-9, 0, n // 2, dtype=torch.float64)
    points = torch.cat([i, torch.sin(i * (math.pi / 2)), steep]).clamp(max=1.0)
    distinct: torch.Tensor = torch.unique_consecutive(points.sort().values)
    return distinct


@functools.lru_cache(maxsize=2)
def _grid(n: int) -> torch.Tensor:
    half = _half_grid(n)
    return torch.cat([-half.flip(0), half[1:]])


def _greatest_error(kind: str, radius: float, coefficients: Sequence[float]) -> float:
    x = _grid(_FINE) * radius
    return float((evaluate(coefficients, radius, x) - _KINDS[kind].function(x)).abs().max())


@functools.lru_cache(maxsize=1024)
def _fit(kind: str, radius: float, degree: int) -> Fit:
    shape = _KINDS[kind]
    t = _grid(_COARSE) if shape.parity == "full" else _half_grid(_COARSE)
    x = t * radius
    rest = shape.function(x) - shape.constant - shape.linear * x
    powers = range(degree + 1) if shape.parity == "full" else range(shape.parity == "odd", degree + 1, 2)
    chebyshev = np.zeros(degree + 1)
    chebyshev[list(powers)] = _exchange(t, list(powers), rest).numpy()
    found = np.zeros(degree + 1)
    monomials = np.polynomial.chebyshev.cheb2poly(chebyshev)
    found[: len(monomials)] = monomials
    found[[i for i in range(degree + 1) if i not in powers]] = 0.0
    found[0] += shape.constant
    if degree > 0:
        found[1] += shape.linear * radius
    coefficients = tuple(float(c) for c in found)
    return Fit(kind, radius, coefficients, _greatest_error(kind, radius, coefficients))


def _exchange(t: torch.Tensor, powers: Sequence[int], wanted: torch.Tensor) -> torch.Tensor:
    """Coefficients of the Chebyshev polynomials T_k, k in powers, whose greatest error on the points t is least.

    One point of the reference is exchanged at a time, which raises its level each time, so that it ends.
    """
    angles = torch.arccos(t)
    basis = torch.stack([torch.cos(k * angles) for k in powers], 1)
    n = len(powers)
    # Where the first polynomial that is not used has its extrema; on [0, 1] those that are not mirrored.
    first_left_out = powers[-1] + (1 if t[0] < 0 else 2)
    extrema = torch.cos(torch.arange(n, -1, -1, dtype=torch.float64) * (math.pi / first_left_out))
    reference = torch.searchsorted(t, extrema.clamp(t[0], t[-1])).clamp(max=len(t) - 1).tolist()
    for i in range(n):  # the grid is much finer than the reference, but near the ends
        reference[i + 1] = max(reference[i + 1], reference[i] + 1)
    signs = torch.tensor([(-1.0) ** i for i in range(n + 1)], dtype=torch.float64).unsqueeze(1)
    noise = 1e-14 * float(wanted.abs().max())
    for _ in range(50 * (n + 1)):
        system = torch.cat([basis[reference], signs], 1)
        solution = torch.linalg.solve(system, wanted[reference])
        error = wanted - basis @ solution[:-1]
        worst = int(error.abs().argmax())
        if float(error[worst].abs()) <= float(solution[-1].abs()) * (1 + 1e-12) + noise:
            break
        if worst in reference:  # rounding: nothing better can be told apart
            break
        _put(reference, worst, error)
    coefficients: torch.Tensor = solution[:-1]
    return coefficients


def _put(reference: list[int], new: int, error: torch.Tensor) -> None:
    """Take a point into the reference for one of its neighbours, so that the errors go on alternating."""
    after = next((i for i, r in enumerate(reference) if r > new), len(reference))
    alike = [
        i for i in (after - 1, after) if 0 <= i < len(reference) and error[reference[i]] * error[new] > 0
    ]
    if alike:
        reference[alike[0]] = new
    elif after == 0:
        reference[:] = [new, *reference[:-1]]
    else:
        reference[:] = [*reference[1:], new]
