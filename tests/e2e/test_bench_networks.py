"""Each party of a local session in a network namespace of its own; and what was projected is what is measured there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.bench import network as networks
from secureinfer.bench.namespaces import spaces, sweep, unavailable
from secureinfer.bench.network import LAN, PLAIN, WAN, Condition
from secureinfer.bench.places import places
from secureinfer.bench.projection import added_ms
from secureinfer.errors import PeerError, SessionError, UsageError
from secureinfer.session.local import Place, local_session

from .leftovers import look, marked, processes, wait_until_nothing_is_left

pytestmark = pytest.mark.needs("netns")

ROLES = ("data_owner", "model_owner", "dealer")
ROOT = Path(__file__).parents[2]
RUNS = 11
AGREE = 0.25
"""How far apart what is projected and what is emulated may lie."""


@pytest.fixture(autouse=True, scope="module")
def _marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch, marked(tmp_path_factory.mktemp("temporary"), patch):
        si.compile(
            perceptron(4), (torch.randn(1, 30),), backend="mpc"
        )  # torch keeps a folder of its own from then on
        yield


def own_spaces() -> list[str]:
    return [space for space in spaces() if space.startswith(f"si-{os.getpid()}-")]


def members(place: Place) -> list[int]:
    """The processes in a namespace that tests started."""
    space = Path(place.command[1].partition("=")[2]).name
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True)
    return [pid for pid in map(int, found.stdout.split()) if pid in processes()]


def perceptron(wide: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(30, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 2)
    ).eval()


@dataclass(frozen=True)
class Measured:
    """A session's report, who ran where, and the quickest inference but the first, online and offline."""

    report: dict[str, Any]
    where: dict[str, list[int]]
    best_ms: dict[str, float]


def measure(network: str, wide: int = 32, batch: int = 1) -> Measured:
    """Some inferences, whose answers were looked at. The quickest: other tests may keep this machine busy."""
    model, x = perceptron(wide), torch.randn(batch, 30)
    program, where = si.compile(model, (x,), backend="mpc"), {}
    before = look()
    times: dict[str, list[float]] = {"offline": [], "online": []}
    with places(network, ROLES) as found, local_session(program, places=found) as session:
        for _ in range(RUNS):
            start = time.perf_counter()
            session.prepare(1)
            between = time.perf_counter()
            answer = session.infer(x)
            times["offline"].append(1000 * (between - start))
            times["online"].append(1000 * (time.perf_counter() - between))
            torch.testing.assert_close(answer, model(x), atol=1e-2, rtol=0)
        if found is not None:
            where = {role: members(place) for role, place in found.items()}
        report: dict[str, Any] = json.loads(json.dumps(session.report().to_dict()))
    wait_until_nothing_is_left(before)
    assert own_spaces() == []
    return Measured(report, where, {phase: min(ms[1:]) for phase, ms in times.items()})


@pytest.fixture(scope="module")
def loopback() -> Measured:
    return measure("loopback")


@pytest.fixture(scope="module")
def wan() -> Measured:
    return measure("wan")


# --- places ---


def test_every_party_runs_in_its_own_namespace_and_the_report_says_what_was_between_them(
    wan: Measured, loopback: Measured
) -> None:
    report = wan.report
    assert {role: len(pids) for role, pids in wan.where.items()} == {
        "data_owner": 1,  # its worker; the caller is where it was
        "model_owner": 2,  # daemon and worker
        "dealer": 2,
    }
    assert report["network"] == {"name": "wan", "source": "emulated"}
    assert report["online"]["latency_ms"] >= report["online"]["rounds"] * WAN.delay_ms
    assert report["invalid_reason"] is None
    # The twin: the same session where all run on the loopback.
    loop = loopback.report
    assert loop["network"] == {"name": "loopback", "source": "measured"}
    assert loopback.best_ms["online"] < loop["online"]["rounds"] * WAN.delay_ms


def test_over_a_slow_network_nearly_all_of_the_time_is_waiting(wan: Measured, loopback: Measured) -> None:
    for report in wan.report, loopback.report:
        for part in (report[phase] for phase in ("setup", "offline", "online")):
            for party in part["parties"].values():
                if party["bytes"] is not None and party["latency_ms"] is not None:
                    assert 0 <= party["waiting_ms"] <= party["latency_ms"]
        for layer in report["online"]["layers"]:
            assert 0 <= layer["waiting_ms"] <= layer["latency_ms"]
    online = wan.report["online"]
    owner = online["parties"]["data_owner"]
    # Half of its rounds are its own messages, whose way it waits for as the answer's.
    assert owner["waiting_ms"] >= (online["rounds"] - 1) * WAN.delay_ms
    layers = online["layers"]
    assert sum(layer["waiting_ms"] for layer in layers) >= (online["rounds"] - 2) * WAN.delay_ms
    at_home = loopback.report["online"]["parties"]["data_owner"]
    assert at_home["waiting_ms"] < owner["waiting_ms"] / 2


def test_a_network_without_a_name_here_is_a_usage_error() -> None:
    with (
        pytest.raises(UsageError, match="no network 'moon' to emulate; choose lan or wan"),
        places("moon", ROLES),
    ):
        pass


def test_a_machine_that_cannot_make_namespaces_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "unavailable", lambda: "only root may make network namespaces")
    with pytest.raises(SessionError, match="only root may"), places("lan", ROLES):
        pass
    with places("loopback", ROLES) as found:
        assert found is None


def test_a_session_wants_a_place_for_each_of_its_parties() -> None:
    before = look()
    program = si.compile(perceptron(4), (torch.randn(1, 30),), backend="mpc")
    with pytest.raises(UsageError, match="one for dealer too"):
        local_session(program, places={"data_owner": Place(), "model_owner": Place()})
    assert not look().beyond(before)


