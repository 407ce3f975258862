"""Sessions between real processes over mutual TLS: what works, what is refused, and how every fault ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.errors import (
    HandshakeError,
    InputError,
    PeerError,
    ProgramFileError,
    RangeError,
    SessionError,
    UsageError,
)
from secureinfer.session.client import Session
from secureinfer.session.local import LocalParties
from secureinfer.transport.base import HEADER_BYTES

from .served import ends

HERE = Path(__file__).parent
TOY = "toy_engine:make"
X = torch.arange(8.0).reshape(2, 4)
MARK = "SECUREINFER_TEST_MARK"


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers find the toy engine; a proxy that leads nowhere stands in the environment of every process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TOY_FAULT", str(tmp_path_factory.mktemp("toy") / "fault"))
        patch.setenv(MARK, secrets.token_hex(8))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")
        yield


@pytest.fixture(scope="module")
def program() -> si.Program:
    return si.compile(torch.nn.Linear(4, 4), (X,))


def ours() -> list[int]:
    """Processes of this test's environment, without this one."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def gone(timeout: float = 8.0) -> bool:
    stop = time.monotonic() + timeout
    while ours():
        if time.monotonic() > stop:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def parties(program: si.Program) -> Iterator[LocalParties]:
    """Daemons that serve several sessions."""
    made = LocalParties(program, engine=TOY, timeout=4.0, overrides=fast())
    yield made
    made.close()
    assert gone() and not made.folder.exists()


def fast(**peers: Any) -> dict[str, dict[str, Any]]:
    deadlines = {"connect": 3.0, "start": 60.0, "step": 4.0, "keepalive": 1.0}
    return {
        role: {"deadlines": deadlines, **peers.get(role, {})}
        for role in ("data_owner", "model_owner", "dealer")
    }


@pytest.fixture(scope="module")
def session(parties: LocalParties) -> Iterator[Session]:
    with Session(parties.program, parties.settings, engine=TOY) as session:
        yield session


