"""A bounded pool of dealt material under a load: how full it is, what was dealt and used, whether it was ever empty."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from . import report as r

POLL_SECONDS = 0.005


class Infers(Protocol):
    """What a load needs of a session."""

    @property
    def room(self) -> int | None: ...

    def infer(self, *inputs: Any) -> Any: ...

    def prepare(self, n: int = 1, wait: bool = True) -> None: ...

    def prepared(self, *, refresh: bool = True) -> int: ...


class DealtPool:
    """Material of `capacity` inferences. refill: after each inference one more is ordered, so that it stays full.

    Not for use by several threads at once, as the session is not.
    """

    def __init__(self, session: Infers, capacity: int, *, refill: bool) -> None:
        self.capacity = capacity
        self.refill = refill
        self._session = session
        self._ordered = session.prepared()
        self.dealing_seconds = 0.0
        """Of what was dealt while nothing else ran, `dealt_before` inferences."""
        self.dealt_before = 0
        self.begin()

    def begin(self) -> None:
        """A run begins: its figures are counted from here."""
        self.at_start = self.least = self._session.prepared()
        self.used = self.empty = 0

    def fill(self) -> None:
        """Deal until it is full, while nothing else runs."""
        missing = self.capacity - self._ordered
        if missing > 0:
            start, before = time.perf_counter(), self._session.prepared()
            self._session.prepare(missing)
            self.dealing_seconds += time.perf_counter() - start
            self.dealt_before += self._session.prepared(refresh=False) - before
            self._ordered += missing
        while self._session.prepared() < self._ordered:  # ordered earlier, and still being dealt
            time.sleep(POLL_SECONDS)

    def infer(self, inputs: Sequence[Any]) -> None:
        """One inference of the run; it waits for its material where there is none."""
        level = self._session.prepared(refresh=False)
        if not level:
            level = self._session.prepared()  # dealing may have caught up since
        self.least = min(self.least, level)
        self.empty += not level
        self._session.infer(*inputs)
        self.used += 1
        self._ordered = max(0, self._ordered - 1)  # what was dealt on demand had not been ordered

    def replenish(self) -> None:
        """Order what was used, which returns at once."""
        if self.refill and self._ordered < self.capacity:
            self._session.prepare(self.capacity - self._ordered, wait=False)
            self._ordered = self.capacity

    def settle(self, seconds: float) -> None:
        """Give what is under way a moment, so that a pool that keeps up is not taken for one that falls."""
        stop = time.perf_counter() + seconds
        while self._session.prepared() < self.at_start and time.perf_counter() < stop:
            time.sleep(POLL_SECONDS)
        self.at_end = self._session.prepared()

    @property
    def offline_ms(self) -> float | None:
        """Of one inference, dealt while nothing else ran."""
        return 1000 * self.dealing_seconds / self.dealt_before if self.dealt_before else None

    def fault(self) -> str | None:
        """Why what was measured cannot go on for ever; None where it can."""
        if self.empty:
            return (
                f"the pool was empty for {self.empty} of {self.used} inferences, which waited for the dealer"
            )
        if self.refill and self.at_end < self.at_start:
            return (
                f"the pool fell from {self.at_start} to {self.at_end} prepared inferences while {self.used} were used: "
                "dealing does not keep up"
            )
        return None

    def figures(self) -> r.Pool:
        return r.Pool(
            capacity=self.capacity,
            at_start=self.at_start,
            at_end=self.at_end,
            least=min(self.least, self.at_end),
            dealt=max(0, self.at_end - self.at_start + self.used),
            used=self.used,
            beforehand=not self.refill,
            empty=self.empty,
            offline_latency_ms=self.offline_ms,
        )
