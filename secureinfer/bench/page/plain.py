"""What stands beside the private runs: plaintext baselines, loads, energy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..report import Baseline, BenchReport, CaseResult, LoadResult
from . import words as w
from .axis import decades, from_zero
from .figure import case_name, figure, folded, lines, of_rows, row_of, standing
from .html import Markup, Part, join, table, tag
from .rows import NARROW, WIDE, Bar, Cell, Dot, Lane, Panel, Row, narrow, wide
from .scatter import Across, Point, draw


def baselines(report: BenchReport) -> Markup | None:
    """For each case: every way to run it in plaintext; those that are not there say why."""
    ran = [(i, case) for i, case in w.measured(report) if case.baselines]
    if not ran:
        return None
    parts: list[Part] = []
    for position, (i, case) in enumerate(ran):
        head = join([f"{i}. {case.key.model} ", tag("span", w.rest_of(case.key), class_="muted")])
        parts.append(folded(position == 0, head, _plot(case), _details(case), group="baselines"))
    return join([tag("div", *parts), _missing(ran)])


def _latency(found: Baseline) -> float:
    return (found.latency.latency_ms if found.latency else None) or 0.0


def _plot(case: CaseResult) -> Markup:
    ok = sorted((b for b in case.baselines if b.status == "ok" and _latency(b)), key=_latency)
    rest = [b for b in case.baselines if b not in ok]
    panel = Panel(from_zero(map(_latency, ok), "latency of one inference", w.ms_tick), 190)
    quickest = next((b for b in ok if b.reason is None), None)
    rows = [
        Row(b.name, (f"on {b.device}",) if b.device != "cpu" else (), (Lane((_bar(b, b is quickest),)),))
        for b in ok
    ]
    rows += [
        Row(
            b.name,
            (f"on {b.device}",) if b.device != "cpu" else (),
            (Lane((Cell(note=f"{b.status}: {_why(b)}"),)),),
        )
        for b in rest
    ]
    title = f"The same model in plaintext: {case.key.model}, batch {case.key.batch}"
    return figure(
        title, wide(rows, [panel], title, names=170), narrow(rows, [panel], title),
        "Measured in processes of their own, in turns with the private runs; the quicker of one thread and all.",
        "The quickest and torch eager fp32 are what the ratios divide by.",
        key=[("plain", "the quickest"), ("setup", "others")],
    )  # fmt: skip


def _bar(found: Baseline, quickest: bool) -> Cell:
    ms = _latency(found)
    threads = "" if found.threads is None else f", {found.threads} thread{'' if found.threads == 1 else 's'}"
    return Cell(
        (Bar(ms, "plain" if quickest else "setup"),),
        text=f"{w.ms(ms)}{threads}{', quickest' if quickest else ', other answers' if found.reason else ''}",
    )


def _why(found: Baseline) -> str:
    return found.reason or "it does not say why"


def _details(case: CaseResult) -> Markup:
    head = ["engine", "status", "latency", "p90", "samples/s", "peak memory", "model", "load", "joules a sample", "accuracy",
            "max abs. error", "int8 covers"]  # fmt: skip
    rows = [
        [
            b.name, b.status, w.ms(_latency(b) or None), w.ms(b.latency.latency_ms_p90 if b.latency else None),
            w.rate(b.samples_per_second), w.size(b.peak_memory_bytes), w.size(b.model_bytes),
            w.UNKNOWN if b.load_seconds is None else f"{b.load_seconds:.1f} s", w.joules(b.energy.joules_per_sample),
            w.percent(b.accuracy), w.UNKNOWN if b.max_absolute_error is None else f"{b.max_absolute_error:.1e}",
            b.quantized or "",
        ]
        for b in case.baselines
    ]  # fmt: skip
    return table(head, rows, name=f"Plaintext baselines of {case.key}", text_columns=(0, 1, 11))


def _missing(ran: Sequence[tuple[int, CaseResult]]) -> Markup | None:
    """Each reason once, in full, with the cases it holds for: a row of a plot may have cut it."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for i, case in ran:
        for b in case.baselines:
            if b.status != "ok" or b.reason is not None:
                status = "other answers" if b.status == "ok" else b.status
                reasons.setdefault((b.name, status, _why(b)), []).append(i)
    if not reasons:
        return None
    rows = [
        [name, status, tag("div", why, class_="reason"), ", ".join(map(str, found))]
        for (name, status, why), found in reasons.items()
    ]
    return join([
        tag("h3", "Baselines that are not compared with, and why", class_="apart"),
        table(["engine", "status", "reason", "in cases"], rows, name="Not compared with", text_columns=(0, 1, 2, 3)),
    ])  # fmt: skip


def loads(report: BenchReport) -> Markup | None:
    if not report.loads:
        return None
    head = ["case", "scenario", "queries/s", "samples/s", "samples/s, dealing counted", "p50", "p90",
            "p99", "bound", "queries", "took", "prepared: start → least → end", "joules"]  # fmt: skip
    rows = [
        [
            case_name(load.key, None, standing(load)), load.scenario, w.rate(load.qps), w.rate(load.samples_per_second),
            w.rate(load.sustained_samples_per_second), w.ms(load.latency_ms_p50), w.ms(load.latency_ms_p90),

            w.ms(load.latency_ms_p99), _bound(load), w.number(load.queries),
            f"{load.seconds:.0f} s", _pool(load), w.energy(load.energy),
        ]
        for load in report.loads
    ]  # fmt: skip
    parts: list[Part] = [table(head, rows, name="Loads", text_columns=(0, 1))]
    parts += [_held(load) for load in report.loads if load.scenario == "Server" and load.status == "ok"]
    parts += [plot for load in report.loads if (plot := _trials(load)) is not None]
    parts += [
        folded(False, f"LoadGen's own summary: {load.key}, {load.scenario}", lines(load.summary))
        for load in report.loads if load.summary
    ]  # fmt: skip
    return join(parts)


