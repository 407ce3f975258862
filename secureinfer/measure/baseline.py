"""A plaintext baseline: warm runs before and after the private ones, and whether the machine was quiet meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from .figures import Plaintext
from .latency import summarise, time_calls
from .load import OtherLoad

MOST_DRIFT = 1.5


@dataclass(frozen=True)
class Baseline:
    """One measurement: milliseconds of each run, and what else kept the machine busy."""

    times_ms: list[float]
    load: OtherLoad


def time_plaintext(call: Callable[[], object]) -> Baseline:
    """Warm runs of a call in this process."""
    with OtherLoad() as load:
        times_ms = time_calls(call)
    return Baseline(times_ms, load)


def together(before: Baseline, after: Baseline, *, engine: str, dtype: str, threads: int) -> Plaintext:
    """Both measurements as one figure of a report."""
    return Plaintext(engine, dtype, threads, summarise([*before.times_ms, *after.times_ms]))


def unrest(before: Baseline, after: Baseline, threads: int) -> list[str]:
    """Whether the machine was busy with something else, which makes plaintext slow and the ratio flattering."""
    found = []
    for when, baseline in (("before", before), ("after", after)):
        if baseline.load.disturbs(threads):
            found.append(
                f"the machine was not quiet: other processes took {baseline.load.cores:.1f} cores while "
                f"plaintext was timed {when} the private runs"
            )
    first, second = statistics.median(before.times_ms), statistics.median(after.times_ms)
    if max(first, second) > MOST_DRIFT * min(first, second):
        found.append(f"plaintext took {first:.1f} ms before the private runs and {second:.1f} ms after")
    return found
