"""The trigonometric series: their coefficients, their exact rotations, their evaluation on shares."""

import math
from fractions import Fraction

import pytest
import torch

from secureinfer.backends.mpc import costs, series

FUNCTIONS = {
    "GELU_EVEN": lambda x: torch.nn.functional.gelu(x) - x / 2,
    "GELU_TANH_EVEN": lambda x: torch.nn.functional.gelu(x, approximate="tanh") - x / 2,
    "GELU_NARROW": lambda x: torch.nn.functional.gelu(x) - x / 2,
    "GELU_TANH_NARROW": lambda x: torch.nn.functional.gelu(x, approximate="tanh") - x / 2,
    "EXP": torch.exp,
    "TANH": torch.tanh,
    "ERF": torch.erf,
    "SILU_EVEN": lambda x: torch.nn.functional.silu(x) - x / 2,
    "INVERSE": lambda u: 1 / u,
    "INVERSE_SQRT": torch.rsqrt,
    "SQRT": torch.sqrt,
    "LOG": torch.log,
    "EXP_UNIT": torch.exp,
}
CATALOG_TERMS = {
    "gelu": "GELU_EVEN",
    "gelu_tanh": "GELU_TANH_EVEN",
    "exp": "EXP",
    "tanh": "TANH",
    "erf": "ERF",
    "silu": "SILU_EVEN",
    "unit": "INVERSE",
    "exp_unit": "EXP_UNIT",
}


def plain(f: series.Series, x: torch.Tensor) -> torch.Tensor:
    """The series in float64."""
    w = 2 * math.pi / f.period
    total = torch.full_like(x, float(f.constant))
    for k, (a, b) in enumerate(zip(f.cosines, f.sines, strict=True), start=1):
        total = total + a * torch.cos(k * w * x) + b * torch.sin(k * w * x)
    return total / 2**series.COEFFICIENT_BITS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_series_is_as_near_as_it_says(name: str) -> None:
    f: series.Series = getattr(series, name)
    x = torch.linspace(f.low, f.high, 50_001, dtype=torch.float64)
    assert float((plain(f, x) - FUNCTIONS[name](x)).abs().max()) <= f.error


def test_a_wrong_coefficient_is_seen() -> None:
    f = series.GELU_EVEN
    broken = series.Series(
        f.name, f.low, f.high, f.period, f.constant, (f.cosines[0] + 2000, *f.cosines[1:]), f.sines, f.error
    )
    x = torch.linspace(f.low, f.high, 1001, dtype=torch.float64)
    assert float((plain(broken, x) - FUNCTIONS["GELU_EVEN"](x)).abs().max()) > f.error


@pytest.mark.parametrize("name", FUNCTIONS)
def test_series_stays_inside_the_ring_even_out_of_range(name: str) -> None:
    """Out of range a series reaches the sum of its coefficients before the range bit clears it."""
    f: series.Series = getattr(series, name)
    reach = abs(f.constant) + sum(abs(a) + abs(b) for a, b in zip(f.cosines, f.sines, strict=True))
    assert reach << series.TRIG_BITS < 1 << 62


def test_catalog_counts_the_terms_of_each_series() -> None:
    assert {k: getattr(series, v).terms for k, v in CATALOG_TERMS.items()} == costs.TERMS
    assert costs.SERIES_BITS == series.COEFFICIENT_BITS + series.TRIG_BITS


@pytest.mark.parametrize("bits", [13, 20, 21, 36, 50, 61])
def test_rotation_is_exact_to_four_units(bits: int) -> None:
    angle = torch.randint(-(2**62), 2**62, (2000,), generator=torch.Generator().manual_seed(bits))
    cos, sin = series.rotation(angle, bits)
    turn = (angle & ((1 << bits) - 1)).double() * (2 * math.pi / 2**bits)
    unit = 2.0**series.TRIG_BITS
    assert float((cos.double() / unit - turn.cos()).abs().max()) < 4 / unit
    assert float((sin.double() / unit - turn.sin()).abs().max()) < 4 / unit


def test_rotation_needs_no_floating_point() -> None:
    """Both parties must compute the same words whatever their processors: some values, fixed here."""
    angle = torch.tensor([0, 1, 12345, 2**19, 2**20 - 1, -7])
    cos, sin = series.rotation(angle, 20)
    assert cos.dtype == sin.dtype == torch.int64
    assert cos.tolist()[:1] == [1 << 30] and sin.tolist()[:1] == [0]
    assert cos[3].item() == -(1 << 30) and sin[3].item() == 0
    for a, c in zip(angle.tolist(), cos.tolist(), strict=True):
        exact = math.cos(float(Fraction(a % 2**20, 2**20) * 2) * math.pi) * 2**30
        assert abs(c - exact) < 4


@pytest.mark.parametrize("name", ["GELU_EVEN", "EXP", "INVERSE"])
def test_shares_of_the_series_add_up(name: str) -> None:
    f: series.Series = getattr(series, name)
    scale, generator = 24, torch.Generator().manual_seed(1)
    x = torch.linspace(f.low, f.high, 4001, dtype=torch.float64)
    r = torch.randint(-(2**63), 2**63 - 1, x.shape, generator=generator)
    bits = scale + f.period.bit_length() - 1
    cos, sin = series.rotation(r, bits)
    trig = torch.stack([row for pair in series.multiples(cos, sin, f.terms) for row in pair])
    share = torch.randint(-(2**63), 2**63 - 1, trig.shape, generator=generator)
    masked = torch.round(x * 2**scale).long() + r
    total = series.combine(f, masked, bits, share, True) + series.combine(
        f, masked, bits, trig - share, False
    )
    error = (total.double() / 2.0 ** (series.COEFFICIENT_BITS + series.TRIG_BITS) - FUNCTIONS[name](x)).abs()
    assert float(error.max()) <= f.error + 2e-6
