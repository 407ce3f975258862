"""The real engine of a party, with its secrets recorded beside what a test scans, and faults on demand.

RECORDS names the folder of the records. The file that RECORDING_FAULT names may hold "role:kind", which makes that role's
process die in the middle of an inference, or write secrets where they must not be, and raise an error that quotes others
(plant).
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch

from secureinfer import backends
from secureinfer.backends.base import Engine
from secureinfer.backends.mpc import dealer, party, randomness, seeds, values

NAME = "recording_engine:make"
MOST = 16
"""Records of each kind in one process: enough to be among what is written, and few enough to look for."""

_counts: dict[str, int] = {}
_held: dict[str, bytes] = {}


def record(kind: str, raw: bytes) -> None:
    _counts[kind] = _counts.get(kind, 0) + 1
    if _counts[kind] <= MOST:
        _held[kind] = raw
        with (Path(os.environ["RECORDS"]) / str(os.getpid())).open("a") as file:
            file.write(f"{kind} {raw.hex()}\n")


def head(tensor: torch.Tensor) -> bytes:
    """The first elements, as they lie in memory."""
    return tensor.detach().reshape(-1)[:2].contiguous().numpy().tobytes()


def _wrap(owner: Any, name: str, after: Any) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, outer)


def _install(role: str) -> None:
    _wrap(randomness.Seed, "__init__", lambda _, self, key, session: record("seed", bytes(key)))
    _wrap(randomness.Stream, "__init__", lambda _, self, key: record("stream key", bytes(key)))
    _wrap(randomness.Stream, "tensor", lambda found, *a, **k: record("mask", head(found)))
    for module in (seeds, dealer):
        _wrap(module, "fresh_nonce", lambda nonce: record("nonce", nonce))

    def shared(_: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if self.tensor.device.type != "meta":
            record("share", head(self.tensor))

    _wrap(values.Share, "__init__", shared)
    _wrap(
        party.Party, "at", lambda _, self, phase, inference, step: self.tracing or _fault(role, phase, step)
    )


def _fault(role: str, phase: str, step: int) -> None:
    file = Path(os.environ["RECORDING_FAULT"])
    if (phase, step) != ("online", 2) or not file.exists():
        return
    at, kind = file.read_text().split(":")
    if at != role:
        return
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "plant":
        logging.getLogger("secureinfer.session").debug("the seed is %s", _held["seed"].hex())
        logging.getLogger("secureinfer.session").debug("a stream's key is %s", list(_held["stream key"]))
        (Path(tempfile.gettempdir()) / "forgotten.bin").write_bytes(b"share" + _held["share"])
        raise ValueError(f"it holds {_held['mask'].hex()} and {_held['nonce']!r}")  # and nobody may read that


def make(role: str, program: Any, **kwargs: Any) -> Engine:
    _install(role)
    engine: Engine = backends.make_engine(role, program, **kwargs)
    return engine
