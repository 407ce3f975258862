"""Links over gRPC: one bidirectional stream of raw bytes for each pair of parties, under mutual TLS. For networks
through which only HTTP/2 passes; tls_link.py is faster.

The gRPC messages are slices (at most 1 MiB) of a byte stream of frames, with identity serialisers: no
protobuf copy. The engine's own thread reads from the stream, so that a message costs one thread switch at
each end; what it does not read stays in gRPC's window, which is the back-pressure. Frames to send wait in a
bounded queue of this process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from ..errors import AuthenticationError, PeerError, SecureInferError, WireError
from .base import Clock
from .framing import FramedLink
from .limits import FLUSH_SECONDS, Limits
from .send_queue import MAX_SLICE_BYTES, SendQueue
from .tls import Credentials, Identity, diagnose
from .wire import Buffer, ChunkReader

METHOD = "/secureinfer.v1.Data/Stream"
WINDOW_BYTES = 16 << 20

TOKEN_KEY = "secureinfer-token-bin"
SESSION_KEY = "secureinfer-session-bin"
ACCEPTED_KEY = "secureinfer-accepted"


def options(keepalive: float, *, max_message_bytes: int = MAX_SLICE_BYTES) -> list[tuple[str, int]]:
    """Channel arguments of both ends; both must agree on keep-alive, or gRPC ends long silence as too many
    pings.
    """
    keepalive_ms = max(1, int(keepalive * 1000))
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # What a ping waits for its answer; its default of a minute is what holds, not the time-out above.
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", max(1, keepalive_ms // 2)),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_frame_size", MAX_SLICE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
    ]


class GrpcLink(FramedLink):
    """A Link on one gRPC stream. `dial` and grpc_listener.Listener make them."""

    def __init__(
        self,
        peer: str,
        session_id: bytes,
        clock: Clock,
        limits: Limits,
        incoming: Iterator[bytes],
        outgoing: SendQueue,
        call: Any,
        channel: grpc.Channel | None,
    ) -> None:
        super().__init__(peer, session_id, clock, limits.deadline, ChunkReader(self._next_chunk))
        self._incoming = incoming
        self._out = outgoing
        self._call = call  # grpc.Call or grpc.ServicerContext
        self._channel = channel
        self._ended: SecureInferError | None = None
        self._closed = False
        self.waits_until: float | None = None
        if not call.add_callback(self._on_end):
            self._on_end()
        _WATCHDOG.add(self)

    @property
    def failure(self) -> SecureInferError | None:
        return self._failure or self._ended

    @property
    def patience(self) -> float:
        """Seconds to flush at the end: a peer that is gone or stalled takes nothing more."""
        return 0.1 if isinstance(self._failure, PeerError) else FLUSH_SECONDS

    def expire(self) -> None:
        """Called by the watchdog when `receive` is past its deadline."""
        self.fail(PeerError(self.peer, "sent nothing within the deadline"))
        self._call.cancel()

    def interrupt(self, error: SecureInferError) -> None:
        super().interrupt(error)
        self._out.finish()
        self._out.ended.wait(FLUSH_SECONDS)
        self._call.cancel()

    def _put(self, header: bytes, payload: memoryview) -> None:
        if self._ended is not None or self._closed:
            raise self._failure or self._ended or PeerError(self.peer, "the link is closed")
        first = MAX_SLICE_BYTES - len(header)
        rest = (bytes(payload[i : i + MAX_SLICE_BYTES]) for i in range(first, len(payload), MAX_SLICE_BYTES))
        slices = itertools.chain((header + payload[:first],), rest)
        before = self._out.blocked_seconds
        taken = self._out.put(slices, len(header) + len(payload), time.monotonic() + self.deadline)
        self._blocked_sending += self._out.blocked_seconds - before
        if not taken:
            error = self.fail(PeerError(self.peer, f"took no data for {self.deadline:g} s"))
            self._call.cancel()
            raise error

    def _next_chunk(self, deadline: float | None) -> Buffer:
        """The peer's next non-empty chunk."""
        if self._failure is not None:
            raise self._failure
        self.waits_until = deadline
        start = time.perf_counter()
        try:
            while True:
                chunk: bytes = next(self._incoming)
                if chunk:
                    return chunk
        except StopIteration:
            raise self.fail(PeerError(self.peer, "closed the link")) from None
        except grpc.RpcError as error:
            raise self.fail(self._reason(error)) from None
        finally:
            self.waits_until = None
            self._blocked_receiving += time.perf_counter() - start

    def _reason(self, error: grpc.RpcError) -> SecureInferError:
        if not isinstance(error, grpc.Call):
            return PeerError(self.peer, "is gone: its connection broke")
        return _from_status(self.peer, error.code(), error.details() or "")

    def _on_end(self) -> None:
        """The call is over, whoever ended it. What had arrived before can still be read."""
        if self._ended is None:
            self._ended = PeerError(self.peer, "is gone: its connection ended")
        self._out.abandon()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        patience = self.patience
        self.fail(PeerError(self.peer, "the link was closed on this side"))
        _WATCHDOG.remove(self)
        self._out.finish()
        self._out.ended.wait(patience)
        if self._channel is not None:
            # The listening side ends the call once it has read to our end; cancelling sooner could lose
            # frames.
            stop = time.monotonic() + patience
            while self._call.is_active() and time.monotonic() < stop:
                time.sleep(0.005)
            self._call.cancel()
            self._channel.close()


