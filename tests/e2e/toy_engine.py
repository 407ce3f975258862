"""An engine for tests of sessions, with or without a dealer: it masks an input, sends it to the model owner, and adds what
comes back.

The file that TOY_FAULT names may hold "role:phase:kind", which makes one party die, stop, fail or compute in silence in
that phase, or its daemon die or stop.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from secureinfer.backends.base import Engine
from secureinfer.transport.base import Address, Clock, Link

NAME = "toy_engine:make"


class ToyEngine(Engine):
    def __init__(
        self, role: str, program: Any, names: Sequence[str], dealer: str, links: Mapping[str, Link]
    ) -> None:
        self.role = role
        self.program = program
        self.links = links
        self.dealer = dealer
        self.model_owner = names[0]
        self.data_owner = names[1]
        self._fault("handshake")

    def _fault(self, phase: str) -> None:
        file = Path(os.environ["TOY_FAULT"])
        if not file.exists():
            return
        role, at, kind = file.read_text().split(":")
        if (role, at) != (self.role, phase):
            return
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "die-daemon":
            os.kill(os.getppid(), signal.SIGKILL)
        elif kind == "stop-daemon":
            os.kill(os.getppid(), signal.SIGSTOP)
        elif kind.startswith("compute-"):
            time.sleep(float(kind.removeprefix("compute-")))
        elif kind == "raise":
            raise ValueError("a secret value 31415")

    def setup(self) -> None:
        self._fault("setup")
        for link in self.links.values():
            link.send(Address("setup"), secrets.token_bytes(16))
        for link in self.links.values():
            link.receive(Address("setup"), 16)

    def prepare(self, index: int) -> None:
        if not self.dealer:
            raise ValueError("there is nothing to prepare without a dealer")
        self._fault("offline")
        at = Address("offline", index, 1, 1)
        if self.role == "dealer":
            self.links[self.model_owner].send(at, bytes(100))
        elif self.role == "model_owner":
            self.links[self.dealer].receive(at, 100)

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        self._fault("online")
        at = Address("online", index, 1, 0)
        if self.role == "model_owner":
            link = self.links[self.data_owner]
            link.send(at, link.receive(at))
            return None
        (name,) = self.program.graph.inputs
        x = (inputs or {})[name].double()
        mask = torch.rand_like(x)
        link = self.links[self.model_owner]
        link.send(at, memoryview((x - mask).contiguous().numpy()))
        back = torch.frombuffer(link.receive(at, x.numel() * 8), dtype=torch.float64).reshape(x.shape)
        return {self.program.graph.outputs[0]: (back + mask).float()}

    def step_times(self) -> dict[int, float]:
        return {0: 0.0, 1: 0.001}

    def close(self) -> None:
        pass


def make(
    role: str,
    program: Any,
    *,
    me: str,
    compute_parties: Sequence[str],
    dealer: str,
    links: Mapping[str, Link],
    clock: Clock,
    session_id: bytes,
    spool_folder: Path | None = None,
    threads: int | None = None,
) -> Engine:
    return ToyEngine(role, program, compute_parties, dealer, links)