def _bound(load: LoadResult) -> str:
    if load.target_latency_ms is None:
        return ""
    part = "" if load.target_percentile is None else f"p{load.target_percentile:g} "
    return f"{part}≤ {w.ms(load.target_latency_ms)}"


def _pool(load: LoadResult) -> Part:
    pool = load.pool
    if pool is None:
        return w.UNKNOWN if load.status == "failed" else "nothing is dealt"
    how = "dealt beforehand" if pool.beforehand else "dealt meanwhile"
    waited = f", {pool.empty:,} waited" if pool.empty else ""
    levels = f"{pool.at_start} → {pool.least} → {pool.at_end} of {pool.capacity}"
    return join([levels, tag("div", how + waited, class_="muted")])


def _held(load: LoadResult) -> Markup:
    if not load.qps or load.target_latency_ms is None:
        return tag("p", f"{load.key}: no rate held the bound. ", "; ".join(load.invalid_reasons))
    percentile = load.target_percentile or 99.0
    held = f"{w.rate(load.qps)} queries a second"
    told = f" with {percentile:g} % of answers within {w.ms(load.target_latency_ms)}, arrivals at random (Poisson)."
    doubt = (
        ""
        if load.valid
        else " Not to be quoted: " + ("; ".join(load.invalid_reasons) or "it does not say why")
    )
    return tag("p", f"{load.key} holds ", tag("b", held), told, doubt)


def _trials(load: LoadResult) -> Markup | None:
    """Each rate that was tried, and its p99 against the bound."""
    tried = [t for t in load.trials if t.latency_ms_p99 and t.target_qps]
    if len(tried) < 2:
        return None
    points = [
        Point(
            t.target_qps, t.latency_ms_p99 or 0.0, "circle" if t.valid else "square", "online" if t.valid else "offline",
            w.rate(t.target_qps), i, t.valid,
            words=f"{w.rate(t.target_qps)}/s: p99 {w.ms(t.latency_ms_p99)}; {t.why or 'holds'}",
        )
        for i, t in enumerate(tried, 1)
    ]  # fmt: skip
    x = from_zero([p.x for p in points], "queries a second that were asked for", w.number)
    bound = [load.target_latency_ms] if load.target_latency_ms else []
    y = decades([*(p.y for p in points), *bound], "p99 latency", w.ms_tick)
    across = [Across(v, f"the bound, {w.ms(v)}") for v in bound]
    title = f"Rates tried: {load.key}"
    plots = [draw(points, x, y, title, width=width, height=300, across=across)[0] for width in (WIDE, NARROW)]
    return figure(
        title, plots[0], plots[1], "Marks are labelled with their rate. The latency scale is logarithmic.",
        key=[("circle/online", "holds the bound"), ("square/offline/hollow", "does not, or was not valid"),
             ("aim", "the bound")],
    )  # fmt: skip


def energy(report: BenchReport) -> Markup:
    """Where figures come from stands in words before any figure."""
    return join(filter(None, [tag("p", *_meter(report)), _unread(report), _joules(report)]))


def _meter(report: BenchReport) -> Iterator[Part]:
    meter = report.meter
    yield tag("b", f"Energy is {w.source(meter.source)}.")
    if meter.model:
        yield f" Power model: {meter.model}."
    if meter.idle_watts is not None:
        over = "" if meter.idle_seconds is None else f", over {meter.idle_seconds:.0f} s before the cases"
        yield f" The idle machine takes {meter.idle_watts:.3g} W{over}; joules here include it."
    else:
        yield " What the idle machine takes is unknown."
    yield " One meter counts all parties' processes."


def _unread(report: BenchReport) -> Markup | None:
    if not report.meter.unavailable:
        return None
    return tag("p", "Could not be read: " + "; ".join(report.meter.unavailable) + ".", class_="muted")


def _joules(report: BenchReport) -> Markup | None:
    rows, seen = [], []
    for i, case in w.measured(report):
        dots, told = [], []
        for name, shape, series, found in _spent(case):
            told.append(f"{name} {w.joules(found)}")
            if found:
                seen.append(found)
                dots.append(Dot(found, shape, series, case.valid, words=told[-1]))
        cell = Cell(dots=tuple(dots)) if dots else Cell(note="unknown")
        rows.append(row_of(i, case, Lane((cell,)), below="; ".join(told) if dots else ""))
    if not rows or not seen:
        return None
    sources = {c.online_energy.source for _, c in w.measured(report)} - {None}
    how = "estimated" if "estimated" in sources else "measured"
    return of_rows(
        f"Joules a sample ({how}), private and in plaintext",
        rows,
        [Panel(decades(seen, f"joules of one sample, {how}", w.joules_tick), 14)],
        f"All of these are {w.source(report.meter.source)}. The scale is logarithmic." if report.meter.source else None,
        key=[("circle/online", "private, online"), ("square/offline", "private, offline"),
             ("diamond/plain", "plaintext, torch eager fp32")],
    )  # fmt: skip


def _spent(case: CaseResult) -> Iterator[tuple[str, str, str, float | None]]:
    yield "online", "circle", "online", case.online_energy.joules_per_sample
    if w.dealt(case):
        yield "offline", "square", "offline", case.offline_energy.joules_per_sample
    fp32 = case.baseline("torch eager", "fp32")
    yield "plaintext", "diamond", "plain", fp32.energy.joules_per_sample if fp32 else None