def dial(
    host: str,
    port: int,
    credentials: Credentials,
    peer: Identity,
    session_id: bytes,
    token: bytes,
    clock: Clock,
    limits: Limits,
    *,
    timeout: float,
) -> GrpcLink:
    """Connect to a peer's data port. timeout: seconds for all of it.

    Raises AuthenticationError where a certificate or the token is refused, PeerError where nobody answers.
    """
    stop = time.monotonic() + timeout
    channel = open_channel(host, port, credentials, peer, limits.keepalive, timeout=timeout)
    outgoing = SendQueue(limits.queued_bytes)
    stream: Any = channel.stream_stream(METHOD)  # typed for messages; these are bytes
    call: Any = stream(iter(outgoing), metadata=((SESSION_KEY, session_id), (TOKEN_KEY, token)))
    timer = threading.Timer(max(0.1, stop - time.monotonic()), call.cancel)
    timer.daemon = True
    timer.start()
    try:
        accepted = {key for key, _ in call.initial_metadata()}
    finally:
        timer.cancel()
    if ACCEPTED_KEY not in accepted:
        error = _from_status(peer.name, call.code(), call.details() or "")
        outgoing.abandon()
        channel.close()
        raise error
    return GrpcLink(peer.name, session_id, clock, limits, call, outgoing, call, channel)


def open_channel(
    host: str,
    port: int,
    credentials: Credentials,
    peer: Identity,
    keepalive: float,
    *,
    timeout: float,
    max_message_bytes: int = MAX_SLICE_BYTES,
) -> grpc.Channel:
    """A channel whose TLS handshake with `peer` succeeded. Waits for a peer that is not there yet.

    Raises AuthenticationError or PeerError after at most `timeout` seconds.
    """
    stop = time.monotonic() + timeout
    channel = grpc.secure_channel(
        f"{host}:{port}",
        credentials.for_client(),
        [
            *options(keepalive, max_message_bytes=max_message_bytes),
            ("grpc.ssl_target_name_override", peer.hostname),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ],
    )
    ready = grpc.channel_ready_future(channel)
    try:
        # A refused certificate shows as a channel that is never ready: ask why before waiting on.
        wait = min(1.0, timeout / 2)
        while True:
            try:
                ready.result(max(0.01, min(wait, stop - time.monotonic())))
                return channel
            except grpc.FutureTimeoutError:
                left = stop - time.monotonic()
                reason = diagnose(host, port, credentials, peer, max(0.1, min(2.0, left)))
                if reason is not None:
                    raise AuthenticationError(f"{peer}: {reason}", public_detail=peer.name) from None
                if left <= 0:
                    raise PeerError(
                        peer.name, f"nobody answers as {peer} at {host}:{port} within {timeout:g} s"
                    ) from None
                wait *= 2
    except BaseException:
        ready.cancel()
        channel.close()
        raise


def _from_status(peer: str, code: grpc.StatusCode, details: str) -> SecureInferError:
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{peer} refused the connection: {details}", public_detail=peer)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return WireError(f"{peer}: a message over the limit of {MAX_SLICE_BYTES} bytes")
    if code is grpc.StatusCode.CANCELLED:
        return PeerError(peer, "the connection was cancelled or did not answer in time")
    return PeerError(peer, f"is gone: {code.name.lower().replace('_', ' ')}")


class _Watchdog:
    """One thread that ends receives past their deadline: gRPC has no time-out for a single read."""

    PERIOD = 0.1

    def __init__(self) -> None:
        self._links: set[GrpcLink] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, link: GrpcLink) -> None:
        with self._lock:
            self._links.add(link)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="link-watchdog", daemon=True)
                self._thread.start()

    def remove(self, link: GrpcLink) -> None:
        with self._lock:
            self._links.discard(link)

    def _run(self) -> None:
        while True:
            time.sleep(self.PERIOD)
            with self._lock:
                if not self._links:
                    self._thread = None
                    return
                links = list(self._links)
            now = time.monotonic()
            for link in links:
                until = link.waits_until
                if until is not None and now > until:
                    link.expire()


_WATCHDOG = _Watchdog()
