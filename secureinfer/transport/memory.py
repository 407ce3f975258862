"""In-process links: the twin of tls_link.py for tests, with the same frames, counters, clock and errors."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from ..errors import PeerError, SecureInferError
from .base import Clock
from .framing import FramedLink
from .limits import MAX_QUEUED_BYTES
from .wire import Buffer, ChunkReader


class Channel:
    """One direction: a bounded queue of chunks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.chunks: deque[Buffer] = deque()
        self.queued = 0
        self.closed = False
        self.changed = threading.Condition()

    def put(self, chunks: Sequence[Buffer], deadline: float) -> bool:
        """Queue chunks once the queue is below its limit; False when closed or past the deadline."""
        with self.changed:
            while self.queued >= self.limit and not self.closed:
                if not self.changed.wait(deadline - time.monotonic()):
                    return False
            if self.closed:
                return False
            self.chunks.extend(chunks)
            self.queued += sum(len(c) for c in chunks)
            self.changed.notify_all()
            return True

    def get(self, deadline: float | None) -> Buffer | None:
        """The next chunk, or None at the end. Raises TimeoutError past the deadline."""
        with self.changed:
            while not self.chunks:
                if self.closed:
                    return None
                if not self.changed.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TimeoutError
            chunk = self.chunks.popleft()
            self.queued -= len(chunk)
            self.changed.notify_all()
            return chunk

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class MemoryLink(FramedLink):
    """A Link inside one process. Frames that were queued before the peer closed can still be received."""

    def __init__(
        self, peer: str, session_id: bytes, clock: Clock, out: Channel, into: Channel, deadline: float
    ) -> None:
        super().__init__(peer, session_id, clock, deadline, ChunkReader(self._next_chunk))
        self._out = out
        self._into = into

    def _put(self, header: bytes, payload: memoryview) -> None:
        frame = [header, bytes(payload)] if len(payload) else [header]
        start = time.perf_counter()
        taken = self._out.put(frame, time.monotonic() + self.deadline)
        self._blocked_sending += time.perf_counter() - start
        if not taken:
            if self._out.closed:  # what the peer sent before can still be received: this link has not failed
                raise PeerError(self.peer, "closed the link")
            raise self.fail(PeerError(self.peer, f"took no data for {self.deadline:g} s"))

    def _next_chunk(self, deadline: float | None) -> Buffer:
        if self._failure is not None:
            raise self._failure
        start = time.perf_counter()
        try:
            chunk = self._into.get(deadline)
        except TimeoutError:
            raise self.fail(PeerError(self.peer, "sent nothing within the deadline")) from None
        finally:
            self._blocked_receiving += time.perf_counter() - start
        if chunk is None:
            raise self.fail(PeerError(self.peer, "closed the link"))
        return chunk

    def interrupt(self, error: SecureInferError) -> None:
        super().interrupt(error)
        self._into.close()

    def close(self) -> None:
        self.fail(PeerError(self.peer, "the link was closed on this side"))
        self._out.close()
        self._into.close()


def memory_links(
    names: Sequence[str],
    session_id: bytes,
    *,
    deadline: float = 60.0,
    limit: int = MAX_QUEUED_BYTES,
) -> dict[str, dict[str, MemoryLink]]:
    """Links between every two names: result[a][b] is a's link to b. `clocks` of one party are one object.

    deadline: seconds for each send and receive. limit: bytes queued in one direction before `send` waits.
    """
    clocks = {name: Clock() for name in names}
    channels = {(a, b): Channel(limit) for a in names for b in names if a != b}
    return {
        a: {
            b: MemoryLink(b, session_id, clocks[a], channels[a, b], channels[b, a], deadline)
            for b in names
            if b != a
        }
        for a in names
    }
