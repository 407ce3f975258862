"""Figures as people read them; what is unknown is a dash."""

from __future__ import annotations

from ..measure.table import UNKNOWN, ms, size, times


def amount(value: float | None, unit: str) -> str:
    """unit: ms, bytes, J, x, or any other word, which stands behind the number."""
    if value is None:
        return UNKNOWN
    if unit == "ms":
        return ms(value)
    if unit == "bytes":
        return size(value)
    if unit == "x":
        return times(value)
    if unit == "J":
        return joules(value)
    return f"{number(value)} {unit}".rstrip()


def number(value: float | None) -> str:
    """Three or four figures; whole numbers as they are, in groups."""
    if value is None:
        return UNKNOWN
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def joules(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, scale in (("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µJ" if value else "0 J"


def share(value: float | None) -> str:
    """An accuracy, 0 to 1, in percent."""
    return UNKNOWN if value is None else f"{100 * value:.2f} %"