def test_a_worker_that_crashes_leaves_no_core_file(session: Session) -> None:
    """It would put seeds, shares and weights on the disk. 1 byte: what Linux takes as "not through a pipe either"."""
    workers = [p for p in ours() if b"secureinfer.session.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(workers) >= 3
    for pid in workers:
        (line,) = (s for s in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in s)
        soft, hard = line.split()[4:6]
        assert soft in ("0", "1") and hard in ("0", "1")


def test_an_inference_goes_through_three_processes_and_comes_back(session: Session) -> None:
    session.prepare(2)
    for i in range(3):  # the third one deals on demand
        assert torch.allclose(session.infer(X + i), X + i, atol=1e-6)
    report = session.report()
    assert {p: report.roles[p] for p in report.roles} == {
        "data_owner": "data_owner",
        "model_owner": "model_owner",
        "dealer": "dealer",
    }


def test_the_statistics_of_both_ends_agree_and_are_exact(session: Session) -> None:
    session.infer(X)
    body, _ = session._request({"op": "report"})
    stats = {
        s["party"]: {phase: runs[-1] for phase, runs in s["phases"].items() if runs} for s in body["parties"]
    }
    for phase in ("setup", "offline", "online"):
        for a in stats:
            for b, counted in stats[a].get(phase, {"links": {}})["links"].items():
                if phase in stats[b]:
                    other = stats[b][phase]["links"][a]
                    assert counted["bytes_sent"] == other["bytes_received"]
                    assert counted["frames_sent"] == other["frames_received"]
    online = stats["data_owner"]["online"]
    sent = online["links"]["model_owner"]
    assert (sent["frames_sent"], sent["bytes_sent"]) == (2, 2 * HEADER_BYTES + 64)
    assert (sent["frames_received"], sent["bytes_received"]) == (1, HEADER_BYTES + 64)
    assert online["rounds"] == 2 and online["steps"]["0"]["bytes_sent"] == HEADER_BYTES
    assert sum(link["frames_sent"] for p in stats for link in stats[p]["offline"]["links"].values()) == 4 + 1
    assert stats["model_owner"]["setup"]["rounds"] == 1 and online["cpu_seconds"] > 0


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (X[:1], InputError, "shape"),
        (X.T.contiguous(), InputError, "compiled for"),
        (X.long(), InputError, "dtype"),
        (X * float("nan"), InputError, "8 values that are NaN or infinite"),
        (torch.where(X == 3, float("inf"), X), InputError, "1 values that are NaN"),
        (X * 1e15, RangeError, "7 values beyond the range"),
        (X.numpy(), InputError, "tensor is expected"),
        (None, InputError, "NoneType"),
    ],
    ids=["rows", "transposed", "dtype", "nan", "inf", "range", "array", "none"],
)
def test_a_refused_input_leaves_the_session_usable(
    session: Session, given: Any, error: type[InputError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        session.infer(given)
    assert "15" not in str(caught.value) or error is not RangeError  # no value in the text
    assert torch.allclose(session.infer(X), X, atol=1e-6)


def test_a_wrong_call_leaves_the_session_usable(session: Session) -> None:
    for call in (lambda: session.infer(), lambda: session.infer(X, X), lambda: session.infer(other=X)):
        with pytest.raises(InputError):
            call()
    for n in (-1, 1.5, True):
        with pytest.raises(UsageError):
            session.prepare(n)  # type: ignore[arg-type]
    assert torch.allclose(session.infer(input=X), X, atol=1e-6)


def test_wider_floats_and_tensors_with_history_are_taken(session: Session) -> None:
    assert session.infer(X.double()).dtype == torch.float32
    assert torch.allclose(session.infer(X.clone().requires_grad_()), X, atol=1e-6)
    assert torch.allclose(session.infer(X.T.contiguous().T), X, atol=1e-6)


def test_two_sessions_on_one_machine_do_not_meet(parties: LocalParties, session: Session) -> None:
    with Session(parties.program, parties.settings, engine=TOY) as second:
        assert torch.allclose(second.infer(X), X, atol=1e-6)
        assert torch.allclose(session.infer(X * 2), X * 2, atol=1e-6)
    with pytest.raises(SessionError, match="closed"):
        second.infer(X)
    assert torch.allclose(session.infer(X * 3), X * 3, atol=1e-6)


@pytest.mark.parametrize(("model_owner", "dealer"), [("grpc", "grpc"), ("tls", "grpc")])
def test_each_listening_party_chooses_how_its_data_comes_and_who_dials_follows(
    program: si.Program, model_owner: str, dealer: str
) -> None:
    kinds = {"model_owner": model_owner, "dealer": dealer}
    listens = {role: {"listen": {"port": 0, "data_link": kind}} for role, kind in kinds.items()}
    parties = LocalParties(program, engine=TOY, timeout=4.0, overrides=fast(**listens))
    with parties.session() as session:
        assert torch.allclose(session.infer(X), X, atol=1e-6)


# --- faults; a party that dies or stops is in test_faults.py ---


@pytest.mark.parametrize("role", ["data_owner", "model_owner"])
def test_an_error_inside_a_party_is_told_without_its_text(
    parties: LocalParties, fault: Callable[[str], None], role: str
) -> None:
    with Session(parties.program, parties.settings, engine=TOY) as session:
        fault(f"{role}:online:raise")
        error = ends(lambda: session.infer(X), within=8)
    if role == "data_owner":
        assert "unexpected ValueError" in str(error)
    else:
        assert isinstance(error, PeerError) and error.peer == role
    assert "31415" not in str(error)


def test_a_dealer_that_is_not_there_is_named(program: si.Program) -> None:
    nobody = {"dealer": {"name": "dealer", "address": "127.0.0.1:9"}}
    parties = LocalParties(program, engine=TOY, overrides=fast(model_owner={"peers": nobody}))
    try:
        # First the model owner alone cannot reach it, then nobody can.
        error = ends(lambda: Session(parties.program, parties.settings, engine=TOY), within=15)
        assert isinstance(error, PeerError) and "dealer" in str(error)
        parties.daemons["dealer"].kill()
        error = ends(lambda: Session(parties.program, parties.settings, engine=TOY), within=15)
        assert isinstance(error, PeerError) and error.peer == "dealer"
    finally:
        parties.close()


def test_another_program_at_the_model_owner_is_a_handshake_error(program: si.Program, tmp_path: Path) -> None:
    other = tmp_path / "other.si"
    si.compile(torch.nn.Linear(4, 5), (X,)).save(other)
    parties = LocalParties(program, engine=TOY, overrides=fast(model_owner={"program": str(other)}))
    try:
        error = ends(lambda: Session(parties.program, parties.settings, engine=TOY), within=15)
        assert isinstance(error, HandshakeError) and "program (manifest digest)" in str(error)
    finally:
        parties.close()


def test_only_a_program_makes_a_local_session() -> None:
    with pytest.raises(si.UsageError, match="got a Linear.*secureinfer.compile"):
        si.local_session(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_model_owner_with_the_public_part_does_not_start(program: si.Program, tmp_path: Path) -> None:
    public = tmp_path / "public.si"
    program.public().save(public)
    with pytest.raises(ProgramFileError, match=r"public.si is the public part"):
        LocalParties(program, engine=TOY, overrides=fast(model_owner={"program": str(public)})).close()


@pytest.mark.parametrize("role", ["data_owner", "dealer"])
def test_private_weights_are_refused_where_they_must_not_be(
    program: si.Program, tmp_path: Path, role: str
) -> None:
    private = tmp_path / "private.si"
    program.save(private)
    with pytest.raises(ProgramFileError, match="private weights"):
        parties = LocalParties(program, engine=TOY, overrides=fast(**{role: {"program": str(private)}}))
        try:
            Session(parties.program, parties.settings, engine=TOY)
        finally:
            parties.close()


# --- how a session is started and how it ends ---

SCRIPT = f"""
import sys, time, torch
import secureinfer as si
from secureinfer.session.local import LocalParties
parties = LocalParties(si.compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),)), engine="{TOY}")
session = parties.session()
print(parties.folder, session.infer(torch.ones(2, 4)).sum().item(), flush=True)
"""


def test_a_script_from_standard_input_that_forgets_to_close_leaves_nothing() -> None:
    done = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=60)
    folder, total = done.stdout.split()
    assert done.returncode == 0 and float(total) == pytest.approx(8.0), done.stderr
    assert not Path(folder).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_caller_that_is_killed_or_interrupted_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT + "time.sleep(60)\n")
    before = set(ours())
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    folder = Path(child.stdout.readline().split()[0])
    assert folder.exists() and len(set(ours()) - before) == 6
    child.send_signal(how)
    child.communicate(timeout=20)
    stop = time.monotonic() + 10
    while (set(ours()) - before or folder.exists()) and time.monotonic() < stop:
        time.sleep(0.1)
    assert set(ours()) <= before and not folder.exists()


@pytest.mark.parametrize("module", ["servicer", "daemon", "control", "worker"])
def test_a_daemon_never_loads_torch(module: str) -> None:
    code = f"import sys, secureinfer.session.{module}; print([m for m in ('torch', 'crypten') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
