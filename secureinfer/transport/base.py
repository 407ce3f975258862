"""Link: an ordered byte channel to one authenticated peer, with counters that are always on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field

PHASES = ("control", "setup", "offline", "online")
HEADER_BYTES = 64
"""Bytes of one frame's header; payload follows. Part of every cost formula."""

MAX_FRAME_BYTES = 1 << 34


@dataclass(frozen=True)
class Address:
    """What a frame belongs to. The receiver states what it expects; any difference is a WireError.

    phase: one of PHASES. inference: index, 0 in setup. step: index in the plan. value: ordinal inside the step.
    """

    phase: str
    inference: int = 0
    step: int = 0
    value: int = 0


@dataclass
class Counter:
    """What one side of a link did in one (phase, inference, step)."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0


@dataclass
class Clock:
    """Lamport counts, one a (phase, inference), shared by all links of a process.

    A frame carries count + 1; receiving raises the count to the frame's. The count at the end is the number of rounds.
    """

    counts: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))


class Link(ABC):
    """An ordered channel of frames to one peer.

    `send` never blocks on the peer's reading (frames are queued, up to a bound, then it waits for the bound); `receive`
    returns frames in the order sent. Both raise PeerError naming the peer when it is gone or the deadline passes, and
    WireError if a frame is not the expected one.
    """

    peer: str

    @abstractmethod
    def send(self, address: Address, payload: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def receive(self, address: Address, size: int | None = None) -> memoryview:
        """The next frame's payload. size: exact length expected, None for any up to MAX_FRAME_BYTES."""

    @abstractmethod
    def counters(self) -> dict[tuple[str, int, int], Counter]:
        """(phase, inference, step) -> Counter."""

    @abstractmethod
    def close(self) -> None: ...
