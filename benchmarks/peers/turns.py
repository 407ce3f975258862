"""How a peer's process works with the benchmark that started it: one line in for each run, one line of JSON at the end."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypeVar

T = TypeVar("T")


def take(once: Callable[[], T], runs: int | None, out: TextIO) -> list[T]:
    """What once gave, each time. runs: how often; None: once for each line that comes in, answered by a line."""
    if runs is not None:
        return [once() for _ in range(runs)]
    found = []
    _say(out, "ready")
    for _ in sys.stdin:
        found.append(once())
        _say(out, "done")
    return found


def seconds(taken: Sequence[tuple[float, float, float, float, float]]) -> dict[str, Any]:
    """What a row says of runs that each give seconds in all, to encrypt, evaluate and decrypt, and of processor time to
    evaluate. The first run stands apart.
    """
    first, *warm = taken
    total, encrypt, evaluate, decrypt, _ = zip(*warm, strict=True)
    return {
        "seconds": total,
        "first_seconds": first[0],
        "encrypt_seconds": statistics.median(encrypt),
        "evaluate_seconds": statistics.median(evaluate),
        "evaluate_cpu_seconds": statistics.mean(run[-1] for run in taken),
        "decrypt_seconds": statistics.median(decrypt),
    }


def close(document: dict[str, Any], out: TextIO) -> None:
    _say(out, json.dumps(document))


def _say(out: TextIO, line: str) -> None:
    out.write(line + "\n")
    out.flush()
