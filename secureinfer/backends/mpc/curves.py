"""Zones, windows and series of smooth functions, for kernels and their cost formulas; plain numbers, no cryptography."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from ...graph.ir import Edge, Node
from . import windows

TRIG_BITS = 18
"""Fraction bits of dealt cosines and sines."""

FACTOR_BITS = 13
"""Fraction bits of the public factors that multiply them, which are below 4: two bytes each."""

ANGLE_BITS = 16
"""The public angle, of a period, to which there are factors: an element's are one line of the processor's cache."""

SERIES_WINDOW = 24
"""Bits of the window in which a series' value is opened: below 2**22 units."""


@dataclass(frozen=True)
class Zone:
    """|x| < limit: there the series counts. unit: log2 of the unit in which |x| is compared with it. period: log2."""

    limit: float
    unit: int
    terms: int
    period: int
    gate: bool
    beyond: float
    slope: float


ZONES = MappingProxyType({
    "gelu": Zone(4.25, -1, 8, 4, True, 1e-4, 4.0),
    "gelu_tanh": Zone(4.25, -1, 8, 4, True, 1e-4, 5.0),
    "silu": Zone(13.0, -1, 20, 5, True, 5e-5, 6.0),
    "tanh": Zone(5.5, -1, 20, 4, False, 6e-5, 4.0),
    "sigmoid": Zone(11.0, 0, 20, 5, False, 5e-5, 4.0),
    "erf": Zone(3.5, -1, 18, 4, False, 3e-5, 7.0),
})  # fmt: skip
"""slope: at least the sum of k |a_k| over the series' terms. beyond: how far the function is from what it tends to, one unit
before the limit.
"""


@dataclass(frozen=True)
class Curve:
    """One step's figures in ring units. bits: of x's window. low: the first compared bit. limit: of the zone.

    word_bits: of the dealt cosines and sines that count. shift: bits that are cut from the series' value.
    """

    name: str
    bits: int
    cut: int | None
    low: int
    limit: int
    terms: int
    period_bits: int
    word_bits: int
    shift: int
    gate: bool


def name_of(node: Node) -> str:
    return "gelu_tanh" if node.op == "gelu" and node.attrs.get("approximate") == "tanh" else node.op


def curve_of(node: Node, edge: Edge, scale: int) -> Curve:
    """edge: of the operand; scale: fraction bits of the result."""
    name = name_of(node)
    zone, s = ZONES[name], edge.scale
    # The gates' sum is halved by cutting one bit less than the result has.
    cut = s - (scale - 1) if zone.gate else None
    shift = TRIG_BITS + FACTOR_BITS - scale + (name == "sigmoid")
    return Curve(
        name=name,
        bits=windows.window(edge),
        cut=cut,
        low=s + zone.unit,
        limit=round(zone.limit * 2.0**s),
        terms=zone.terms,
        period_bits=s + zone.period,
        word_bits=8 * math.ceil((SERIES_WINDOW + shift) / 8),
        shift=shift,
        gate=zone.gate,
    )


def refusal(node: Node, edge: Edge, scale: int) -> str | None:
    """Why the kernel cannot run, or None."""
    if edge.bound is None:
        return "the range of the operand is not known"
    curve, zone = curve_of(node, edge, scale), ZONES[name_of(node)]
    if edge.scale < 13 or not 8 <= scale <= 20 or zone.limit * 2.0**scale >= 1 << (SERIES_WINDOW - 3):
        return "the series' window does not hold these fraction bits"
    if curve.period_bits > min(60, curve.bits) or curve.limit >= 1 << (curve.bits - 3):
        return "the zone of the series does not fit the operand's window"
    if curve.cut is not None and not 0 <= curve.cut <= curve.bits - 3:
        return "the result has more fraction bits than the operand"
    return None
