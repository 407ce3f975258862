"""A plot with what a reader needs to read it: a title that says what it shows, a caption, a legend, both of its drawings."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import BenchReport, CaseKey, CaseResult, LoadResult
from . import words as w
from .html import Markup, Part, escape, join, tag
from .marks import legend
from .rows import NAMES, Lane, Panel, Row, narrow, wide
from .scatter import Point

Legend = Sequence[tuple[str, str]]


def figure(
    title: str, wide_plot: Markup, narrow_plot: Markup, *caption: Part, key: Legend = (), after: Part = None
) -> Markup:
    """caption: paragraphs. after: what stands below the plot, on narrow pages too."""
    side = tag("figcaption", *(tag("p", p) for p in caption if p), legend(*key) if key else None)
    return tag(
        "figure",
        tag("h3", title),
        side,
        tag("div", wide_plot, class_="plot wide", tabindex=0, role="region", aria_label=title),
        tag("div", narrow_plot, class_="plot narrow", tabindex=0, role="region", aria_label=title),
        after,
        class_="drawn",
    )


def of_rows(
    title: str, rows: Sequence[Row], panels: Sequence[Panel], *caption: Part, key: Legend = (), names: float = NAMES
) -> Markup:  # fmt: skip
    return figure(
        title, wide(rows, panels, title, names=names), narrow(rows, panels, title), *caption, key=key
    )


def folded(open_: bool, head: Part, *parts: Part, group: str | None = None) -> Markup:
    """A part that opens without a script. group: of those with one name, browsers show one at a time."""
    return tag("details", tag("summary", head), *parts, name=group, open=open_)


def row_of(number: int, case: CaseResult, *lanes: Lane, below: str = "", told: str = "") -> Row:
    return Row(f"{number}. {case.key.model}", w.where(case.key), lanes, below, told)


def unquotable(case: CaseResult) -> str:
    """Words for in plain sight, beside the figures; empty where the case may be quoted."""
    return "" if case.valid else f"Not to be quoted: {case.invalid_reason or 'its report does not say why'}"


def unlabelled(points: Sequence[Point]) -> Markup | None:
    if not points:
        return None
    told = ", ".join(str(p.number) for p in points)
    return join([f"No room for the labels of {told}: they are in the table of all cases."])


def numbers(report: BenchReport, points: Sequence[Point]) -> Markup:
    """What the numbers in a narrow plot stand for."""
    known = dict(enumerate(report.cases, 1))
    entries = (
        tag("li", tag("b", str(i)), f"{known[i].key.model} · {w.rest_of(known[i].key)}")
        for i in sorted({p.number for p in points})
    )
    return tag("ul", *entries, class_="numbers narrow")


def lines(words: str) -> Markup:
    return tag("pre", escape(words))


def case_name(key: CaseKey, number: int | None = None, *more: Part) -> Markup:
    """In a table: the model, and below it all else."""
    head = key.model if number is None else f"{number}. {key.model}"
    first, second = w.where(key)
    below = (tag("div", part, class_="muted") for part in (first, second))
    return join([tag("span", head, class_="strong"), *below, *more])


def standing(found: CaseResult | LoadResult) -> Markup:
    """Whether it may be quoted, and if not, why."""
    if found.status == "failed":
        kind = "an unknown error" if found.fault is None else found.fault.type
        link = tag("a", "failures", href="#failures")
        return tag(
            "div", tag("span", "failed", class_="bad strong"), f": {kind}, see ", link, class_="reason"
        )
    if found.valid:
        return tag(
            "div", "may be quoted" + (", as projected" if w.projected(found.key) else ""), class_="good"
        )
    why = found.invalid_reason if isinstance(found, CaseResult) else "; ".join(found.invalid_reasons)
    told = f": {why or 'it does not say why'}"
    return tag("div", tag("span", "not to be quoted", class_="bad strong"), told, class_="reason")
