"""What privacy costs: the headline, each case's ratio, and ratios against model size and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..report import BenchReport, CaseKey, CaseResult, Overhead
from . import words as w
from .axis import Axis, around, decades
from .figure import Legend, figure, numbers, of_rows, row_of, unlabelled, unquotable
from .html import Markup, Part, join, tag
from .marks import SHAPES
from .rows import NARROW, WIDE, Cell, Dot, Lane, Panel, Row
from .scatter import Across, Point, draw

AIM = 2.0
"""Private latency over plaintext latency that the project aims at."""
AIM_WORDS = "the aim, 2×"

Against = Literal["fp32", "best"]

_KNOWN_SHAPES = {"mpc": "circle", "crypten": "square", "ckks": "triangle"}
_LEVELS = {"none": "circle", "int8": "square", "approximate": "triangle", "approximate+int8": "diamond"}
_MANY = 12
"""Marks from which some may have room for no more than their number."""
_SERIES = ("online", "offline", "other", "plain", "setup")


def headline(report: BenchReport) -> Markup:
    """The range of both ratios over all cases that may be quoted, and what stands at its ends."""
    ran = [case for case in report.cases if case.status == "ok"]
    valid = [case for case in ran if case.valid]
    quoted = [case for case in valid if not w.projected(case.key)]
    heroes = [_hero(quoted, "fp32"), _hero(quoted, "best"), _aim()]
    parts: list[Part] = [tag("p", _told(report, len(ran), len(valid)))]
    parts.append(tag("div", *heroes, class_="heroes"))
    if not valid:
        parts.append(
            tag(
                "p",
                tag("b", "No case of this report may be quoted."),
                " Each says why below.",
                class_="warning",
            )
        )
    if not report.complete:
        parts.append(
            tag(
                "p",
                tag("b", "The sweep was stopped."),
                " Some of its cases have not run and are not here.",
                class_="warning",
            )
        )
    parts.append(_excluded(report))
    return join(parts)


def _told(report: BenchReport, ran: int, valid: int) -> str:
    failed = len(report.cases) - ran
    told = [f"{_many(len(report.cases), 'case')}: {valid} may be quoted"]
    if ran - valid:
        told.append(f"{ran - valid} measured but not to be quoted")
    if failed:
        told.append(f"{failed} failed")
    return (
        ", ".join(told)
        + ". Latency of private inference over latency of the same model in plaintext, same machine, same run."
    )


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _hero(cases: Sequence[CaseResult], against: Against) -> Markup:
    found = sorted(
        ((o, case) for case in cases if (o := case.overhead("online", against)) is not None),
        key=lambda p: p[0].ratio,
    )
    below = "torch eager fp32" if against == "fp32" else "the quickest plaintext"
    if not found:
        return tag(
            "div", tag("b", w.UNKNOWN), tag("span", f"online, over {below}: no case to quote"), class_="hero"
        )
    (least, least_case), (most, most_case) = found[0], found[-1]
    if len(found) == 1:
        return tag(
            "div", tag("b", w.times(least.ratio)),
            tag("span", f"online, over {_side(least, against)} {w.interval(least.interval)}", class_="strong"),
            _ends("", least, least_case), class_="hero",
        )  # fmt: skip
    return tag(
        "div",
        tag("b", f"{w.times(least.ratio)} to {w.times(most.ratio)}"),
        tag("span", f"online, over {below}", class_="strong"),
        _ends("least: ", least, least_case),
        _ends("most: ", most, most_case),
        class_="hero",
    )


def _side(found: Overhead, against: Against) -> str:
    return found.denominator if against == "fp32" else f"the quickest plaintext, {found.denominator}"


def _ends(which: str, found: Overhead, case: CaseResult) -> Markup:
    sides = f"{w.ms(found.numerator_ms)} / {w.ms(found.denominator_ms)} ({found.denominator})"
    where = f"{case.key.model}, {w.rest_of(case.key).replace(' · ', ', ')}"
    return tag("span", f"{which}{where}: {sides}", class_="small muted")


def _aim() -> Markup:
    return tag(
        "div", tag("b", w.times(AIM).replace(".00", "")), tag("span", "the aim of this project", class_="strong"),
        tag("span", "MPC with model compression, within twice the plaintext's latency", class_="small muted"),
        class_="hero aimed",
    )  # fmt: skip


def _excluded(report: BenchReport) -> Markup | None:
    """Why some cases are not in the range above, where nobody overlooks it."""
    entries = []
    for i, case in enumerate(report.cases, 1):
        name = f"{i}. {case.key.model} ({w.rest_of(case.key).replace(' · ', ', ')})"
        if case.status == "failed":
            kind = case.fault.type if case.fault else "an unknown error"
            entries.append(
                tag("li", f"{name}: failed with {kind}, see ", tag("a", "failures", href="#failures"))
            )
        elif not case.valid:
            entries.append(
                tag("li", f"{name}: not to be quoted: {case.invalid_reason or 'its report does not say why'}")
            )
        elif w.projected(case.key):
            told = f"{name}: computed from a loopback run, not measured over that network"
            entries.append(tag("li", told))
    if not entries:
        return None
    return tag("div", tag("b", "Not in the figures above"), tag("ul", *entries), class_="warning small")


def each_case(report: BenchReport) -> Markup | None:
    """One row a case: the ratio to fp32 and to the best plaintext with their intervals."""
    rows = [_case(i, case) for i, case in enumerate(report.cases, 1)]
    ratios = [o.ratio for case in report.cases for o in case.overheads if o.phase == "online" and o.ratio > 0]
    if not ratios:
        return None
    panel = Panel(
        decades([AIM / 1.3, *ratios], "online latency, private over plaintext", w.times_tick),
        284,
        (AIM, AIM_WORDS),
    )
    return of_rows(
        "Each case's overhead, online",
        rows,
        [panel],
        "Read: private online latency divided by plaintext latency, both from the same machine in the same run. "
        "The scale is logarithmic. In brackets: the 95 % interval, where there were runs enough for one.",
        "A hollow mark is not to be quoted, and the row says why.",
        key=[("circle/online", "over torch eager fp32"), ("diamond/plain", "over the quickest plaintext"),
             ("circle/online/hollow", "not to be quoted"), ("interval", "95 % interval"), ("aim", AIM_WORDS)],
    )  # fmt: skip


def _case(number: int, case: CaseResult) -> Row:
    if case.status == "failed":
        told = "an unknown error" if case.fault is None else f"{case.fault.type}: {case.fault.message}"
        return row_of(number, case, Lane((Cell(note=f"Failed: {' '.join(told.split())[:400]}"),)))
    lanes = []
    for against, shape, series in (("fp32", "circle", "online"), ("best", "diamond", "plain")):
        found = case.overhead("online", against)
        if found is None:
            lanes.append(
                Lane(
                    (Cell(note=f"No ratio to {'torch eager fp32' if against == 'fp32' else 'a plaintext'}"),)
                )
            )
            continue
        interval = found.interval
        dot = Dot(
            found.ratio, shape, series, case.valid, interval.low if interval else None, interval.high if interval else None,
            f"{found.numerator} {w.ms(found.numerator_ms)} / {found.denominator} {w.ms(found.denominator_ms)}",
        )  # fmt: skip
        lanes.append(Lane((Cell(dots=(dot,), text=f"{w.with_interval(found)} {found.denominator}"),)))
    return row_of(number, case, *lanes, below=unquotable(case))


def shapes(names: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """A shape for each name: the one it is known by, and others in turn for names that nobody foresaw."""
    free = [s for s in SHAPES if s not in {known.get(n) for n in names}]
    found = {}
    for name in dict.fromkeys(names):
        found[name] = known.get(name) or (free.pop(0) if free else "bar")
    return found


def by_size(report: BenchReport) -> Markup | None:
    """Ratio over parameters, both logarithmic; shapes tell backends apart."""
    ran = [
        (i, c, o)
        for i, c in w.measured(report)
        if c.model and c.model.parameters and (o := c.overhead()) and o.ratio > 0
    ]
    if not ran:
        return None
    backends = list(dict.fromkeys(case.key.backend for _, case, _ in ran))
    shape = shapes(backends, _KNOWN_SHAPES)
    points = [
        Point(
            float(case.model.parameters), found.ratio, shape[case.key.backend],
            _SERIES[backends.index(case.key.backend) % 5],
            w.short(case.key, report.cases), i, case.valid, found.interval.low if found.interval else None,
            found.interval.high if found.interval else None,
            f"{i}. {case.key}: {w.with_interval(found)}",
        )
        for i, case, found in ran if case.model is not None
    ]  # fmt: skip
    x = decades([p.x for p in points], "parameters of the model", w.count)
    y = decades([AIM / 1.3, *(p.y for p in points)], "online latency over torch eager fp32", w.times_tick)
    key = [(f"{shape[b]}/{_SERIES[i % 5]}", w.BACKENDS.get(b, b)) for i, b in enumerate(backends)]
    return _scattered(
        report, "Overhead against model size, for each backend", points, x, y, [Across(AIM, AIM_WORDS)], [],
        [*key, ("circle/ink/hollow", "hollow: not to be quoted"), ("aim", AIM_WORDS)],
        "Both scales are logarithmic. A small model pays for messages, which take their time however little they carry; "
        "a large one for arithmetic and bytes.",
    )  # fmt: skip


def by_accuracy(report: BenchReport) -> Markup | None:
    """What compression costs in accuracy and what it saves; a line joins the levels of one case."""
    ran = [
        (i, c, o, c.accuracy)
        for i, c in w.measured(report)
        if c.accuracy and (o := c.overhead()) and o.ratio > 0
    ]
    if not ran:
        return None
    levels = list(dict.fromkeys(case.key.compression for _, case, _, _ in ran))
    shape = shapes(levels, _LEVELS)
    groups: dict[CaseKey, list[Point]] = {}
    points = []
    for i, case, found, accuracy in ran:
        lost = 100 * (accuracy.secure - accuracy.float)
        point = Point(
            found.ratio, lost, shape[case.key.compression], _SERIES[levels.index(case.key.compression) % 5],
            _place(case.key), i, case.valid,
            words=f"{i}. {case.key}: {w.percent(accuracy.secure)} secure, {w.percent(accuracy.float)} float "
            f"({accuracy.metric})",
        )  # fmt: skip
        points.append(point)
        groups.setdefault(case.key.model_copy(update={"compression": ""}), []).append(point)
    x = decades([p.x for p in points], "online latency over torch eager fp32", w.times_tick)
    y = around([p.y for p in points], "secure minus float accuracy, points", w.points, least=1.0)
    key = [(f"{shape[c]}/{_SERIES[i % 5]}", w.compression(c)) for i, c in enumerate(levels)]
    return _scattered(
        report, "Accuracy against overhead, for each level of compression", points, x, y,
        [Across(0.0, "as accurate as the float model", "base", "muted")], [g for g in groups.values() if len(g) > 1],
        [*key, ("circle/ink/hollow", "hollow: not to be quoted")],
        "Up is more accurate, left is quicker. Accuracy is that of decrypted outputs, less that of the float model on the "
        "same samples, in percentage points; thin lines join levels of one model on one backend, network and batch.",
        "What is counted differs between models: the table of all cases names each one's metric and gives float, compressed "
        "and secure.",
    )  # fmt: skip


def _place(key: CaseKey) -> str:
    away = "" if key.network == "loopback" else f" · {w.network(key.network)}"
    return f"{key.model} · {key.backend}{away}"


def _scattered(
    report: BenchReport, title: str, points: list[Point], x: Axis, y: Axis, across: list[Across],
    joined: list[list[Point]], key: Legend, *caption: Part,
) -> Markup:  # fmt: skip
    wide_plot, missing = draw(points, x, y, title, width=WIDE, height=440, across=across, joined=joined)
    numbered = "A bare number is that of its case in the table of all cases." if len(points) > _MANY else None
    narrow_plot, lost = draw(
        points, x, y, title, width=NARROW, height=380, across=across, joined=joined, named=False
    )
    notes = [
        tag("span", part, class_=kind)
        for part, kind in ((unlabelled(missing), "wide"), (unlabelled(lost), "narrow"))
        if part
    ]
    return figure(
        title, wide_plot, narrow_plot, *caption, numbered, *notes, key=key, after=numbers(report, points)
    )
