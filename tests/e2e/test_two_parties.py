"""Sessions without a dealer, between real processes: two parties and one link, nothing to prepare, and every fault named."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import secureinfer as si
from secureinfer import cli
from secureinfer.config import Peer, make_settings
from secureinfer.errors import (
    AuthenticationError,
    HandshakeError,
    PeerError,
    SessionError,
    SettingsError,
    UsageError,
)
from secureinfer.measure.figures import Plaintext
from secureinfer.measure.latency import summarise
from secureinfer.plan.planner import make_plan
from secureinfer.session.control import ControlClient
from secureinfer.session.handshake import make_hello
from secureinfer.session.local import LocalParties
from secureinfer.session.manifest import read_manifest
from secureinfer.session.servicer import Daemon
from secureinfer.transport.tls import Identity, make_certificates

from .leftovers import look, processes, wait_until_nothing_is_left
from .served import DEADLINES, TOY, WITHIN, Parties, ends, told, toys
from .toy_ckks import SENT, SET_UP, registry

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
X = torch.arange(8.0).reshape(2, 4)
OWNERS = ("data_owner", "model_owner")
NOBODY = {"name": "dealer", "address": "dealer.example.org:9"}


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with toys(tmp_path_factory):
        yield


def two_party(most: int = 1000) -> si.Program:
    """A program of backend "ckks" for the toy engine, whose middle step is said to send at most so many bytes."""
    made = si.compile(torch.nn.Linear(4, 4), (X,), backend="plaintext")
    return si.Program(
        made.graph,
        make_plan(made.graph, registry(most), 2, made.options),
        backend="ckks",
        protocol="ckks",
        options=made.options,
        constants=made.constants,
        weights=made.weights,
    )


@pytest.fixture(scope="module")
def program() -> si.Program:
    return two_party()


@pytest.fixture(scope="module")
def local(program: si.Program) -> Iterator[LocalParties]:
    """Parties whose settings still name a dealer, whom nobody must ask for: there is none at that address."""
    overrides: dict[str, dict[str, Any]] = {role: {"deadlines": DEADLINES} for role in OWNERS}
    overrides["model_owner"]["peers"] = {"dealer": NOBODY}
    made = LocalParties(program, engine=TOY, overrides=overrides)
    peers = made.settings.peers.model_copy(update={"dealer": Peer(**NOBODY)})
    made.settings = made.settings.model_copy(update={"peers": peers})
    yield made
    made.close()


@pytest.fixture(scope="module")
def session(local: LocalParties) -> Iterator[si.Session]:
    with si.Session(local.program, local.settings, engine=TOY) as session:
        yield session


# --- what works ---


def test_an_inference_goes_through_two_parties_and_nobody_is_dialled_but_the_model_owner(
    local: LocalParties, session: si.Session
) -> None:
    for i in range(3):
        assert torch.allclose(session.infer(X + i), X + i, atol=1e-6)
    assert sorted(session._online_ms) == [0, 1, 2]  # an index each, up by one
    assert list(local.daemons) == ["model_owner"]
    assert {p.name for p in local.folder.iterdir()} == {"certs", *OWNERS}
    assert sorted(c.stem for c in (local.folder / "certs").glob("*.key")) == list(OWNERS)
    assert len(processes()) == 3  # a daemon, its worker, and the data owner's


def test_a_report_has_two_parties_and_both_ends_of_their_link_agree(session: si.Session) -> None:
    session.infer(X)
    report = session.report()
    assert dict(report.roles) == {"data_owner": "data_owner", "model_owner": "model_owner"}
    assert report.setup.figures.bytes == SET_UP and report.online.figures.bytes == SENT
    assert report.online.figures.bytes_received == SENT and report.online.figures.rounds == 2
    assert report.online.parties["data_owner"].bytes == report.online.parties["model_owner"].bytes_received
    # The plan's bytes are bounds, and its rounds are exact: neither is a fault.
    assert "plan" not in (report.invalid_reason or "") and "differently" not in (report.invalid_reason or "")
    assert report.network["name"] == "loopback"  # whatever the settings say of a dealer


def test_a_report_says_that_nothing_runs_offline_and_that_online_is_the_total(session: si.Session) -> None:
    session.infer(X)
    report = session.report().with_plaintext(Plaintext("torch eager", "float32", 1, summarise([1.0])))
    data = report.to_dict()
    assert data["program"]["dealer"] is False and data["program"]["planned"]["exact_bytes"] is False
    assert data["program"]["planned"]["dealt_bytes"] == 0
    offline = data["offline"]
    assert offline["count"] == 0
    assert all(offline[key] is None for key in ("latency_ms", "cold_latency_ms", "bytes", "rounds"))
    online, total = data["overhead"]["online"], data["overhead"]["total"]
    assert total["ratio"] == online["ratio"] > 0
    assert total["numerator"] == "online latency_ms, there is no offline phase"
    assert "offline, each" not in str(report) and "dealer" not in str(report)


def test_there_is_nothing_to_prepare(session: si.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by these parties' limits either; and the toy would fail if it were asked to."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "_request", lambda *_: pytest.fail("something was sent"))
        session.prepare(1000)
        session.prepare(1000, wait=False)
        session.prepare(0)
        for wrong in (-1, True):
            with pytest.raises(UsageError):
                session.prepare(wrong)
    before = max(session._online_ms, default=-1)
    assert torch.allclose(session.infer(X), X, atol=1e-6)
    assert max(session._online_ms) == before + 1  # it took no index
    assert session.report().offline.figures.latency.count == 0


def test_a_refused_input_takes_no_index_and_leaves_the_session_usable(session: si.Session) -> None:
    session.infer(X)
    before = max(session._online_ms)
    with pytest.raises(si.InputError):
        session.infer(X[:1])
    session.infer(X)
    assert max(session._online_ms) == before + 1


def test_more_bytes_than_the_plan_allows_are_a_fault(
    session: si.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the report above: the same traffic, beside a plan that promises less."""
    session.infer(X)
    monkeypatch.setattr(session, "program", two_party(most=100))
    said = session.report().invalid_reason or ""
    assert f"online 0 took {SENT} bytes where the plan says at most {64 + 100}" in said


