"""Plots of one row a case: bars from zero or marks on a logarithmic scale, drawn for a wide and for a narrow page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from . import text
from .axis import Axis
from .html import Markup
from .marks import RADIUS, drawing, label, line, mark, rectangle, uprights

WIDE, NARROW = 720.0, 328.0
"""Pixels of a plot. Plots are drawn twice and not scaled, for on a telephone a scaled one could not be read."""

NAMES = 190.0
"""Pixels of a case's name, on a wide page."""

LANE, BAR, ROW_GAP, EDGE = 20.0, 13.0, 16.0, 9.0
_LINE = 16.0
_TICKS, _TITLE = 20.0, 18.0
_MOST_TAG = 110.0


@dataclass(frozen=True)
class Bar:
    value: float
    series: str
    words: str | None = None


@dataclass(frozen=True)
class Dot:
    """low, high: the interval of its value."""

    value: float
    shape: str
    series: str
    filled: bool = True
    low: float | None = None
    high: float | None = None
    words: str | None = None


@dataclass(frozen=True)
class Cell:
    """What stands in one lane of one panel: bars end to end, or dots, and a text. note: words in the place of both.

    said: the text on a narrow page, where it has a line of its own; the same as text if it is not given.
    """

    bars: tuple[Bar, ...] = ()
    dots: tuple[Dot, ...] = ()
    text: str = ""
    note: str = ""
    said: str = ""


@dataclass(frozen=True)
class Lane:
    cells: tuple[Cell, ...]
    tag: str = ""


@dataclass(frozen=True)
class Row:
    """name, and below it the lines of sub. below: words under its lanes, such as why it is not to be quoted.

    told: the same on a wide page alone, where panels stand side by side and have no room for their cells' own words.
    """

    name: str
    sub: tuple[str, ...] = ()
    lanes: tuple[Lane, ...] = ()
    below: str = ""
    told: str = ""
    keep: str = "start"


@dataclass(frozen=True)
class Panel:
    """One scale. gutter: pixels to its right, for texts. line: (value, words) of a line across all rows.

    as_words: on a narrow page its texts join those of the first panel, in place of a plot.
    """

    axis: Axis
    gutter: float
    line: tuple[float, str] | None = None
    as_words: bool = False
    weight: float = 1.0


@dataclass
class _Page:
    """lanes: from where to where marks are drawn, top and bottom."""

    parts: list[Markup] = field(default_factory=list)
    lanes: list[tuple[float, float]] = field(default_factory=list)
    y: float = 0.0


def wide(rows: Sequence[Row], panels: Sequence[Panel], name: str, *, names: float = NAMES) -> Markup:
    """Names at the left, panels side by side. names: pixels of the names."""
    tags = min(_MOST_TAG, max((text.width(lane.tag) for row in rows for lane in row.lanes), default=0.0))
    tags += 10 if tags else 0
    free = WIDE - names - tags - EDGE - sum(p.gutter for p in panels)
    whole = sum(p.weight for p in panels)
    spans: list[tuple[float, float]] = []
    x = names + tags + EDGE
    for panel in panels:
        spans.append((x, x + free * panel.weight / whole))
        x = spans[-1][1] + panel.gutter
    page = _Page(y=_head(panels))
    top = page.y
    for row in rows:
        page.parts.append(line(0, page.y, WIDE, page.y, "rule"))
        _wide_row(page, row, panels, spans, names, tags)
    scales = [
        _scale(p, span, top, page.y, span[1] + p.gutter - EDGE - 4, [(top, page.y)])
        for p, span in zip(panels, spans, strict=True)
    ]
    return drawing(WIDE, page.y + _TICKS + 4, name, *scales, *page.parts)


def narrow(rows: Sequence[Row], panels: Sequence[Panel], name: str) -> Markup:
    """Names above, texts above their marks; a plot for each panel, one below the other."""
    words = [i for i, p in enumerate(panels) if p.as_words]
    plots = [i for i in range(len(panels)) if i not in words]
    return Markup(
        "".join(_narrow_panel(rows, panels[i], i, words if i == plots[0] else [], name) for i in plots)
    )


def _narrow_panel(rows: Sequence[Row], panel: Panel, index: int, words: list[int], name: str) -> Markup:
    span = (EDGE, NARROW - EDGE - 2)
    page = _Page(y=_head([panel]))
    top = page.y
    for row in rows:
        page.parts.append(line(0, page.y, NARROW, page.y, "rule"))
        page.y += 20
        page.parts.append(label(0, page.y, row.name, room=NARROW, body=True, keep=row.keep))
        if row.sub:
            page.y += _LINE
            page.parts.append(label(0, page.y, " · ".join(row.sub), room=NARROW, kind="muted"))
        for lane in row.lanes:
            cell = lane.cells[index]
            told = " · ".join(filter(None, (cell.said or cell.text, *(lane.cells[i].said for i in words))))
            told = f"{lane.tag}: {told}" if lane.tag and told else lane.tag or told
            if told:
                page.y += _LINE + 1
                page.parts.append(label(0, page.y, told, room=NARROW))
            if cell.note:
                _below(page, cell.note, 0, NARROW)
            if cell.bars or cell.dots:
                page.parts.extend(_drawn(replace(cell, text=""), panel, span, page.y + 6 + BAR / 2, NARROW))
                page.lanes.append((page.y + 2, page.y + 9 + BAR))
                page.y += 9 + BAR
        if row.below:
            _below(page, row.below, 0, NARROW)
        page.y += 10
    return drawing(
        NARROW, page.y + _TICKS + 4, name, _scale(panel, span, top, page.y, NARROW, page.lanes), *page.parts
    )


