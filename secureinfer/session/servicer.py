"""The daemon of a model owner or dealer: its control port, and one worker process for each session.

The daemon holds no protocol state and never imports torch: it checks who asks, compares handshakes, and
starts workers.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from ..backends import has_dealer
from ..config import Settings
from ..errors import (
    AuthenticationError,
    PeerError,
    ProgramFileError,
    SecureInferError,
    SessionError,
    SettingsError,
)
from ..transport.grpc_link import options
from ..transport.grpc_listener import bind_first
from ..transport.preface import TOKEN_BYTES
from ..transport.tls import Identity, load_credentials, peer_identity
from ..v1 import control_pb2, control_pb2_grpc
from .control import MAX_CONTROL_BYTES
from .faults import abort
from .handshake import Hello, expect_same, from_message, make_hello
from .launch import Child, stop_all
from .manifest import ProgramHead, read_manifest

log = logging.getLogger("secureinfer.session")

WORKER_MODULE = "secureinfer.session.worker"
HANDLERS = 16
WORKER_GRACE_SECONDS = 4.0
"""A worker ends itself before; one that is stopped must be killed before this daemon is."""

LEAST_SILENCE_SECONDS = 10.0
"""A worker that gave no sign of life for a step's deadline, and for so long at least, is killed: it may be stopped, or
stuck, and would hold its place, its port and its memory for good. Its peers have given it up by then."""

WITHDRAWN_SECONDS = 0.5
"""For a worker to end by itself, before it is ended because its session was withdrawn."""

Reply = TypeVar("Reply")


@dataclasses.dataclass
class _Record:
    """One session at this daemon. Tokens are for the data owner and, at a dealer, for the model owner."""

    hello: Hello
    opener: Identity
    tokens: dict[Identity, bytes]
    child: Child | None = None
    port: int = 0
    joined: bool = False

    def __repr__(self) -> str:
        return f"session {self.hello.session_id.hex()[:8]} of {self.opener.name}"


class Daemon(control_pb2_grpc.ControlServicer):
    """Serves sessions of one program until `close`. engine: for tests alone, see worker.Worker.

    Raises SettingsError, ProgramFileError, or SessionError where its port is in use.
    """

    def __init__(self, settings: Settings, *, engine: str | None = None) -> None:
        if settings.listen is None:
            raise SettingsError(f"a {settings.role} has no daemon; only a model owner and a dealer listen")
        tls = settings.tls
        self.settings = settings
        self._listen = settings.listen
        self._engine = engine
        self._sessions: dict[bytes, _Record] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._read_program()
        credentials = load_credentials(
            Identity(settings.role, settings.name), tls.ca, tls.certificate, tls.key
        )
        self._server = grpc.server(
            ThreadPoolExecutor(HANDLERS, thread_name_prefix="control"),
            options=options(settings.deadlines.keepalive, max_message_bytes=MAX_CONTROL_BYTES),
            maximum_concurrent_rpcs=2 * HANDLERS,
        )
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = bind_first(
            self._server, self._listen.bind, (self._listen.port,), credentials.for_server()
        )
        self._server.start()

    def close(self) -> None:
        """End every session and the port."""
        with self._changed:
            self._closing = True
            children = [r.child for r in self._sessions.values() if r.child is not None]
            self._changed.notify_all()
        self._server.stop(0)
        stop_all(children, WORKER_GRACE_SECONDS)

    # --- the three calls ---

    def OpenSession(
        self, request: control_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> control_pb2.SessionReply:
        return self._answer(context, lambda who: self._open(who, from_message(request.hello)))

    def JoinSession(
        self, request: control_pb2.JoinSessionRequest, context: grpc.ServicerContext
    ) -> control_pb2.SessionReply:
        return self._answer(context, lambda who: self._join(who, from_message(request.hello)))

    def CloseSession(
        self, request: control_pb2.CloseSessionRequest, context: grpc.ServicerContext
    ) -> control_pb2.CloseSessionReply:
        return self._answer(context, lambda who: self._close_session(who, request.session_id))

    def _answer(self, context: grpc.ServicerContext, call: Callable[[Identity], Reply]) -> Reply:
        """Run a call as the certificate's party; the caller reads public texts only."""
        try:
            return call(peer_identity(context))
        except SecureInferError as error:
            log.warning("refused: %s", error)
            failure = error
        except Exception as error:
            log.error("unexpected %s in a call", type(error).__name__)
            failure = SessionError("unexpected error")
        abort(context, failure)

    def _open(self, who: Identity, hello: Hello) -> control_pb2.SessionReply:
        if who.role != "data_owner" or who.name not in self.settings.accept.data_owners:
            raise AuthenticationError(f"{who} may not open a session here", public_detail="not accepted here")
        expect_same(self._view(hello, who), hello, who.name)
        tokens = {who: secrets.token_bytes(TOKEN_BYTES)}
        if self.settings.role == "dealer":
            tokens[Identity("model_owner", hello.model_owner)] = secrets.token_bytes(TOKEN_BYTES)
        record = _Record(hello, who, tokens)
        with self._changed:
            if self._closing:
                raise SessionError("this party is shutting down", public_detail="shutting down")
            if hello.session_id in self._sessions:
                raise AuthenticationError(
                    f"{who} presents a session id that is in use", public_detail="session id"
                )
            if len(self._sessions) >= self._listen.sessions:
                text = f"all {self._listen.sessions} sessions are in use"
                raise SessionError(text, public_detail=text)
            self._sessions[hello.session_id] = record
        try:
            self._start_worker(record)
        except BaseException:
            self._forget(record)
            raise
        log.info("opened %r", record)
        return self._reply(record, tokens[who])

    def _join(self, who: Identity, hello: Hello) -> control_pb2.SessionReply:
        """The model owner may come before the data owner's call has been served: wait for it.

        Nobody else waits: each wait holds a handler, and enough of them would keep everybody out.
        """
        if (
            self.settings.role != "dealer"
            or who.role != "model_owner"
            or who.name not in self.settings.accept.model_owners
        ):
            raise AuthenticationError(f"{who} may not join a session here", public_detail="not accepted here")
        stop = time.monotonic() + self.settings.deadlines.connect
        with self._changed:
            while (record := self._sessions.get(hello.session_id)) is None or not record.port:
                if self._closing or not self._changed.wait(max(0.0, stop - time.monotonic())):
                    raise SessionError(
                        f"{who} joins a session that nobody opened", public_detail="no such session"
                    )
            token = record.tokens.get(who)
            if token is None or record.joined:
                raise AuthenticationError(f"{who} has no place in {record!r}", public_detail="no place in it")
            expect_same(record.hello, hello, who.name)
            record.joined = True
        return self._reply(record, token)

    def _reply(self, record: _Record, token: bytes) -> control_pb2.SessionReply:
        return control_pb2.SessionReply(port=record.port, token=token, data_link=self._listen.data_link)

    def _close_session(self, who: Identity, session_id: bytes) -> control_pb2.CloseSessionReply:
        with self._changed:
            record = self._sessions.get(session_id)
            if record is None or record.opener != who or record.child is None:
                return control_pb2.CloseSessionReply()
            # The opener tells a worker that it is connected to why it gives up: that is logged, not this call.
            ended = self._changed.wait_for(lambda: session_id not in self._sessions, WITHDRAWN_SECONDS)
        if not ended:
            log.warning("%r: %s ended it before it began", record, who.name)
            record.child.pipe.close()  # which ends it, and `_follow` sees to that
        return control_pb2.CloseSessionReply()

    # --- sessions and their workers ---

    def _read_program(self) -> ProgramHead:
        path, owner = self.settings.program, self.settings.role == "model_owner"
        head = read_manifest(path, allow_private=owner)
        if self.settings.role == "dealer" and not has_dealer(head.backend):
            raise SettingsError(
                f"{path.name} is a program of backend {head.backend!r}, which needs no dealer: start none for it, or name "
                "a program of backend 'mpc' in the settings",
                public_detail="this program needs no dealer",
            )
        if owner and head.is_public and head.has_weights:
            raise ProgramFileError(
                f"{path.name} is the public part, without the weights that a model owner brings; "
                "name the private file in the settings"
            )
        return head

    def _view(self, hello: Hello, who: Identity) -> Hello:
        """What this party says of the session that is asked for."""
        s = self.settings
        if s.role == "dealer":
            known = hello.model_owner in s.accept.model_owners
            model_owner, dealer = hello.model_owner if known else " or ".join(s.accept.model_owners), s.name
        else:
            model_owner, dealer = s.name, s.peers.dealer.name if s.peers.dealer else ""
        return make_hello(
            self._read_program(),
            session_id=hello.session_id,
            model_owner=model_owner,
            data_owners=(who.name,),
            dealer=dealer,
            unsafe=s.unsafe,
        )

    def _start_worker(self, record: _Record) -> None:
        child = Child(
            WORKER_MODULE,
            self.settings.name,
            {
                "settings": self.settings.model_dump(mode="json"),
                "engine": self._engine,
                "hello": record.hello.to_json(),
                "expected": [
                    {"role": who.role, "name": who.name, "token": token.hex()}
                    for who, token in record.tokens.items()
                ],
            },
            {"OMP_NUM_THREADS": str(self.settings.worker_threads)},
        )
        try:
            body, _ = child.receive(self.settings.deadlines.start)
        except BaseException:
            child.kill()
            raise
        with self._changed:
            record.child, record.port = child, int(body["port"])
            closing = self._closing
            self._changed.notify_all()
        threading.Thread(target=self._follow, args=(record, child), name="session", daemon=True).start()
        if closing:
            child.stop()

    def _follow(self, record: _Record, child: Child) -> None:
        """Log how a session ended, and free its place, its port and its memory."""
        silence = max(self.settings.deadlines.step, LEAST_SILENCE_SECONDS)
        try:
            while True:
                child.receive(silence)
        except PeerError as error:
            # The end of the pipe is the end of the worker, and so is silence; anything else is what it ended with.
            if error.peer != self.settings.name:
                log.warning("%r: %s", record, error)
        except (SecureInferError, OSError, ValueError) as error:
            log.warning("%r: %s", record, error)
        if not child.stop(WORKER_GRACE_SECONDS):
            log.warning("%r: the worker %s did not go on and was killed", record, self.settings.name)
        self._forget(record)
        log.info("ended %r", record)

    def _forget(self, record: _Record) -> None:
        with self._changed:
            self._sessions.pop(record.hello.session_id, None)
            self._changed.notify_all()


def serve(settings: Settings) -> None:
    """Run a model owner or dealer until SIGTERM or Ctrl-C. Logs to standard error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    daemon = Daemon(settings)
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    log.info("%s %s listens on port %d", settings.role, settings.name, daemon.port)
    try:
        stop.wait()
    except KeyboardInterrupt:
        log.info("stopping")
    finally:
        signal.signal(signal.SIGTERM, previous)
        daemon.close()
