"""Every fault of a session ends at each surviving side in time with one typed error, and leaves nothing behind.

The daemons run in this process, so that what each of them logs about its session can be read; the workers are
processes of their own. Each party dies and stops in each phase; the full table is slow, some of it is not.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.config import Settings
from secureinfer.errors import (
    AuthenticationError,
    HandshakeError,
    PeerError,
    SessionError,
    SettingsError,
)
from secureinfer.session import servicer
from secureinfer.session.client import Session
from secureinfer.session.local import LocalParties
from secureinfer.session.servicer import Daemon
from secureinfer.transport.tls import Identity, make_certificates

from .leftovers import Seen, look, wait_until_nothing_is_left
from .served import DEADLINES, TOY, WITHIN, Parties, ends, told, toys

X = torch.arange(8.0).reshape(2, 4)
ROLES = ("data_owner", "model_owner", "dealer")
PHASES = ("handshake", "setup", "offline", "online")


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with toys(tmp_path_factory):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, no port and no file more than there was before the test."""
    before = look()
    yield
    wait_until_nothing_is_left(before)


def program() -> si.Program:
    return si.compile(torch.nn.Linear(4, 4), (X,))


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    made = Parties(tmp_path_factory.mktemp("parties"), program())
    yield made
    made.close()


def ask_on(session: Session) -> None:
    """One inference after the other, until one fails."""
    stop = time.monotonic() + WITHIN
    with session:
        while time.monotonic() < stop:
            session.infer(X)
            time.sleep(0.05)


def serves(parties: Parties) -> None:
    """The daemons hold no session any more, and take another one."""
    stop = time.monotonic() + 10
    while any(d._sessions for d in parties.daemons.values()):
        assert time.monotonic() < stop, "a daemon still holds the session that ended"
        time.sleep(0.05)
    with parties.session() as session:
        assert torch.allclose(session.infer(X), X, atol=1e-6)


# --- a party dies or stops ---

IN_MAKE_TEST = {
    ("data_owner", "online", "die"),
    ("model_owner", "online", "stop"),
    ("dealer", "offline", "die"),
}


def table() -> list[Any]:
    rows = []
    for row in itertools.product(ROLES, PHASES, ("die", "stop")):
        rows.append(
            pytest.param(*row, id=":".join(row), marks=[] if row in IN_MAKE_TEST else [pytest.mark.slow])
        )
    return rows


@pytest.mark.parametrize(("role", "phase", "kind"), table())
def test_a_party_that_dies_or_stops_is_named_by_every_survivor(
    parties: Parties,
    fault: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    role: str,
    phase: str,
    kind: str,
) -> None:
    before = look()
    session = None
    with caplog.at_level(logging.WARNING, "secureinfer.session"):
        if phase in ("handshake", "setup"):
            fault(f"{role}:{phase}:{kind}")
            error = ends(parties.session, 60)
        else:
            session = parties.session()
            if (role, phase) == ("dealer", "online"):
                # The dealer has no part in it: it is missed by then, and not only at the next dealing.
                session.prepare()
                os.kill(parties.worker("dealer"), signal.SIGKILL if kind == "die" else signal.SIGSTOP)
                time.sleep(4.5)  # two keep-alive periods, and what a stall may take
            else:
                fault(f"{role}:{phase}:{kind}")
            error = ends(lambda: session.infer(X), WITHIN)
        assert isinstance(error, PeerError) and error.peer == role, str(error)
        survivors = [r for r in ROLES[1:] if r != role]
        said = told(caplog, len(survivors), stopped=kind == "stop")
    # Before a session stands, a worker that waits for a third party is ended by the data owner's word to its daemon.
    reasons = (role, "data_owner ended it before it began") if session is None else (role,)
    assert all(any(r in line for r in reasons) for line in said), said
    # And a stopped worker's own daemon says that it was withdrawn, where it was, and that it was killed.
    assert len(survivors) <= len(said) <= len(survivors) + (kind == "stop") * (1 + (session is None)), said
    Path(os.environ["TOY_FAULT"]).unlink(missing_ok=True)
    if session is not None:
        later = ends(lambda: session.infer(X), 1)
        assert role in str(later)
        session.close()
    wait_until_nothing_is_left(before)  # a stopped process too, which cannot end by itself
    if (role, phase, kind) not in IN_MAKE_TEST:
        serves(parties)


