"""Network namespaces of this project: made by name, entered, and removed, also those of a process that was killed.

A namespace is called si-<pid>-<start of that process>-<count>-<index>: its name tells whether its maker lives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import SessionError

COMMAND_SECONDS = 20.0

_NAME = re.compile(r"si-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9]+-[0-9]+")
_counter = itertools.count()


def new_names(count: int) -> list[str]:
    """Of so many new namespaces of this process."""
    prefix = f"si-{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"
    return [f"{prefix}-{i}" for i in range(count)]


def make(space: str) -> None:
    ip("netns", "add", space)
    ip("-n", space, "link", "set", "lo", "up")


def unavailable() -> str | None:
    """Why this machine cannot make networks; None where it can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    done = attempt("unshare", "--net", "ip", "tuntap", "add", "dev", "tun0", "mode", "tun")
    return None if done.returncode == 0 else f"no network namespace with a TUN device: {done.stderr.strip()}"


@functools.cache
def has_netem() -> bool:
    """Whether this kernel can delay, slow down and lose packets itself."""
    if shutil.which("tc") is None or unavailable() is not None:
        return False
    probe = ("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    return attempt("unshare", "--net", *probe).returncode == 0


def spaces() -> list[str]:
    """Every namespace of this kind on this machine, whosever it is."""
    return [name for line in ip("netns", "list").splitlines() if _NAME.fullmatch(name := line.split()[0])]


def sweep() -> list[str]:
    """Remove the namespaces of processes that have ended, with all that still runs in them. Returns their names."""
    stale = [space for space in spaces() if not _owner_lives(space)]
    for space in stale:
        remove(space)
    return stale


def _owner_lives(space: str) -> bool:
    match = _NAME.fullmatch(space)
    return match is not None and _start_time(int(match["pid"])) == match["start"]


def _start_time(pid: int) -> str:
    """When a process started, in ticks since boot: with the pid, it names a process for good. Empty: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def remove(space: str) -> None:
    """Kill what runs in a namespace, and remove it. One that is not there, or just went, is fine."""
    stop = time.monotonic() + COMMAND_SECONDS
    while members := attempt("ip", "netns", "pids", space).stdout.split():
        if time.monotonic() > stop:
            raise SessionError(f"processes {', '.join(members)} in the namespace {space} do not end")
        for pid in map(int, members):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    attempt("ip", "netns", "delete", space)


def inside(space: str, command: Sequence[str]) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{space}", "--", *command]


def ip(*arguments: str) -> str:
    return run("ip", *arguments)


def run(*command: str) -> str:
    done = attempt(*command)
    if done.returncode != 0:
        raise SessionError(f"`{' '.join(command)}` failed{told(done.stderr)}")
    return done.stdout


def attempt(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise SessionError(f"`{' '.join(command)}` did not end within {COMMAND_SECONDS} s") from None


def told(text: str) -> str:
    return f": {last}" if (last := text.strip()[-500:]) else ""
