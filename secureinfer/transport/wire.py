"""The bytes between processes: a frame's header, a reader over a stream of chunks, and messages on a worker's
pipe.

Nothing here trusts a length that came from outside: a declared size is checked against its limit, and memory
is taken as bytes arrive.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import PeerError, WireError
from .base import HEADER_BYTES, MAX_FRAME_BYTES, PHASES, Address

MAGIC = b"SIFR"
VERSION = 1

_HEADER = struct.Struct("<4sBBH16sQIIQQQ")
_PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}

_CLEARED_BYTES = 1 << 20
"""From this size on, memory that this side reserves is not cleared first. It is also what is reserved on a peer's word; it
doubles as bytes arrive.
"""

MAX_JSON_BYTES = 16 << 20
MAX_BLOBS = 4096
_PREFIX = struct.Struct("<4sI")
_PIPE_MAGIC = b"SIPM"
_PIPE_SLICE = 1 << 20

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """One frame's header. sequence: from 0, per direction. length: bytes of payload. lamport: the clock's
    count.
    """

    session_id: bytes
    address: Address
    sequence: int
    length: int
    lamport: int


def pack_header(session_id: bytes, address: Address, sequence: int, length: int, lamport: int) -> bytes:
    """The 64 bytes before a payload. Raises WireError where a field does not fit."""
    try:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            _PHASE_CODE[address.phase],
            0,
            session_id,
            address.inference,
            address.step,
            address.value,
            sequence,
            length,
            lamport,
        )
    except (KeyError, struct.error) as error:
        raise WireError(f"no frame can carry {address} with {length} bytes: {error}") from None


def unpack_header(data: Buffer) -> Header:
    """Read 64 bytes. Raises WireError on anything but a well-formed header of this version."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, version, phase, reserved, session_id, inference, step, value, sequence, length, lamport = (
        _HEADER.unpack(data)
    )
    if magic != MAGIC:
        raise WireError("the frame does not begin with the protocol's magic bytes")
    if version != VERSION:
        raise WireError(f"the frame has version {version}, this side speaks {VERSION}")
    if phase >= len(PHASES) or reserved != 0:
        raise WireError("the frame header has a value that this version does not define")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"the frame declares {length} bytes, the limit is {MAX_FRAME_BYTES}")
    return Header(session_id, Address(PHASES[phase], inference, step, value), sequence, length, lamport)