@pytest.mark.parametrize("role", ["dealer", pytest.param("model_owner", marks=pytest.mark.slow)])
def test_a_daemon_kills_a_worker_that_stopped_in_a_running_session_and_frees_its_place(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    """And the twin: one that is idle for longer goes on."""
    daemon, before = parties.daemons[role], look()
    monkeypatch.setattr(daemon, "settings", parties.make(role, deadlines={**DEADLINES, "step": 2.0}))
    with parties.session() as session, caplog.at_level(logging.WARNING, "secureinfer.session"):
        worker = parties.worker(role)
        time.sleep(3.5)
        assert torch.allclose(session.infer(X), X, atol=1e-6)
        assert parties.worker(role) == worker
        os.kill(worker, signal.SIGSTOP)
        stop = time.monotonic() + 2.0 + servicer.WORKER_GRACE_SECONDS + 3.0
        while daemon._sessions:
            assert time.monotonic() < stop, "the stopped worker keeps its place"
            time.sleep(0.05)
        assert not Path(f"/proc/{worker}").exists()
        assert f"the worker {role} did not go on and was killed" in caplog.text
    wait_until_nothing_is_left(before)


def test_the_daemons_still_serve_after_all_these_faults(parties: Parties) -> None:
    serves(parties)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ["model_owner", "dealer"])
def test_a_daemon_that_dies_takes_its_session_with_it(
    fault: Callable[[str], None], role: str, phase: str
) -> None:
    overrides = {r: {"deadlines": DEADLINES} for r in ROLES}
    parties = LocalParties(program(), engine=TOY, overrides=overrides)
    try:
        if phase in ("handshake", "setup"):
            fault(f"{role}:{phase}:die-daemon")
            # It may stand before the end is seen.
            error = ends(lambda: ask_on(Session(parties.program, parties.settings, engine=TOY)), 60)
        else:
            session = Session(parties.program, parties.settings, engine=TOY)
            if (role, phase) == ("dealer", "online"):
                parties.daemons["dealer"].process.kill()
            else:
                fault(f"{role}:{phase}:die-daemon")
            error = ends(lambda: ask_on(session), WITHIN)
        assert isinstance(error, PeerError) and error.peer == role, str(error)
        error = ends(lambda: Session(parties.program, parties.settings, engine=TOY), 15)
        assert isinstance(error, PeerError) and error.peer == role, str(error)
    finally:
        parties.close()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["model_owner", "dealer"])
def test_a_daemon_that_stops_harms_no_running_session_and_is_named_by_the_next(role: str) -> None:
    overrides = {r: {"deadlines": {**DEADLINES, "start": 10.0}} for r in ROLES}
    parties = LocalParties(program(), engine=TOY, overrides=overrides)
    try:
        with Session(parties.program, parties.settings, engine=TOY) as session:
            parties.daemons[role].process.send_signal(signal.SIGSTOP)
            assert torch.allclose(session.infer(X), X, atol=1e-6)
            error = ends(lambda: Session(parties.program, parties.settings, engine=TOY), 30)
            assert isinstance(error, PeerError) and error.peer == role, str(error)
            assert torch.allclose(session.infer(X), X, atol=1e-6)
        parties.daemons[role].process.send_signal(signal.SIGCONT)
        with Session(parties.program, parties.settings, engine=TOY) as session:
            assert torch.allclose(session.infer(X), X, atol=1e-6)
    finally:
        parties.daemons[role].process.send_signal(signal.SIGCONT)
        parties.close()


# --- silence, and other sessions ---


