"""The data owner's worker: it opens the session at the other parties, and does what its caller asks."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import threading
import time
from typing import Any

from ..errors import PeerError, SecureInferError, SessionError, SettingsError
from ..transport.tls import Identity
from .base import Worker
from .handshake import Hello, make_hello
from .manifest import read_manifest
from .process import Loading, Parent
from .session import DataOwnerSession


class Driver(Worker):
    """It dials the model owner, and the dealer if there is one, and drives the session until its caller closes it."""

    def __init__(self, parent: Parent, start: dict[str, Any]) -> None:
        super().__init__(parent, start)
        self._opened: list[Identity] = []

    def run(self) -> None:
        s = self.settings
        hello = self._make_hello()
        loading = Loading(s)
        try:
            with self.parent.heartbeat():
                self._open(hello)
                engine, statistics = self._make_engine(loading, hello)
                session = DataOwnerSession(
                    engine,
                    statistics,
                    self.links[hello.model_owner],
                    self.links[hello.dealer] if hello.dealer else None,
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
        if s.peers.model_owner is None:
            raise SettingsError("peers.model_owner: a data owner needs the model owner's name and address")
        return make_hello(
            head,
            session_id=secrets.token_bytes(16),
            model_owner=s.peers.model_owner.name,
            data_owners=(s.name,),
            dealer=s.peers.dealer.name if s.peers.dealer else "",
            unsafe=s.unsafe,
        )

    def _open(self, hello: Hello) -> None:
        """Open the session at all parties at once: their processes load side by side."""
        peers = [Identity("dealer", hello.dealer)] if hello.dealer else []
        peers.append(Identity("model_owner", hello.model_owner))
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
