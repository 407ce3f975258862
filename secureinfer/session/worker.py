"""One party's process in one session: `python -m secureinfer.session.worker FD`, started by launch.Child.

It opens its port, or dials, before torch is loaded, so that the processes of all parties load at the same
time. It ends with its session, on any error, and when the process that started it goes away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from ..errors import SecureInferError
from ..transport.spawn import forbid_core_dumps, inherited_pipe
from . import faults
from .base import Worker
from .driver import Driver
from .follower import Follower
from .process import Parent

START_SECONDS = 60.0


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    forbid_core_dumps()
    # Threads of a link wait for the interpreter's lock behind the engine's Python code; 5 ms would be ten round
    # trips.
    sys.setswitchinterval(0.0005)
    pipe = inherited_pipe(arguments, "the process that started this worker")
    parent = Parent(pipe)
    party, drives = "worker", False
    worker: Worker | None = None
    try:
        start, _ = pipe.receive(timeout=START_SECONDS)
        party = str(start["settings"]["name"])
        drives = start["settings"]["role"] == "data_owner"
        parent.watch()
        worker = (Driver if drives else Follower)(parent, start)
        worker.run()
    except BaseException as error:
        # First the parties that wait, then what takes time.
        if worker is not None:
            worker.fail(error)
        with contextlib.suppress(SecureInferError):
            parent.send({"error": faults.to_json(error, party)})
        if worker is not None:
            worker.close()
            if drives:
                _linger(parent)
        return 1
    worker.close()
    return 0


def _linger(parent: Parent) -> None:
    """Stay until the caller has read why the session ended: a pipe that closes with unread data loses it."""
    while (message := parent.next()) is not None and message[0].get("op") != "close":
        pass


if __name__ == "__main__":
    code = main(sys.argv)
    # Threads of gRPC and torch would only delay the end of a session that is over.
    logging.shutdown()
    os._exit(code)
