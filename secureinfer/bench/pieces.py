"""Pieces of Markdown: tables, spans of code, facts; and what is read out of a session's report, whatever is in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..measure.table import UNKNOWN, ms, times
from . import report as r
from .text import joules, number

RATIOS = (("online", "fp32"), ("online", "best"), ("total", "fp32"), ("total", "best"))


def mean(timing: r.Timed | None) -> str:
    if timing is None or timing.latency_ms is None:
        return UNKNOWN
    interval = timing.latency_ms_interval
    return ms(timing.latency_ms) + (
        "" if interval is None else f" [{ms(interval.low)} to {ms(interval.high)}]"
    )


def ratio(found: r.Overhead | None) -> str:
    if found is None:
        return UNKNOWN
    interval = found.interval
    between = "" if interval is None else f" [{times(interval.low)} to {times(interval.high)}]"
    return f"**{times(found.ratio)}**{between}"


def energy(found: r.Energy) -> str:
    if found.joules_per_sample is None:
        return UNKNOWN
    return f"{joules(found.joules_per_sample)} ({found.source or 'of an unknown source'})"


def whole(found: r.Energy) -> str:
    if found.joules is None:
        return UNKNOWN
    above = UNKNOWN if found.above_idle_joules is None else joules(found.above_idle_joules)
    return f"{joules(found.joules)}, {above} above idle ({found.source or 'of an unknown source'})"


def settings(found: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in found.items()) or "no settings"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, right: int | None = None
) -> str:
    """Columns before `left` and from `right` on hold words, the others numbers."""
    last = len(head) if right is None else right
    rule = ("---" if i < left or i >= last else "---:" for i in range(len(head)))
    lines = [" | ".join(head), " | ".join(rule), *(" | ".join(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


_LINK = re.compile(r"!(?=\[)|\](?=[\[(:])")
"""What makes an image, which a reader's program would load at once, a link or the definition of one."""


def _cell(text: str) -> str:
    return flat(text).replace("|", "\\|")


def flat(value: Any) -> str:
    """One line of text that Markdown takes as text, but for the emphasis of this module."""
    line = " ".join(str(value).split()).replace("\\", "\\\\").replace("<", "&lt;")
    return _LINK.sub(r"\\\g<0>", line)


def code(text: str) -> str:
    """A span of code, fenced by more backticks than the text has in a row."""
    fence, line = "`" * (1 + _longest_run(text)), " ".join(text.split())
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"


def fenced(text: str) -> str:
    fence = "`" * max(3, 1 + _longest_run(text))
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def facts(found: dict[str, Any]) -> str:
    return "\n".join(f"- {flat(f'{key}:')} {_value(value)}" for key, value in found.items()) or UNKNOWN


def _value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, list | tuple):
        return ", ".join(_value(v) for v in value) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{flat(k)} {_value(v)}" for k, v in value.items()) or "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return flat(value)


def mapping(found: Any, *path: str) -> dict[str, Any]:
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def sequence(found: Any, *path: str) -> list[Any]:
    value = mapping(found, *path[:-1]).get(path[-1])
    return list(value) if isinstance(value, list | tuple) else []


def figure(found: dict[str, Any], key: str) -> float | None:
    value = found.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
