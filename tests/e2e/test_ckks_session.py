"""CKKS between real processes: answers, reports, refused inputs, a model owner that dies, and memory that stays flat."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.errors import PeerError, SessionError
from secureinfer.session.local import LocalParties

from .ckks_probe import NAME
from .leftovers import look, marked, wait_until_nothing_is_left

pytestmark = pytest.mark.needs("he")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OWNERS = ("data_owner", "model_owner")
CLIENT = {"secureinfer.backends.ckks.client", "secureinfer.backends.ckks.data_owner"}
SERVER = {"secureinfer.backends.ckks.model_owner", "secureinfer.backends.ckks.server"}
X = torch.rand(1, 12, generator=torch.Generator().manual_seed(9))


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        return {"logits": self.second(h * h)}


MODEL = Squares().eval()


def right(answer: Any, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(answer["logits"], MODEL(x)["logits"], atol=1e-3)


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PROBE", str(tmp_path_factory.mktemp("probe")))
        with marked(tmp_path_factory.mktemp("temporary"), patch):
            yield


@pytest.fixture
def fault() -> Iterator[Path]:
    file = Path(os.environ["PROBE"]) / "fault"
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def program() -> si.Program:
    calibration = [(torch.rand(1, 12),) for _ in range(16)]
    return si.compile(MODEL, (X,), backend="ckks", calibration=calibration)


def parties(program: si.Program) -> LocalParties:
    return LocalParties(
        program, engine=NAME, threads=1, overrides={r: {"deadlines": {"step": 20.0}} for r in OWNERS}
    )


@pytest.fixture(scope="module")
def probed(program: si.Program) -> Iterator[tuple[LocalParties, si.Session]]:
    made = parties(program)
    with made.session() as session:
        yield made, session


@pytest.fixture
def session(probed: tuple[LocalParties, si.Session]) -> si.Session:
    return probed[1]


# --- what works ---


def test_several_inferences_are_right_in_the_models_own_structure(session: si.Session) -> None:
    for x in (X, X / 2, torch.zeros_like(X), torch.ones_like(X)):
        assert right(session.infer(x), x)
    assert session.infer(X)["logits"].dtype == torch.float32


def test_the_report_has_two_parties_two_rounds_and_no_more_bytes_than_the_plan(session: si.Session) -> None:
    session.infer(X)
    session.infer(X)
    data = session.report().to_dict()
    planned, online = data["program"]["planned"], data["online"]
    assert set(online["parties"]) == set(OWNERS) and data["program"]["backend"] == "ckks"
    assert online["rounds"] == planned["rounds"] == 2 and planned["exact_bytes"] is False
    assert 0 < online["bytes"] <= planned["bytes"] and 0 < data["setup"]["bytes"] <= planned["setup_bytes"]
    assert online["bytes"] > planned["bytes"] / 2  # a bound that says something
    assert data["offline"]["count"] == 0 and data["offline"]["bytes"] is None
    assert "plan" not in (data["invalid_reason"] or "")


def test_there_is_nothing_to_prepare(session: si.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(session, "_request", lambda *_: pytest.fail("something was sent"))
        session.prepare(1000)
    assert right(session.infer(X), X)


REFUSED = {
    "not a number": (torch.full_like(X, math.nan), si.InputError),
    "infinite": (torch.full_like(X, math.inf), si.InputError),
    "one value out of range": (torch.cat([X[:, 1:], torch.tensor([[1e6]])], 1), si.RangeError),
    "negative, where calibration had no such value": (-X, si.RangeError),
    "of another shape": (torch.rand(2, 12), si.InputError),
    "of integers": (torch.ones(1, 12, dtype=torch.int64), si.InputError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_input_sends_nothing_and_leaves_the_session_usable(session: si.Session, what: str) -> None:
    session.infer(X)
    before = max(session._online_ms)
    x, kind = REFUSED[what]
    with pytest.raises(kind, match="'x'") as caught:
        session.infer(x)
    assert type(caught.value) is kind
    assert right(session.infer(X), X)
    assert max(session._online_ms) == before + 1


@pytest.mark.parametrize("layout", [pytest.param("slots", marks=pytest.mark.slow), "batch"])
def test_a_batch_is_right_in_either_layout(layout: str) -> None:
    x = torch.rand(5, 12)
    program = si.compile(MODEL, (x,), backend="ckks", calibration=[(x,)], ckks={"layout": layout})
    with si.local_session(program, threads=1) as session:
        assert right(session.infer(x), x)
        assert right(session.infer(x / 3), x / 3)


@pytest.mark.slow
def test_circuit_privacy_between_processes() -> None:
    program = si.compile(MODEL, (X,), backend="ckks", calibration=[(X,)], circuit_privacy=40)
    with si.local_session(program, threads=1) as session:
        assert right(session.infer(X), X)


# --- who loads what (rule K2) ---


def modules(role: str) -> set[str]:
    return set(json.loads((Path(os.environ["PROBE"]) / f"{role}.json").read_text())["modules"])


def test_no_process_of_the_model_owner_loads_what_makes_or_holds_a_secret_key(
    session: si.Session, fault: Path
) -> None:
    session.infer(X)
    session.report()  # the model owner answers once it is done with the inference
    assert modules("model_owner") & CLIENT == set() and SERVER <= modules("model_owner")
    assert modules("data_owner") & SERVER == set() and CLIENT <= modules("data_owner")
    fault.write_text("model_owner:load-client")  # the twin
    session.infer(X)
    session.report()
    assert modules("model_owner") & CLIENT == {"secureinfer.backends.ckks.client"}


def test_the_processes_that_help_a_model_owner_do_not_load_it_either() -> None:
    code = (
        "import sys, secureinfer.backends.ckks.pool as pool\n"
        f"assert not {CLIENT!r} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


# --- memory ---


def resident_bytes(role: str) -> int:
    pid = json.loads((Path(os.environ["PROBE"]) / f"{role}.json").read_text())["pid"]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


MOST_GROWTH = 6 << 20


def growth(session: si.Session, warm: int, count: int) -> dict[str, int]:
    """Of each worker's resident size, between two numbers of inferences."""
    for _ in range(warm):
        session.infer(X)
    session.report()
    before = {role: resident_bytes(role) for role in OWNERS}
    for _ in range(count):
        session.infer(X)
    session.report()
    return {role: resident_bytes(role) - before[role] for role in OWNERS}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_over_a_hundred_inferences(session: si.Session) -> None:
    assert all(grown < MOST_GROWTH for grown in growth(session, 20, 80).values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("role", OWNERS)
def test_an_engine_that_keeps_something_of_each_inference_is_seen(
    session: si.Session, fault: Path, role: str
) -> None:
    fault.write_text(f"{role}:leak")
    grown = growth(session, 1, 3)
    assert {r for r, size in grown.items() if size > MOST_GROWTH} == {role}


# --- a party that dies ---


def worker_of(daemon: int) -> int:
    (child,) = (c for f in Path(f"/proc/{daemon}/task").glob("*/children") for c in f.read_text().split())
    return int(child)


@pytest.mark.parametrize(
    "when", [pytest.param("between two inferences", marks=pytest.mark.slow), "within one"]
)
def test_a_model_owner_that_is_killed_is_named(program: si.Program, fault: Path, when: str) -> None:
    before = look()
    made = parties(program)
    with made.session() as session:
        assert right(session.infer(X), X)
        if when == "within one":
            fault.write_text("model_owner:die")
        else:
            os.kill(worker_of(made.daemons["model_owner"].process.pid), signal.SIGKILL)
            time.sleep(0.3)
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            session.infer(X)
        assert caught.value.peer == "model_owner" and time.monotonic() - start < 10
        with pytest.raises(SessionError, match="model_owner"):
            session.infer(X)
    wait_until_nothing_is_left(before)


@pytest.mark.slow
def test_a_model_owner_that_is_killed_while_it_computes_is_named_and_its_helpers_end() -> None:
    """A wide layer, which it shares with a second process."""
    torch.manual_seed(0)
    x = torch.rand(1, 784)
    model = nn.Sequential(nn.Linear(784, 512), Square(), nn.Linear(512, 10)).eval()
    program = si.compile(model, (x,), backend="ckks", calibration=[(x,)])
    before = look()
    made = LocalParties(program, engine=NAME, threads=2)
    with made.session() as session, torch.no_grad():
        assert torch.allclose(session.infer(x), model(x), atol=1e-2)
        pid = worker_of(made.daemons["model_owner"].process.pid)
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(PeerError) as caught:
            for _ in range(100):
                session.infer(x)
        assert caught.value.peer == "model_owner"
    wait_until_nothing_is_left(before)


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x
