"""A sweep on a terminal: progress with what is left, and its result as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..measure.table import UNKNOWN, ms, size, times
from ..terminal import Terminal
from . import report as r
from .cases import Progress
from .pieces import figure, mapping
from .sweep import Plan, Result, Unit, Watcher


class Shown(Watcher):
    """Lines on stderr: which case runs, what it does, how it ended, and about how long the rest takes."""

    def __init__(self, terminal: Terminal, plan: Plan) -> None:
        self._terminal = terminal
        self._progress = None if plan.load is not None else _progress(plan)
        self._at: Unit | None = None

    def say(self, text: str) -> None:
        self._terminal.note(f"  {r.shown(text)}")

    def began(self, unit: Unit, number: int, count: int) -> None:
        if unit == self._at:
            return
        self._at = unit
        key, scenario = unit
        left = ""
        if self._progress is not None:
            self._progress.begin(key)
            left = f"; {self._progress.text()}"
        named = str(key) if scenario is None else f"{key}, {scenario}"
        self._terminal.note(f"{number} of {count}: {named}{left}")

    def ended(self, result: Result, *, kept: bool) -> None:
        told = "was there already" if kept else f"took {result.seconds:.0f} s"
        if result.status == "failed" and result.fault is not None:
            told += f"; failed: {result.fault.type}: {first_line(result.fault.message)}"
        if isinstance(result, r.CaseResult):
            if self._progress is not None:
                self._progress.end(result.key, None if kept else result.seconds, ok=result.status == "ok")
            if (found := result.overhead()) is not None:
                told += f"; {times(found.ratio)} = {found.numerator} / {found.denominator}"
        self._terminal.note(f"  {result.key}: {told}")


def _progress(plan: Plan) -> Progress:
    return Progress(plan.keys, seconds=plan.effort.seconds, runs=plan.effort.least_runs)


def first_line(text: str, most: int = 160) -> str:
    line = text.strip().split("\n")[0]
    return line if len(line) <= most else line[: most - 1] + "…"


def summary(report: r.BenchReport) -> list[RenderableType]:
    """What a terminal shows of a report."""
    parts: list[RenderableType] = []
    if report.cases:
        parts += [_cases(report.cases), "\n".join(_lines(report))]
    if report.loads:
        parts += [_loads(report.loads), "\n".join(_load_lines(report.loads))]
    return parts


def _cases(cases: tuple[r.CaseResult, ...]) -> Table:
    table = Table(
        title="Private inference beside plaintext, on this machine in this run", title_justify="left",
        title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("case", overflow="fold")
    for column in (
        "online", "fp32", "best plaintext", "online / fp32", "online / best", "total / fp32", "bytes", "rounds",
        "accuracy, float / compressed / secure",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for case in cases:
        table.add_row(*_row(case))
    return table


def _row(case: r.CaseResult) -> list[str]:
    if case.status == "failed":
        return [str(case.key), "failed", *[""] * 8]
    fp32, best, total = (
        case.overhead(*which) for which in (("online", "fp32"), ("online", "best"), ("total", "fp32"))
    )
    online = mapping(case.session, "online")
    rounds = figure(online, "rounds")
    accuracy = case.accuracy
    return [
        str(case.key) + ("" if case.valid else " (not to be quoted)"),
        ms(None if case.online is None else case.online.latency_ms),
        ms(None if fp32 is None else fp32.denominator_ms),
        UNKNOWN if best is None else f"{ms(best.denominator_ms)} {best.denominator}",
        *(times(None if o is None else o.ratio) for o in (fp32, best, total)),
        size(figure(online, "bytes")),
        UNKNOWN if rounds is None else f"{rounds:g}",
        UNKNOWN
        if accuracy is None
        else " / ".join(f"{v:.4f}" for v in (accuracy.float, accuracy.compressed, accuracy.secure)),
    ]


def _lines(report: r.BenchReport) -> Iterator[str]:
    for case in report.cases:
        if case.status == "failed" and case.fault is not None:
            yield f"failed: {case.key}: {case.fault.type}: {first_line(case.fault.message, 400)}"
        elif not case.valid:
            yield f"not to be quoted: {case.key}: {case.invalid_reason}"
    meter = report.meter
    if meter.source == "estimated":
        yield f"energy is estimated: {meter.model}"
    elif meter.source is None:
        yield "energy is unknown: " + ("; ".join(meter.unavailable) or "nothing can be read")


def _loads(loads: tuple[r.LoadResult, ...]) -> Table:
    table = Table(
        title="Load, by MLPerf LoadGen",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("case", overflow="fold")
    for column in (
        "scenario",
        "valid",
        "queries/s",
        "samples/s",
        "sustained",
        "p50",
        "p90",
        "p99",
        "queries",
        "prepared, start → end",
    ):
        table.add_column(column, justify="right")
    for load in loads:
        pool = (
            "" if load.pool is None else f"{load.pool.at_start} → {load.pool.at_end} of {load.pool.capacity}"
        )
        table.add_row(
            str(load.key),
            load.scenario,
            "failed" if load.status == "failed" else "yes" if load.valid else "no",
            *(UNKNOWN if v is None else f"{v:.4g}" for v in _rates(load)),
            *(ms(v) for v in (load.latency_ms_p50, load.latency_ms_p90, load.latency_ms_p99)),
            UNKNOWN if load.queries is None else str(load.queries),
            pool,
        )
    return table


def _rates(load: r.LoadResult) -> tuple[float | None, ...]:
    return load.qps, load.samples_per_second, load.sustained_samples_per_second


def _load_lines(loads: tuple[r.LoadResult, ...]) -> Iterator[str]:
    for load in loads:
        if load.fault is not None:
            yield f"failed: {load.key}, {load.scenario}: {load.fault.type}: {first_line(load.fault.message, 400)}"
        elif load.invalid_reasons:
            yield f"not valid: {load.key}, {load.scenario}: {'; '.join(load.invalid_reasons)}"
        if load.sustained_samples_per_second is not None:
            yield (
                f"{load.key}, {load.scenario}: {load.sustained_samples_per_second:.4g} samples/s with all dealing counted"
            )
        bound = load.target_latency_ms, load.target_percentile
        if load.scenario == "Server" and load.valid and load.qps is not None and None not in bound:
            yield f"{load.key} holds {load.qps:.4g} queries/s with {bound[1]:g} % of them within {bound[0]:g} ms"
