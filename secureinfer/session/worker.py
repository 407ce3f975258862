"""One party's process in one session: `python -m secureinfer.session.worker FD`, started by launch.Child.

It opens its port, or dials, before torch is loaded, so that the processes of all parties load at the same
time. It ends with its session, on any error, and when the process that started it goes away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import Settings, make_settings
from ..errors import HandshakeError, PeerError, SecureInferError, SessionError, SettingsError, UnsafeError
from ..transport.base import Clock
from ..transport.data import LISTENERS, DataListener, dialler
from ..transport.framing import FramedLink
from ..transport.limits import Limits
from ..transport.tls import Credentials, Identity, load_credentials
from . import faults
from .control import ControlClient, Place
from .handshake import Hello, make_hello
from .launch import inherited_pipe
from .manifest import read_manifest
from .process import Loading, Parent, forbid_core_dumps
from .session import DataOwnerSession, DealerSession, ModelOwnerSession
from .statistics import Statistics

if TYPE_CHECKING:
    from ..backends.base import Engine

log = logging.getLogger("secureinfer.session")

START_SECONDS = 60.0


class Worker:
    """One party of one session. engine: "module:function" in place of the program's backend, for tests alone;
    it comes from the process that started this one and never from a settings file.
    """

    def __init__(self, parent: Parent, start: dict[str, Any]) -> None:
        self.parent = parent
        self.settings: Settings = make_settings(start["settings"])
        self.engine_name: str | None = start.get("engine")
        self.start = start
        s = self.settings
        self.me = Identity(s.role, s.name)
        self.credentials: Credentials = load_credentials(self.me, s.tls.ca, s.tls.certificate, s.tls.key)
        self.limits = Limits(s.deadlines.start, s.deadlines.keepalive, s.queue_bytes)
        self.clock = Clock()
        self.links: dict[str, FramedLink] = {}
        self.listener: DataListener | None = None
        self.engine: Engine | None = None
        self._opened: list[Identity] = []

    def run(self) -> None:
        """The whole session. Whoever calls this also calls `fail` on an error, and `close` at the end."""
        if self.settings.role == "data_owner":
            self._run_data_owner()
        else:
            with self.parent.heartbeat():  # its daemon ends a worker that gives no sign of life
                self._run_listening()

    def fail(self, error: BaseException) -> None:
        """Tell the peers why the session ends."""
        told = error if isinstance(error, SecureInferError) else SessionError("unexpected error")
        for link in self.links.values():
            link.send_error(told)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        for link in self.links.values():
            link.close()
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    # --- a listening party: the daemon has done the handshake ---

    def _run_listening(self) -> None:
        s = self.settings
        hello = hello_from_json(self.start["hello"])
        if s.listen is None:
            raise SettingsError("a listening party has no listen settings")
        expected = {Identity(e["role"], e["name"]): bytes.fromhex(e["token"]) for e in self.start["expected"]}
        self.listener = LISTENERS[s.listen.data_link](
            self.credentials,
            s.listen.bind,
            s.listen.ports,
            hello.session_id,
            expected,
            self.clock,
            self.limits,
        )
        self.parent.send({"event": "listening", "port": self.listener.port})
        loading = Loading(s)
        data_owner = hello.data_owners[0]
        if s.role == "model_owner":
            try:
                self.links[hello.dealer] = self._join_dealer(hello)
            except SecureInferError:
                # The data owner must read why; it is on its way here.
                with contextlib.suppress(SecureInferError):
                    self.links[data_owner] = self.listener.accept(data_owner, s.deadlines.connect)
                raise
            other = hello.dealer
        else:
            other = hello.model_owner
        self.links[data_owner] = self.listener.accept(data_owner, s.deadlines.start)
        if s.role == "dealer":
            self.links[other] = self.listener.accept(other, s.deadlines.start)
        statistics = self._make_engine(loading, hello)
        if self.engine is None:
            raise SessionError("there is no engine")
        links, idle = (self.links[data_owner], self.links[other]), s.deadlines.idle
        session: ModelOwnerSession | DealerSession
        if s.role == "model_owner":
            session = ModelOwnerSession(
                self.engine,
                statistics,
                *links,
                idle=idle,
                step=s.deadlines.step,
                limits=s.limits,
                party=s.name,
            )
        else:
            session = DealerSession(self.engine, statistics, *links, idle=idle)
        session.setup()
        self._step_deadlines()
        session.serve()

    def _join_dealer(self, hello: Hello) -> FramedLink:
        peer = self.settings.peers.dealer
        if peer is None:
            raise SettingsError("peers.dealer: this program needs a dealer")
        identity = Identity("dealer", peer.name)
        with self._control(identity) as control:
            place = control.join(hello)
        return self._dial(identity, hello, place)

    # --- the data owner ---

    def _run_data_owner(self) -> None:
        s = self.settings
        hello = self._make_hello()
        loading = Loading(s)
        try:
            with self.parent.heartbeat():
                self._open(hello)
                statistics = self._make_engine(loading, hello)
                if self.engine is None:
                    raise SessionError("there is no engine")
                session = DataOwnerSession(
                    self.engine,
                    statistics,
                    self.links[hello.model_owner],
                    self.links[hello.dealer],
                    step=s.deadlines.step,
                    limits=s.limits,
                    party=s.name,
                )
                session.setup()
        except SecureInferError as error:
            self.fail(error)
            self._withdraw(hello)
            raise
        self._step_deadlines()
        rooms = {name: dataclasses.asdict(room) for name, room in session.rooms.items()}
        self.parent.send({"event": "ready", "rooms": rooms})
        self._obey(session)

    def _make_hello(self) -> Hello:
        s = self.settings
        head = read_manifest(s.program, allow_private=False)
        if s.peers.model_owner is None or s.peers.dealer is None:
            raise SettingsError("peers.dealer: this program needs a dealer's name and address")
        return make_hello(
            head,
            session_id=secrets.token_bytes(16),
            model_owner=s.peers.model_owner.name,
            data_owners=(s.name,),
            dealer=s.peers.dealer.name,
            unsafe=s.unsafe,
        )

    def _open(self, hello: Hello) -> None:
        """Open the session at the dealer and the model owner at once: their processes load side by side."""
        peers = [Identity("dealer", hello.dealer), Identity("model_owner", hello.model_owner)]
        problems: dict[Identity, BaseException] = {}

        def open_one(identity: Identity) -> None:
            try:
                with self._control(identity) as control:
                    place = control.open(hello)
                self._opened.append(identity)
                self.links[identity.name] = self._dial(identity, hello, place)
            except BaseException as error:
                problems[identity] = error

        threads = [threading.Thread(target=open_one, args=(i,), name=f"open-{i.name}") for i in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not problems:
            return
        # A handshake or a certificate says more than the silence that may follow from it elsewhere.
        raise min(problems.values(), key=lambda e: isinstance(e, PeerError))

    def _withdraw(self, hello: Hello) -> None:
        """End what was opened: a worker that waits for others would hold its place until its own deadline."""
        for identity in self._opened:
            with contextlib.suppress(SecureInferError), self._control(identity, hurry=2.0) as control:
                control.close_session(hello.session_id)

    def _obey(self, session: DataOwnerSession) -> None:
        """Do what the caller asks until it closes the session or goes away, or a peer does."""
        ended = time.monotonic() + self.settings.deadlines.idle
        while True:
            try:
                message = self.parent.next(timeout=0.5)
            except queue.Empty:
                session.check()
                if session.busy:
                    ended = time.monotonic() + self.settings.deadlines.idle
                if time.monotonic() > ended:
                    raise SessionError(
                        f"no call for {self.settings.deadlines.idle:g} s; the session was closed (deadlines.idle)"
                    ) from None
                continue
            if message is None or message[0].get("op") == "close":
                session.close()
                return
            session.check()
            with self.parent.heartbeat():
                answer, blobs = self._do(session, *message)
            self.parent.send(answer, blobs)
            ended = time.monotonic() + self.settings.deadlines.idle

    def _do(
        self, session: DataOwnerSession, body: dict[str, Any], blobs: list[bytearray]
    ) -> tuple[dict[str, Any], list[Any]]:
        from .tensors import pack, unpack

        operation = body.get("op")
        answer: dict[str, Any] = {}
        packed: list[Any] = []
        if operation == "prepare":
            session.prepare(int(body["n"]), wait=bool(body["wait"]))
        elif operation == "await":
            session.await_ready()
        elif operation == "infer":
            answer["index"], outputs = session.infer(unpack(body["inputs"], blobs))
            answer["outputs"], packed = pack(outputs)
        elif operation == "report":
            answer["parties"] = session.report()
        else:
            raise SessionError(f"unknown operation {operation!r}")
        return {**answer, "ready": session.ready}, packed

    # --- both ---

    def _control(self, identity: Identity, hurry: float | None = None) -> ControlClient:
        s = self.settings
        peer = s.peers.dealer if identity.role == "dealer" else s.peers.model_owner
        if peer is None:
            raise SettingsError(f"peers.{identity.role} is not set")
        return ControlClient(
            peer.host,
            peer.port,
            self.credentials,
            identity,
            connect=hurry or s.deadlines.connect,
            deadline=hurry or s.deadlines.start,
            keepalive=s.deadlines.keepalive,
        )

    def _dial(self, identity: Identity, hello: Hello, place: Place) -> FramedLink:
        s = self.settings
        peer = s.peers.dealer if identity.role == "dealer" else s.peers.model_owner
        if peer is None:
            raise SettingsError(f"peers.{identity.role} is not set")
        return dialler(place.data_link, identity.name)(
            peer.host,
            place.port,
            self.credentials,
            identity,
            hello.session_id,
            place.token,
            self.clock,
            self.limits,
            timeout=s.deadlines.connect,
        )

    def _make_engine(self, loading: Loading, hello: Hello) -> Statistics:
        s = self.settings
        program = loading.result()
        if program.manifest_digest != hello.manifest_digest:
            raise HandshakeError(
                f"{s.program.name} is not the program that the session was opened for; it changed in between",
                public_detail="the program changed",
            )
        for switch, on in program.options.items():
            if switch.startswith("unsafe_") and on and switch not in s.unsafe:
                raise UnsafeError(
                    f"the program was compiled with {switch}; set it in the settings to accept that"
                )
        make: Callable[..., Engine]
        if self.engine_name is None:
            from ..backends import compile_steps
            from ..backends import make_engine as make

            if s.torch_compile:
                compile_steps()
        else:
            module, _, function = self.engine_name.partition(":")
            make = getattr(importlib.import_module(module), function)
        self.engine = make(
            s.role,
            program,
            me=s.name,
            compute_parties=hello.compute_parties,
            dealer=hello.dealer,
            links=self.links,
            clock=self.clock,
            session_id=hello.session_id,
            spool_folder=s.material_folder if s.material == "disk" else None,
        )
        return Statistics(s.name, s.role, self.links, self.clock, s.worker_threads)

    def _step_deadlines(self) -> None:
        for link in self.links.values():
            link.deadline = self.settings.deadlines.step


def hello_from_json(body: dict[str, Any]) -> Hello:
    return Hello(
        **{
            **body,
            "session_id": bytes.fromhex(body["session_id"]),
            "data_owners": tuple(body["data_owners"]),
            "unsafe": tuple(body["unsafe"]),
        }
    )


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    forbid_core_dumps()
    # Threads of a link wait for the interpreter's lock behind the engine's Python code; 5 ms would be ten round
    # trips.
    sys.setswitchinterval(0.0005)
    pipe = inherited_pipe(arguments, "the process that started this worker")
    parent = Parent(pipe)
    party, worker = "worker", None
    try:
        start, _ = pipe.receive(timeout=START_SECONDS)
        party = str(start["settings"]["name"])
        parent.watch()
        worker = Worker(parent, start)
        worker.run()
    except BaseException as error:
        # First the parties that wait, then what takes time.
        if worker is not None:
            worker.fail(error)
        with contextlib.suppress(SecureInferError):
            parent.send({"error": faults.to_json(error, party)})
        if worker is not None:
            worker.close()
            if worker.settings.role == "data_owner":
                _linger(parent)
        return 1
    worker.close()
    return 0


def _linger(parent: Parent) -> None:
    """Stay until the caller has read why the session ended: a pipe that closes with unread data loses it."""
    while (message := parent.next()) is not None and message[0].get("op") != "close":
        pass


if __name__ == "__main__":
    code = main(sys.argv)
    # Threads of gRPC and torch would only delay the end of a session that is over.
    logging.shutdown()
    os._exit(code)
