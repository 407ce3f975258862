"""Whether something else ran on the machine while a case was timed: judged in the timed windows, each side by itself.

An average over the whole case would hide what ran while plaintext had its turn, which is the shorter part: a ratio is
flattered by what slows plaintext alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..measure.energy import EnergyMeter, Reading
from ..measure.load import LEAST_SECONDS, busy_seconds

MOST_OTHER_CORES = 0.25
"""What an idle system takes; more than this makes plaintext slow and the ratio flattering."""
WINDOW_SECONDS = 1.0
"""The kernel counts in ticks of 10 ms: over a second of two cores that leaves 0.05 cores of doubt, over 20 ms a core."""
MOST_DISTURBED = 0.1
"""The part of a side's timed seconds that may have been disturbed."""

SECURE, PLAINTEXT, CHOICE = "private inferences", "plaintext", "the choice of plaintext's threads"


@dataclass(frozen=True)
class Mark:
    """A moment: the meter's reading, and the processor seconds of everybody, None where the system does not tell."""

    reading: Reading
    busy: float | None


class Quiet:
    """What other processes took in the windows of each side. busy: instead of the system's, for tests."""

    def __init__(self, meter: EnergyMeter, busy: Callable[[], float | None] = busy_seconds) -> None:
        self._meter, self._busy = meter, busy
        self._windows: dict[str, list[tuple[float, float]]] = {}

    def mark(self) -> Mark:
        return Mark(self._meter.read(), self._busy())

    def add(self, side: str, begin: Mark, end: Mark) -> None:
        """A timed window, from one mark to a later one. Short ones of a side are judged together, in their order."""
        if begin.busy is None or end.busy is None:
            return
        a, b = begin.reading, end.reading
        if a.cpu_seconds is None or b.cpu_seconds is None:
            return
        ours = b.cpu_seconds - a.cpu_seconds + b.reading_seconds - a.reading_seconds
        self._windows.setdefault(side, []).append((b.at - a.at, end.busy - begin.busy - ours))

    def faults(self) -> list[str]:
        """Of each side that was disturbed; nothing where it is not known."""
        return [fault for side, windows in self._windows.items() if (fault := _fault(side, _joined(windows)))]


def _joined(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(seconds, seconds that others took) of windows of WINDOW_SECONDS at least; what is left belongs to the last."""
    joined: list[tuple[float, float]] = []
    seconds = others = 0.0
    for more_seconds, more_others in windows:
        seconds, others = seconds + more_seconds, others + more_others
        if seconds >= WINDOW_SECONDS:
            joined.append((seconds, others))
            seconds = others = 0.0
    if joined:
        joined[-1] = joined[-1][0] + seconds, joined[-1][1] + others
    elif seconds >= LEAST_SECONDS:
        joined.append((seconds, others))
    return joined


def _fault(side: str, windows: list[tuple[float, float]]) -> str | None:
    total = sum(seconds for seconds, _ in windows)
    disturbed = [(seconds, others) for seconds, others in windows if others / seconds > MOST_OTHER_CORES]
    lost = sum(seconds for seconds, _ in disturbed)
    if not disturbed or lost <= MOST_DISTURBED * total:
        return None
    cores = sum(others for _, others in disturbed) / lost
    return (
        f"the machine was not quiet: other processes took {cores:.1f} of its {os.cpu_count()} cores in {lost:.1f} of the "
        f"{total:.1f} s of {side}"
    )
