"""Whether the machine was busy with something else while a baseline was timed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

STAT = Path("/proc/stat")
LEAST_SECONDS = 0.2
"""The kernel counts in ticks of 10 ms; a shorter block says nothing."""


class OtherLoad:
    """Cores that other processes kept busy during a `with` block.

    cores: None where the system does not tell (it is read from /proc/stat), or the block was too short.
    """

    cores: float | None = None

    def __enter__(self) -> OtherLoad:
        self._start = (time.perf_counter(), time.process_time(), busy_seconds())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, own, everybody = self._start
        elapsed, mine, after = time.perf_counter() - wall, time.process_time() - own, busy_seconds()
        if everybody is not None and after is not None and elapsed >= LEAST_SECONDS:
            self.cores = max(0.0, (after - everybody - mine) / elapsed)

    def disturbs(self, threads: int) -> bool:
        """Whether fewer cores than `threads` were left; a quarter of a core is what an idle system takes."""
        return self.cores is not None and (os.cpu_count() or 1) - self.cores < threads - 0.25


def busy_seconds() -> float | None:
    """CPU seconds of all processes since the system started, without idle time."""
    if not STAT.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, *rest = map(
        int, STAT.read_text().split("\n")[0].split()[1:]
    )
    stolen = rest[0] if rest else 0
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
