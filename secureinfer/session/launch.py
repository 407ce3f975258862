"""Child processes of a caller or a daemon, and the messages to and from them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PeerError
from ..transport.spawn import spawn
from ..transport.wire import Buffer, Pipe
from .faults import from_json

GRACE_SECONDS = 6.0


class Child:
    """One process and the pipe to it. It ends itself when the pipe closes.

    module: run as `python -m`. party: its name, for errors. start: the first message, over the pipe, so that
    nothing of it stands in the process list or the environment. command: as in `spawn`.
    """

    def __init__(
        self,
        module: str,
        party: str,
        start: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.process, ours = spawn(module, environment, command)
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
