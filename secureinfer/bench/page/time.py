"""Where the time goes: by phase, by party, by layer, and offline against online."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..report import BenchReport, CaseResult
from . import text
from . import words as w
from .axis import decades, from_zero, share
from .figure import figure, folded, of_rows, row_of, unquotable
from .html import Markup, Part, join, tag
from .rows import Bar, Cell, Dot, Lane, Panel, Row, narrow, wide

MOST_LAYERS = 12
_NAMES = 190.0
_FOLD_FROM = 16
"""Layers from which repeated ones are one row: twelve equal layers of an encoder would leave no room for another."""


def phases(report: BenchReport) -> Markup | None:
    """Stacked shares, for the cases' own times lie orders of magnitude apart; the times stand beside them."""
    rows = [row for i, case in w.measured(report) if (row := _phases(i, case)) is not None]
    if not rows:
        return None
    return of_rows(
        "Setup, offline, online: what the time goes into",
        rows,
        [Panel(share("share of the time"), 176)],
        "The upper bar is the first answer of a new session: setup (starting the parties and sharing weights), then the "
        "offline and the online phase. The lower bar is each further answer, where setup is past.",
        "Each bar is the whole of its time, which stands at its right: shares can be compared between cases that take "
        "milliseconds and cases that take minutes.",
        key=[("setup", "setup, once a session"), ("offline", "offline, before the input is known"),
             ("online", "online, from input to answer")],
    )  # fmt: skip


def _phases(number: int, case: CaseResult) -> Row | None:
    setup, offline, online = w.setup_ms(case), w.offline_ms(case), w.online_ms(case)
    if online is None:
        return None
    each = [(offline, "offline"), (online, "online")]
    lanes = []
    if setup is not None:
        lanes.append(_shares("first", [(setup, "setup"), *each], f", setup {w.ms(setup)}"))
    lanes.append(_shares("further", each, f", online {w.ms(online)}"))
    below = (
        ""
        if offline is not None
        else "No offline phase: nothing is dealt."
        if not w.dealt(case)
        else "Offline: unknown."
    )
    return row_of(number, case, *lanes, below=below)


def _shares(name: str, parts: Sequence[tuple[float | None, str]], of_these: str) -> Lane:
    known = [(ms, series) for ms, series in parts if ms]
    whole = sum(ms for ms, _ in known) or 1.0
    bars = tuple(
        Bar(ms / whole, series, f"{series}: {w.ms(ms)}, {w.percent(ms / whole)}") for ms, series in known
    )
    return Lane((Cell(bars, text=w.ms(whole) + of_these),), name)


def waiting(report: BenchReport) -> Markup | None:
    """Of the online phase, how long each party computes and how long it is blocked for its peers."""
    rows = []
    for i, case in w.measured(report):
        lanes = [
            lane
            for name in w.branch(case.session, "online", "parties")
            if (lane := _party(case, name)) is not None
        ]
        if lanes:
            rows.append(row_of(i, case, *lanes))
    if not rows:
        return None
    return of_rows(
        "Online: computing against waiting, for each party",
        rows,
        [Panel(share("share of the party's online time"), 168)],
        "Waiting is time in which the party's thread was blocked, in receiving from its peers or in sending to them: it "
        "shrinks with a quicker network or fewer rounds. Computing shrinks with quicker kernels or more cores.",
        key=[("online", "computing"), ("waiting", "waiting for peers")],
    )  # fmt: skip


def _party(case: CaseResult, name: str) -> Lane | None:
    party = ("online", "parties", name)
    whole, waits = (w.figure(case.session, *party, k) for k in ("latency_ms", "waiting_ms"))
    shown = name.replace("_", " ")
    if not whole:
        return None
    if waits is None:
        return Lane((Cell(note=f"{w.ms(whole)} in all; how much of it is waiting is unknown"),), shown)
    waits = min(waits, whole)
    busy = whole - waits
    bars = (
        Bar(busy / whole, "online", f"computing: {w.ms(busy)}"),
        Bar(waits / whole, "waiting", f"waiting: {w.ms(waits)}"),
    )
    return Lane((Cell(bars, text=f"{w.ms(whole)}, {100 * waits / whole:.0f} % waiting"),), shown)


