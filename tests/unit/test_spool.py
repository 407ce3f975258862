"""Material on disk: read back as it was written, for its place alone, once; and nothing of it can be read by others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from secureinfer.backends.mpc import spool as module
from secureinfer.backends.mpc.correlations import And, Product, Square, Truncation
from secureinfer.backends.mpc.randomness import Stream
from secureinfer.backends.mpc.spool import PIECE_BYTES, Spool
from secureinfer.errors import CorrelationError, SessionError, SettingsError
from tests.e2e.plain_cipher import Plain

SESSION = bytes(range(16))
KINDS = [
    Square((5,)),
    Truncation((3, 7), 16),
    And((4,), (4,), (4,), torch.uint8),
    Square((0, 3)),
    Product("mul", (2, 3), (3,), (2, 3)),
    Square((PIECE_BYTES // 8 + 3,)),  # more than one piece
]


def parts(kind: Any, inference: int = 0) -> dict[str, torch.Tensor]:
    return {
        p.name: Stream(bytes([inference, i]) + bytes(30)).tensor(p.shape, p.dtype)
        for i, p in enumerate(kind.parts())
    }


def written(folder: Path, inferences: int = 1, kinds: Any = KINDS, session: bytes = SESSION) -> Spool:
    spool = Spool(folder, session)
    for inference in range(inferences):
        writer = spool.begin(inference)
        for i, kind in enumerate(kinds):
            writer.write(i // 2, i % 2, kind, parts(kind, inference))
        writer.finish()
    return spool


def file_of(spool: Spool, inference: int) -> int:
    file = spool._sealed[inference].file
    file.flush()
    return file.fileno()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    spool = written(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []  # no name in the folder
    for inference in (0, 1):
        material = spool.take(inference)
        assert list(material) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        for i, kind in enumerate(KINDS):
            dealt, got = material[i // 2, i % 2]
            assert dealt == kind
            for name, tensor in parts(kind, inference).items():
                assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype
                got[name] += 1  # it belongs to the kernel that takes it


def test_an_inference_is_taken_once_and_its_key_goes_with_it(tmp_path: Path) -> None:
    spool = written(tmp_path)
    sealed = spool._sealed[0]
    spool.take(0)
    assert sealed.file.closed and not any(sealed.key) and 0 not in spool
    for index in (0, 1):
        with pytest.raises(CorrelationError, match=f"inference {index} has no material on disk"):
            spool.take(index)


def test_indices_that_are_passed_over_are_burnt(tmp_path: Path) -> None:
    spool = written(tmp_path, 4)
    sealed = dict(spool._sealed)
    spool.burn_below(2)
    assert [i in spool for i in range(4)] == [False, False, True, True]
    assert all(sealed[i].file.closed and not any(sealed[i].key) for i in (0, 1))
    spool.close()
    assert all(s.file.closed and not any(s.key) for s in sealed.values())


@pytest.mark.parametrize("at", [0, 77, -1])
def test_a_changed_byte_is_refused_and_burns_the_index(tmp_path: Path, at: int) -> None:
    spool = written(tmp_path)
    fd = file_of(spool, 0)
    place = at % os.fstat(fd).st_size
    byte = os.pread(fd, 1, place)
    os.pwrite(fd, bytes([byte[0] ^ 1]), place)
    with pytest.raises(CorrelationError, match="changed there; its index is burnt"):
        spool.take(0)
    assert 0 not in spool


@pytest.mark.parametrize("change", [-1, 1 - (1 << 20)])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, change: int) -> None:
    spool = written(tmp_path)
    fd = file_of(spool, 0)
    os.ftruncate(fd, os.fstat(fd).st_size + change)
    with pytest.raises(CorrelationError, match="changed there"):
        spool.take(0)


def test_files_that_are_swapped_between_inferences_are_refused(tmp_path: Path) -> None:
    spool = written(tmp_path, 2)
    fds = [file_of(spool, i) for i in (0, 1)]
    first, second = (os.pread(fd, os.fstat(fd).st_size, 0) for fd in fds)
    assert len(first) == len(second) and first != second
    os.pwrite(fds[0], second, 0)
    os.pwrite(fds[1], first, 0)
    for index in (0, 1):
        with pytest.raises(CorrelationError, match=f"inference {index}, step 0, record 0"):
            spool.take(index)


def test_records_that_are_swapped_within_an_inference_are_refused(tmp_path: Path) -> None:
    spool = written(tmp_path, kinds=[Square((8,)), Square((8,))])
    fd = file_of(spool, 0)
    both = os.pread(fd, 256, 0)
    assert len(both) == 256
    os.pwrite(fd, both[128:] + both[:128], 0)
    with pytest.raises(CorrelationError, match="changed there"):
        spool.take(0)


@pytest.mark.parametrize("what", ["session", "inference", "step", "record", "kind"])
def test_material_for_another_place_is_refused(tmp_path: Path, what: str) -> None:
    """Even with its own key, as if a program mixed up what it holds: the place is authenticated. And the twin: none is."""
    spool = written(tmp_path, 1, [Square((8,))])
    sealed = spool._sealed[0]
    index = 0
    if what == "session":
        spool._session_id = bytes(16)
    elif what == "inference":
        index = 1
        spool._sealed[1] = spool._sealed.pop(0)
    elif what == "kind":
        sealed.records[0].kind = Square((2, 4))
    else:
        setattr(sealed.records[0], what, 3)
    with pytest.raises(CorrelationError, match="changed there"):
        spool.take(index)


def test_without_what_binds_a_record_another_place_would_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: nothing binds the records."""
    monkeypatch.setattr(Spool, "place", lambda self, *args: b"")
    spool = written(tmp_path, 1, [Square((8,))])
    spool._sealed[1] = spool._sealed.pop(0)
    assert spool.take(1)


