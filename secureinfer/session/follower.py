"""The worker of a listening party, a model owner or a dealer: its daemon has done the handshake with the data owner."""

from __future__ import annotations

import contextlib

from ..errors import SecureInferError, SettingsError
from ..transport.data import LISTENERS
from ..transport.framing import FramedLink
from ..transport.tls import Identity
from .base import Worker
from .handshake import Hello, hello_from_json
from .process import Loading
from .session import DealerSession, ModelOwnerSession


class Follower(Worker):
    """It opens the port that its daemon announces, and follows the data owner until the session ends."""

    def run(self) -> None:
        with self.parent.heartbeat():  # its daemon ends a worker that gives no sign of life
            session = self._begin(hello_from_json(self.start["hello"]))
            session.setup()
            self._step_deadlines()
            session.serve()

    def _begin(self, hello: Hello) -> ModelOwnerSession | DealerSession:
        s = self.settings
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
        other = hello.model_owner if s.role == "dealer" else hello.dealer  # nobody where there is no dealer
        data_owner = hello.data_owners[0]
        if s.role == "model_owner" and other:
            try:
                self.links[other] = self._join_dealer(hello)
            except SecureInferError:
                # The data owner must read why; it is on its way here.
                with contextlib.suppress(SecureInferError):
                    self.links[data_owner] = self.listener.accept(data_owner, s.deadlines.connect)
                raise
        self.links[data_owner] = self.listener.accept(data_owner, s.deadlines.start)
        if s.role == "dealer":
            self.links[other] = self.listener.accept(other, s.deadlines.start)
        engine, statistics = self._make_engine(loading, hello)
        link, idle = self.links[data_owner], s.deadlines.idle
        if s.role == "dealer":
            return DealerSession(engine, statistics, link, self.links[other], idle=idle)
        return ModelOwnerSession(
            engine,
            statistics,
            link,
            self.links[other] if other else None,
            idle=idle,
            step=s.deadlines.step,
            limits=s.limits,
            party=s.name,
        )

    def _join_dealer(self, hello: Hello) -> FramedLink:
        identity = Identity("dealer", hello.dealer)
        with self._control(identity) as control:
            place = control.join(hello)
        return self._dial(identity, hello, place)
