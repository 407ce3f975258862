"""A Report as tables for people."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .report import Report
from .stats import PHASES

UNKNOWN = "–"
_LABEL = {"setup": "setup, once", "offline": "offline, each", "online": "online, each"}


def ms(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.1f} ms" if value >= 1 else f"{1000 * value:.0f} µs"


def size(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def times(ratio: float | None) -> str:
    if ratio is None:
        return UNKNOWN
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x"


def _grid(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("phase", "party") else "right", no_wrap=True)
    return table


def _phases(report: Report) -> Table:
    table = _grid("Cost", "phase", "runs", "mean", "p50", "p90", "first run", "bytes", "rounds")
    for phase in PHASES:
        if phase == "offline" and not report.program.dealer:
            continue
        part, figures = report.phases[phase], report.phases[phase].figures
        warm = figures.latency
        table.add_row(
            _LABEL[phase],
            str(warm.count),
            ms(warm.latency_ms),
            ms(warm.latency_ms_p50),
            ms(warm.latency_ms_p90),
            ms(part.cold_latency_ms),
            size(figures.bytes),
            number(figures.rounds),
        )
    return table


def _parties(report: Report) -> Table:
    table = _grid("Each party", "party", "phase", "sent", "received", "rounds", "CPU time", "memory")
    for name, role in report.roles.items():
        label = name if name == role else f"{name} ({role})"
        for phase in PHASES:
            figures = report.phases[phase].parties.get(name)
            if figures is None or figures.bytes is None:
                continue
            cpu_ms = None if figures.cpu_seconds is None else 1000 * figures.cpu_seconds
            table.add_row(
                label,
                phase,
                size(figures.bytes),
                size(figures.bytes_received),
                number(figures.rounds),
                ms(cpu_ms),
                size(figures.peak_memory_bytes),
            )
            label = ""
    return table


def _network(report: Report) -> str:
    name, source = report.network.get("name"), report.network.get("source")
    return f"{name or 'unknown'}" + ("" if source == "measured" else f" ({source})")


def machine(report: Report) -> str:
    """What it ran on, in one line."""
    environment = report.environment
    return (
        f"on {environment.get('processor') or 'an unknown processor'}, {environment.get('cores')} core(s), "
        f"torch {environment.get('torch')}, network: {_network(report)}"
    )


def _lines(report: Report) -> Iterator[str]:
    if report.plaintext is not None:
        plain = report.plaintext
        yield (
            f"plaintext: {ms(plain.latency.latency_ms)}, mean of {plain.latency.count} warm runs "
            f"({plain.engine}, {plain.dtype}, {plain.processes} process, {number(plain.threads)} thread(s))"
        )
    for name, ratio in report.overhead().items():
        if ratio["ratio"] is not None:
            yield f"{name} overhead: {times(ratio['ratio'])} = {ratio['numerator']} / {ratio['denominator']}"
    yield machine(report)
    for switch in report.program.unsafe:
        yield f"UNSAFE: {switch} is on"
    if report.invalid_reason is not None:
        yield f"not to be quoted: {report.invalid_reason}"


def tables(report: Report) -> RenderableType:
    """The whole report for a rich console."""
    return Group(_phases(report), _parties(report), *(Text(line) for line in _lines(report)))


def render(report: Report) -> str:
    """The whole report as plain text, 120 columns."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(tables(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text).rstrip("\n")
