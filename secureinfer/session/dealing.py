"""A data owner's indices: dealt in a thread of its own while inferences run on those that are ready, or just counted up
where there is no dealer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from ..errors import CorrelationError, SecureInferError
from .faults import told

CHECK_SECONDS = 0.2


class Undealt:
    """Indices of a session without a dealer: the next one whenever an inference begins, and nothing to prepare for it."""

    ready = 0
    busy = False
    error: SecureInferError | None = None

    def __init__(self) -> None:
        self._next = 0

    def order(self, count: int) -> None:
        """Nothing is dealt."""

    def wait(self, check: Callable[[], None], *, for_all: bool) -> None:
        """Nothing is waited for."""

    @contextlib.contextmanager
    def take(self) -> Iterator[int]:
        """The next index, for an inference that ends with the block. It is never used again, whatever happens (R3)."""
        index = self._next
        self._next += 1  # burnt before its first frame leaves
        yield index

    @contextlib.contextmanager
    def pause(self, timeout: float | None = None) -> Iterator[None]:
        """Nothing goes on beside this thread."""
        yield

    def close(self) -> None:
        """Nothing is to be ended."""


class Dealing:
    """Counts indices up, deals those that were ordered one after the other, and hands out the lowest that is ready.

    deal: deals one index, with every party; called in the thread, which is the only one that uses the dealer's link
    meanwhile. room: how many inferences' material may be there at once, that of a running one included. party: for
    errors that are not ours. An index is never used again, whatever happens (R3).
    """

    def __init__(self, deal: Callable[[int], None], party: str) -> None:
        self._deal = deal
        self._party = party
        self.room = 1
        self._changed = threading.Condition()
        self._next = 0
        self._ordered = 0
        self._ready: deque[int] = deque()
        self._dealing = self._running = self._held = self._closed = False
        self._thread: threading.Thread | None = None
        self.error: SecureInferError | None = None
        """Why dealing ended. The session cannot go on."""

    @property
    def ready(self) -> int:
        """How many inferences can begin at once."""
        return len(self._ready)

    @property
    def busy(self) -> bool:
        """Whether an index is being dealt."""
        return self._dealing

    def order(self, count: int) -> None:
        """Deal so many more, as soon as there is room. Returns at once."""
        with self._changed:
            self._ordered += count
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dealing", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, check: Callable[[], None], *, for_all: bool) -> None:
        """Until one index is ready, or all that were ordered are. check: called now and then; it raises to end this."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_there(for_all), CHECK_SECONDS):
                    break
            check()
        if self.error is not None:
            check()
            raise self.error

    def _is_there(self, for_all: bool) -> bool:
        if self.error is not None:
            return True
        return not (self._ordered or self._dealing) if for_all else bool(self._ready)

    @contextlib.contextmanager
    def take(self) -> Iterator[int]:
        """The lowest index that is ready, for an inference that ends with the block. Raises CorrelationError without one."""
        with self._changed:
            if not self._ready:
                raise CorrelationError("no inference is prepared; call prepare first")
            index = self._ready.popleft()
            self._running = True
        try:
            yield index
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def pause(self, timeout: float | None = None) -> Iterator[None]:
        """Nothing is dealt in the block, so that this thread may use the dealer's link. Waits for an index that is being
        dealt, or for `timeout` seconds.
        """
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._dealing, timeout)
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _may_deal(self) -> bool:
        return bool(self._ordered) and not self._held and len(self._ready) + self._running < self.room

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_deal())
                if self._closed:
                    return
                index = self._next
                self._next += 1  # burnt before its first frame leaves
                self._ordered -= 1
                self._dealing = True
            try:
                self._deal(index)
            except BaseException as error:
                with self._changed:
                    self.error = told(error, self._party)
                    self._dealing = False
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(index)
                self._dealing = False
                self._changed.notify_all()
