"""The rows as one SVG: latency and bytes on logarithmic scales, published figures hollow and apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from secureinfer.bench.page import words
from secureinfer.bench.page.axis import decades
from secureinfer.bench.page.html import Markup, escape
from secureinfer.bench.page.rows import Cell, Dot, Lane, Panel, wide
from secureinfer.bench.page.rows import Row as Drawn
from secureinfer.bench.page.style import CSS

from .row import PUBLISHED, Row

TITLE = "One BERT, one input, in turns on one machine; hollow: wrong answers, and published figures"
SHAPES = {"plaintext": ("diamond", "plain"), "fast": ("circle", "online"), "crypten": ("square", "online")}
PEER = ("triangle", "offline")
PAPER = ("down", "setup")
GUTTER = 84.0


def svg(rows: Sequence[Row]) -> str:
    """A file that opens by itself."""
    drawn = [_measured(row) for row in rows]
    drawn += [
        Drawn(
            f"{p.label}, published", (p.what, p.hardware),
            (Lane((_cell(p.latency_ms, PAPER, False, _short), _cell(p.bytes, PAPER, False, words.size_tick))),),
        )
        for p in PUBLISHED
    ]  # fmt: skip
    times = [t for row in rows for t in row.latency_ms] + [p.latency_ms for p in PUBLISHED]
    sizes = [row.bytes for row in rows if row.bytes] + [p.bytes for p in PUBLISHED]
    panels = [
        Panel(decades(times, "online latency", words.ms_tick), GUTTER),
        Panel(decades(sizes, "bytes online", words.size_tick), GUTTER),
    ]
    found = str(wide(drawn, panels, TITLE, names=250.0))
    head, rest = found.split(">", 1)
    style = Markup(f"<title>{escape(TITLE)}</title><style>{CSS}svg{{background:var(--surface)}}</style>")
    return f'{head} xmlns="http://www.w3.org/2000/svg" font-family="DejaVu Sans, sans-serif">{style}{rest}\n'


def _measured(row: Row) -> Drawn:
    mark = SHAPES.get(row.engine, PEER)
    name, _, more = row.label.partition(", ")
    sub = (more,) if more else ()
    right = row.status == "ok"
    if row.latency_ms_p50 is None:
        cells = (Cell(note=f"{row.status}: {row.why or 'it does not say why'}"), Cell())
        return Drawn(name, sub, (Lane(cells),))
    latency = Dot(row.latency_ms_p50, *mark, right, row.latency_ms_least, row.latency_ms_greatest)
    told = "" if row.why is None else f"{row.status}: {row.why}"
    cells = (
        Cell(dots=(latency,), text=_short(row.latency_ms_p50)),
        _cell(row.bytes, mark, right, words.size_tick),
    )
    return Drawn(name, sub, (Lane(cells),), below=told)


def _short(ms: float) -> str:
    return f"{ms / 1e3:.3g} s" if ms >= 1e3 else f"{ms:.3g} ms"


def _cell(value: float | None, mark: tuple[str, str], filled: bool, show: Callable[[float], str]) -> Cell:
    return Cell(dots=(Dot(value, *mark, filled),), text=show(value)) if value else Cell()
