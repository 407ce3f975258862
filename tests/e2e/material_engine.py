"""recording_engine with more records and more faults: RECORDING_FAULT may also hold "role:kind" with a kind that makes the
role wait in the middle of an inference (pause), have the seeds that any session has (old-seeds), or write its material to
the disk as it is (plain-disk). The role "all" is all of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import recording_engine
from plain_cipher import Plain

from secureinfer.backends.base import Engine
from secureinfer.backends.mpc import dealer, party, randomness, seeds, spool

NAME = "material_engine:make"
MOST = 64


def fault(role: str) -> str:
    """The kind of fault that this role has now."""
    file = Path(os.environ["RECORDING_FAULT"])
    at, _, kind = file.read_text().partition(":") if file.exists() else ("", "", "")
    return kind if at in (role, "all") else ""


def _one_seed(*nonces: bytes, role: str, **_: Any) -> randomness.Seed:
    return randomness.Seed(role.encode().ljust(32)[:32], bytes(16))


def make(role: str, program: Any, **kwargs: Any) -> Engine:
    recording_engine.MOST = MOST
    kind = fault(role)
    if kind == "plain-disk":
        spool.Cipher = Plain  # type: ignore[misc, assignment]
    if kind == "old-seeds":
        for module in (seeds, dealer):
            module.agree_seed = _one_seed  # type: ignore[attr-defined]
    at = party.Party.at

    def pausing(self: party.Party, phase: str, inference: int, step: int) -> None:
        at(self, phase, inference, step)
        if not self.tracing and (phase, step) == ("online", 2) and fault(role) == "pause":
            time.sleep(3)

    party.Party.at = pausing  # type: ignore[method-assign]
    return recording_engine.make(role, program, **kwargs)
