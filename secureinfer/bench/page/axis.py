"""A scale of a plot: where a value stands, and which ticks say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import text

Show = Callable[[float], str]
Tick = tuple[float, str]

_GAP = 13.0
"""Least pixels between two labels of an axis."""


@dataclass(frozen=True)
class Axis:
    """From low to high, linear or logarithmic. show: a tick's label. title: what it measures, with its unit."""

    low: float
    high: float
    log: bool
    title: str
    show: Show

    def at(self, value: float) -> float:
        """0 at low, 1 at high; what lies outside stands at the edge."""
        if self.log:
            value = max(value, self.low)
            part = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))

    def ticks(self, pixels: float, *, upright: bool = False) -> list[Tick]:
        """As many as can be labelled. upright: the axis stands, so that labels take height and not width."""
        for steps in self._choices():
            ticks = [(v, self.show(v)) for v in steps]
            if len(ticks) >= 2 and self._apart(ticks, pixels, upright):
                return ticks
        return [(v, self.show(v)) for v in (self.low, self.high)]

    def _choices(self) -> Iterable[list[float]]:
        if not self.log:
            for count in (8, 6, 5, 4, 3, 2):
                yield _linear(self.low, self.high, count)
            return
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1, 2, 5), (1, 3), (1,)):
            yield self._inside(10.0**e * f for e in range(first, last + 1) for f in factors)
        for step in range(2, 8):
            yield self._inside(10.0**e for e in range(first, last + 1) if e % step == 0)

    def _inside(self, values: Iterable[float]) -> list[float]:
        return [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]

    def _apart(self, ticks: list[Tick], pixels: float, upright: bool) -> bool:
        places = [self.at(v) * pixels for v, _ in ticks]
        needed = [(text.SMALL * 2 if upright else text.width(label)) for _, label in ticks]
        return all(
            b - a >= (m + n) / 2 + (0 if upright else _GAP)
            for a, b, m, n in zip(places, places[1:], needed, needed[1:], strict=False)
        )


def from_zero(values: Iterable[float], title: str, show: Show) -> Axis:
    """Linear from zero, as bars need it, to a round number above the greatest."""
    high = max((v for v in values if v > 0), default=1.0)
    step = _step(high / 5)
    return Axis(0.0, step * math.ceil(high / step - 1e-9), False, title, show)


def around(values: Iterable[float], title: str, show: Show, *, least: float) -> Axis:
    """Linear with zero inside, at least `least` wide, with some room at both ends."""
    found = [0.0, *values]
    low, high = min(found), max(found)
    room = max(high - low, least) * 0.12
    middle = max(0.0, least - (high - low)) / 2
    return Axis(low - room - middle, high + room + middle, False, title, show)


def share(title: str) -> Axis:
    return Axis(0.0, 1.0, False, title, lambda v: f"{100 * v:.0f} %")


def decades(values: Iterable[float], title: str, show: Show) -> Axis:
    """Logarithmic, from 1, 2 or 5 below the least to 1, 2 or 5 above the greatest, at least one decade."""
    found = [v for v in values if v > 0]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    low, high = _round_down(low / 1.15), _round_up(high * 1.15)
    if high / low < 10:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    return Axis(low, high, True, title, show)


def _round_down(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return max(f * decade for f in (1, 2, 5) if f * decade <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return min(f * decade for f in (1, 2, 5, 10) if f * decade >= value * (1 - 1e-9))


def _step(rough: float) -> float:
    decade = 10.0 ** math.floor(math.log10(rough))
    return min(f * decade for f in (1, 2, 2.5, 5, 10) if f * decade >= rough * (1 - 1e-9))


def _linear(low: float, high: float, count: int) -> list[float]:
    step = _step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