def against_offline(report: BenchReport) -> Markup | None:
    """Time and bytes of both phases, on logarithmic scales."""
    found = [(i, case, _pairs(case)) for i, case in w.measured(report) if w.online_ms(case)]
    if not found:
        return None
    times = [v for _, _, pairs in found for v in pairs[0] if v]
    sizes = [v for _, _, pairs in found for v in pairs[1] if v]
    panels = [
        Panel(decades(times, "time of one inference", w.ms_tick), 34),
        Panel(decades(sizes, "bytes of one inference", w.size_tick), 22),
    ]
    rows = [
        row_of(i, case, Lane((_two(pairs[0], w.ms), _two(pairs[1], w.size))), told=_both(case, pairs))
        for i, case, pairs in found
    ]
    return of_rows(
        "Offline against online",
        rows,
        panels,
        "The offline phase needs no input: it can be done before, or by night, and its material is stored. It is still "
        "work, and an inference that finds none waits for it.",
        "Scales are logarithmic.",
        key=[("square/offline", "offline"), ("circle/online", "online")],
    )


Pair = tuple[float | None, float | None]


def _pairs(case: CaseResult) -> tuple[Pair, Pair]:
    dealt = w.dealt(case)
    sizes = [w.figure(case.session, phase, "bytes") for phase in ("offline", "online")]
    return (w.offline_ms(case), w.online_ms(case)), (sizes[0] if dealt else None, sizes[1])


def _two(pair: Pair, show: Any) -> Cell:
    offline, online = pair
    dots = []
    if offline:
        dots.append(Dot(offline, "square", "offline", words=f"offline {show(offline)}"))
    if online:
        dots.append(Dot(online, "circle", "online", words=f"online {show(online)}"))
    said = ", ".join(filter(None, (dot.words for dot in dots)))
    return Cell(dots=tuple(dots), said=said) if dots else Cell(note="unknown")


def _both(case: CaseResult, pairs: tuple[Pair, Pair]) -> str:
    (offline, online), (dealt, sent) = pairs
    if not w.dealt(case):
        return f"online {w.ms(online)}, {w.size(sent)}; nothing runs offline"
    return f"offline {w.ms(offline)}, {w.size(dealt)}; online {w.ms(online)}, {w.size(sent)}"


@dataclass(frozen=True)
class Layer:
    """One module path, or `count` like ones. times are those of one inference, all of them together."""

    path: str
    count: int
    ms: float | None
    waiting_ms: float | None
    bytes: float | None
    rounds: float | None


def layers_of(session: Any) -> list[Layer]:
    """The online layers of a session's report; where there are many, those whose paths differ in an index are one."""
    raw = w.branch(session, "online").get("layers")
    found = [layer for item in (raw if isinstance(raw, list) else []) if (layer := _layer(item)) is not None]
    if len(found) < _FOLD_FROM:
        return found
    groups: dict[str, list[Layer]] = {}
    for layer in found:
        # An index that is the last part tells modules of a Sequential apart, which are not alike.
        groups.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "*", layer.path), []).append(layer)
    return [_sum(path, same) if len(same) > 1 else same[0] for path, same in groups.items()]


def _layer(item: Any) -> Layer | None:
    if not isinstance(item, dict) or not isinstance(item.get("path"), str):
        return None
    ms, waits, size, rounds = (w.figure(item, k) for k in ("latency_ms", "waiting_ms", "bytes", "rounds"))
    return Layer(item["path"] or "(inputs and outputs)", 1, ms, waits, size, rounds)


