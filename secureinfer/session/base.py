"""Worker: what the process of any role has in one session: its settings and certificate, its links, and an engine."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import Peer, Settings, make_settings
from ..errors import HandshakeError, SecureInferError, SessionError, SettingsError, UnsafeError
from ..transport.base import Clock
from ..transport.data import DataListener, dialler
from ..transport.framing import FramedLink
from ..transport.limits import Limits
from ..transport.tls import Credentials, Identity, load_credentials
from .control import ControlClient, Place
from .handshake import Hello
from .process import Loading, Parent
from .statistics import Statistics

if TYPE_CHECKING:
    from ..backends.base import Engine


class Worker(ABC):
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

    @abstractmethod
    def run(self) -> None:
        """The whole session. Whoever calls this also calls `fail` on an error, and `close` at the end."""

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

    def _peer(self, identity: Identity) -> Peer:
        peers = self.settings.peers
        peer = peers.dealer if identity.role == "dealer" else peers.model_owner
        if peer is None:
            raise SettingsError(f"peers.{identity.role} is not set")
        return peer

    def _control(self, identity: Identity, hurry: float | None = None) -> ControlClient:
        peer, deadlines = self._peer(identity), self.settings.deadlines
        return ControlClient(
            peer.host,
            peer.port,
            self.credentials,
            identity,
            connect=hurry or deadlines.connect,
            deadline=hurry or deadlines.start,
            keepalive=deadlines.keepalive,
        )

    def _dial(self, identity: Identity, hello: Hello, place: Place) -> FramedLink:
        return dialler(place.data_link, identity.name)(
            self._peer(identity).host,
            place.port,
            self.credentials,
            identity,
            hello.session_id,
            place.token,
            self.clock,
            self.limits,
            timeout=self.settings.deadlines.connect,
        )

    def _make_engine(self, loading: Loading, hello: Hello) -> tuple[Engine, Statistics]:
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
                compile_steps(program.backend)
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
            threads=s.threads,
        )
        return self.engine, Statistics(s.name, s.role, self.links, self.clock, s.worker_threads)

    def _step_deadlines(self) -> None:
        for link in self.links.values():
            link.deadline = self.settings.deadlines.step
