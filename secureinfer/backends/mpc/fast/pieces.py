"""Functions of a positive value of any magnitude, by pieces: cubics from one opening, and comparisons that choose the zone.

c = X + 2**(k-2) + r is opened. Modulo the reach of a zone, X = 2**t (c_hi - r_hi) + (c_lo - r_lo), with c_lo and r_lo the t
lowest bits: on the piece c_hi - r_hi the function is a cubic in (c_lo - r_lo) / 2**t, which lies between -1 and 1. Expanded
in the public c_lo, its coefficients depend on r alone, for each of the pieces that c_hi may name: they are dealt as a table
of shares. So every zone's value follows without a message; then the zones are chosen by their comparisons, from the same
opening, and the chosen value is cut.

Beaver's products and truncation: scaled.py; comparisons: opening.py. Piecewise polynomials on secret values from tables of a
dealer: after Ishai et al. (TCC 2013), "On the power of correlated randomness in secure computation", section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .. import pieces
from ..correlations import MaskedWeight, Part, SessionWeight, Shares, combine
from ..party import Party
from ..pieces import DEGREE, PIECES_BITS, SLOPE_BITS, VALUE_BITS, Pieces
from . import opening, scaled
from .talk import Talk


@functools.cache
def cubics(plan: Pieces, zone: int) -> torch.Tensor:
    """Coefficients of u**0..3 on each piece of a zone, u in (-1, 1) in widths of a piece: float64 [4, pieces].

    Chebyshev interpolation. Below half of the zone's beginning the function keeps the value that it has there.
    """
    function = pieces.FUNCTIONS[plan.function]
    width = 2.0 ** plan.piece_bits(zone)
    least = 2.0 ** (plan.begin(zone) - 1)
    nodes = np.cos((2 * np.arange(8) + 1) * math.pi / 16)
    basis = np.vander(nodes, DEGREE + 1, increasing=True)
    at = np.maximum((np.arange(1 << PIECES_BITS) + nodes[:, None]) * width, least)
    values = plan.gain * np.vectorize(function)(at / 2.0**plan.scale)
    return torch.tensor(np.linalg.lstsq(basis, values, rcond=None)[0])


@dataclass(frozen=True)
class PieceWindow(opening.Window):
    """A window whose record also holds the expanded cubics of every zone of a plan."""

    plan: Pieces = Pieces("reciprocal", 1, 1, 0)

    def parts(self) -> tuple[Part, ...]:
        size = (self.plan.zones, DEGREE + 1, 1 << PIECES_BITS, *self.shape)
        return (*super().parts(), Part("cubics", size, bound=True))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False).long()
        zones = torch.stack([_expanded(self.plan, z, r) for z in range(self.plan.zones)])
        return {**super().bind(free, weights), "cubics": zones}


def _expanded(plan: Pieces, zone: int, r: torch.Tensor) -> torch.Tensor:
    """Coefficients in c_lo / 2**t for each c_hi: int64 [4, pieces, *r.shape], VALUE_BITS fraction bits."""
    t, count = plan.piece_bits(zone), 1 << PIECES_BITS
    place = (r & ((1 << t) - 1)).double() / 2.0**t
    c_hi = torch.arange(count, device=r.device).reshape(-1, *([1] * r.dim()))
    index = (c_hi - (r >> t)) & (count - 1)
    a = [row[index] for row in cubics(plan, zone).to(r.device)]
    expanded = []
    for m in range(DEGREE + 1):
        total = torch.zeros_like(a[0])
        for k in range(DEGREE, m - 1, -1):
            total = total + a[k] * math.comb(k, m) * (-place) ** (k - m)
        expanded.append(total)
    return torch.round(torch.stack(expanded) * 2.0**VALUE_BITS).long()


def _values(plan: Pieces, c: torch.Tensor, dealt: torch.Tensor) -> torch.Tensor:
    """Shares of every zone's value at VALUE_BITS + SLOPE_BITS: [zones, *c.shape]. c: public X + r."""
    out = []
    for zone in range(plan.zones):
        t = plan.piece_bits(zone)
        index = ((c >> t) & ((1 << PIECES_BITS) - 1)).unsqueeze(0).unsqueeze(0)
        rows = dealt[zone].gather(1, index.expand(DEGREE + 1, 1, *c.shape)).squeeze(1)
        low = c & ((1 << t) - 1)
        u = low << (SLOPE_BITS - t) if t <= SLOPE_BITS else low >> (t - SLOPE_BITS)
        power, total = torch.full_like(c, 1 << SLOPE_BITS), torch.zeros_like(c)
        for m in range(DEGREE + 1):
            total = total + power * rows[m]
            power = (power * u) >> SLOPE_BITS
        out.append(total)
    return torch.stack(out)


def evaluate(p: Party, x: torch.Tensor, plan: Pieces, scale: int) -> Talk[torch.Tensor]:
    """A share of the plan's function of X at `scale` fraction bits, in the 64-bit ring. x: share of X, 0 <= X < 2**high."""
    shape, zones = tuple(x.shape), plan.zones
    kind = PieceWindow(shape, plan.bits, None, plan.compared_low, plan.bits - 1, zones - 1, plan=plan)
    opened = yield from opening.opening(p, x.contiguous(), kind)
    if p.tracing:
        values = torch.empty((zones, *shape), dtype=torch.int64, device="meta")
    else:
        values = _values(plan, opened.c - (1 << (plan.bits - 2)), opened.parts["cubics"])
    one = torch.zeros_like(values[:1]) + (1 if p.first else 0)
    chosen = one
    if zones > 1:
        compared = yield from opening.comparing(p, opened, plan.thresholds)
        chosen = torch.cat([one, compared.bits()])
    steps = torch.cat([values[:1], values[1:] - values[:-1]])
    kind_of_product = scaled.Scaled((zones, *shape), (zones, *shape), 64, VALUE_BITS + SLOPE_BITS - scale)
    product = yield from scaled.multiplied(p, steps, chosen, kind_of_product)
    total: torch.Tensor = product.sum(0)
    return total