def _sum(path: str, same: Sequence[Layer]) -> Layer:
    def total(values: Iterable[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return sum(known) if len(known) == len(same) else None

    return Layer(
        path, len(same), total(x.ms for x in same), total(x.waiting_ms for x in same),
        total(x.bytes for x in same), total(x.rounds for x in same),
    )  # fmt: skip


def by_layer(report: BenchReport) -> Markup | None:
    """One plot a case; the first is open."""
    drawn = [(i, case, found) for i, case in w.measured(report) if (found := layers_of(case.session))]
    if not drawn:
        return None
    parts: list[Part] = []
    for position, (i, case, found) in enumerate(drawn):
        head = join([f"{i}. {case.key.model} ", tag("span", w.rest_of(case.key), class_="muted")])
        parts.append(folded(position == 0, head, _layers(case, found), group="layers"))
    return tag("div", *parts)


def _layers(case: CaseResult, found: list[Layer]) -> Markup:
    ordered = sorted(found, key=lambda x: -(x.ms or 0.0))
    shown, rest = ordered[:MOST_LAYERS], ordered[MOST_LAYERS:]
    if len(rest) == 1:
        shown, rest = ordered, []
    if rest:
        other = _sum(f"{len(rest)} other rows", rest)
        shown = [*shown, replace(other, count=sum(x.count for x in rest))]
    times = [x.ms or 0.0 for x in shown]
    panels = [
        Panel(from_zero(times, "time", w.ms_tick), 84, weight=1.6),
        Panel(from_zero([x.bytes or 0.0 for x in shown], "bytes", w.size_tick), 84, as_words=True),
        Panel(from_zero([x.rounds or 0.0 for x in shown], "rounds", w.number), 40, as_words=True, weight=0.7),
    ]
    rows = [_layer_row(x, bool(rest) and x is shown[-1]) for x in shown]
    title = f"The longest layers of one online inference: {case.key.model}"
    caption = [
        "Time is that of the slower party in each layer. Equal layers are one row where there are many: * stands for each "
        "index, and bars are their sums.",
        unquotable(case),
    ]
    known = any(x.waiting_ms is not None for x in shown)
    key = [("online", "computing"), ("waiting", "waiting for peers")] if known else [("online", "time")]
    return figure(
        title, wide(rows, panels, title, names=_NAMES), narrow(rows, panels, title), *caption,
        key=[*key, ("other", "bytes"), ("setup", "rounds")],
    )  # fmt: skip


def _layer_row(layer: Layer, rest: bool) -> Row:
    name, parent = (layer.path, "") if rest else _split(layer.path)
    sub = tuple(filter(None, (parent, f"{layer.count} layers" if layer.count > 1 else "")))
    cells = (
        Cell(tuple(_time_bars(layer)), text=w.ms(layer.ms)),
        Cell(
            (Bar(layer.bytes or 0.0, "other"),) if layer.bytes else (),
            text=w.size(layer.bytes),
            said=w.size(layer.bytes),
        ),
        Cell(
            (Bar(layer.rounds or 0.0, "setup"),) if layer.rounds else (),
            text=w.number(layer.rounds),
            said=f"{w.number(layer.rounds)} rounds",
        ),
    )
    return Row(name, sub, (Lane(cells),), keep="end")


def _split(path: str) -> tuple[str, str]:
    """The end of a module path, which says what it is, and where it stands."""
    parts = path.split(".")
    count = 1
    while (
        count < len(parts) and text.width(".".join(parts[-count - 1 :]), text.BODY, bold=True) <= _NAMES - 10
    ):
        count += 1
    # The name of a list or of its index says nothing before what it holds.
    while count > 1 and (parts[-count] == "*" or parts[-count].isdigit()):
        count -= 1
    return ".".join(parts[-count:]), ".".join(parts[:-count])


def _time_bars(layer: Layer) -> Iterator[Bar]:
    if layer.ms is None:
        return
    waits = min(layer.waiting_ms or 0.0, layer.ms)
    yield Bar(layer.ms - waits, "online", f"computing: {w.ms(layer.ms - waits)}")
    if waits:
        yield Bar(waits, "waiting", f"waiting: {w.ms(waits)}")
