"""Dialling a peer's data port over TLS 1.3."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import AuthenticationError, PeerError, WireError
from .base import Clock
from .limits import Limits
from .preface import ACCEPTED, ANSWER_BYTES, REFUSED, Preface, pack_preface, unpack_answer
from .tls import DATA_PROTOCOL, Credentials, Identity, refusal
from .tls_link import TlsLink

RECEIVE_BYTES = 4 << 20
"""The socket's receive buffer. The kernel's own choice grows too late for frames of many megabytes: measured on loopback,
half the rate at 64 MiB.
"""
RETRY_SECONDS = 0.1


def dial_tls(
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
) -> TlsLink:
    """Connect to a peer's data port, waiting for one that is not there yet. timeout: seconds for all of it.

    Raises AuthenticationError where a certificate or the token is refused, PeerError where nobody answers.
    """
    stop = time.monotonic() + timeout
    context = credentials.context(server=False)
    preface = pack_preface(Preface(session_id, token))
    while True:
        try:
            sock = _connect(context, host, port, peer, preface, stop)
        except OSError:  # nobody there, or gone before it answered
            left = stop - time.monotonic()
            if left <= RETRY_SECONDS:
                text = f"nobody answers as {peer} at {host}:{port} within {timeout:g} s"
                raise PeerError(peer.name, text) from None
            time.sleep(RETRY_SECONDS)
            continue
        try:
            return TlsLink(peer.name, session_id, clock, limits, sock)
        except BaseException:
            sock.close()
            raise


def tune(sock: socket.socket) -> None:
    """For a data connection: nothing waits for more to send, and large frames have room."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, ValueError):
        # Where the system allows less, asking would cap the buffer below what the kernel lets it grow to.
        if int(Path("/proc/sys/net/core/rmem_max").read_text()) >= RECEIVE_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)


def read_exactly(sock: ssl.SSLSocket, size: int, stop: float) -> bytes:
    """Exactly `size` bytes. Raises TimeoutError past `stop`, and ConnectionError at the end."""
    data = b""
    while len(data) < size:
        left = stop - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection ended")
        data += chunk
    return data


def _connect(
    context: ssl.SSLContext, host: str, port: int, peer: Identity, preface: bytes, stop: float
) -> ssl.SSLSocket:
    """One attempt. Raises OSError where another may succeed."""
    raw = socket.create_connection((host.strip("[]"), port), max(0.1, stop - time.monotonic()))
    with _closed_on_failure(raw, peer):
        tune(raw)
        raw.settimeout(max(0.1, stop - time.monotonic()))
        sock = context.wrap_socket(raw, server_hostname=peer.hostname, suppress_ragged_eofs=False)
    with _closed_on_failure(sock, peer):
        if sock.selected_alpn_protocol() != DATA_PROTOCOL:
            raise WireError(f"what listens at {host}:{port} takes no data connections")
        # Under TLS 1.3 our certificate is judged after our side of the handshake: a refusal shows at the first read.
        with contextlib.suppress(ConnectionError):
            sock.sendall(preface)
        status, text = unpack_answer(read_exactly(sock, ANSWER_BYTES, stop))
        if status == REFUSED:
            raise AuthenticationError(f"{peer.name} refused the connection: {text}", public_detail=peer.name)
        if status != ACCEPTED:
            raise PeerError(peer.name, f"refused the connection: {text}")
    return sock


@contextlib.contextmanager
def _closed_on_failure(sock: socket.socket, peer: Identity) -> Iterator[None]:
    """Close what did not become a link, and say whose it would have been."""
    try:
        yield
    except BaseException as error:
        sock.close()
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise ConnectionError from None
        if isinstance(error, ssl.SSLError):
            raise AuthenticationError(f"{peer}: {refusal(error)}", public_detail=peer.name) from None
        if isinstance(error, WireError):
            raise WireError(f"{peer.name}: {error}") from None
        raise
