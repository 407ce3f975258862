"""Parties whose daemons run in the test's own process, so that what each of them logs about its session can be read; their
workers, with the toy engine, are processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import secureinfer as si
from secureinfer.backends import has_dealer
from secureinfer.config import Settings, make_settings
from secureinfer.errors import SecureInferError
from secureinfer.session import client, servicer
from secureinfer.session.client import Session
from secureinfer.session.servicer import Daemon
from secureinfer.transport.tls import Identity, make_certificates

from .leftovers import marked

HERE = Path(__file__).parent
TOY = "toy_engine:make"
DEADLINES = {"connect": 3.0, "start": 60.0, "step": 4.0, "keepalive": 1.0}
WITHIN = 8.0
"""Seconds in which a fault of a running session is told: twice the deadline of a step."""


class Parties:
    """The daemons of a program in this process, and the data owner's settings. changes: settings by role."""

    def __init__(self, folder: Path, program: si.Program, **changes: dict[str, Any]) -> None:
        self.folder = folder
        self.program = program.public()
        listening = ("dealer", "model_owner") if has_dealer(program.backend) else ("model_owner",)
        for role in ("data_owner", *listening):
            (program if role == "model_owner" else self.program).save(folder / f"{role}.si")
        self.certificates = make_certificates(folder / "certs", {r: [r] for r in ("data_owner", *listening)})
        self.changes = changes
        self.daemons: dict[str, Daemon] = {}
        for role in listening:
            self.daemons[role] = Daemon(self.make(role), engine=TOY)

    def make(self, role: str, **changes: Any) -> Settings:
        own = self.certificates[Identity(role, role)]
        made: dict[str, Any] = {
            "role": role,
            "name": role,
            "program": str(self.folder / f"{role}.si"),
            "tls": {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)},
            "deadlines": DEADLINES,
        }
        if role != "dealer":
            known = ["dealer"] if role == "model_owner" else ["dealer", "model_owner"]
            made["peers"] = {
                r: {"name": r, "address": f"127.0.0.1:{self.daemons[r].port}"}
                for r in known
                if r in self.daemons
            }
        if role != "data_owner":
            made["listen"] = {"port": 0}
        return make_settings({**made, **self.changes.get(role, {}), **changes})

    def session(self, **changes: Any) -> Session:
        return Session(self.program, self.make("data_owner", **changes), engine=TOY)

    def worker(self, role: str) -> int:
        """The process of a daemon's only session."""
        (record,) = self.daemons[role]._sessions.values()
        assert record.child is not None
        return record.child.process.pid

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.close()


@contextlib.contextmanager
def toys(folders: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that are started find the toy engine, and are given up soon; what they leave behind is told apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TOY_FAULT", str(folders.mktemp("toy") / "fault"))
        patch.setattr(client, "SIGN_OF_LIFE_SECONDS", 6.0)
        patch.setattr(servicer, "LEAST_SILENCE_SECONDS", 2.0)
        with marked(folders.mktemp("temporary"), patch):
            yield


def ends(call: Callable[[], Any], within: float) -> SecureInferError:
    start = time.monotonic()
    with pytest.raises(SecureInferError) as caught:
        call()
    assert time.monotonic() - start < within, str(caught.value)
    return caught.value


def told(caplog: pytest.LogCaptureFixture, count: int, *, stopped: bool = True) -> list[str]:
    """What the daemons said of the session's end, one line each."""
    stop = time.monotonic() + WITHIN
    while True:
        found = [
            r.getMessage()
            for r in caplog.records
            if re.match(r"session \w+ of data_owner: ", r.getMessage())
            # of a party that an earlier test stopped
            and (stopped or "did not go on and was killed" not in r.getMessage())
        ]
        if len(found) >= count or time.monotonic() > stop:
            time.sleep(0.2)
            return found
        time.sleep(0.05)
