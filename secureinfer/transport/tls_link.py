"""Links over TLS 1.3: one connection for each pair of parties, read and written by the threads that use it.

Frames follow each other as they are, without a layer between them and TLS. A small frame is written at once by
the thread that sends it, and received by the thread that waits for it, so that a message costs no thread
switch. So does a large one as long as the socket takes it. What it does not take waits in a bounded queue,
which a thread of its own empties, so that two sides that both send before they receive never wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections import deque

from ..errors import PeerError, SecureInferError
from .base import Clock
from .framing import FramedLink
from .keeper import Keeper
from .limits import FLUSH_SECONDS, Limits
from .wire import Buffer, DirectReader

ROOM_SECONDS = 0.005
"""How long the sending thread waits for room in the socket. A peer that reads, over a network as fast as this machine, makes
it in 1 or 2 ms; over a slower one, or while both sides send, the rest is copied and sent from a thread of its own.
"""
RECORD_BYTES = 16 << 10
"""Of TLS. The header of a frame shares the first one with the payload."""
PIECE_BYTES = 256 << 10
"""What is given to TLS at once, and copied into the queue at once. TLS takes all of it or, where the socket is full, must be
given the same again.
"""
AHEAD_PIECES = 64
PIECE_SECONDS = 0.001
"""Copying is at most so far ahead of a sender's thread that sends a piece within this time: memory that is used again costs
no page faults. Over a slower network all of a frame is copied at once.
"""

STALL_SECONDS = 1.0
"""How late a thread of a busy process may be with its sign of life: loading torch holds the interpreter's lock."""
FULL_BYTES = 64 << 10
"""Received and not yet read: from here on the peer may be silent because there is no room."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)
_KEEPER = Keeper()


class TlsLink(FramedLink):
    """A Link on one TLS connection. tls_dial.dial and tls_listener.TlsListener make them.

    OpenSSL's connections are for one thread at a time, so that each call into it holds `_tls`; none of them waits, and
    each moves little (a piece out, a record of 16 KiB in). Whoever has to wait polls the socket outside that lock.
    """

    def __init__(
        self, peer: str, session_id: bytes, clock: Clock, limits: Limits, sock: ssl.SSLSocket
    ) -> None:
        super().__init__(peer, session_id, clock, limits.deadline, DirectReader(self._fill))
        sock.setblocking(False)
        self._sock = sock
        self._tls = threading.Lock()
        self._readable = _poll(sock, select.POLLIN)
        self._writable = _poll(sock, select.POLLOUT)  # for who holds the send lock
        self._limit = limits.queued_bytes
        self._queue: deque[Buffer] = deque()
        self._queued = 0
        self._changed = threading.Condition()
        self._sender: threading.Thread | None = None
        self._ended: SecureInferError | None = None
        self._closed = False
        self._keepalive = limits.keepalive
        self.period = min(1.0, limits.keepalive / 4)
        self._spoke = time.monotonic()
        self._got = self._heard = self._silent = 0
        _KEEPER.add(self)

    @property
    def failure(self) -> SecureInferError | None:
        if self._failure is None and self._ended is None and self._hung_up():
            self._end("is gone: its connection ended")
        return self._failure or self._ended

    @property
    def patience(self) -> float:
        """Seconds to flush at the end: a peer that is gone or stalled takes nothing more."""
        return 0.1 if self._ended is not None or isinstance(self._failure, PeerError) else FLUSH_SECONDS

    # --- sending ---

    @property
    def _backlog(self) -> bool:
        return self._queued > 0

    def _put(self, header: bytes, payload: memoryview) -> None:
        if self._ended is not None or self._closed:
            raise self._failure or self._ended or PeerError(self.peer, "the link is closed")
        self._spoke = time.monotonic()
        joined = RECORD_BYTES - len(header)
        parts = [memoryview(header + payload[:joined]), payload[joined:]]
        if not self._queued:  # only a sender that holds the send lock adds to it
            parts = self._write_now(parts)
        if any(len(part) for part in parts):
            self._enqueue(parts, self._spoke + self.deadline)

    def _write_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Write while the socket takes it, or soon does; returns the rest."""
        for i, part in enumerate(parts):
            done = 0
            while done < len(part):
                count = self._write(part[done : done + PIECE_BYTES])
                if not count and not self._room():
                    return [part[done:], *parts[i + 1 :]]
                done += count
        return []

    def _room(self) -> bool:
        """Whether the socket takes more, now or soon."""
        start = time.perf_counter()
        ready = bool(self._writable.poll(ROOM_SECONDS * 1000))
        self._blocked_sending += time.perf_counter() - start
        return ready

    def _write(self, view: Buffer) -> int:
        """Bytes that TLS took, all of them; 0 where the socket is full, and then the next call must give the same."""
        try:
            with self._tls:
                return self._sock.write(view)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError):
            raise self._end("is gone: its connection broke") from None

    def _enqueue(self, parts: list[memoryview], deadline: float) -> None:
        """Copy into the queue once it is below its limit: one inside a frame would stop two sides that send at once."""
        with self._changed:
            start = time.perf_counter()
            while self._queued >= self._limit and self._ended is None and not self._closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            self._blocked_sending += time.perf_counter() - start
            if self._ended is not None or self._closed:
                raise self._failure or self._ended or PeerError(self.peer, "the link is closed")
            stalled = self._queued >= self._limit
            if not stalled:
                self._queued += sum(len(part) for part in parts)
        if stalled:
            error = self.fail(PeerError(self.peer, f"took no data for {self.deadline:g} s"))
            self._end("took no data")
            self._shut_down()
            raise error
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_queued, name=f"send-{self.peer}", daemon=True)
            self._sender.start()
        quick = True
        for part in parts:
            for i in range(0, len(part), PIECE_BYTES):
                copied = _copy(part[i : i + PIECE_BYTES])
                with self._changed:
                    self._queue.append(copied)
                    self._changed.notify_all()
                    if quick and len(self._queue) >= AHEAD_PIECES:
                        quick = self._changed.wait(PIECE_SECONDS)

    def _send_queued(self) -> None:
        """The sender's thread: the queue in order, until the link ends."""
        writable = _poll(self._sock, select.POLLOUT)
        while True:
            with self._changed:
                while not self._queue:
                    if self._ended is not None or (self._closed and not self._queued):
                        return
                    self._changed.wait()
                view = memoryview(self._queue[0])
            done = 0
            try:
                while done < len(view):
                    if self._ended is not None:
                        return
                    count = self._write(view[done:])
                    if not count:
                        writable.poll(1000)
                    done += count
            except SecureInferError:
                return
            with self._changed:
                if self._queue:
                    self._queue.popleft()
                    self._queued -= len(view)
                self._changed.notify_all()

    # --- receiving ---

    def _fill(self, view: memoryview, deadline: float | None) -> None:
        """Fill all of the view. Raises PeerError at the stream's end and past the deadline."""
        read, tls = self._sock.read, self._tls
        done, size = 0, len(view)
        while done < size:
            if self._failure is not None:
                raise self._failure
            with tls:
                pending = self._sock.pending()
            if not pending:  # a read would fail first, and an exception costs more than a poll
                self._wait(deadline)
            try:
                with tls:
                    # Given a buffer, it returns a count.
                    count = int(read(size - done, view[done:]))
            except ssl.SSLWantReadError:
                continue  # part of a record has come
            except ssl.SSLWantWriteError:
                time.sleep(0.001)  # TLS has to answer first, and the socket is full
                continue
            except (OSError, ValueError):
                # Without TLS's own end: the process died or the network cut it.
                raise self.fail(
                    self._ended or PeerError(self.peer, "is gone: its connection broke")
                ) from None
            if not count:
                raise self.fail(PeerError(self.peer, "closed the link"))
            done += count
            self._got += count

    def _wait(self, deadline: float | None) -> None:
        """For the socket to have something to read. Raises PeerError past the deadline."""
        # In turns of a second: closing this side wakes who waits, unless it was just about to.
        left = 1.0 if deadline is None else deadline - time.monotonic()
        if left > 0:
            start = time.perf_counter()
            self._readable.poll(min(left, 1.0) * 1000)
            self._blocked_receiving += time.perf_counter() - start
        else:
            error = self.fail(PeerError(self.peer, "sent nothing within the deadline"))
            self._end("sent nothing within the deadline")
            self._shut_down()
            raise error

    # --- life and end ---

    def tick(self) -> None:
        """Called by the keeper. A stopped process still acknowledges in its kernel, so that only bytes count as life."""
        if self.failure is not None:
            return
        try:
            unread = _ioctl(self._sock, termios.FIONREAD)
        except (OSError, ValueError):
            return
        if self._got + unread != self._heard or unread >= FULL_BYTES:
            self._heard, self._silent = self._got + unread, 0
        else:
            # Ticks and not time: a process that was stopped itself has heard nothing meanwhile.
            self._silent += 1
        if self._silent * self.period > 2 * self._keepalive + STALL_SECONDS:
            self._end("is gone: it gives no sign of life")
            self._shut_down()
        elif time.monotonic() - self._spoke >= self._keepalive / 2:
            with contextlib.suppress(SecureInferError):
                self.say_alive()

    def _hung_up(self) -> bool:
        try:
            return bool(_poll(self._sock, _HUNG_UP).poll(0))
        except (OSError, ValueError):
            return True

    def _end(self, reason: str) -> SecureInferError:
        """Nothing can be sent any more. What had arrived before can still be read."""
        with self._changed:
            if self._ended is None:
                self._ended = self._failure or PeerError(self.peer, reason)
            self._queue.clear()
            self._queued = 0
            self._changed.notify_all()
        return self._ended

    def _shut_down(self) -> None:
        """Wake whoever polls. The plain socket's call: ssl's would put TLS away under a thread that reads."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        stop = time.monotonic() + self.patience
        self.fail(PeerError(self.peer, "the link was closed on this side"))
        _KEEPER.remove(self)
        with self._changed:
            self._changed.notify_all()
            while self._queued and self._ended is None:
                if not self._changed.wait(max(0.0, stop - time.monotonic())):
                    break
            flushed = not self._queued
        if flushed and self._ended is None:
            # TLS's own end, after which the peer knows that nothing was cut off; its answer is not waited for.
            with contextlib.suppress(OSError, ValueError), self._tls:
                self._sock.unwrap()
        self._part(stop)
        self._end("the link was closed on this side")
        if self._sender is not None:
            self._sender.join(1.0)
        with self._tls:
            self._sock.close()

    def _part(self, stop: float) -> None:
        """End this direction and wait until the peer's kernel has all of it: closing sooner, with something unread, is a
        reset, which throws away what is still on its way.
        """
        readable = _poll(self._sock, select.POLLIN)
        with contextlib.suppress(OSError, ValueError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            while time.monotonic() < stop and _ioctl(self._sock, termios.TIOCOUTQ):
                if readable.poll(2) and not socket.socket.recv(self._sock, PIECE_BYTES):
                    break
        self._shut_down()


def _copy(view: memoryview) -> Buffer:
    if len(view) < RECORD_BYTES:
        return bytes(view)
    import numpy

    # Without the interpreter's lock, which the sender's thread needs after each piece.
    return numpy.frombuffer(view, numpy.uint8).copy().data


def _poll(sock: socket.socket, events: int) -> select.poll:
    poll = select.poll()
    poll.register(sock.fileno(), events)
    return poll


def _ioctl(sock: socket.socket, request: int) -> int:
    """Bytes that wait in the kernel: received and unread (FIONREAD), or sent and not acknowledged (TIOCOUTQ)."""
    count: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), request, bytes(4)))[0]
    return count