def test_namespaces_go_with_an_error_in_the_block_and_so_does_what_runs_in_them() -> None:
    before = look()
    with pytest.raises(PeerError, match="it went"), places("lan", ROLES) as found:
        assert found is not None and len(own_spaces()) == 1 + len(ROLES)
        subprocess.Popen([*found["dealer"].command, "sleep", "600"])
        raise PeerError("dealer", "it went")
    assert own_spaces() == []
    wait_until_nothing_is_left(before)


CALLER = """
import sys, torch
import secureinfer as si
from secureinfer.bench.places import places
from secureinfer.session.local import local_session
x = torch.randn(1, 4)
program = si.compile(torch.nn.Linear(4, 2), (x,), backend="mpc")
with places("lan", ("data_owner", "model_owner", "dealer")) as found:
    with local_session(program, places=found) as session:
        session.infer(x)
        print("up", flush=True)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_parties_end_with_a_caller_that_is_killed_and_their_namespaces_with_the_next_sweep() -> None:
    before = look()
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert caller.stdout is not None and caller.stdout.readline() == "up\n"
    assert len(processes() - before.processes) > 5  # the twin: they were there
    caller.send_signal(signal.SIGKILL)
    caller.communicate(timeout=20)
    wait_until_nothing_is_left(before)
    left = {space for space in spaces() if space.startswith(f"si-{caller.pid}-")}
    assert left <= set(sweep())
    assert not any(space.startswith(f"si-{caller.pid}-") for space in spaces())


@pytest.mark.slow
def test_a_party_that_dies_in_its_namespace_is_named_and_nothing_stays() -> None:
    before = look()
    x = torch.randn(1, 30)
    program = si.compile(perceptron(4), (x,), backend="mpc")
    with places("lan", ROLES) as found, local_session(program, places=found) as session:
        assert found is not None
        session.infer(x)
        for pid in members(found["model_owner"]):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerError, match="model_owner"):
            session.infer(x)
    wait_until_nothing_is_left(before)
    assert own_spaces() == []


@pytest.mark.slow
@pytest.mark.needs("he")
def test_two_parties_without_a_dealer_and_the_processes_that_share_the_computing() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return self.second(h * h)

    model, x = Squares().eval(), torch.rand(1, 256)
    calibration = [(torch.rand(1, 256),) for _ in range(16)]
    program = si.compile(model, (x,), backend="ckks", calibration=calibration)
    with places("wan", ROLES[:2]) as found, local_session(program, places=found, threads=2) as session:
        assert found is not None
        for _ in range(3):
            torch.testing.assert_close(session.infer(x), model(x), atol=1e-3, rtol=0)
        where = {role: len(members(place)) for role, place in found.items()}
        report = session.report().to_dict()
    assert where == {"data_owner": 1, "model_owner": 3}  # daemon, worker, and its helper
    assert report["network"] == {"name": "wan", "source": "emulated"}
    online = report["online"]
    assert online["latency_ms"] >= 2 * WAN.delay_ms
    assert online["parties"]["data_owner"]["waiting_ms"] >= 2 * WAN.delay_ms
    assert all(layer["waiting_ms"] is None for layer in online["layers"])


# --- projection ---


def check(here: Measured, there: Measured, condition: Condition, *phases: str) -> None:
    """What a loopback's best runs become over a network agrees with the best runs over it."""
    added = added_ms(here.report, condition)
    for phase in phases or ("offline", "online"):
        projected, emulated = here.best_ms[phase] + added[phase], there.best_ms[phase]
        assert abs(projected - emulated) <= AGREE * emulated, (
            f"{phase}: {projected} ms, and it took {emulated}"
        )


def test_what_is_projected_for_a_wan_is_what_was_measured_over_one(wan: Measured, loopback: Measured) -> None:
    check(loopback, wan, WAN)
    # The twins: what the loopback took, and what is wrong for who takes a round for a round trip.
    for wrong in PLAIN, Condition(2 * WAN.delay_ms, WAN.bytes_per_second):
        with pytest.raises(AssertionError, match="online"):
            check(loopback, wan, wrong, "online")


@pytest.mark.slow
def test_bytes_are_projected_too_where_they_take_the_time() -> None:
    """What is dealt for a batch of a wider perceptron takes a WAN longer than its delays."""
    here, there = measure("loopback", 128, 16), measure("wan", 128, 16)
    check(here, there, WAN)
    with pytest.raises(AssertionError, match="offline"):
        check(here, there, Condition(WAN.delay_ms), "offline")


@pytest.mark.slow
def test_what_is_projected_for_a_lan_is_what_is_measured_over_one() -> None:
    """Rounds are so quick there that the two sessions take turns: this machine is as busy for the one as for the other."""
    model, x = perceptron(32), torch.randn(1, 30)
    program = si.compile(model, (x,), backend="mpc")
    ratios: dict[str, list[float]] = {"lan": [], "slower": []}
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(local_session(program))
        there = stack.enter_context(local_session(program, places=stack.enter_context(places("lan", ROLES))))
        for _ in range(30):
            times = []
            for session in here, there:
                session.prepare(1)
                start = time.perf_counter()
                session.infer(x)
                times.append(1000 * (time.perf_counter() - start))
            report = here.report().to_dict()
            for name, condition in ("lan", LAN), ("slower", Condition(20 * LAN.delay_ms)):
                ratios[name].append((times[0] + added_ms(report, condition)["online"]) / times[1])
    assert abs(statistics.median(ratios["lan"]) - 1) <= AGREE
    assert abs(statistics.median(ratios["slower"]) - 1) > AGREE  # the twin
