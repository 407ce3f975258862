"""One energy meter for all processes of a machine: counters where they can be read, else an estimate that says so.

    with EnergyMeter() as meter:
        meter.measure_idle(3)
        before = meter.read()
        ...
        print(meter.between(before, meter.read()))

A counter says what the whole machine took, whoever took it, so that there is one meter in the process that measures and
none in the parties. An estimate is the CPU time of this process and of all that it started, times a stated power.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .counters import Absent, Counter, open_nvml, open_rapl
from .cputime import CpuTime, open_cpu_time

WATTS_PER_CORE = 12.0
"""Of a busy core of a processor that is not known: the row "Any" of Green Algorithms' table
(Lannelongue et al., Advanced Science 8 (2021), 2100707)."""
ESTIMATED = "estimated"


@dataclass(frozen=True)
class Reading:
    """What the meter stood at. joules: None where unknown. cpu_seconds: of this process and all its descendants, less what
    reading took (reading_seconds), so far.
    """

    at: float
    joules: float | None
    cpu_seconds: float | None
    reading_seconds: float = 0.0


@dataclass(frozen=True)
class Spent:
    """Between two readings. joules: idle included, None where unknown. source: of joules, None with them.

    above_idle_joules: less what the idle machine takes in that time, never below 0; None where idle is unknown.
    """

    seconds: float
    joules: float | None
    above_idle_joules: float | None
    source: str | None
    cpu_seconds: float | None = None


class EnergyMeter:
    """Reads NVML and RAPL, whichever there is, and else estimates. Counters are polled in a thread while it is entered.

    watts_per_core: of the estimate. gpu: whether the work runs on GPUs; without it, what idle boards take is not counted.
    sources: counters instead of this machine's, for tests; an Absent stands for one that is not there.
    cpu_time: instead of psutil's, for tests.
    """

    def __init__(
        self,
        watts_per_core: float = WATTS_PER_CORE,
        sources: Sequence[Counter | Absent] | None = None,
        *,
        gpu: bool = True,
        cpu_time: CpuTime | Absent | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not 0 < watts_per_core < 1000:
            raise UsageError(f"a core takes more than 0 and less than 1000 W, not {watts_per_core:g}")
        opened = _machine(gpu) if sources is None else sources
        self._counters = [s for s in opened if not isinstance(s, Absent)]
        self._absent = [s for s in opened if isinstance(s, Absent)]
        time_of = open_cpu_time() if cpu_time is None else cpu_time
        self._cpu_time = None if isinstance(time_of, Absent) else time_of
        if isinstance(time_of, Absent):
            self._absent.append(time_of)
        self._watts_per_core, self._clock, self._sleep = watts_per_core, clock, sleep
        self._idle_watts: float | None = None
        self._idle_seconds: float | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def source(self) -> str | None:
        """nvml, rapl, nvml+rapl, estimated; None where nothing can be known."""
        if self._counters:
            return "+".join(sorted(counter.name for counter in self._counters))
        return None if self._cpu_time is None else ESTIMATED

    def read(self) -> Reading:
        with self._lock:
            cpu_seconds = None if self._cpu_time is None else self._cpu_time.seconds()
            joules = self._joules(cpu_seconds)
            reading = 0.0 if self._cpu_time is None else self._cpu_time.reading_seconds
            return Reading(self._clock(), joules, cpu_seconds, reading)

    def between(self, a: Reading, b: Reading) -> Spent:
        """What was spent from reading a to a later one, b."""
        seconds = b.at - a.at
        cpu = None if a.cpu_seconds is None or b.cpu_seconds is None else b.cpu_seconds - a.cpu_seconds
        if a.joules is None or b.joules is None:
            return Spent(seconds, None, None, None, cpu)
        joules = b.joules - a.joules
        above = None if self._idle_watts is None else max(0.0, joules - self._idle_watts * seconds)
        return Spent(seconds, joules, above, self.source, cpu)

    def measure_idle(self, seconds: float) -> float | None:
        """Watts of the machine while this process sleeps, for later `above_idle_joules`; None of an estimate.

        To be called before the work starts: what runs meanwhile counts as idle.
        """
        if seconds <= 0:
            raise UsageError(f"idle is measured over more than 0 seconds, not {seconds:g}")
        if not self._counters:
            return None
        before = self.read()
        self._sleep(seconds)
        spent = self.between(before, self.read())
        if spent.joules is not None and spent.seconds > 0:
            self._idle_watts, self._idle_seconds = spent.joules / spent.seconds, spent.seconds
        return self._idle_watts

    def describe(self) -> dict[str, Any]:
        """source, model, idle_watts, idle_seconds, unavailable: why each better source is not read, or no longer."""
        model = None
        if self.source == ESTIMATED:
            model = (
                f"CPU seconds of all processes x {self._watts_per_core:g} W, stated, not measured; "
                "without memory, GPUs, idle and cooling"
            )
        lost = [counter.lost for counter in self._counters if counter.lost is not None]
        return {
            "source": self.source,
            "model": model,
            "idle_watts": self._idle_watts,
            "idle_seconds": self._idle_seconds,
            "unavailable": (*(f"{absent.name}: {absent.why}" for absent in self._absent), *lost),
        }

    def poll(self) -> None:
        """Read what would wrap, or end unseen. The thread does it; tests do it themselves."""
        with self._lock:
            for counter in self._counters:
                counter.joules()
            if self._cpu_time is not None:
                self._cpu_time.seconds()

    @property
    def poll_seconds(self) -> float:
        every = [c.poll_seconds for c in self._counters if c.poll_seconds is not None]
        return min([*every, CpuTime.poll_seconds])

    def __enter__(self) -> EnergyMeter:
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_polling, name="energy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _keep_polling(self) -> None:
        while not self._stop.wait(self.poll_seconds):
            try:
                self.poll()
            except (
                Exception
            ) as error:  # a thread that ends in silence would miss wraps, and nobody would know
                sys.stderr.write(f"energy: polling failed: {error}\n")

    def _joules(self, cpu_seconds: float | None) -> float | None:
        if not self._counters:
            return None if cpu_seconds is None else cpu_seconds * self._watts_per_core
        found = [counter.joules() for counter in self._counters]
        known = [joules for joules in found if joules is not None]
        return sum(known) if len(known) == len(found) else None  # half of a machine is no figure


def _machine(gpu: bool) -> list[Counter | Absent]:
    return [open_nvml() if gpu else Absent("nvml", "the work runs on no GPU"), open_rapl()]
