"""What a session may leave behind: processes, listening ports and temporary files, all of this test run alone.

Every process that a test starts inherits a mark in its environment and a folder for temporary files, so that whatever
else runs on the machine is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

MARK = "SECUREINFER_TEST_MARK"
_LISTENING = "0A"


@dataclass(frozen=True)
class Seen:
    """Processes by id, listening ports, files in the temporary folder."""

    processes: frozenset[int]
    ports: frozenset[int]
    files: frozenset[str]

    def beyond(self, before: Seen) -> str:
        """What is here and was not before, in words; empty where nothing is."""
        found = []
        for what in ("processes", "ports", "files"):
            if more := sorted(getattr(self, what) - getattr(before, what)):
                found.append(f"{what}: {more}")
        return "; ".join(found)


@contextlib.contextmanager
def marked(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mark this process's children, and keep their temporary files and its own in `folder`."""
    patch.setenv(MARK, secrets.token_hex(8))
    patch.setenv("TMPDIR", str(folder))
    patch.setattr(tempfile, "tempdir", str(folder))
    yield


def processes() -> frozenset[int]:
    """The marked processes, without this one and without those that ended and were not yet waited for."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return frozenset(found)


def _ports(pids: frozenset[int]) -> frozenset[int]:
    """The TCP ports on which these processes listen."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and fields[9] in inodes:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return frozenset(found)


def look() -> Seen:
    running = processes()
    folder = Path(tempfile.gettempdir())
    files = frozenset(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return Seen(running, _ports(running | {os.getpid()}), files)


def wait_until_nothing_is_left(before: Seen, seconds: float = 10.0) -> None:
    """Fail, and say what is left, where more is here after so many seconds than there was before."""
    stop = time.monotonic() + seconds
    while left := look().beyond(before):
        assert time.monotonic() < stop, f"left behind: {left}"
        time.sleep(0.1)
