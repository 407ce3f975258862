"""CPU seconds of this process and all its descendants, those that ended meanwhile included, none of them twice."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from typing import Any

from .counters import BENCH, Absent

FIND_SECONDS = 0.5
"""Looking for new processes takes 6 ms, reading those that are known a tenth of that. One found late loses no time: what it
took so far is in its count."""
MOST_PASSES = 10
"""A pass in which a process ended is made again; with more than this many, something starts and ends all the time."""


@dataclass
class _Seen:
    """A process as last read. own: its threads' seconds; of_children: of descendants that ended and were waited for."""

    parent: Any
    own: float = 0.0
    of_children: float = 0.0

    @property
    def total(self) -> float:
        return self.own + self.of_children


class CpuTime:
    """Seconds since it was opened.

    A process that was waited for is in its parent's children time, and one that is still there is read itself, so a sum
    over those that are there counts each once. It misses what nobody waits for (an orphan, or a child of a parent that
    ignores SIGCHLD): of those, what was last seen is kept. So it has to be read now and then.
    """

    poll_seconds: float = 1.0

    def __init__(self, psutil: Any) -> None:
        self._error: type[Exception] = psutil.Error
        self._root = psutil.Process(os.getpid())
        # A psutil.Process is its number and its start: a number that is given again is another key.
        self._seen: dict[Any, _Seen] = {self._root: _Seen(None)}
        self._lost = 0.0
        self.reading_seconds = self._last = 0.0
        self._found = time.monotonic() - FIND_SECONDS
        self._first = self._sum()

    def seconds(self) -> float:
        """Less what reading took, some milliseconds each time: of a short inference that would be a good part.

        Not safe to call from two threads at once: the meter locks.
        """
        begin = time.thread_time()
        total = self._sum() - self._first
        self.reading_seconds += time.thread_time() - begin
        self._last = max(self._last, total - self.reading_seconds)
        return self._last

    @property
    def processes(self) -> int:
        return len(self._seen)

    def _sum(self) -> float:
        late = time.monotonic() - self._found >= FIND_SECONDS
        if late or not all(process.is_running() for process in self._seen):
            self._find()
            self._found = time.monotonic()
        for _ in range(MOST_PASSES):
            now, ended = self._pass()
            if not ended:
                break
        self._keep_lost(now)
        self._seen = now
        return self._lost + sum(seen.total for seen in now.values())

    def _find(self) -> None:
        """Take up descendants that are new; those of an orphan too, which no walk from this process finds."""
        orphans = []
        for process, seen in self._seen.items():
            if seen.parent is not None:
                parent = self._parent_of(process)
                if parent in self._seen:
                    seen.parent = parent
                else:
                    orphans.append(process)
        for start in [self._root, *orphans]:
            try:
                found = start.children(recursive=True)
            except self._error:
                continue
            for process in found:
                if process not in self._seen:
                    parent = self._parent_of(process)
                    self._seen[process] = _Seen(parent if parent in self._seen else self._root)

    def _parent_of(self, process: Any) -> Any:
        try:
            return process.parent()
        except self._error:
            return None

    def _pass(self) -> tuple[dict[Any, _Seen], bool]:
        """Read all, parents before children; and whether one ended in between, for then its parent was read too early."""
        now: dict[Any, _Seen] = {}
        ended = False
        for process in [p for p in self._seen if p.is_running()]:
            try:
                times = process.cpu_times()
            except self._error:
                ended = True
                continue
            of_children = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            now[process] = _Seen(self._seen[process].parent, times.user + times.system, of_children)
        return now, ended

    def _keep_lost(self, now: dict[Any, _Seen]) -> None:
        """Of those that ended, what did not arrive in the children time of the nearest ancestor that is there."""
        gone: dict[Any, float] = {}
        for process, seen in self._seen.items():
            if process not in now:
                heir = self._heir(seen, now)
                gone[heir] = gone.get(heir, 0.0) + seen.total
        for heir, seconds in gone.items():
            arrived = now[heir].of_children - self._seen[heir].of_children
            self._lost += max(0.0, seconds - arrived)
        for seen in now.values():
            if seen.parent is not None:
                seen.parent = self._heir(seen, now)

    def _heir(self, seen: _Seen, now: dict[Any, _Seen]) -> Any:
        parent = seen.parent
        while parent is not None and parent not in now:
            parent = self._seen[parent].parent
        return self._root if parent is None else parent


def open_cpu_time() -> CpuTime | Absent:
    try:
        psutil = importlib.import_module("psutil")
    except ImportError as error:
        return Absent("estimated", f"psutil cannot be imported ({error}): {BENCH}")
    return CpuTime(psutil)