def flat(payload: Buffer) -> memoryview:
    """The payload as contiguous bytes, without a copy."""
    view = memoryview(payload)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise WireError("a payload must be contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Reader(Protocol):
    """Reads exact sizes from an incoming stream."""

    def read(self, size: int, deadline: float | None, *, trusted: bool = False) -> memoryview:
        """Exactly `size` bytes, writable. deadline: time.monotonic() seconds, or None. trusted: this side named the
        size, so that it may be reserved before the bytes come.
        """


class DirectReader:
    """Reads exact sizes from a stream that fills this side's memory itself, with no chunk between.

    fill(view, deadline) fills all of the view, or raises.
    """

    def __init__(self, fill: Callable[[memoryview, float | None], None]) -> None:
        self._fill = fill

    def read(self, size: int, deadline: float | None, *, trusted: bool = False) -> memoryview:
        """As Reader says. Memory for a size that is not trusted at most doubles what has come."""
        reserved = size if trusted else min(size, _CLEARED_BYTES)
        out = _reserve(reserved)
        self._fill(out, deadline)
        while (done := len(out)) < size:
            larger = _reserve(min(size, 2 * done))
            larger[:done] = out
            self._fill(larger[done:], deadline)
            out = larger
        return out


class ChunkReader(DirectReader):
    """Reads exact sizes from a stream that arrives in chunks of any size.

    next_chunk(deadline) gives the next non-empty chunk, or raises. deadline: time.monotonic() seconds, or
    None.
    """

    def __init__(self, next_chunk: Callable[[float | None], Buffer]) -> None:
        super().__init__(self._from_chunks)
        self._next = next_chunk
        self._chunk = memoryview(b"")

    def _from_chunks(self, out: memoryview, deadline: float | None) -> None:
        chunk, done = self._chunk, 0
        while done < len(out):
            if not len(chunk):
                chunk = memoryview(self._next(deadline))
            take = min(len(chunk), len(out) - done)
            out[done : done + take] = chunk[:take]
            done += take
            chunk = chunk[take:]
        self._chunk = chunk


def _uninitialised(size: int) -> memoryview:
    """Writable memory that nobody has to clear first: a bytearray's zeros cost a pass over the pages of a large frame."""
    import numpy

    return numpy.empty(size, numpy.uint8).data


def _reserve(size: int) -> memoryview:
    return memoryview(bytearray(size)) if size < _CLEARED_BYTES else _uninitialised(size)


class Pipe:
    """Messages on a socket between the caller's process and its worker: a JSON object and raw byte blobs.

    Layout: magic, JSON length (u32), JSON {"body": ..., "blobs": [sizes]}, then the blobs. peer: name for
    errors.
    """

    def __init__(self, sock: socket.socket, peer: str, *, max_blob_bytes: int = MAX_FRAME_BYTES) -> None:
        self.sock = sock
        self.peer = peer
        self.max_blob_bytes = max_blob_bytes

    def send(
        self, body: dict[str, Any], blobs: Sequence[Buffer] = (), *, timeout: float | None = None
    ) -> None:
        views = [flat(blob) for blob in blobs]
        head = json.dumps({"body": body, "blobs": [len(v) for v in views]}, allow_nan=False).encode()
        if len(head) > MAX_JSON_BYTES or len(views) > MAX_BLOBS:
            raise WireError(f"a message of {len(head)} bytes with {len(views)} blobs is over the limit")
        try:
            self.sock.settimeout(timeout)
            self.sock.sendall(_PREFIX.pack(_PIPE_MAGIC, len(head)) + head)
            for view in views:
                self.sock.sendall(view)
        except TimeoutError:
            raise PeerError(self.peer, f"took no data for {timeout:g} s") from None
        except OSError as error:
            raise PeerError(self.peer, f"its process is gone ({error.strerror or error})") from None

    def receive(self, *, timeout: float | None = None) -> tuple[dict[str, Any], list[bytearray]]:
        """The next message. timeout: seconds for all of it. Raises PeerError at end of file and at the time-
        out.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        magic, length = _PREFIX.unpack(self._exact(_PREFIX.size, deadline))
        if magic != _PIPE_MAGIC or length > MAX_JSON_BYTES:
            raise WireError(f"{self.peer}: not a message of this protocol")
        try:
            head = json.loads(bytes(self._exact(length, deadline)))
            body, sizes = head["body"], head["blobs"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise WireError(f"{self.peer}: a message without a valid head") from None
        if not isinstance(body, dict) or not isinstance(sizes, list) or len(sizes) > MAX_BLOBS:
            raise WireError(f"{self.peer}: a message without a valid head")
        for size in sizes:
            if type(size) is not int or not 0 <= size <= self.max_blob_bytes:
                raise WireError(f"{self.peer}: a blob size that is over the limit")
        return body, [self._exact(size, deadline) for size in sizes]

    def close(self) -> None:
        # A thread that waits in `receive` would keep the socket open under a mere close.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _exact(self, size: int, deadline: float | None) -> bytearray:
        out = bytearray()
        try:
            while len(out) < size:
                if deadline is None:
                    self.sock.settimeout(None)
                else:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    self.sock.settimeout(left)
                data = self.sock.recv(min(size - len(out), _PIPE_SLICE))
                if not data:
                    raise PeerError(self.peer, "its process ended")
                out += data
        except TimeoutError:
            raise PeerError(self.peer, "gave no answer within the deadline") from None
        except OSError as error:
            raise PeerError(self.peer, f"its process is gone ({error.strerror or error})") from None
        return out
