"""A daemon that lives as long as the process that started it: `python -m secureinfer.session.daemon FD`
(local.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys

from ..config import make_settings
from ..errors import PeerError, SecureInferError
from ..transport.spawn import inherited_pipe
from . import faults
from .servicer import Daemon

START_SECONDS = 60.0


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    pipe = inherited_pipe(arguments, "the process that started this daemon")
    party = "daemon"
    folder = None
    try:
        start, _ = pipe.receive(timeout=START_SECONDS)
        party = str(start["party"])
        # The settings come in a second message: a model owner's name the dealer's port, which is known only
        # then.
        body, _ = pipe.receive(timeout=START_SECONDS)
        folder = start.get("folder")
        daemon = Daemon(make_settings(body["settings"]), engine=start.get("engine"))
    except BaseException as error:
        with contextlib.suppress(SecureInferError):
            pipe.send({"error": faults.to_json(error, party)})
        return 1
    try:
        pipe.send({"event": "listening", "port": daemon.port})
        pipe.receive()
    except PeerError:
        pass
    finally:
        daemon.close()
        if folder is not None:
            # Also where the starter was killed and could not.
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv)
    logging.shutdown()
    os._exit(code)
