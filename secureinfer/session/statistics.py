"""What one party counts in a session, for each phase and inference, as JSON (checked by measure/stats.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..measure.memory import peak_gpu_memory_bytes, peak_memory_bytes
from ..transport.base import Clock, Counter, Link

MAX_RUNS = 4096
MAX_DETAILED = 8
"""Runs that are kept in each phase, and those of them with figures for each step besides the first (cold)
one.
"""


SETTLE_SECONDS = 5.0
"""What a report waits for a run that is just about to end."""


class Statistics:
    """Times, rounds and bytes of each run of a phase at this party. Two runs may overlap, in two threads: bytes and rounds
    are counted for each, and what its thread waited, but whose the processor's time was is then not known.
    """

    def __init__(self, party: str, role: str, links: Mapping[str, Link], clock: Clock, threads: int) -> None:
        self._head = {"party": party, "role": role, "threads": threads}
        self._links = links
        self._clock = clock
        self._runs: dict[str, deque[dict[str, Any]]] = {
            phase: deque(maxlen=MAX_RUNS) for phase in ("setup", "offline", "online")
        }
        self._changed = threading.Condition()
        self._active = self._begun = 0

    @property
    def active(self) -> int:
        """How many runs are going on."""
        return self._active

    @contextmanager
    def run(self, phase: str, inference: int, step_times: dict[int, float] | None = None) -> Iterator[None]:
        """Measure one run. step_times: filled by the block, seconds by plan step. A run that fails is not
        kept.
        """
        with self._changed:
            alone = not self._active
            self._active += 1
            self._begun += 1
            begun = self._begun
        start, cpu = time.perf_counter(), time.process_time()
        try:
            yield
            latency, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
            with self._changed:
                counted = {peer: link.settle(phase, inference) for peer, link in self._links.items()}
                runs = self._runs[phase]
                if len(runs) > MAX_DETAILED:
                    runs[-MAX_DETAILED]["steps"] = {}
                runs.append(
                    {
                        "inference": inference,
                        "latency_ms": 1000 * latency,
                        "waiting_ms": sum(
                            _waiting_ms(c) for steps in counted.values() for c in steps.values()
                        ),
                        "rounds": self._clock.counts.pop((phase, inference), 0),
                        "cpu_seconds": cpu_seconds if alone and self._begun == begun else None,
                        "peak_memory_bytes": peak_memory_bytes(),
                        "peak_gpu_memory_bytes": peak_gpu_memory_bytes(),
                        "links": {peer: _link(steps) for peer, steps in counted.items()},
                        "steps": _steps(counted, step_times or {}),
                    }
                )
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def to_json(self) -> dict[str, Any]:
        """All runs that have ended. A peer may know of one's end by its last frame just before it is recorded here."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active, SETTLE_SECONDS)
            return {
                **self._head,
                "phases": {phase: list(runs) for phase, runs in self._runs.items()},
                "peak_memory_bytes": peak_memory_bytes(),
                "peak_gpu_memory_bytes": peak_gpu_memory_bytes(),
            }


def _waiting_ms(counter: Counter) -> float:
    return 1000 * counter.waiting_seconds


def _link(steps: Mapping[int, Counter]) -> dict[str, int]:
    total = Counter()
    for counter in steps.values():
        total.add(counter)
    return {
        "bytes_sent": total.bytes_sent,
        "bytes_received": total.bytes_received,
        "frames_sent": total.frames_sent,
        "frames_received": total.frames_received,
    }


def _steps(counted: Mapping[str, Mapping[int, Counter]], times: Mapping[int, float]) -> dict[str, Any]:
    totals: dict[int, Counter] = {step: Counter() for step in times}
    for steps in counted.values():
        for step, counter in steps.items():
            totals.setdefault(step, Counter()).add(counter)
    return {
        str(step): {
            "latency_ms": 1000 * times[step] if step in times else None,
            "waiting_ms": _waiting_ms(total),
            "bytes_sent": total.bytes_sent,
            "bytes_received": total.bytes_received,
            "rounds": None,
        }
        for step, total in sorted(totals.items())
    }
