"""A worker's data port over TLS 1.3: it takes one connection from each of a session's peers, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping

from ..errors import AuthenticationError, PeerError, SecureInferError, SettingsError
from .base import Clock
from .data_port import DataPort, no_free_port
from .limits import Limits
from .preface import (
    ACCEPTED,
    PREFACE_BYTES,
    REFUSED,
    TAKEN,
    TOKEN_BYTES,
    pack_answer,
    unpack_preface,
)
from .tls import DATA_PROTOCOL, Credentials, Identity, identity_from_certificate
from .tls_dial import read_exactly, tune
from .tls_link import TlsLink

log = logging.getLogger("secureinfer.transport")

ADMISSION_SECONDS = 10.0
"""For a connection to say who it is."""
MAX_STRANGERS = 16
"""Connections that have not said so yet. One more ends the oldest of them: a party needs milliseconds, so that idle
strangers, however many, keep none out.
"""
_LINGER_SECONDS = 0.5


class TlsListener(DataPort[TlsLink]):
    """A worker's data port: takes one connection from each expected peer of one session, and refuses all else.

    expected: who may connect, each with its token of 32 bytes. ports: tried in order; 0 lets the system choose.
    admission: seconds for a connection to say who it is. Raises SessionError if no port is free.
    """

    def __init__(
        self,
        credentials: Credentials,
        bind: str,
        ports: range | tuple[int, ...],
        session_id: bytes,
        expected: Mapping[Identity, bytes],
        clock: Clock,
        limits: Limits,
        *,
        admission: float = ADMISSION_SECONDS,
    ) -> None:
        if len(session_id) != 16 or any(len(token) != TOKEN_BYTES for token in expected.values()):
            raise SettingsError(f"a session id has 16 bytes and a token {TOKEN_BYTES}")
        super().__init__(session_id, expected)
        self._clock = clock
        self._limits = limits
        self._admission = admission
        self._context = credentials.context(server=True)
        self._taken: set[str] = set()
        self._strangers: dict[socket.socket, None] = {}
        self._closing = False
        self._server = _bind_first(bind, ports)
        self.port: int = self._server.getsockname()[1]
        self._acceptor = threading.Thread(target=self._take, name="data-port", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close all links and the port."""
        with self._arrived:
            self._closing = True
            strangers = list(self._strangers)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._acceptor.join()
        self._server.close()
        for stranger in strangers:
            _cut(stranger)
        for link in list(self._links.values()):
            link.close()

    # --- strangers ---

    def _take(self) -> None:
        """The port's thread: each connection gets a thread of its own, until it is a link or refused."""
        while not self._closing:
            try:
                raw, _ = self._server.accept()
            except OSError as error:
                if not self._closing:
                    log.warning("the data port cannot accept: %s", error.strerror or error)
                    time.sleep(0.1)  # such as no file descriptor left
                continue
            with self._arrived:
                if self._closing:
                    raw.close()
                    return
                oldest = next(iter(self._strangers)) if len(self._strangers) >= MAX_STRANGERS else None
                if oldest is not None:
                    del self._strangers[oldest]
                self._strangers[raw] = None
            if oldest is not None:
                log.info("a connection that did not say who it is was ended for another")
                _cut(oldest)
            threading.Thread(target=self._serve, args=(raw,), name="stranger", daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        """One connection, up to its admission or its end. Never raises: what went wrong is logged here."""
        try:
            self._admit(raw)
        except SecureInferError as error:
            log.warning("a connection was refused: %s", error)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = (
                getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
            )
            log.info("a connection ended before it was anybody's: %s", reason)
        except Exception as error:
            log.error("unexpected %s at the data port", type(error).__name__)
        finally:
            with self._arrived:
                self._strangers.pop(raw, None)

    def _admit(self, raw: socket.socket) -> None:
        """TLS, then the preface, then a link. Nothing past the preface is read before."""
        stop = time.monotonic() + self._admission
        sock: ssl.SSLSocket | None = None
        try:
            tune(raw)
            raw.settimeout(self._admission)
            sock = self._context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            with self._arrived:  # wrapping moves the descriptor to another object, which the port must know
                if self._strangers.pop(raw, self) is self:
                    raise ConnectionError("ended for another")
                self._strangers[sock] = None
            sock.do_handshake()
            if sock.selected_alpn_protocol() != DATA_PROTOCOL:
                raise AuthenticationError("a connection for something else than data")
            try:
                identity = identity_from_certificate(sock.getpeercert(binary_form=True))
                shown = unpack_preface(read_exactly(sock, PREFACE_BYTES, stop))
                self._check(identity, shown.session_id, shown.token)
                self._reserve(identity)
            except SecureInferError as error:
                taken = isinstance(error, PeerError)
                text = "this party is connected already" if taken else error.for_peer
                with contextlib.suppress(OSError):
                    sock.sendall(pack_answer(TAKEN if taken else REFUSED, text))
                raise
            self._welcome(identity, sock)
        except BaseException:
            _part(raw if sock is None else sock)
            raise
        finally:
            if sock is not None:
                with self._arrived:
                    self._strangers.pop(sock, None)

    def _reserve(self, identity: Identity) -> None:
        """A party comes once: the place of one that is lost is not given again."""
        with self._arrived:
            if identity.name in self._taken:
                raise PeerError(identity.name, "is connected already")
            self._taken.add(identity.name)

    def _welcome(self, identity: Identity, sock: ssl.SSLSocket) -> None:
        with self._arrived:
            if self._strangers.pop(sock, self) is self or self._closing:
                self._taken.discard(identity.name)
                raise ConnectionError("ended for another")
        try:
            sock.sendall(pack_answer(ACCEPTED))
            link = TlsLink(identity.name, self._session_id, self._clock, self._limits, sock)
        except BaseException:
            with self._arrived:
                self._taken.discard(identity.name)
            raise
        with self._arrived:
            self._links[identity.name] = link
            closing = self._closing
            self._arrived.notify_all()
        if closing:
            link.close()


def _bind_first(bind: str, ports: range | tuple[int, ...]) -> socket.socket:
    """Listen on the first free port. Raises SessionError naming the range if none is."""
    host = bind.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=family, backlog=64)
    raise no_free_port(bind, ports)


def _cut(sock: socket.socket) -> None:
    """End a connection under the thread that serves it, which closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _part(sock: socket.socket) -> None:
    """Close so that what was said last, an alert or a refusal, is not lost in a reset: let a moment's bytes pass."""
    stop = time.monotonic() + _LINGER_SECONDS
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while (left := stop - time.monotonic()) > 0:
            sock.settimeout(left)
            if not socket.socket.recv(sock, 1 << 16):
                break
    sock.close()