# --- what others may read ---


def readable(folder: Path, secrets: list[bytes]) -> list[bytes]:
    """The secrets that stand in a file of the folder or behind a descriptor of this process."""
    contents = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(folder) in os.readlink(link):
                contents.append(link.read_bytes())
        except OSError:
            continue
    assert contents
    return [s for s in secrets if any(s in c for c in contents)]


def chunks(kinds: Any, inference: int) -> list[bytes]:
    """16 bytes at a time of all that was written, the first and the last of each tensor."""
    found = []
    for kind in kinds:
        for tensor in parts(kind, inference).values():
            raw = tensor.numpy().tobytes()
            found += [raw[:16], raw[-16:]] if len(raw) >= 16 else []
    return found


def test_nothing_in_the_files_can_be_read(tmp_path: Path) -> None:
    spool = written(tmp_path, 2)
    for i in (0, 1):
        file_of(spool, i)
    secrets = [*chunks(KINDS, 0), *chunks(KINDS, 1)]
    keys = [bytes(s.key) for s in spool._sealed.values()]
    assert keys[0] != keys[1]
    assert readable(tmp_path, secrets + keys) == []


def test_plain_material_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the cipher leaves everything as it was."""
    monkeypatch.setattr(module, "Cipher", Plain)
    spool = written(tmp_path, 2)
    for i in (0, 1):
        file_of(spool, i)
    assert len(readable(tmp_path, chunks(KINDS, 1))) == len(chunks(KINDS, 1))


# --- disks ---


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="material_folder: no file can be made in .*nowhere"):
        Spool(tmp_path / "nowhere", SESSION)


@pytest.mark.parametrize("buffered", [0, 1 << 16])
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: int
) -> None:
    spool = Spool(tmp_path, SESSION)
    monkeypatch.setattr(Spool, "_open", lambda self: open("/dev/full", "wb", buffering=buffered))
    writer = spool.begin(0)
    with pytest.raises(SessionError, match="No space left on device.*limits.material_bytes"):
        writer.write(0, 0, KINDS[0], parts(KINDS[0]))
        writer.finish()
    writer.abandon()
    assert 0 not in spool
