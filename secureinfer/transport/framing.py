"""FramedLink: what every Link does with a frame, whatever carries the bytes: header, order, counters, Lamport
clock.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable

from ..errors import PeerError, SecureInferError, WireError
from .base import HEADER_BYTES, MAX_FRAME_BYTES, NAME_PATTERN, Address, Clock, Counter, Link
from .wire import Buffer, Header, Reader, flat, pack_header, unpack_header

ERROR = Address("control", 0, 0, 1)
"""A frame with which a peer ends the session and says why; it may come where any other is expected."""

ALIVE = Address("control", 0, 0, 4)
"""A frame without payload which says only that its sender is alive. It takes no number and is not counted, and it may
come where any other is expected.
"""

MAX_ERROR_BYTES = 1 << 16
MAX_ERROR_TEXT = 2000


class FramedLink(Link):
    """A Link over a byte stream in each direction.

    deadline: seconds that one `send` or `receive` may take. reader: over the incoming stream; it raises PeerError
    at the stream's end and past the deadline. A subclass gives `_put`. One thread may send while another receives;
    two threads may send at once.
    """

    def __init__(self, peer: str, session_id: bytes, clock: Clock, deadline: float, reader: Reader) -> None:
        if len(session_id) != 16:
            raise WireError("a session id has 16 bytes")
        self.peer = peer
        self.clock = clock
        self.deadline = deadline
        self._session_id = session_id
        self._counters: dict[tuple[str, int, int], Counter] = {}
        self._send_lock = threading.Lock()
        self._sent = 0
        self._received = 0
        self._reader = reader
        self._failure: SecureInferError | None = None
        self._settled: list[Counter] = []
        # Seconds in which the thread that receives, and the one that holds the send lock, were blocked in the present frame.
        self._blocked_receiving = self._blocked_sending = 0.0

    @abstractmethod
    def _put(self, header: bytes, payload: memoryview) -> None:
        """Queue one frame. Copies the payload. Raises PeerError where nothing can be sent any more."""

    @property
    def _backlog(self) -> bool:
        """Whether frames wait to be sent."""
        return False

    @property
    def failure(self) -> SecureInferError | None:
        return self._failure

    def fail(self, error: SecureInferError) -> SecureInferError:
        """Keep the first reason for which this link ended, and return it."""
        if self._failure is None:
            self._failure = error
        return self._failure

    def interrupt(self, error: SecureInferError) -> None:
        """End this link from another thread: who waits in it, or uses it later, raises `error`. The peer is told."""
        self.send_error(error)
        self.fail(error)

    def send(self, address: Address, payload: Buffer = b"") -> None:
        if self._failure is not None:
            raise self._failure
        self._send(address, flat(payload))

    def _send(self, address: Address, view: memoryview) -> None:
        with self._send_lock:
            self._blocked_sending = 0.0
            lamport = self.clock.stamp(address.phase, address.inference)
            self._put(pack_header(self._session_id, address, self._sent, len(view), lamport), view)
            self._sent += 1
            counter = self._counter(address)
            counter.bytes_sent += HEADER_BYTES + len(view)
            counter.frames_sent += 1
            counter.waiting_seconds += self._blocked_sending

    def receive(
        self,
        address: Address,
        size: int | None = None,
        *,
        limit: int = MAX_FRAME_BYTES,
        timeout: float | None = None,
    ) -> memoryview:
        deadline = time.monotonic() + (self.deadline if timeout is None else timeout)
        self._blocked_receiving = 0.0
        header = self._header(deadline)
        if header.address == ERROR:
            self._raise_peers_error(header)
        if header.address != address:
            raise self.fail(
                WireError(f"{self.peer}: expected a frame for {address}, got one for {header.address}")
            )
        if size is not None and header.length != size:
            raise self.fail(
                WireError(
                    f"{self.peer}: expected {size} bytes for {address}, the frame declares {header.length}"
                )
            )
        self._check_length(header, limit)
        return self._payload(header, deadline, trusted=size is not None)

    def receive_any(
        self, timeout: float | None = None, *, limit: int = MAX_FRAME_BYTES
    ) -> tuple[Address, memoryview]:
        deadline = None if timeout is None else time.monotonic() + timeout
        header = self._header(deadline)
        if header.address == ERROR:
            self._raise_peers_error(header)
        self._check_length(header, limit)
        self._blocked_receiving = 0.0
        return header.address, self._payload(header, time.monotonic() + self.deadline, trusted=False)

    def counters(self) -> dict[tuple[str, int, int], Counter]:
        return self._counters

    def settle(self, phase: str, inference: int) -> dict[int, Counter]:
        taken = super().settle(phase, inference)
        self._settled.extend(taken.values())
        if len(self._settled) > 1024:
            self._settled = [_sum(self._settled)]
        return taken

    def total(self) -> Counter:
        return _sum([*self._settled, super().total()])

    def say_alive(self) -> None:
        """Send a frame that only says so, unless another is being sent. Raises PeerError where nothing can be sent."""
        if self._send_lock.acquire(blocking=False):
            try:
                if not self._backlog:
                    self._put(pack_header(self._session_id, ALIVE, self._sent, 0, 0), memoryview(b""))
            finally:
                self._send_lock.release()

    def send_error(self, error: SecureInferError) -> None:
        """Tell the peer why this side ends the session: its public text only. Never raises."""
        body = {"code": error.code, "text": error.for_peer, "detail": error.public_detail}
        with contextlib.suppress(SecureInferError):
            # Also where receiving failed: that peer should read why.
            self._send(ERROR, memoryview(json.dumps(body).encode()))

    def _raise_peers_error(self, header: Header) -> None:
        """The peer ended the session and said why. Its text is shown; nothing else of it is trusted."""
        if header.length > MAX_ERROR_BYTES:
            raise self.fail(WireError(f"{self.peer}: an error frame of {header.length} bytes"))
        try:
            body = json.loads(bytes(self._payload(header, time.monotonic() + self.deadline, trusted=False)))
            code, text, detail = (str(body[key])[:MAX_ERROR_TEXT] for key in ("code", "text", "detail"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self.fail(WireError(f"{self.peer}: an error frame that cannot be read")) from None
        shown = "".join(c for c in text if c.isprintable())
        if code == PeerError.code and re.fullmatch(NAME_PATTERN, detail):
            raise self.fail(PeerError(detail, f"is gone, {self.peer} says"))
        raise self.fail(PeerError(self.peer, f"ended the session: {shown}"))

    def _header(self, deadline: float | None) -> Header:
        while (header := self._any_header(deadline)).address == ALIVE:
            if header.length:
                raise self.fail(WireError(f"{self.peer}: a sign of life with {header.length} bytes"))
        return header

    def _any_header(self, deadline: float | None) -> Header:
        if self._failure is not None:
            raise self._failure
        try:
            header = unpack_header(self._reader.read(HEADER_BYTES, deadline))
        except WireError as error:
            raise self.fail(WireError(f"{self.peer}: {error}")) from None
        if header.session_id != self._session_id:
            raise self.fail(WireError(f"{self.peer}: a frame of another session"))
        if header.sequence != self._received:
            raise self.fail(
                WireError(f"{self.peer}: expected frame number {self._received}, got {header.sequence}")
            )
        return header

    def _check_length(self, header: Header, limit: int) -> None:
        if header.length > limit:
            text = f"{self.peer}: {header.address} declares {header.length} bytes, at most {limit} are taken here"
            raise self.fail(WireError(text))

    def _payload(self, header: Header, deadline: float | None, *, trusted: bool) -> memoryview:
        data = self._reader.read(header.length, deadline, trusted=trusted)
        self._received += 1
        self.clock.observe(header.address.phase, header.address.inference, header.lamport)
        counter = self._counter(header.address)
        counter.bytes_received += HEADER_BYTES + header.length
        counter.frames_received += 1
        counter.waiting_seconds += self._blocked_receiving
        return memoryview(data)

    def _counter(self, address: Address) -> Counter:
        key = (address.phase, address.inference, address.step)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters.setdefault(key, Counter())
        return counter


def _sum(counters: Iterable[Counter]) -> Counter:
    total = Counter()
    for counter in counters:
        total.add(counter)
    return total
