"""Processes that are started from a module's name with one inherited socket, so that nothing needs a __main__ guard."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .wire import Pipe

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = ("site-packages", "dist-packages")


def spawn(
    module: str, environment: Mapping[str, str] | None = None, command: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module` and give its process and our end of the socket. It ends itself when that closes.

    command: what starts it in another place, such as a network namespace. It must become the process (exec) and keep what
    is open.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*command, sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment(environment or {}),
            # Ctrl-C goes to the starter alone, which then closes the pipes in order.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def inherited_pipe(arguments: list[str], peer: str) -> Pipe:
    """The pipe of a process that `spawn` started."""
    return Pipe(socket.socket(fileno=int(arguments[1])), peer)


def forbid_core_dumps() -> None:
    """Keep this process's memory, with its seeds, shares and weights, off the disk when it crashes (rule R3)."""
    if resource is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # Linux gives a dump to a program (core_pattern with "|") whatever the limit is, unless it is exactly 1.
    limit = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {**os.environ, **extra}
    if _PACKAGE_ROOT.name not in _INSTALLED:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), env.get("PYTHONPATH")]))
    # gRPC's own log would print a refused peer's address and certificate trouble on the user's terminal.
    env.setdefault("GRPC_VERBOSITY", "NONE")
    env["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    return env
