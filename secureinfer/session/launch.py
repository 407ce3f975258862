"""Child processes: started from a module's name with one inherited socket, so that nothing needs a __main__
guard.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import PeerError
from ..transport.wire import Buffer, Pipe
from .faults import from_json

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 6.0
_INSTALLED = ("site-packages", "dist-packages")


class Child:
    """One process and the pipe to it. It ends itself when the pipe closes.

    module: run as `python -m`. party: its name, for errors. start: the first message, over the pipe, so that
    nothing of it stands in the process list or the environment.
    """

    def __init__(
        self, module: str, party: str, start: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(environment or {}),
                # Ctrl-C goes to the starter alone, which then closes the pipes in order.
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.party = party
        self.pipe = Pipe(ours, party)
        self.pipe.send(dict(start))

    def receive(self, timeout: float | None) -> tuple[dict[str, Any], list[bytearray]]:
        """The next message; raises the error that it carries, or PeerError when the process ended.

        timeout: seconds without any sign of life.
        """
        while True:
            body, blobs = self.pipe.receive(timeout=timeout)
            if "alive" in body:
                continue
            if isinstance(body.get("error"), dict):
                raise from_json(body["error"])
            return body, blobs

    def request(
        self, body: dict[str, Any], blobs: list[Buffer] | None = None, *, timeout: float | None
    ) -> tuple[dict[str, Any], list[bytearray]]:
        try:
            self.pipe.send(body, blobs or [], timeout=timeout)
        except PeerError:
            # The process may have said why it ended before it went.
            return self.receive(timeout)
        return self.receive(timeout)

    def stop(self, grace: float = GRACE_SECONDS) -> bool:
        """Close the pipe, which ends the process; kill it after `grace` seconds. Returns whether it ended by itself."""
        self.pipe.close()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.pipe.close()
        self.process.wait()


def stop_all(children: list[Child], grace: float = GRACE_SECONDS) -> None:
    """Stop children together."""
    for child in children:
        child.pipe.close()
    stop = time.monotonic() + grace
    for child in children:
        child.stop(max(0.1, stop - time.monotonic()))


def inherited_pipe(arguments: list[str], peer: str) -> Pipe:
    """The pipe of a process that Child started."""
    return Pipe(socket.socket(fileno=int(arguments[1])), peer)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {**os.environ, **extra}
    if _PACKAGE_ROOT.name not in _INSTALLED:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), env.get("PYTHONPATH")]))
    # gRPC's own log would print a refused peer's address and certificate trouble on the user's terminal.
    env.setdefault("GRPC_VERBOSITY", "NONE")
    env["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    return env
