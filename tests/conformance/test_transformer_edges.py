"""Attention, layer norm and smooth functions where approximations fail: at the ends of ranges, masks, ties, constant rows.

Limits of error are a few times what is measured, and in units of 2**-16 where a kernel's own rounding is all that is left.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from secureinfer.backends.mpc import attention as plans
from secureinfer.backends.mpc import curves
from secureinfer.backends.mpc.fast.catalog import CATALOG
from secureinfer.graph.ops import OPS
from secureinfer.plan.spec import step_context

from .harness import Operand, exact_grid, one_step, run

UNIT = 2.0**-16


def computed(
    op: str, operands: list[Operand], attrs: dict[str, Any], *, bound: float = 64.0, parties: int = 2
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(the kernel's answer, that of float64, the declared error)."""
    values = [o.value.double() if o.value.is_floating_point() else o.value for o in operands]
    expected = OPS[op](attrs, values)
    program, inputs, step = one_step(
        op, operands, attrs, expected.shape, kernel=f"{op}.window", output_bound=bound, parties=parties
    )
    context = step_context(program.graph, step.node, parties, program.options)
    got = run(program, inputs, parties=parties).outputs["y"].double()
    return got, expected, CATALOG.specs[f"{op}.window"].error_bound(context)


def worst(op: str, operands: list[Operand], attrs: dict[str, Any], **options: Any) -> float:
    """The greatest error, which is within what is declared."""
    got, expected, declared = computed(op, operands, attrs, **options)
    error = float((got - expected).abs().max())
    assert error <= declared
    return error


def shared(x: torch.Tensor, bound: float, scale: int = 16) -> Operand:
    return Operand(exact_grid(x, scale), bound=bound, scale=scale)


# -- attention


