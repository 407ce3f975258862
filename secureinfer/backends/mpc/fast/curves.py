"""Smooth functions of one variable: a series inside a zone, what the function tends to outside, from one opening.

c = x + 2**(k-2) + r is opened in x's window. From it come, without further rounds, the look-ups of the comparisons and the
value S of a trigonometric series. Then [x >= -t] and [x >= t] are merged, while S is opened under a mask of its own in a
window of SERIES_WINDOW bits, and the bits under masks b; all that z = w ^ b turns into [x >= t] x and [|x| < t] S is dealt.
Three rounds where at most 16 bits are compared.

A value within one compared unit of the edge of the zone may go either way: the series is fitted beyond it, and the function
is near what it tends to before it. GELU(x) = ([x >= -t] + [x >= t]) x / 2 + [|x| < t] (GELU(x) - x / 2), SiLU alike.
Source: PROTOCOLS, "Smooth functions from one opening"; opening.py for comparisons and gates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import series
from ..correlations import MaskedWeight, Part, SessionWeight, Shares, combine
from ..curves import ANGLE_BITS, FACTOR_BITS, SERIES_WINDOW, TRIG_BITS, Curve, curve_of
from ..kernels import StepCall, kernel
from ..party import Party
from ..series import Series
from ..values import Share
from . import fused, opening
from .choices import Values
from .gates import value_and_top
from .opening import masked_by
from .rounding import shrink
from .talk import Talk, run, together

SERIES: Mapping[str, Series] = {
    "gelu": series.GELU_NARROW,
    "gelu_tanh": series.GELU_TANH_NARROW,
    "silu": series.SILU_EVEN,
    "tanh": series.TANH,
    "sigmoid": series.TANH,
    "erf": series.ERF,
}


@dataclass(frozen=True)
class CurveWindow(opening.Window):
    """A window whose record also holds a series in r, and a second mask r2, also times b0 ^ b1, the mask of the zone's bit.

    terms, period_bits: of the series, in ring units. word_bits: of its dealt values that count.
    """

    terms: int = 0
    period_bits: int = 0
    word_bits: int = 64

    @property
    def direct(self) -> bool:
        """The bits are opened: their masks gate the series."""
        return False

    def parts(self) -> tuple[Part, ...]:
        top = 64 - SERIES_WINDOW
        return (
            *super().parts(),
            Part("trig", (2 * self.terms, *self.shape), bound=True, bits=self.word_bits),
            Part("r2", self.shape, torch.int32),
            Part("value2", self.shape, bound=True),
            Part("top2", self.shape, bound=True, bits=top),
            Part("zone", self.shape, bound=True),
            Part("zone_value2", self.shape, bound=True),
            Part("zone_top2", self.shape, bound=True, bits=top),
        )

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False).long()
        value2, top2 = value_and_top(combine(free["r2"], False), SERIES_WINDOW)
        b = combine(free["b"], True)
        zone = ((b[0] ^ b[1]) & 1).long()
        trig = fused.run(_dealt_trig, r.reshape(-1), self.period_bits, self.terms).view(
            2 * self.terms, *self.shape
        )
        return {
            **super().bind(free, weights),
            "trig": trig,
            "value2": value2,
            "top2": top2,
            "zone": zone,
            "zone_value2": zone * value2,
            "zone_top2": zone * top2,
        }


def _dealt_trig(r: torch.Tensor, period_bits: int, terms: int) -> torch.Tensor:
    """Cosines and sines of the multiples of r's angle, TRIG_BITS fraction bits: [2 terms, elements]."""
    cos, sin = series.rotation(r, period_bits)
    shift = series.TRIG_BITS - TRIG_BITS
    half = 1 << (shift - 1)
    return torch.stack([(v + half) >> shift for pair in series.multiples(cos, sin, terms) for v in pair])


