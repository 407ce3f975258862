"""SendQueue: frames that wait to be sent on one gRPC stream."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator

MAX_SLICE_BYTES = 1 << 20
"""Of one gRPC message. Larger ones are slower: 8 MB at once falls to a tenth of this rate."""


class SendQueue:
    """The iterator that gRPC pulls messages from: joins small frames, ends at `finish`, bounds what waits."""

    def __init__(self, limit: int) -> None:
        self._items: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._limit = limit
        self._queued = 0
        self._changed = threading.Condition()
        self._held: bytes | None = None
        self._done = False
        self.ended = threading.Event()
        self.blocked_seconds = 0.0
        """What `put` has waited for room, in all."""

    def put(self, slices: Iterable[bytes], size: int, deadline: float) -> bool:
        """Queue one frame of `size` bytes; the first slices are on their way while the later ones are still copied.

        False past the deadline. A frame larger than the limit is taken once the queue is below it: a limit inside a frame
        would stop two sides that send at once.
        """
        with self._changed:
            start = time.perf_counter()
            while self._queued >= self._limit and not self.ended.is_set():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
            self.blocked_seconds += time.perf_counter() - start
            self._queued += size
        for item in slices:
            self._items.put(item)
        return True

    def finish(self) -> None:
        """Send what is queued, then end the stream."""
        self._items.put(None)

    def abandon(self) -> None:
        """The stream is over: wake everybody who waits."""
        self.ended.set()
        self._items.put(None)
        with self._changed:
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        item = self._held
        self._held = None
        if item is None:
            item = None if self._done else self._items.get()
        if item is None or self.ended.is_set():
            self.ended.set()
            with self._changed:
                self._changed.notify_all()
            raise StopIteration
        size = len(item)
        parts = [item]
        while size < MAX_SLICE_BYTES and not self._items.empty():
            more = self._items.get()
            if more is None:
                self._done = True
                break
            if size + len(more) > MAX_SLICE_BYTES:
                self._held = more
                break
            parts.append(more)
            size += len(more)
        with self._changed:
            if self._queued >= self._limit:
                self._changed.notify_all()
            self._queued -= size
        return item if len(parts) == 1 else b"".join(parts)