def attend(
    scores: torch.Tensor, mask: Operand | None = None, *, most: float | None = None, parties: int = 2
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Attention whose scores [rows, width] are given: queries times the unit matrix, as keys; values in +-4."""
    rows, width = scores.shape
    values = torch.linspace(-4, 4, width * 2, dtype=torch.float64).reshape(width, 2)
    operands = [shared(scores, 64.0), shared(torch.eye(width), 1.0), shared(values, 4.0)]
    operands += [mask] if mask is not None else []
    most = 4 * float(scores.abs().max()) if most is None else most
    return computed("attention", operands, {"scores": max(16.0, most)}, bound=4.0, parties=parties)


def off(case: tuple[torch.Tensor, torch.Tensor, float]) -> float:
    got, expected, declared = case
    error = float((got - expected).abs().max())
    assert error <= declared
    return error


@pytest.fixture(params=["counts", "a tournament"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "a tournament":
        monkeypatch.setattr(plans, "MOST_BUCKETS", 0)
    return str(request.param)


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("width", [1, 2, 200, 255, 256, 600])
def test_equal_scores_have_equal_weight(width: int, parties: int, form: str) -> None:
    """Field report 9: 1/n at any n. The values' mean is 0, and the least of them has a 1/n-th."""
    scores = torch.full((3, width), 2.5, dtype=torch.float64)
    assert off(attend(scores, parties=parties)) < 2e-3
    one = torch.zeros((width, 1), dtype=torch.float64)
    one[-1] = 4.0
    operands = [shared(scores, 64.0), shared(torch.eye(width), 1.0), shared(one, 4.0)]
    got, expected, _ = computed("attention", operands, {"scores": 16.0}, bound=4.0, parties=parties)
    assert torch.allclose(expected, torch.tensor(4.0 / width, dtype=torch.float64))
    assert float((got / expected - 1).abs().max()) < 0.01


KINDS = ("public", "data", "shared")


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_place_gets_nothing_and_a_row_without_places_exactly_zero(
    kind: str, parties: int, form: str
) -> None:
    """Field reports 10, 11, 12."""
    scores = torch.tensor([[0.0, 1.0, 4.0, -4.0], [4.0, 4.0, 4.0, 4.0], [-4.0, 3.0, 0.0, 2.0]]).double()
    keep = torch.tensor([[True, True, False, False], [False] * 4, [True, False, False, False]])
    got, expected, declared = attend(scores, Operand(keep, kind, 1.0), most=16.0, parties=parties)
    assert float((got - expected).abs().max()) < 2e-3 and declared > 0
    assert bool((got[1].abs() <= UNIT).all())  # what the last cut rounds at random
    # What the greatest score is at a place that is dropped changes nothing.
    other = torch.where(keep, scores, -4.0)
    again, _, _ = attend(other, Operand(keep, kind, 1.0), most=16.0, parties=parties)
    assert float((got - again).abs().max()) < 2e-3


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("reach", [4.0, 16.0])
def test_scores_at_the_ends_of_their_range(reach: float, kind: str | None, form: str) -> None:
    """Up to a quarter of the bound, that is four times the greatest score of calibration."""
    ends = torch.tensor([[reach, -reach], [-reach, -reach], [reach, reach], [-reach, reach - 1]]).double()
    scores = torch.cat([ends, ends.flip(0), torch.zeros(4, 3).double()], -1)
    keep = torch.tensor([True, True, True, False, True, True, True])
    mask = None if kind is None else Operand(keep.expand(4, 7), kind, 1.0)
    assert off(attend(scores, mask, most=4 * reach)) < 3e-3


def test_scores_of_a_long_row() -> None:
    scores = 2 * torch.randn(64, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert off(attend(scores, most=64.0)) < 5e-3


def test_dropped_places_leave_a_low_row_its_own_maximum(form: str) -> None:
    """Scores near the lower end beside dropped ones at the upper: adding -1e4, or a maximum over all, would give zeros."""
    scores = torch.tensor([[-15.5, -16.0, 16.0, 16.0]]).double()
    keep = torch.tensor([[True, True, False, False]])
    assert off(attend(scores, Operand(keep, "data", 1.0), most=64.0)) < 3e-3


# -- layer norm


def normed(x: torch.Tensor, size: float, *, gain: bool = True, parties: int = 2, eps: float = 1e-5) -> float:
    width = x.shape[-1]
    operands = [shared(x, size)]
    attrs = {"normalized_shape": [width], "eps": eps, "has_weight": gain, "has_bias": False}
    if gain:
        operands.append(Operand(torch.linspace(-1, 1, width), "weight", 1.0))
    return worst("layer_norm", operands, attrs, parties=parties)


def rows_of(width: int, sigma: float) -> torch.Tensor:
    x = torch.randn((2, width), generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, unbiased=False)
    return x * sigma + sigma / 3


WIDTHS = (4, 33, 312, 768, 1000)


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_of_any_width(width: int, parties: int) -> None:
    assert normed(rows_of(width, 1.0), 64.0, parties=parties) < 1e-3


@pytest.mark.parametrize("width", [4, 768])
@pytest.mark.parametrize("exponent", range(-8, 8, 3))
def test_layer_norm_of_small_and_large_rows(exponent: int, width: int) -> None:
    """Far within what is declared, which grows with the width and with the operand's bound."""
    size = 4.0 if exponent < 0 else 8 * 2.0**exponent
    x = exact_grid(rows_of(width, 2.0**exponent).clamp(-size, size))
    attrs = {"normalized_shape": [width], "eps": 1e-12, "has_weight": False, "has_bias": False}
    error = worst("layer_norm", [shared(x, size)], attrs) if exponent >= -6 else below(x, size, attrs)
    assert error < 3e-4


def below(x: torch.Tensor, size: float, attrs: dict[str, Any]) -> float:
    """The error of rows with a sigma below that for which one is declared."""
    got, expected, _ = computed("layer_norm", [shared(x, size)], attrs)
    return float((got - expected).abs().max())


@pytest.mark.parametrize("value", [0.0, 3.75, -16.0])
@pytest.mark.parametrize("width", [4, 33, 768])
def test_a_constant_row_is_finite_and_near_zero(width: int, value: float) -> None:
    """Division by zero but for eps: what is left is the rounding of the mean, times 1/sigma at the least sigma."""
    attrs = {"normalized_shape": [width], "eps": 1e-5, "has_weight": False, "has_bias": False}
    x = torch.full((2, width), value, dtype=torch.float64)
    got, expected, _ = computed("layer_norm", [shared(x, 16.0)], attrs)
    assert float(expected.abs().max()) < 1e-3
    assert float(got.abs().max()) < 0.01


# -- smooth functions

LIMITS = {"gelu": 6e-4, "gelu_tanh": 6e-4, "silu": 1e-3, "tanh": 1e-3, "sigmoid": 5e-4, "erf": 8e-4}
"""One and a half times what was measured."""


def curved(name: str, x: torch.Tensor, size: float, scale: int, parties: int = 2) -> torch.Tensor:
    """The error at each value; within what is declared."""
    op = name.removesuffix("_tanh")
    attrs = {"approximate": "tanh" if name == "gelu_tanh" else "none"} if op == "gelu" else {}
    got, expected, declared = computed(op, [shared(x, size, scale)], attrs, bound=size, parties=parties)
    error = (got - expected).abs() - expected.abs() * 2.0**-23  # answers are float32
    assert float(error.max()) <= declared
    return error


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("scale", [16, 32])
@pytest.mark.parametrize("name", LIMITS)
def test_a_smooth_function_all_over_its_range(name: str, scale: int, parties: int) -> None:
    """Field reports 7 and 32: right beyond |x| = 2, and the model's own form of GELU."""
    x = torch.linspace(-16, 16, 4001, dtype=torch.float64)
    assert float(curved(name, x, 16.0, scale, parties).max()) < LIMITS[name]


@pytest.mark.parametrize("name", LIMITS)
def test_a_smooth_function_at_the_edges_of_its_zone_and_at_the_ends_of_its_range(name: str) -> None:
    """A value within a compared unit of the zone's edge may be judged either way: both ways must be right."""
    zone = curves.ZONES[name]
    near = torch.linspace(-1.0, 1.0, 801, dtype=torch.float64) * 2.0 ** (zone.unit + 1)
    edges = torch.cat([near + zone.limit, near - zone.limit])
    assert float(curved(name, edges, 64.0, 32).max()) < LIMITS[name]
    size = 1024.0
    ends = torch.tensor([size, -size, size - UNIT, UNIT - size, size / 2, 0.0, UNIT, -UNIT]).double()
    units = 4 if name in ("gelu", "gelu_tanh", "silu") else 2
    error = curved(name, ends, size, 20)
    assert float(error[:5].max()) <= units * UNIT


def test_both_forms_of_gelu_are_told_apart() -> None:
    x = torch.linspace(1.5, 3.0, 50, dtype=torch.float64)
    forms = [
        computed("gelu", [shared(x, 16.0, 32)], {"approximate": form}, bound=16.0)[:2]
        for form in ("none", "tanh")
    ]
    apart = float((forms[0][1] - forms[1][1]).abs().max())
    assert apart > 4e-4
    for (got, own), (_, other) in zip(forms, forms[::-1], strict=True):
        assert float((got - own).abs().mean()) < float((got - other).abs().mean())


def test_a_series_that_diverges_out_of_its_range_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a zone that is wider than the series is good for."""
    zones = dict(curves.ZONES)
    old = zones["erf"]
    zones["erf"] = type(old)(**{**{f: getattr(old, f) for f in old.__dataclass_fields__}, "limit": 12.0})
    monkeypatch.setattr(curves, "ZONES", zones)
    x = torch.linspace(-11, 11, 501, dtype=torch.float64)
    got, expected, _ = computed("erf", [shared(x, 16.0, 32)], {}, bound=16.0)
    assert float((got - expected).abs().max()) > 0.05
    assert math.isfinite(float(got.abs().max()))
