"""The result of comparing two reports: its rows, as a table for people and as JSON."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..measure.intervals import CONFIDENCE, Interval
from ..measure.table import UNKNOWN
from .text import amount, number

SCHEMA = "secureinfer.compare/1"

Verdict = Literal["worse", "better", "same", "unclear", "shown"]
"""unclear: beyond the tolerance, but noise may explain it. shown: told, and not judged; `note` says why."""


@dataclass(frozen=True)
class Row:
    """One figure of one case. interval: of ratio, after / before. A row of figure "case" is about all of it."""

    case: str
    figure: str
    unit: str
    before: float | None
    after: float | None
    ratio: float | None
    interval: Interval | None
    verdict: Verdict
    note: str | None = None


@dataclass(frozen=True)
class Comparison:
    """str() is for people, to_dict() for programs. environment: what differs, key -> (before, after)."""

    rows: tuple[Row, ...]
    tolerance: float
    environment: dict[str, tuple[Any, Any]]

    @property
    def worse(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == "worse")

    @property
    def regressed(self) -> bool:
        return bool(self.worse)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "regressed": self.regressed,
            "tolerance": self.tolerance,
            "confidence": CONFIDENCE,
            "environment": {key: list(pair) for key, pair in self.environment.items()},
            "rows": [asdict(row) for row in self.rows],
        }

    def __rich__(self) -> RenderableType:
        return Group(_table(self), *(Text(line) for line in _lines(self)))

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=160, color_system=None).print(self)
        return out.getvalue().rstrip("\n")


def _change(row: Row) -> str:
    if row.ratio is None:
        return UNKNOWN
    if row.interval is None:
        return f"{100 * (row.ratio - 1):+.3g} %"
    low, high = (100 * (v - 1) for v in (row.interval.low, row.interval.high))
    return f"{100 * (row.ratio - 1):+.1f} % ({low:+.1f} to {high:+.1f})"


def _exact(value: float | None, unit: str) -> str:
    """Bytes to the byte, for one of them may be what is told."""
    if value is not None and unit == "bytes":
        return f"{number(value)} B"
    return amount(value, unit)


def _table(found: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="After beside before", title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("figure")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in found.rows:
        if row.verdict == "same" and row.unit != "x":
            continue  # counted below the table
        table.add_row(
            row.case,
            row.figure,
            *("" if row.figure == "case" else _exact(v, row.unit) for v in (row.before, row.after)),
            "" if row.figure == "case" else _change(row),
            row.verdict.upper() if row.verdict == "worse" else row.verdict,
            row.note or "",
        )
    return table


def _lines(found: Comparison) -> Iterator[str]:
    same = sum(row.verdict == "same" and row.unit != "x" for row in found.rows)
    if same:
        yield f"{same} more figures are the same within {100 * found.tolerance:g} %, bytes and rounds exactly"
    for key, (before, after) in found.environment.items():
        yield f"the environments differ: {key}: {before} before, {after} now"
    if not found.rows:
        yield "nothing to compare: the reports hold no case"
    elif found.regressed:
        yield f"{len(found.worse)} figure(s) became slower or fatter"
    else:
        yield "nothing became slower or fatter beyond noise"