def _head(panels: Sequence[Panel]) -> float:
    return _TITLE + _TICKS + (_LINE + 2 if any(p.line for p in panels) else 0)


def _wide_row(
    page: _Page, row: Row, panels: Sequence[Panel], spans: Sequence[tuple[float, float]], names: float, tags: float
) -> None:  # fmt: skip
    start = page.y
    room = names - 8
    page.parts.append(label(0, start + 20, row.name, room=room, body=True, keep=row.keep))
    for i, sub in enumerate(row.sub, 1):
        page.parts.append(label(0, start + 20 + _LINE * i, sub, kind="muted", room=room))
    y = start + ROW_GAP / 2
    for lane in row.lanes:
        middle = y + LANE / 2
        if lane.tag:
            page.parts.append(label(names, middle + 4, lane.tag, kind="muted", room=tags - 8))
        lines = 1
        for cell, panel, span in zip(lane.cells, panels, spans, strict=True):
            if cell.note:
                noted = text.wrapped(cell.note, span[1] + panel.gutter - span[0] - 4)
                lines = max(lines, len(noted))
                for i, told in enumerate(noted):
                    page.parts.append(
                        label(span[0], middle + 4 + i * _LINE, told, kind="note", full=cell.note)
                    )
            page.parts.extend(_drawn(cell, panel, span, middle, span[1] + panel.gutter))
        y += LANE + (lines - 1) * _LINE
    page.y = y - 2
    for words in filter(None, (row.told, row.below)):
        _below(page, words, names, WIDE)
    page.y = max(page.y + 2 + ROW_GAP / 2, start + 28 + _LINE * len(row.sub))


def _below(page: _Page, words: str, x: float, right: float) -> None:
    for told in text.wrapped(words, right - x - 4):
        page.y += _LINE
        page.parts.append(label(x, page.y, told, kind="note", full=words))


def _drawn(cell: Cell, panel: Panel, span: tuple[float, float], y: float, right: float) -> Iterator[Markup]:
    left, room = span[0], span[1] - span[0]
    x = left
    total = 0.0
    for bar in cell.bars:
        total += bar.value
        end = left + room * panel.axis.at(total)
        yield rectangle(x, y - BAR / 2, end - x, BAR, bar.series, bar.words)
        x = end
    places = [left + room * panel.axis.at(dot.value) for dot in cell.dots]
    if len(places) > 1:
        yield line(min(places), y, max(places), y, "between")
    for dot, place in zip(cell.dots, places, strict=True):
        if dot.low is not None and dot.high is not None:
            low, high = (left + room * panel.axis.at(v) for v in (dot.low, dot.high))
            yield line(low, y, high, y, "interval")
        yield mark(dot.shape, place, y, dot.series, filled=dot.filled, words=dot.words)
    if cell.text:
        begin = x + 7 if cell.bars else span[1] + RADIUS + 6
        yield label(begin, y + 4, cell.text, room=right - begin)


def _scale(
    panel: Panel, span: tuple[float, float], top: float, bottom: float, edge: float, lanes: Sequence[tuple[float, float]]
) -> Markup:  # fmt: skip
    """Title, ticks above and below, thin lines through all lanes, and the panel's own line where it has one.

    edge: to which texts may reach. Lines end where texts stand, on a narrow page, so that they cross none.
    """
    left, room = span[0], span[1] - span[0]
    parts = [label(left, 12, panel.axis.title, kind="title", room=room + panel.gutter)]
    thin: list[tuple[float, float, float]] = []
    for value, told in panel.axis.ticks(room):
        x = left + room * panel.axis.at(value)
        half = text.width(told) / 2
        # The first and the last label may stand out over the scale by no more than what is free there.
        middle = min(max(x, left - EDGE + half), edge - half)
        thin += [(x, top - 5, top), (x, bottom, bottom + 5), *((x, *lane) for lane in lanes)]
        for y in (top - 8, bottom + 17):
            parts.append(label(middle, y, told, kind="tick", anchor="middle"))
    parts.insert(0, uprights(thin, "grid"))
    if panel.line is not None:
        x = left + room * panel.axis.at(panel.line[0])
        parts.append(uprights([(x, _TITLE + 14, top), *((x, *lane) for lane in lanes)], "aim"))
        parts.append(label(x + 5, _TITLE + 12, panel.line[1], kind="aimed"))
    return Markup("".join(parts))