def test_the_command_tells_the_cost_without_speaking_of_a_dealer(program: si.Program) -> None:
    assert cli._totals(program) == (
        "3 steps; each inference will take 2 rounds and at most 1.06 kB, after at most 320 B once a session"
    )
    data = cli.plan_json(program)
    assert data["totals"]["exact_bytes"] is False and data["totals"]["dealt_bytes"] == 0
    assert data["steps"][1] == {
        "index": 1, "path": "", "op": "linear", "kernel": "toy.linear", "rounds": 2, "bytes": 1000, "dealt_bytes": 0,
    }  # fmt: skip
    mpc = si.compile(torch.nn.Linear(4, 4), (X,))
    assert "offline" in cli._totals(mpc) and "at most" not in cli._totals(mpc)
    assert cli.plan_json(mpc)["totals"]["exact_bytes"] is True


def test_whether_there_is_a_dealer_is_known_without_torch() -> None:
    code = (
        "import sys; from secureinfer.backends import has_dealer, has_exact_bytes as exact\n"
        "import secureinfer.session.base, secureinfer.session.driver, secureinfer.session.follower\n"
        "assert (has_dealer('mpc'), has_dealer('ckks'), exact('mpc'), exact('ckks')) == (True, False, True, False)\n"
        "assert not {'torch', 'crypten', 'tenseal'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


# --- a party dies, stops or is silent ---


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory, program: si.Program) -> Iterator[Parties]:
    made = Parties(tmp_path_factory.mktemp("parties"), program)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("role", "phase", "kind"),
    [
        ("model_owner", "online", "die"),
        ("data_owner", "online", "die"),
        pytest.param("model_owner", "online", "stop", marks=pytest.mark.slow),
        pytest.param("model_owner", "setup", "die", marks=pytest.mark.slow),
        pytest.param("model_owner", "setup", "stop", marks=pytest.mark.slow),
        pytest.param("data_owner", "online", "stop", marks=pytest.mark.slow),
        pytest.param("data_owner", "setup", "die", marks=pytest.mark.slow),
        pytest.param("model_owner", "handshake", "die", marks=pytest.mark.slow),
        pytest.param("data_owner", "handshake", "stop", marks=pytest.mark.slow),
    ],
)
def test_a_party_that_dies_or_stops_is_named_by_the_other_within_the_deadline(
    parties: Parties,
    fault: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    role: str,
    phase: str,
    kind: str,
) -> None:
    before, session = look(), None
    with caplog.at_level(logging.WARNING, "secureinfer.session"):
        if phase == "online":
            session = parties.session()
            assert torch.allclose(session.infer(X), X, atol=1e-6)  # the twin: without the fault it goes on
            fault(f"{role}:{phase}:{kind}")
            error = ends(lambda: session.infer(X), WITHIN)
        else:
            fault(f"{role}:{phase}:{kind}")
            error = ends(parties.session, 60)
        assert isinstance(error, PeerError) and error.peer == role, str(error)
        if role == "data_owner":
            assert any(role in line for line in told(caplog, 1))
    if session is not None:
        assert role in str(ends(lambda: session.infer(X), 1))
        assert role in str(ends(session.prepare, 1))  # nothing to prepare, and no session to do it in
        session.close()
    Path(os.environ["TOY_FAULT"]).unlink()
    wait_until_nothing_is_left(before)


