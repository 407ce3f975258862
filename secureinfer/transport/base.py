"""Link: an ordered byte channel to one authenticated peer, with counters that are always on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field

from ..errors import SecureInferError

PHASES = ("control", "setup", "offline", "online")
HEADER_BYTES = 64
"""Bytes of one frame's header; payload follows. Part of every cost formula."""

MAX_FRAME_BYTES = 1 << 34

NAME_PATTERN = r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?"
"""Names of parties."""

OFFLINE_DEALT_HEADERS = 4
"""Frames without payload around the dealing of one inference: data owner to dealer, dealer to model owner, and back the
same way when all is there. None on the link between the owners, where an inference may be running.
"""

ONLINE_BEGIN_HEADERS = 1
"""Frames without payload that begin one inference online: data owner to model owner. One round."""


@dataclass(frozen=True)
class Address:
    """What a frame belongs to. The receiver states what it expects; any difference is a WireError.

    phase: one of PHASES. inference: index, 0 in setup. step: index in the plan. value: ordinal inside the
    step.
    """

    phase: str
    inference: int = 0
    step: int = 0
    value: int = 0


@dataclass
class Counter:
    """What one side of a link did in one (phase, inference, step).

    waiting_seconds: how long its thread was blocked, in `receive` because nothing had come, or in `send` because no more
    was taken. A time, and so no part of what two counters are compared by.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    waiting_seconds: float = field(default=0.0, compare=False)

    def add(self, other: Counter) -> None:
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received
        self.frames_sent += other.frames_sent
        self.frames_received += other.frames_received
        self.waiting_seconds += other.waiting_seconds


@dataclass
class Clock:
    """Lamport counts, one a (phase, inference), shared by all links of a process.

    A frame carries count + 1; receiving raises the count to the frame's. The count at the end is the number
    of rounds.
    """

    counts: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))

    def stamp(self, phase: str, inference: int) -> int:
        """The count that a frame sent now carries. Sending alone is no round, so that the own count stays."""
        return self.counts.get((phase, inference), 0) + 1

    def observe(self, phase: str, inference: int, count: int) -> None:
        """Take a received frame's count into account."""
        if count > self.counts.get((phase, inference), 0):
            self.counts[phase, inference] = count

    def rounds(self, phase: str, inference: int = 0) -> int:
        """Length of the longest chain of dependent messages that ended here."""
        return self.counts.get((phase, inference), 0)


class Link(ABC):
    """An ordered channel of frames to one peer.

    `send` never blocks on the peer's reading (frames are queued, up to a bound, then it waits for the bound);
    `receive` returns frames in the order sent, each in a writable buffer that belongs to the caller. Both
    raise PeerError naming the peer when it is gone or the deadline passes, and WireError if a frame is not
    the expected one.
    """

    peer: str

    @abstractmethod
    def send(self, address: Address, payload: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def receive(
        self,
        address: Address,
        size: int | None = None,
        *,
        limit: int = MAX_FRAME_BYTES,
        timeout: float | None = None,
    ) -> memoryview:
        """The next frame's payload. size: exact length expected, None for any up to `limit` bytes. timeout: seconds, in
        place of the link's deadline.
        """

    @abstractmethod
    def receive_any(
        self, timeout: float | None = None, *, limit: int = MAX_FRAME_BYTES
    ) -> tuple[Address, memoryview]:
        """The next frame, whatever its address: for loops that wait for the peer's next command. Until one begins, the wait
        is nobody's: nothing runs.

        timeout: seconds; None waits as long as the peer is alive (keep-alive finds a dead one). limit: bytes of
        payload; a frame that declares more is refused before it is read.
        """

    @property
    @abstractmethod
    def failure(self) -> SecureInferError | None:
        """Why this link can no longer be used, or None. Set without a call to `receive` when the peer goes
        away.
        """

    @abstractmethod
    def counters(self) -> dict[tuple[str, int, int], Counter]:
        """(phase, inference, step) -> Counter."""

    def settle(self, phase: str, inference: int) -> dict[int, Counter]:
        """Take the counters of a finished (phase, inference) out: step -> Counter. `total` still has them."""
        counters = self.counters()
        # Another thread may count meanwhile, for another phase or inference.
        keys = [key for key in list(counters) if key[:2] == (phase, inference)]
        return {key[2]: counters.pop(key) for key in keys}

    def total(self) -> Counter:
        """The sum of all counters."""
        total = Counter()
        for counter in list(self.counters().values()):
            total.add(counter)
        return total

    @abstractmethod
    def close(self) -> None:
        """Flush what is queued (bounded), then close both directions. May be called twice."""
