"""Real parties on this machine: daemons and workers of their own, certificates, mutual TLS over loopback."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends import has_dealer
from ..config import Settings, make_settings, parse_network
from ..errors import ProgramFileError, UsageError
from ..plan.program import Program
from ..transport.tls import Credentials, Identity, make_certificates
from .client import Session
from .launch import Child, stop_all

DAEMON_MODULE = "secureinfer.session.daemon"
OWNERS = ("data_owner", "model_owner")
"""Each party's name is its role."""
START_SECONDS = 60.0


@dataclass(frozen=True)
class Place:
    """Where a party of a local session runs. address: what it listens on there, and where the others reach it. command: what
    starts a process there, as in `spawn`; all that this process starts is there too. network: what reports say lies between
    it and the others, as `local_session` takes it.
    """

    address: str = "127.0.0.1"
    command: tuple[str, ...] = ()
    network: str | None = None


HERE = Place()


def local_session(
    program: Program,
    *,
    timeout: float = 120.0,
    threads: int | None = None,
    network: str | None = None,
    torch_compile: bool = False,
    unsafe_trusted_first_party: bool = False,
    places: Mapping[str, Place] | None = None,
) -> Session:
    """A session between two owners and a dealer on this machine, each a process of its own, over mutual TLS; without the
    dealer where the program needs none (CKKS).

    program: with its weights; only the model owner's processes get the file that has them. timeout: seconds
    that one message may take, a peer's computing included. threads: for computing at each party, default half
    of the cores. network: what reports say of a loopback that was made slow, such as "emulated:wan-40ms".
    torch_compile: as in the settings of all. places: by role, where not all run on the loopback; they state the
    network, unless `network` does.
    Everything, certificates included, lives in a temporary folder that goes with the session.
    """
    if network is None and places is not None:
        network = _place(places, "data_owner").network
    stated = {} if network is None else {"network": parse_network(network).model_dump()}
    parties = LocalParties(
        program,
        timeout=timeout,
        threads=threads,
        unsafe=unsafe_trusted_first_party,
        overrides={
            "data_owner": {**stated, "torch_compile": torch_compile},
            "model_owner": {"torch_compile": torch_compile},
            "dealer": {"torch_compile": torch_compile},
        },
        places=places,
    )
    return parties.session()


class LocalParties:
    """The daemons of a local session and the data owner's settings. overrides: settings by role. engine: for tests alone."""

    def __init__(
        self,
        program: Program,
        *,
        timeout: float = 120.0,
        threads: int | None = None,
        unsafe: bool = False,
        engine: str | None = None,
        overrides: dict[str, dict[str, Any]] | None = None,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        if not isinstance(program, Program):
            raise UsageError(
                f"a local session takes a program, and got a {type(program).__name__}; "
                "secureinfer.compile(model, example_inputs) makes one"
            )
        if program.is_public and program.graph.weights:
            raise ProgramFileError(
                "a local session needs the program with its weights, and this is the public part; load the private file"
            )
        self.program = program.public()
        self.roles = (*OWNERS, "dealer") if has_dealer(program.backend) else OWNERS
        self.places = {role: HERE if places is None else _place(places, role) for role in self.roles}
        self.folder = Path(tempfile.mkdtemp(prefix="secureinfer-"))
        self.daemons: dict[str, Child] = {}
        self._engine = engine
        self._closed = threading.Lock()
        try:
            self.certificates = make_certificates(
                self.folder / "certs", {role: [role] for role in self.roles}, keep_authority=False
            )
            files = {role: self.folder / role / "program.si" for role in self.roles}
            for role, file in files.items():
                file.parent.mkdir(mode=0o700)
                (program if role == "model_owner" else self.program).save(file)
            common = {
                "threads": threads,
                "unsafe_trusted_first_party": unsafe,
                "deadlines": {"step": timeout},
            }
            self._settings = {
                role: {
                    "role": role,
                    "name": role,
                    "program": str(files[role]),
                    "tls": _tls(self.certificates[Identity(role, role)]),
                    **common,
                    **(overrides or {}).get(role, {}),
                }
                for role in self.roles
            }
            self.ports = self._start()
            self.settings: Settings = make_settings(
                {"peers": self._peers(self.ports), **self._settings["data_owner"]}
            )
        except BaseException:
            self.close()
            raise

    def _start(self) -> dict[str, int]:
        listening = [role for role in ("dealer", "model_owner") if role in self.roles]
        for role in listening:
            start = {"party": role, "engine": self._engine, "folder": str(self.folder)}
            self.daemons[role] = Child(DAEMON_MODULE, role, start, command=self.places[role].command)
        ports: dict[str, int] = {}
        for role in listening:
            listen = {"bind": self.places[role].address, "port": 0}
            settings: dict[str, Any] = {"listen": listen, **self._settings[role]}
            if role == "model_owner" and "peers" not in settings:
                settings["peers"] = self._peers(ports)
            make_settings(settings)
            body, _ = self.daemons[role].request({"settings": settings}, timeout=START_SECONDS)
            ports[role] = int(body["port"])
        return ports

    def session(self) -> Session:
        """A session that ends these parties when it is closed."""
        try:
            return Session(
                self.program,
                self.settings,
                engine=self._engine,
                cleanup=self.close,
                command=self.places["data_owner"].command,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes and remove the folder. May be called twice."""
        with self._closed:
            stop_all(list(self.daemons.values()))
            self.daemons.clear()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _peers(self, ports: dict[str, int]) -> dict[str, dict[str, str]]:
        return {
            role: {"name": role, "address": f"{self.places[role].address}:{port}"}
            for role, port in ports.items()
        }


def _place(places: Mapping[str, Place], role: str) -> Place:
    if role not in places:
        raise UsageError(f"places name {', '.join(places)}, and this session needs one for {role} too")
    return places[role]


def _tls(credentials: Credentials) -> dict[str, str]:
    return {
        "ca": str(credentials.ca),
        "certificate": str(credentials.certificate),
        "key": str(credentials.key),
    }
