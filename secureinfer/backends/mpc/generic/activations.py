"""Activations: a series inside [-T, T] and the function's asymptote outside, from one opening.

The bits of [x >= -T] and [x >= T] and the value of the series come from the same masked opening. Beyond T the asymptote's
error is part of each row's error bound.
"""

from __future__ import annotations

import torch

from .. import protocols, series
from ..kernels import StepCall, kernel
from ..values import Share
from .common import multiply
from .local import Values


def _inside(
    call: StepCall, x: torch.Tensor, scale: int, f: series.Series, limit: int, *, plus_half: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(f(x) at the program's scale, [x >= -limit], [x >= limit]); plus_half adds x / 2 before the truncation."""
    party = call.party
    opened = protocols.open_for_series(party, x, scale, f, compare=True)
    value = protocols.evaluate(party, opened, f)
    if plus_half:
        value = value + (x << (protocols.SERIES_BITS - scale - 1))
    value = protocols.truncate(party, value, protocols.SERIES_BITS - call.scale)
    above, over = protocols.at_least(party, opened, [-(limit << scale), limit << scale])
    return value, above, over


def _gated(call: StepCall, f: series.Series, limit: int) -> Values:
    """x / 2 + f(x) inside, x above, 0 below: GELU and SiLU."""
    x = call.share(0)
    value, above, over = _inside(call, x.tensor, x.scale, f, limit, plus_half=True)
    terms = multiply(torch.stack([over, above - over]), torch.stack([x.tensor, value]))
    return [Share(terms[0] + terms[1], call.scale)]


@kernel("gelu.series")
def _gelu(call: StepCall) -> Values:
    tanh = call.attr("approximate") == "tanh"
    return _gated(call, series.GELU_TANH_EVEN if tanh else series.GELU_EVEN, 5)


@kernel("silu.series")
def _silu(call: StepCall) -> Values:
    return _gated(call, series.SILU_EVEN, 14)


def _saturating(call: StepCall, x: torch.Tensor, scale: int, f: series.Series, limit: int) -> torch.Tensor:
    """f(x) inside, 1 above, -1 below, at the program's scale."""
    value, above, over = _inside(call, x, scale, f, limit)
    one = 1 << call.scale
    outside = (over + above) * one - (one if call.party.first else 0)
    return multiply(above - over, value) + outside


@kernel("tanh.series")
def _tanh(call: StepCall) -> Values:
    x = call.share(0)
    return [Share(_saturating(call, x.tensor, x.scale, series.TANH, 6), call.scale)]


@kernel("erf.series")
def _erf(call: StepCall) -> Values:
    x = call.share(0)
    return [Share(_saturating(call, x.tensor, x.scale, series.ERF, 4), call.scale)]


@kernel("sigmoid.series")
def _sigmoid(call: StepCall) -> Values:
    """(1 + tanh(x / 2)) / 2. Halving is a change of scale, and the program's scale is kept by doubling first."""
    x = call.share(0)
    value, above, over = _inside(call, x.tensor, x.scale + 1, _half(series.TANH), 6)
    one = 1 << call.scale
    # [|x| < 12] (1 + tanh) / 2 + [x >= 12]
    inside = multiply(above - over, value + ((one >> 1) if call.party.first else 0))
    return [Share(inside + over * one, call.scale)]


def _half(f: series.Series) -> series.Series:
    """f / 2."""
    return series.Series(
        f"({f.name}) / 2",
        f.low,
        f.high,
        f.period,
        f.constant // 2,
        tuple(c // 2 for c in f.cosines),
        tuple(s // 2 for s in f.sines),
        f.error / 2 + 1e-6,
    )
