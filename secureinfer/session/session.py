"""Each role's state machine in one session, over links that are up and an engine that was made.

    data owner                     model owner                    dealer
           <--------------------- ready (both followers)
    setup  ----------------------- engine.setup at all three ------------------------
    prepare: burn i
      offline i ----------------->  burn i
      offline i ------------------------------------------------->  expects i of both, burns it
                                    offline i ------------------->
      engine.prepare(i) at all three; the dealer's corrections are its sign
      <------------------ ready i
    infer: burn the prepared i
      online i ------------------>  burn the prepared i
      engine.run(i) at both
    report, close: control frames with JSON

An index is burnt before its first frame leaves, goes up by one, and is never used again, whatever happens
(rule R3).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import CorrelationError, WireError
from ..transport.base import Address, Link
from .statistics import Statistics

if TYPE_CHECKING:
    import torch

    from ..backends.base import Engine

COMMAND = Address("control", 0, 0, 0)
ANSWER = Address("control", 0, 0, 2)
READY = Address("control", 0, 0, 3)
"""A follower's word to the data owner that its links are up and its program is loaded; setup begins after all
have said so, so that a fault before it is read from the party that had it.
"""

INDIRECT = 1.5
"""Deadlines that a wait takes where the peer itself waits for a third party."""

MAX_COMMAND_BYTES = 1 << 10
MAX_ANSWER_BYTES = 16 << 20

_EMPTY = b""


class DataOwnerSession:
    """The data owner's side: it drives."""

    def __init__(
        self, engine: Engine, statistics: Statistics, model_owner: Link, dealer: Link, *, step: float
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._model_owner = model_owner
        self._dealer = dealer
        self._step = step
        self._next = 0
        self._ready: deque[int] = deque()

    def setup(self) -> None:
        for link in (self._model_owner, self._dealer):
            link.receive(READY, 0)
        with self._statistics.run("setup", 0):
            self._engine.setup()

    def prepare(self) -> int:
        """Deal for one inference; returns its index."""
        index = self._next
        self._next += 1
        with self._statistics.run("offline", index):
            begin = Address("offline", index, 0, 0)
            self._model_owner.send(begin, _EMPTY)
            self._dealer.send(begin, _EMPTY)
            self._engine.prepare(index)
            # The model owner waits for the dealer meanwhile: its own deadline comes first, and names the dealer.
            address, _ = self._model_owner.receive_any(INDIRECT * self._step, limit=0)
            if address != Address("offline", index, 0, 1):
                raise WireError(
                    f"{self._model_owner.peer}: expected its word on inference {index}, got {address}"
                )
        self._ready.append(index)
        return index

    def infer(self, inputs: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, torch.Tensor]]:
        """Run one inference on this party's inputs; returns its index and the outputs that are revealed here.

        Raises CorrelationError if nothing is prepared.
        """
        if not self._ready:
            raise CorrelationError("no inference is prepared; call prepare first")
        index = self._ready.popleft()
        times: dict[int, float] = {}
        with self._statistics.run("online", index, times):
            self._model_owner.send(Address("online", index, 0, 0), _EMPTY)
            outputs = self._engine.run(index, inputs) or {}
            times.update(self._engine.step_times())
        return index, outputs

    def report(self) -> list[dict[str, Any]]:
        """Statistics of all three parties."""
        found = [self._statistics.to_json()]
        for link in (self._model_owner, self._dealer):
            link.send(COMMAND, json.dumps({"command": "report"}).encode())
            found.append(_json(link.receive(ANSWER, limit=MAX_ANSWER_BYTES), link.peer))
        return found

    def close(self) -> None:
        for link in (self._model_owner, self._dealer):
            if link.failure is None:
                link.send(COMMAND, json.dumps({"command": "close"}).encode())


class ModelOwnerSession:
    """The model owner's side: it follows the data owner, and asks the dealer with it."""

    def __init__(
        self, engine: Engine, statistics: Statistics, data_owner: Link, dealer: Link, *, idle: float
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._data_owner = data_owner
        self._dealer = dealer
        self._idle = idle
        self._next = 0
        self._next_online = 0
        self._ready: set[int] = set()

    def setup(self) -> None:
        self._data_owner.send(READY, _EMPTY)
        with self._statistics.run("setup", 0):
            self._engine.setup()

    def serve(self) -> None:
        """Follow until the data owner closes the session. Raises PeerError and WireError."""
        while True:
            address, payload = self._data_owner.receive_any(self._idle, limit=MAX_COMMAND_BYTES)
            if address == COMMAND:
                if not _command(self._data_owner, payload, self._statistics):
                    return
            elif address == Address("offline", self._next, 0, 0) and not len(payload):
                self._prepare(address.inference)
            elif address == Address("online", address.inference, 0, 0) and not len(payload):
                self._run(address.inference)
            else:
                raise WireError(f"{self._data_owner.peer}: {address} begins nothing here")

    def _prepare(self, index: int) -> None:
        self._next = index + 1
        with self._statistics.run("offline", index):
            self._dealer.send(Address("offline", index, 0, 0), _EMPTY)
            self._engine.prepare(index)
            self._data_owner.send(Address("offline", index, 0, 1), _EMPTY)
        self._ready.add(index)

    def _run(self, index: int) -> None:
        if index not in self._ready or index < self._next_online:
            raise CorrelationError(
                f"{self._data_owner.peer} asks for inference {index}, which is not prepared or was used",
                public_detail=f"inference {index}",
            )
        self._next_online = index + 1
        self._ready.discard(index)
        times: dict[int, float] = {}
        with self._statistics.run("online", index, times):
            self._engine.run(index, None)
            times.update(self._engine.step_times())


class DealerSession:
    """The dealer's side: it deals an index once, when both owners ask for it."""

    def __init__(
        self, engine: Engine, statistics: Statistics, data_owner: Link, model_owner: Link, *, idle: float
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._data_owner = data_owner
        self._model_owner = model_owner
        self._idle = idle
        self._next = 0

    def setup(self) -> None:
        self._data_owner.send(READY, _EMPTY)
        with self._statistics.run("setup", 0):
            self._engine.setup()

    def serve(self) -> None:
        while True:
            address, payload = self._data_owner.receive_any(self._idle, limit=MAX_COMMAND_BYTES)
            if address == COMMAND:
                if not _command(self._data_owner, payload, self._statistics):
                    return
            elif address == Address("offline", self._next, 0, 0) and not len(payload):
                index = address.inference
                self._next = index + 1
                with self._statistics.run("offline", index):
                    self._model_owner.receive(address, 0)
                    self._engine.prepare(index)
            else:
                raise WireError(f"{self._data_owner.peer}: {address} begins nothing here")


def _command(link: Link, payload: memoryview, statistics: Statistics) -> bool:
    """Obey a control frame; False when it closes the session."""
    command = _json(payload, link.peer).get("command")
    if command == "report":
        link.send(ANSWER, json.dumps(statistics.to_json()).encode())
        return True
    if command == "close":
        return False
    raise WireError(f"{link.peer}: an unknown command")


def _json(payload: memoryview, peer: str) -> dict[str, Any]:
    try:
        value = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        raise WireError(f"{peer}: a control frame that is not JSON") from None
    if not isinstance(value, dict):
        raise WireError(f"{peer}: a control frame that is not a JSON object")
    return value
