"""Latencies: the mean and the percentiles that enough runs support, and a timer for a plaintext baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .intervals import Interval, mean_interval, percentile_interval


@dataclass(frozen=True)
class LatencySummary:
    """Milliseconds over `count` runs. A percentile is None where it needs more runs (p90: 10, p99: 100).

    Intervals hold with 95 %, and take more runs still (mean: 3, p50: 6, p90: 36, p99: 368).
    """

    count: int
    latency_ms: float | None
    latency_ms_p50: float | None
    latency_ms_p90: float | None
    latency_ms_p99: float | None
    latency_ms_interval: Interval | None = None
    latency_ms_p50_interval: Interval | None = None
    latency_ms_p90_interval: Interval | None = None
    latency_ms_p99_interval: Interval | None = None


def percentile(values_ms: Sequence[float], percent: int) -> float | None:
    """Nearest-rank percentile, or None with fewer than 100/(100-percent) values: none would lie above it."""
    if len(values_ms) * (100 - percent) < 100:
        return None
    ordered = sorted(values_ms)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def summarise(values_ms: Sequence[float]) -> LatencySummary:
    return LatencySummary(
        count=len(values_ms),
        latency_ms=sum(values_ms) / len(values_ms) if values_ms else None,
        latency_ms_p50=percentile(values_ms, 50),
        latency_ms_p90=percentile(values_ms, 90),
        latency_ms_p99=percentile(values_ms, 99),
        latency_ms_interval=mean_interval(values_ms),
        latency_ms_p50_interval=percentile_interval(values_ms, 50),
        latency_ms_p90_interval=percentile_interval(values_ms, 90),
        latency_ms_p99_interval=percentile_interval(values_ms, 99),
    )


def time_calls(
    call: Callable[[], object], *, warmup: int = 3, least_runs: int = 10, least_seconds: float = 1.0
) -> list[float]:
    """Milliseconds of each `call` after `warmup` untimed ones, until least_runs and least_seconds are reached."""
    for _ in range(warmup):
        call()
    values_ms: list[float] = []
    total_ms = 0.0
    while len(values_ms) < least_runs or total_ms < 1000 * least_seconds:
        start = time.perf_counter()
        call()
        values_ms.append(1000 * (time.perf_counter() - start))
        total_ms += values_ms[-1]
    return values_ms
