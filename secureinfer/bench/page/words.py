"""Figures and names as the page words them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...measure.table import UNKNOWN, ms, size
from ..report import BenchReport, CaseKey, CaseResult, Energy, Interval, Overhead
from ..text import joules as _joules
from ..text import number

__all__ = ["UNKNOWN", "ms", "number", "size"]

NBSP = "\N{NO-BREAK SPACE}"

BACKENDS = {"mpc": "MPC, fast kernels", "crypten": "MPC, CrypTen's kernels", "ckks": "CKKS"}

SOURCES = {
    "nvml": "measured: NVML's counter of the GPU",
    "rapl": "measured: RAPL's counter of the processor",
    "nvml+rapl": "measured: NVML's counter of the GPU and RAPL's of the processor",
    "estimated": "estimated from CPU time and a stated power model, not measured",
}
"""Of energy. What is not here is shown as it is named."""


def times(ratio: float | None) -> str:
    """61.2×, 2,310×; small ratios with two digits after the point."""
    if ratio is None:
        return UNKNOWN
    if ratio >= 100:
        return f"{ratio:,.0f}×"
    return f"{ratio:.1f}×" if ratio >= 10 else f"{ratio:.2f}×"


def times_tick(value: float) -> str:
    return f"{value:,.0f}×" if value >= 1 else f"{value:.3g}×"


def points(value: float) -> str:
    """Percentage points with their sign; a true minus, which is as wide as a plus."""
    return f"{value:+.3g}".replace("-", "−") if value else "0"


def interval(found: Interval | None) -> str:
    """(60.1–62.3×), or nothing where too few runs support one."""
    return "" if found is None else f"({times(found.low).removesuffix('×')}–{times(found.high)})"


def with_interval(found: Overhead | None) -> str:
    return UNKNOWN if found is None else f"{times(found.ratio)} {interval(found.interval)}".strip()


def joules(value: float | None) -> str:
    """In words where it is not known, for a bare dash beside energies reads as zero."""
    return "unknown" if value is None else _joules(value)


def joules_tick(value: float) -> str:
    for unit, scale in (("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)):
        if value >= scale * (1 - 1e-9):
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µJ"


def ms_tick(value: float) -> str:
    """Round values of a scale, without the zeros that a measured value has."""
    for unit, scale in (("s", 1000.0), ("ms", 1.0), ("µs", 1e-3)):
        if value >= scale * (1 - 1e-9):
            return f"{value / scale:,.3g} {unit}" if value < 1e6 else f"{value / scale:,.0f} {unit}"
    return "0" if not value else f"{value * 1000:.3g} µs"


def size_tick(value: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale * (1 - 1e-9):
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B" if value else "0"


def energy(found: Energy) -> str:
    if found.joules is None:
        return "unknown"
    return joules(found.joules) + (" (estimated)" if found.source == "estimated" else "")


def source(name: str | None) -> str:
    return "unknown: nothing could be read" if name is None else SOURCES.get(name, name)


def rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def count(value: float) -> str:
    """Of parameters: 22.7M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * (1 - 1e-9):
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def network(name: str) -> str:
    """As the key names it, but where it comes from in words."""
    kind, _, source = name.partition(":")
    return f"{kind.upper() if kind in ('lan', 'wan') else kind}{f'{NBSP}({source})' if source else ''}"


def where(key: CaseKey) -> tuple[str, str]:
    """The same in two short lines, for beside a plot."""
    return (
        f"{compression(key.compression)} · {key.backend}",
        f"{network(key.network)} · batch{NBSP}{key.batch}",
    )


def projected(key: CaseKey) -> bool:
    return ":" in key.network


def compression(name: str) -> str:
    return "float32" if name == "none" else name


def rest_of(key: CaseKey) -> str:
    """All of a key but its model."""
    return f"{compression(key.compression)} · {key.backend} · {network(key.network)} · batch{NBSP}{key.batch}"


def short(key: CaseKey, cases: Sequence[CaseResult]) -> str:
    """A label beside a mark whose shape tells the backend: what is plain, or the same in all cases, is left out."""
    parts = [key.model]
    if key.compression != "none":
        parts.append(key.compression)
    if key.network != "loopback":
        parts.append(network(key.network))
    if len({c.key.batch for c in cases if c.key.model == key.model}) > 1:
        parts.append(f"batch {key.batch}")
    return " · ".join(parts)


def figure(tree: Any, *path: str) -> float | None:
    """A number somewhere in a session's report; None where it is missing, or is no number that could be drawn."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        return None
    try:
        value = float(tree)
    except OverflowError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def branch(tree: Any, *path: str) -> dict[str, Any]:
    """A part of a session's report; empty where there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return {str(k): v for k, v in tree.items()} if isinstance(tree, dict) else {}


def measured(report: BenchReport) -> list[tuple[int, CaseResult]]:
    """Cases with figures, each with its number on the page."""
    return [(i, case) for i, case in enumerate(report.cases, 1) if case.status == "ok"]


def dealt(case: CaseResult) -> bool:
    """Whether anything runs offline: without a dealer nothing does."""
    return branch(case.session, "program").get("dealer") is not False


def setup_ms(case: CaseResult) -> float | None:
    return figure(case.session, "setup", "latency_ms")


def online_ms(case: CaseResult) -> float | None:
    return case.online.latency_ms if case.online else figure(case.session, "online", "latency_ms")


def offline_ms(case: CaseResult) -> float | None:
    """None where nothing runs offline."""
    if not dealt(case):
        return None
    return case.offline.latency_ms if case.offline else figure(case.session, "offline", "latency_ms")
