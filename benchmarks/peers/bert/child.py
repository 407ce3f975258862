"""A peer's side of the turns: `run` on a line asks for one inference, answered by one line of JSON; `end` ends.

Where standard input closes without `end`, whoever started this is gone, and the process ends at once, in the middle of an
inference too. What libraries print goes to standard error; answers go where standard output was.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

ORPHANED = 70


def answers() -> TextIO:
    """Where answers go. After this, what is printed, by C++ too, goes to standard error."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept


def watch() -> queue.SimpleQueue[str]:
    """The lines that come in. To be called before anything that takes long."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
            if line.strip() == "end":
                return
        os._exit(ORPHANED)

    threading.Thread(target=read, daemon=True).start()
    return lines


def say(out: TextIO, body: dict[str, Any]) -> None:
    out.write(json.dumps(body) + "\n")
    out.flush()


def serve(
    lines: queue.SimpleQueue[str], out: TextIO, ready: dict[str, Any], once: Callable[[], dict[str, Any]]
) -> None:
    say(out, ready)
    while lines.get() == "run":
        say(out, once())