@pytest.mark.slow
def test_a_model_owner_that_is_killed_between_two_inferences_is_named_by_the_next(parties: Parties) -> None:
    with parties.session() as session:
        session.infer(X)
        os.kill(parties.worker("model_owner"), signal.SIGKILL)
        time.sleep(0.2)
        error = ends(lambda: session.infer(X), WITHIN)
    assert isinstance(error, PeerError) and error.peer == "model_owner", str(error)


def test_a_peer_may_compute_for_as_long_as_the_deadline_and_no_longer(
    parties: Parties, fault: Callable[[str], None]
) -> None:
    with parties.session(deadlines={**DEADLINES, "step": 2.0}) as session:
        fault("model_owner:online:compute-1")
        assert torch.allclose(session.infer(X), X, atol=1e-6)
        fault("model_owner:online:compute-4")
        error = ends(lambda: session.infer(X), 3.5)
    assert isinstance(error, PeerError) and error.peer == "model_owner" and "deadline" in str(error)


@pytest.mark.parametrize("idle", ["data_owner", pytest.param("model_owner", marks=pytest.mark.slow)])
def test_a_session_that_nobody_uses_ends(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, idle: str
) -> None:
    deadlines = {**DEADLINES, "idle": 1.0}
    changes = {"deadlines": deadlines} if idle == "data_owner" else {}
    if idle == "model_owner":
        monkeypatch.setattr(parties.daemons[idle], "settings", parties.make(idle, deadlines=deadlines))
    with caplog.at_level(logging.WARNING, "secureinfer.session"), parties.session(**changes) as session:
        for _ in range(3):  # the twin: a session in use goes on for longer
            session.infer(X)
            time.sleep(0.5)
        time.sleep(2.0)
        error = ends(lambda: session.infer(X), WITHIN)
    if idle == "data_owner":
        assert isinstance(error, SessionError) and "deadlines.idle" in str(error)
    else:
        assert isinstance(error, PeerError) and "model_owner says" in str(error)
        assert any("data_owner: sent nothing within 1 s" in line for line in told(caplog, 1))


# --- who is not there, or not the right one ---


@pytest.mark.parametrize("silent", [False, True])
def test_a_model_owner_that_is_not_there_is_named(parties: Parties, silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not silent:
            server.close()
        peers = {"model_owner": {"name": "model_owner", "address": address}}
        deadlines = {**DEADLINES, "connect": 1.0}
        error = ends(lambda: parties.session(peers=peers, deadlines=deadlines), 8)
    assert isinstance(error, PeerError) and error.peer == "model_owner", str(error)
    assert "party --role model-owner" in str(error) and "dealer" not in str(error)


def test_another_program_is_a_handshake_error_at_both_sides(
    parties: Parties, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.si"
    two_party(most=999).public().save(other)
    with caplog.at_level(logging.WARNING, "secureinfer.session"):
        error = ends(lambda: parties.session(program=str(other)), 12)
    assert isinstance(error, HandshakeError) and "program (manifest digest)" in str(error)
    assert "program (manifest digest)" in caplog.text


def test_a_stranger_is_refused(parties: Parties, tmp_path: Path) -> None:
    other = Identity("data_owner", "other")
    certificates = make_certificates(parties.folder / "certs", {"data_owner": ["other"]})
    foreign = make_certificates(tmp_path, {"data_owner": ["data_owner"]})

    def tls(own: Any) -> dict[str, str]:
        return {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)}

    error = ends(lambda: parties.session(name="other", tls=tls(certificates[other])), 12)
    assert isinstance(error, AuthenticationError) and "not accepted here" in str(error)
    own = foreign[Identity("data_owner", "data_owner")]
    error = ends(lambda: parties.session(tls=tls(own)), 12)
    assert isinstance(error, AuthenticationError), str(error)


def test_a_dealers_daemon_refuses_a_program_that_needs_none(parties: Parties, tmp_path: Path) -> None:
    own = make_certificates(tmp_path, {"dealer": ["dealer"]})[Identity("dealer", "dealer")]
    file = tmp_path / "program.si"
    settings = make_settings(
        {
            "role": "dealer",
            "name": "dealer",
            "program": str(file),
            "tls": {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)},
            "listen": {"port": 0},
        }
    )
    parties.program.save(file)
    with pytest.raises(SettingsError, match=r"program.si .* 'ckks', which needs no dealer: start none"):
        Daemon(settings)
    si.compile(torch.nn.Linear(4, 4), (X,)).public().save(file)
    daemon = Daemon(settings)  # the twin
    try:
        parties.program.save(file)  # and where the file changes while it runs
        with pytest.raises(SettingsError, match="needs no dealer"):
            daemon._read_program()
    finally:
        daemon.close()


