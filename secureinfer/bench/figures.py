"""From runs to figures of a report: latencies, energy and overheads, with their intervals."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from ..measure.energy import Spent
from ..measure.intervals import ratio_interval
from ..measure.latency import summarise
from .report import Baseline, Energy, Overhead, Timed

FP32 = ("torch eager", "fp32")


def timed(values_ms: Sequence[float], cold_ms: float | None = None, blocks: Sequence[int] = ()) -> Timed:
    """Latencies of warm runs, milliseconds, in the order in which they ran. cold_ms: of the first run, which is not in them.

    Where an engine runs several times in a block, its value is what stands for the block, such as their median: runs of
    one position are paired with those of other engines.
    """
    return Timed(
        **dataclasses.asdict(summarise(values_ms)),
        cold_latency_ms=cold_ms,
        runs_ms=tuple(values_ms),
        blocks=tuple(blocks),
    )


def energy_of(spent: Sequence[Spent | tuple[Spent, int]], samples: int) -> Energy:
    """Of one inference, the mean of all. spent: of one inference, or of as many as the tuple says.

    samples: of one inference. All is unknown if any part is: what is missing may be the part that took most.
    """
    parts = [part if isinstance(part, tuple) else (part, 1) for part in spent]
    inferences, sources = sum(count for _, count in parts), {part.source for part, _ in parts}
    joules = _sum(part.joules for part, _ in parts)
    if inferences < 1 or joules is None or len(sources) != 1:
        return Energy()
    above = _sum(part.above_idle_joules for part, _ in parts)
    return Energy(
        joules=joules / inferences,
        joules_per_sample=joules / inferences / samples,
        above_idle_joules=None if above is None else above / inferences,
        source=sources.pop(),
    )


def overheads(
    online: Timed, offline: Timed | None, baselines: Sequence[Baseline], secure: str = "secure"
) -> tuple[Overhead, ...]:
    """Secure over plaintext, online and total, against torch eager fp32 and against the quickest baseline.

    offline: None where nothing runs offline; then the total is what is online. secure: what the numerator is called.
    Both sides are means of warm runs. An interval takes runs of both sides by block, as many on one as on the other.
    """
    ran = [b for b in baselines if b.status == "ok" and b.latency is not None and b.latency.latency_ms]
    below = {
        "fp32": next((b for b in ran if (b.engine, b.dtype) == FP32), None),
        "best": min(ran, key=_mean_ms, default=None),
    }
    above = {
        "online": ("online", online),
        "total": ("offline + online" if offline is not None else "online", total(online, offline)),
    }
    return tuple(
        Overhead.model_validate(
            {
                "phase": phase,
                "against": against,
                "numerator": f"{secure} {what} latency",
                "numerator_ms": timing.latency_ms,
                "denominator": baseline.name,
                "denominator_ms": _mean_ms(baseline),
                "ratio": timing.latency_ms / _mean_ms(baseline),
                "interval": _interval(timing, baseline),
            }
        )
        for phase, (what, timing) in above.items()
        for against, baseline in below.items()
        if baseline is not None and timing.latency_ms is not None
    )


def per_block(found: Timed) -> list[float]:
    """The mean of each block's runs: runs of one block share what the machine did in it, and are one observation."""
    if sum(found.blocks) != len(found.runs_ms) or 0 in found.blocks:
        return list(found.runs_ms)
    ends = list(itertools.accumulate(found.blocks))
    return [
        statistics.fmean(found.runs_ms[end - size : end])
        for size, end in zip(found.blocks, ends, strict=True)
    ]


def total(online: Timed, offline: Timed | None) -> Timed:
    """Offline and online of each inference together; only the mean, where their runs do not belong together."""
    if offline is None:
        return online
    if online.runs_ms and len(online.runs_ms) == len(offline.runs_ms):
        cold = (online.cold_latency_ms, offline.cold_latency_ms)
        return timed(
            [a + b for a, b in zip(online.runs_ms, offline.runs_ms, strict=True)],
            None if None in cold else sum(c for c in cold if c is not None),
            online.blocks,
        )
    known = online.latency_ms is not None and offline.latency_ms is not None
    return Timed(
        count=min(online.count, offline.count),
        latency_ms=(online.latency_ms or 0.0) + (offline.latency_ms or 0.0) if known else None,
        latency_ms_p50=None,
        latency_ms_p90=None,
        latency_ms_p99=None,
    )


def _mean_ms(baseline: Baseline) -> float:
    return (baseline.latency.latency_ms if baseline.latency is not None else None) or float("inf")


def _interval(above: Timed, below: Baseline) -> dict[str, float] | None:
    found = None if below.latency is None else ratio_interval(per_block(above), per_block(below.latency))
    return None if found is None else dataclasses.asdict(found)


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [v for v in found if v is not None]
    return sum(known) if known and len(known) == len(found) else None