@functools.cache
def factors(name: str, device: torch.device) -> torch.Tensor:
    """What multiplies the dealt cosines and sines at each of 2**ANGLE_BITS angles, FACTOR_BITS fraction bits: int16.

    [2**ANGLE_BITS * 2 terms], an angle's factors side by side. Integers alone: every party multiplies by the same.
    """
    f = SERIES[name]
    middle = 2 * torch.arange(1 << ANGLE_BITS, device=device) + 1
    cos, sin = series.rotation(middle, ANGLE_BITS + 1)
    shift = series.COEFFICIENT_BITS + series.TRIG_BITS - FACTOR_BITS
    columns = []
    for (c, s), a, b in zip(series.multiples(cos, sin, f.terms), f.cosines, f.sines, strict=True):
        columns += [a * c + b * s, a * s - b * c]
    table = (torch.stack(columns, -1) + (1 << (shift - 1))) >> shift
    return table.to(torch.int16).reshape(-1)


def _series(
    c: torch.Tensor, trig: torch.Tensor, table: torch.Tensor, constant: int, period_bits: int, first: bool
) -> torch.Tensor:
    """A share of f(x), FACTOR_BITS + TRIG_BITS fraction bits, from public c = x + r and dealt trig [2 terms, elements]."""
    rows = trig.shape[0]
    start = ((c >> (period_bits - ANGLE_BITS)) & ((1 << ANGLE_BITS) - 1)) * rows
    out = torch.zeros_like(c)
    for k in range(rows):
        out = out + table[start + k].long() * trig[k]
    return out + constant if first else out


def _opened_series(p: Party, opened: opening.Opened, curve: Curve) -> Talk[torch.Tensor]:
    """The public S + 2**(SERIES_WINDOW-2) + r2, S at the program's scale."""
    kind, parts = opened.kind, opened.parts
    if p.tracing or not isinstance(kind, CurveWindow):
        words = opened.c
    else:
        flat = opened.c.reshape(-1)
        trig = parts["trig"].reshape(2 * kind.terms, -1)
        table, f = factors(curve.name, flat.device), SERIES[curve.name]
        constant = f.constant << (FACTOR_BITS + TRIG_BITS - series.COEFFICIENT_BITS)
        x = flat - (1 << (kind.bits - 2))
        value = fused.run(_series, x, trig, table, constant, kind.period_bits, p.first).view(kind.shape)
        words = masked_by(p, shrink(value, curve.shift), parts["r2"], SERIES_WINDOW)
    (c,) = yield [p.word("curve", (words, SERIES_WINDOW), mask=opened.mask)]
    return c


def _curve(call: StepCall) -> Values:
    p, edge, out = call.party, call.operands[0].edge, call.outputs[0]
    x = call.share(0).tensor
    curve = curve_of(call.node, edge, out.scale)
    kind = CurveWindow(
        tuple(x.shape), curve.bits, curve.cut, curve.low, curve.bits - 1, 2, gate=curve.gate,
        terms=curve.terms, period_bits=curve.period_bits, word_bits=curve.word_bits,
    )  # fmt: skip
    return [Share(run(p, _evaluated(p, x, kind, curve, out.scale)), out.scale)]


def _evaluated(p: Party, x: torch.Tensor, kind: CurveWindow, curve: Curve, scale: int) -> Talk[torch.Tensor]:
    opened = yield from opening.opening(p, x.contiguous(), kind)
    compared, c2 = yield from together(
        opening.comparing(p, opened, [-curve.limit, curve.limit]), _opened_series(p, opened, curve)
    )
    if p.tracing:
        return torch.empty_like(x)
    parts, one = opened.parts, 1 if p.first else 0
    dealt = (parts[n] for n in ("zone", "zone_value2", "value2", "zone_top2", "top2"))
    z = (compared.z[0] ^ compared.z[1]).unsqueeze(0)
    inside = opening.gated(p, c2, z, SERIES_WINDOW, 0, *dealt)[0]
    beyond: torch.Tensor
    if curve.gate:
        beyond = compared.values().sum(0)
    else:
        halves = compared.bits().sum(0)  # 0, 1 or 2; sigmoid(x) = (1 + tanh(x / 2)) / 2
        beyond = halves << (scale - 1) if curve.name == "sigmoid" else (halves - one) << scale
    total: torch.Tensor = beyond + inside
    return total


for _name in ("gelu", "silu", "tanh", "sigmoid", "erf"):
    kernel(f"{_name}.window")(_curve)