def test_a_program_that_needs_a_dealer_is_not_run_without_one(tmp_path: Path) -> None:
    """Neither by a data owner nor for one, whose word alone would leave the dealer out."""
    mpc = si.compile(torch.nn.Linear(4, 4), (X,))
    parties = Parties(tmp_path, mpc)
    try:
        nobody = parties.make("model_owner", peers={})
        model_owner = parties.make("data_owner").peers.model_owner
        assert model_owner is not None
        error = ends(lambda: parties.session(peers={"model_owner": model_owner.model_dump()}), 12)
        assert isinstance(error, SettingsError) and "peers.dealer: this program needs" in str(error)

        parties.daemons["model_owner"].settings = nobody
        hello = make_hello(
            read_manifest(tmp_path / "data_owner.si", allow_private=False),
            session_id=secrets.token_bytes(16),
            model_owner="model_owner",
            data_owners=("data_owner",),
            dealer="dealer",
            unsafe=(),
        )
        identity = Identity("model_owner", "model_owner")
        own = parties.certificates[Identity("data_owner", "data_owner")]
        port = parties.daemons["model_owner"].port
        with ControlClient("127.0.0.1", port, own, identity, connect=3, deadline=9, keepalive=9) as control:
            with pytest.raises(SettingsError, match="needs a dealer, and peers.dealer is not set"):
                control.open(dataclasses.replace(hello, dealer=""))
        assert not parties.daemons["model_owner"]._sessions
    finally:
        parties.close()


# --- by hand: the command, settings in files, processes that know nothing of this test ---


def written(folder: Path, role: str, more: str) -> Path:
    file = folder / f"{role}.toml"
    program = "program.si" if role == "model_owner" else "program.public.si"
    file.write_text(
        f'role = "{role}"\nname = "{role}"\nprogram = "{program}"\n[tls]\nca = "certs/ca.pem"\n'
        f'certificate = "certs/{role}.pem"\nkey = "certs/{role}.key"\n{more}'
    )
    return file


@pytest.fixture
def by_hand(tmp_path: Path, program: si.Program, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs, certificates and settings of two parties; the command there finds the toy as its backend."""
    stub = os.pathsep.join([str(HERE / "ckks_stub"), str(ROOT), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", stub)
    program.save(tmp_path / "program.si")
    program.public().save(tmp_path / "program.public.si")
    names = ["--data-owner", "data_owner", "--model-owner", "model_owner"]
    assert cli.run(["certs", "--out", str(tmp_path / "certs"), *names]) == 0
    assert sorted(c.stem for c in (tmp_path / "certs").glob("*.key") if c.stem != "ca") == list(OWNERS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    written(tmp_path, "model_owner", f"[listen]\nport = {port}\n")
    peer = f'[peers.model_owner]\nname = "model_owner"\naddress = "127.0.0.1:{port}"\n'
    written(tmp_path, "data_owner", peer)
    np.savez(tmp_path / "in.npz", **{program.graph.inputs[0]: X.numpy()})
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "secureinfer", *words]


def test_two_parties_that_are_started_by_hand(by_hand: Path) -> None:
    up = subprocess.Popen(
        command("party", "--role", "model-owner", "--config", "model_owner.toml"),
        cwd=by_hand,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stderr is not None
        assert "model_owner model_owner listens" in up.stderr.readline()
        words = ("infer", "--config", "data_owner.toml", "--input", "in.npz", "--output", "out.npz")
        done = subprocess.run(command(*words), cwd=by_hand, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        with np.load(by_hand / "out.npz") as found:
            assert np.allclose(found[found.files[0]], X.numpy(), atol=1e-6)
        assert "opening the session with the model owner" in done.stderr
        assert "dealer" not in done.stderr + done.stdout
    finally:
        up.terminate()
        up.communicate(timeout=20)


def test_a_dealer_started_by_hand_says_that_it_is_not_needed(by_hand: Path) -> None:
    assert cli.run(["certs", "--out", str(by_hand / "certs"), "--dealer", "dealer"]) == 0
    settings = written(by_hand, "dealer", "[listen]\nport = 0\n")
    done = subprocess.run(
        command("party", "--role", "dealer", "--config", str(settings)),
        cwd=by_hand,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "needs no dealer" in done.stderr, done.stderr