@pytest.mark.slow
def test_computing_in_silence_for_longer_than_keep_alive_ends_no_session(
    parties: Parties, fault: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Three keep-alive periods in which no frame goes anywhere; the deadline of a step is longer. Then it is not."""
    with parties.session() as session:
        fault("model_owner:online:compute-3")
        assert torch.allclose(session.infer(X), X, atol=1e-6)
        fault("model_owner:online:compute-6")
        error = ends(lambda: session.infer(X), WITHIN)  # the twin: longer than the deadline
        assert isinstance(error, PeerError) and error.peer == "model_owner", str(error)
        assert "within the deadline" in str(error)
    assert "too_many_pings" not in caplog.text
    Path(os.environ["TOY_FAULT"]).unlink()


# --- at the start ---


def test_a_model_owner_that_is_not_there_is_named_and_the_dealer_is_free_again(parties: Parties) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    peers = {
        "dealer": {"name": "dealer", "address": f"127.0.0.1:{parties.daemons['dealer'].port}"},
        "model_owner": {"name": "model_owner", "address": f"127.0.0.1:{port}"},
    }
    error = ends(lambda: parties.session(peers=peers), 12)
    assert isinstance(error, PeerError) and error.peer == "model_owner", str(error)
    assert "nobody answers as model_owner" in str(error)
    stop = time.monotonic() + 8
    while parties.daemons["dealer"]._sessions and time.monotonic() < stop:
        time.sleep(0.05)
    assert not parties.daemons["dealer"]._sessions


def test_session_ports_in_use_are_told_to_the_caller(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = Parties(tmp_path, program(), dealer={"listen": {"port": 0, "session_ports": f"{port}-{port}"}})
        try:
            error = ends(made.session, 20)
            assert isinstance(error, SessionError) and not isinstance(error, PeerError)
            assert "dealer" in str(error) and "no free port" in str(error), str(error)
            assert not made.daemons["dealer"]._sessions
        finally:
            made.close()


@pytest.mark.parametrize("which", ["ca", "certificate", "key"])
def test_a_missing_file_is_named_before_anything_is_dialled(parties: Parties, which: str) -> None:
    def changed(role: str) -> Settings:
        own = parties.certificates[Identity(role, role)]
        tls = {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)}
        return parties.make(role, tls={**tls, which: str(parties.folder / "certs" / "missing.pem")})

    for start in (
        lambda: Session(parties.program, changed("data_owner"), engine=TOY),
        lambda: Daemon(changed("dealer")),
    ):
        error = ends(start, 10)
        assert isinstance(error, SettingsError) and "missing.pem" in str(error)


def test_a_party_whose_name_is_not_as_the_settings_say_is_named(parties: Parties) -> None:
    """The certificate at the address belongs to another party; the twin is every other test."""
    peers = parties.make("data_owner").model_dump(mode="json")["peers"]
    peers["dealer"]["name"] = "another"
    error = ends(lambda: parties.session(peers=peers), 12)
    # The dealer's certificate, or the model owner's settings: whichever is found first.
    assert isinstance(error, AuthenticationError | HandshakeError) and "another" in str(error)
    own = parties.certificates[Identity("dealer", "dealer")]
    tls = {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)}
    error = ends(lambda: parties.session(tls=tls), 12)
    assert isinstance(error, SettingsError) and "belongs to dealer" in str(error)


def test_a_program_of_another_shape_is_a_difference_of_the_handshake(
    parties: Parties, tmp_path: Path
) -> None:
    other = tmp_path / "other.si"
    si.compile(torch.nn.Linear(4, 4), (torch.cat([X, X]),)).public().save(other)
    error = ends(lambda: parties.session(program=str(other)), 12)
    assert isinstance(error, HandshakeError) and "program (manifest digest)" in str(error)


@pytest.mark.parametrize("bad", ["data_owner", "dealer"])
def test_an_expired_certificate_is_named(parties: Parties, tmp_path: Path, bad: str) -> None:
    """Refused by its own side when it starts; the other side's refusal is in test_link_faults."""
    certs = make_certificates(tmp_path / "certs", {bad: [bad]}, days=0)[Identity(bad, bad)]
    tls = {"ca": str(certs.ca), "certificate": str(certs.certificate), "key": str(certs.key)}
    changed = parties.make(bad, tls=tls)
    error = ends(lambda: parties.session(tls=tls) if bad == "data_owner" else Daemon(changed), 12)
    assert isinstance(error, SettingsError) and "make a new one" in str(error)


# --- the twin of what every test here checks at its end ---


@pytest.mark.parametrize("what", ["processes", "ports", "files"])
def test_what_is_left_behind_is_found(what: str) -> None:
    before: Seen = look()
    assert look().beyond(before) == ""
    with contextlib.ExitStack() as stack:
        if what == "processes":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            stack.callback(child.wait)
            stack.callback(child.kill)
        elif what == "ports":
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        else:
            file = Path(os.environ["TMPDIR"]) / "forgotten"
            file.write_text("x")
            stack.callback(file.unlink)
        with pytest.raises(AssertionError, match=f"left behind: {what}"):
            wait_until_nothing_is_left(before, 0.5)
