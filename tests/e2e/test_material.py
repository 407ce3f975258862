"""Dealt material between real processes: bounded, dealt beside inferences, encrypted on disk, burnt by whatever fails."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import secureinfer as si
from secureinfer.errors import InputError, LimitError, PeerError, SecureInferError
from secureinfer.session.client import Session
from secureinfer.session.local import LocalParties

HERE = Path(__file__).parent
RECORDING = "material_engine:make"
ROLES = ("data_owner", "model_owner", "dealer")
X = torch.linspace(-2.0, 2.0, 256).reshape(4, 64)
DEADLINES = {"connect": 3.0, "start": 60.0, "step": 6.0, "keepalive": 1.0}
WITHIN = 12.0
MOST = 3
"""Inferences whose material the model owner keeps."""


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("material")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def parties(
    model: torch.nn.Module, folder: Path, records: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalParties]:
    """Both owners keep material on disk, in one folder."""
    disk = {"material": "disk", "material_folder": str(folder), "deadlines": DEADLINES}
    overrides = {
        "data_owner": disk,
        "model_owner": {**disk, "limits": {"prepared_inferences": MOST}},
        "dealer": {"deadlines": DEADLINES},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RECORDS", str(records))
        patch.setenv("RECORDING_FAULT", str(tmp_path_factory.mktemp("fault") / "fault"))
        program = si.compile(model, (X,))
        made = LocalParties(program, engine=RECORDING, threads=1, overrides=overrides)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def fault() -> Iterator[Callable[[str], None]]:
    file = Path(os.environ["RECORDING_FAULT"])
    yield lambda text: file.write_text(text) and None
    file.unlink(missing_ok=True)


def opened(parties: LocalParties) -> Session:
    return Session(parties.program, parties.settings, engine=RECORDING)


def workers(parties: LocalParties, session: Session) -> dict[str, int]:
    """The process of each party of the only session."""
    found = {"data_owner": session._worker.process.pid}
    for role, daemon in parties.daemons.items():
        children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
        threads = Path(f"/proc/{daemon.process.pid}/task").iterdir()
        pids = [p for t in threads for p in (t / "children").read_text().split()]
        assert children.exists() and len(pids) == 1, (role, pids)
        found[role] = int(pids[0])
    return found


def right(session: Session, model: torch.nn.Module) -> bool:
    return float((session.infer(X) - model(X)).abs().max().detach()) < 1e-2


# --- bounds and the background ---


def test_what_does_not_fit_is_refused_beforehand_and_the_background_waits_for_room(
    parties: LocalParties, model: torch.nn.Module
) -> None:
    with opened(parties) as session:
        with pytest.raises(LimitError) as caught:
            session.prepare(MOST + 1)
        assert str(caught.value) == (
            "0 inferences are prepared or ordered, and 4 more do not fit: model_owner keeps material of 3 at most "
            "(limits.prepared_inferences = 3). Prepare at most 3, use prepare(n, wait=False), which deals on as inferences "
            "make room, or raise the limit there"
        )
        session.prepare(2)
        with pytest.raises(LimitError, match="Prepare at most 1,"):
            session.prepare(2)
        start = time.monotonic()
        session.prepare(5, wait=False)
        assert time.monotonic() - start < 2
        for _ in range(8):  # the eighth on demand
            assert right(session, model)
        report = session.report()
        planned, run = session.program.plan.totals, report.to_dict()
        assert run["offline"]["count"] == run["online"]["count"] == 7  # without the cold one
        assert (run["online"]["bytes"], run["online"]["rounds"]) == (planned.bytes, planned.rounds)
        assert run["offline"]["bytes"] == planned.dealt_bytes
        # A refused input burns nothing, for nothing was sent: the next inference has the index that it would have had.
        session.prepare(MOST)
        with pytest.raises(InputError):
            session.infer(X * float("nan"))
        assert right(session, model) and list(session._online_ms) == list(range(9))


@pytest.mark.parametrize("role", [pytest.param("model_owner", marks=pytest.mark.slow), "dealer"])
def test_a_fault_in_the_background_is_raised_by_the_next_call(parties: LocalParties, role: str) -> None:
    with opened(parties) as session:
        session.prepare(50, wait=False)
        os.kill(workers(parties, session)[role], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            while time.monotonic() - start < WITHIN:
                session.prepare(0)
                session.infer(X)
        assert caught.value.peer == role and time.monotonic() - start < WITHIN


# --- on disk ---


def masks(records: Path, pid: int) -> list[bytes]:
    """The first elements of what the process drew from its streams."""
    rows = (records / str(pid)).read_text().splitlines()
    found = [bytes.fromhex(r.partition(" ")[2]) for r in rows if r.startswith("mask ")]
    return [m for m in found if len(m) == 16]


def on_disk(folder: Path, pid: int) -> bytes:
    """All that a process has in files of the folder, named or not."""
    found = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(folder) in os.readlink(link):
                found += link.read_bytes()
    return found


@pytest.mark.parametrize("plain", [None, "all"])
def test_material_on_disk_cannot_be_read_and_what_is_written_plain_is_found(
    parties: LocalParties,
    folder: Path,
    records: Path,
    fault: Callable[[str], None],
    plain: str | None,
) -> None:
    if plain:
        fault(f"{plain}:plain-disk")
    with opened(parties) as session:
        session.prepare(2)
        pids = workers(parties, session)
        for role in ("data_owner", "model_owner"):
            written, drawn = on_disk(folder, pids[role]), masks(records, pids[role])
            assert len(written) >= 2 * 64 * 64 and len(drawn) >= 4
            assert any(m in written for m in drawn) is (plain is not None)
            assert any(m[:8] in written for m in drawn) is (plain is not None)
        assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there_ends_the_session_at_its_start(
    parties: LocalParties, tmp_path: Path
) -> None:
    settings = parties.settings.model_copy(update={"material_folder": tmp_path / "nowhere"})
    with pytest.raises(si.SettingsError, match="material_folder"):
        Session(parties.program, settings, engine=RECORDING)


# --- a crash burns it ---


def drawn_by(records: Path, pids: set[str]) -> set[str]:
    """Seeds, keys of streams and masks that these processes had."""
    kinds = ("seed ", "stream key ", "mask ")
    rows = {r for pid in pids for r in (records / pid).read_text().splitlines() if r.startswith(kinds)}
    return {r for r in rows if len(set(r.rpartition(" ")[2])) > 4}


WHEN = ["prepared", "running"]
IN_MAKE_TEST = {("model_owner", "running")}
CASES = [
    pytest.param(role, when, marks=[] if (role, when) in IN_MAKE_TEST else [pytest.mark.slow])
    for role in ROLES
    for when in WHEN
]


@pytest.mark.parametrize(("role", "when"), CASES)
def test_a_party_that_is_killed_burns_the_material_and_the_next_session_has_none_of_it(
    parties: LocalParties,
    model: torch.nn.Module,
    folder: Path,
    records: Path,
    fault: Callable[[str], None],
    role: str,
    when: str,
) -> None:
    known = {p.name for p in records.iterdir()}
    with opened(parties) as session:
        session.prepare(MOST)
        pid = workers(parties, session)[role]
        if when == "prepared":
            os.kill(pid, signal.SIGKILL)
        elif role == "dealer":  # it has no part in the inference, which may end well
            fault("model_owner:pause")
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        else:
            fault(f"{role}:die")
        start = time.monotonic()
        with pytest.raises(SecureInferError) as caught:
            for _ in range(MOST + 1):
                session.infer(X)
        assert time.monotonic() - start < WITHIN and role in str(caught.value)
        with pytest.raises(SecureInferError):
            session.infer(X)
    Path(os.environ["RECORDING_FAULT"]).unlink(missing_ok=True)
    first = {p.name for p in records.iterdir()} - known
    with opened(parties) as session:
        assert right(session, model)
        assert session._online_ms.keys() == {0}  # a new count, in a new session
    second = {p.name for p in records.iterdir()} - known - first
    assert len(first) == len(second) == 3
    old, new = drawn_by(records, first), drawn_by(records, second)
    assert len(old) > 50 and len(new) > 20 and not old & new
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_session_that_had_the_seeds_of_another_is_seen(
    parties: LocalParties, records: Path, fault: Callable[[str], None]
) -> None:
    """Planted fault: every session has the same seeds, so that a second one deals what the first one dealt."""
    fault("all:old-seeds")
    drawn = []
    for _ in range(2):
        known = {p.name for p in records.iterdir()}
        with opened(parties) as session:
            session.prepare(1)
        drawn.append(drawn_by(records, {p.name for p in records.iterdir()} - known))
    assert len(drawn[0] & drawn[1]) > 20
