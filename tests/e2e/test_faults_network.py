"""A cut between two parties, each in a namespace of its own: every side names an end of it in time, and heals with it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.bench.namespaces import unavailable
from secureinfer.bench.network import Network
from secureinfer.transport.tls import Identity, make_certificates

from .leftovers import look, marked, wait_until_nothing_is_left

pytestmark = pytest.mark.needs("netns")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROLES = ("data_owner", "model_owner", "dealer")
PORT = 7400
WITHIN = 8.0

PARTY = r"""
import json, logging, sys, time
import secureinfer.session.client as client
from secureinfer.config import make_settings
from secureinfer.errors import SecureInferError

client.SIGN_OF_LIFE_SECONDS = 6.0
settings = make_settings(json.loads(sys.argv[1]))
if settings.role != "data_owner":
    from secureinfer.session.servicer import Daemon
    logging.basicConfig(level=logging.WARNING, filename=sys.argv[2], format="%(message)s")
    daemon = Daemon(settings, engine="toy_engine:make")
    print("up", flush=True)
    sys.stdin.read()
    daemon.close()
else:
    import torch
    from secureinfer.plan.program import Program
    program = Program.load(settings.program, allow_private=False)
    session = None
    for line in sys.stdin:
        start, answer = time.monotonic(), {}
        try:
            if line == "open\n":
                session = client.Session(program, settings, engine="toy_engine:make")
            else:
                answer["sum"] = session.infer(torch.ones(2, 4)).sum().item()
        except SecureInferError as error:
            answer = {"error": str(error), "code": error.code, "peer": getattr(error, "peer", None)}
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer), flush=True)
    if session is not None:
        session.close()
"""


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TOY_FAULT", str(tmp_path_factory.mktemp("toy") / "fault"))
        with marked(tmp_path_factory.mktemp("temporary"), patch):
            yield


class World:
    """Two daemons in their namespaces; owners are started as they are needed."""

    def __init__(self, folder: Path, network: Network, program: si.Program) -> None:
        self.folder, self.network = folder, network
        program.save(folder / "model_owner.si")
        for role in ("data_owner", "dealer"):
            program.public().save(folder / f"{role}.si")
        self.certificates = make_certificates(folder / "certs", {r: [r] for r in ROLES})
        self.daemons = [self.start("dealer"), self.start("model_owner")]
        for daemon in self.daemons:
            assert daemon.stdout is not None and daemon.stdout.readline() == "up\n"

    def start(self, role: str) -> subprocess.Popen[str]:
        own = self.certificates[Identity(role, role)]
        settings: dict[str, Any] = {
            "role": role,
            "name": role,
            "program": str(self.folder / f"{role}.si"),
            "tls": {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)},
            "deadlines": {"connect": 3.0, "start": 60.0, "step": 4.0, "keepalive": 1.0},
        }
        dials = {"data_owner": ["model_owner", "dealer"], "model_owner": ["dealer"], "dealer": []}[role]
        settings["peers"] = {r: {"name": r, "address": f"{self.network.address(r)}:{PORT}"} for r in dials}
        if role != "data_owner":
            settings["listen"] = {"port": PORT, "bind": self.network.address(role)}
        command = [sys.executable, "-c", PARTY, json.dumps(settings), str(self.folder / f"{role}.log")]
        with (self.folder / f"{role}.err").open("w") as err:
            return self.network.start(role, command, stdin=subprocess.PIPE, stderr=err, cwd=ROOT)

    def log(self, role: str) -> list[str]:
        file = self.folder / f"{role}.log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith("session ")]

    def told(self, role: str, before: int) -> list[str]:
        stop = time.monotonic() + WITHIN
        while len(found := self.log(role)[before:]) < 1 and time.monotonic() < stop:
            time.sleep(0.05)
        time.sleep(0.3)
        return self.log(role)[before:] or found


class Owner:
    """A data owner in its namespace, told line by line what to do."""

    def __init__(self, world: World) -> None:
        self.process = world.start("data_owner")

    def do(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, environment: None) -> Iterator[World]:
    program = si.compile(
        torch.nn.Linear(4, 4), (torch.ones(2, 4),)
    )  # torch keeps a cache of its own from then on
    before = look()
    with Network(ROLES) as network:
        yield World(tmp_path_factory.mktemp("world"), network, program)
    wait_until_nothing_is_left(before)


@contextlib.contextmanager
def owner(world: World) -> Iterator[Owner]:
    made = Owner(world)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("pair", "whole"),
    [
        pytest.param(("data_owner", "model_owner"), False, id="in a session"),
        pytest.param(
            ("data_owner", "model_owner"), True, marks=pytest.mark.slow, id="data_owner-model_owner"
        ),
        pytest.param(("model_owner", "dealer"), True, marks=pytest.mark.slow, id="model_owner-dealer"),
        pytest.param(("data_owner", "dealer"), True, marks=pytest.mark.slow, id="data_owner-dealer"),
    ],
)
def test_a_cut_is_named_by_every_side_in_time_and_after_it_all_is_well(
    world: World, pair: tuple[str, str], whole: bool
) -> None:
    before = look()
    logged = {role: len(world.log(role)) for role in ("model_owner", "dealer")}
    with owner(world) as first:
        assert "error" not in first.do("open")
        assert first.do("infer")["sum"] == pytest.approx(8.0)  # the twin: without a cut
        world.network.cut(*pair)
        try:
            answer = first.do("infer")
            assert answer["code"] == "peer" and answer["peer"] in pair and answer["seconds"] < WITHIN, answer
            for role, count in logged.items():
                said = world.told(role, count)
                assert len(said) == 1 and any(name in said[0].partition(": ")[2] for name in pair), (
                    role,
                    said,
                )
            if whole:
                with owner(world) as second:  # and none can be opened meanwhile
                    answer = second.do("open")
                    assert answer["code"] == "peer" and answer["seconds"] < 20, answer
                    assert any(name in answer["error"] for name in pair), answer
        finally:
            world.network.heal(*pair)
    wait_until_nothing_is_left(before)
    if not whole:
        return
    with owner(world) as third:
        assert "error" not in third.do("open")
        assert third.do("infer")["sum"] == pytest.approx(8.0)
    wait_until_nothing_is_left(before)
