"""Each role's state machine in one session, over links that are up and an engine that was made.

    data owner                     model owner                    dealer
           <--------------------- ready (both followers; the model owner's with its limits)
    setup  ----------------------- engine.setup at all three ------------------------
    prepare: burn i
      offline i ------------------------------------------------->  burn i
                                   burn i  <--------------------- offline i
      engine.prepare(i) at all three; the dealer's corrections are its sign
                                   ready i ---------------------->
             <----------------------------------------------------  ready i
    infer: burn the prepared i
      online i ------------------>  burn the prepared i
      engine.run(i) at both
    report, close: control frames with JSON

Offline frames travel on the dealer's links alone, and each owner has a thread for them, so that inferences run meanwhile
and no link has two readers. An index is burnt before its first frame leaves, goes up by one, and is never used again,
whatever happens (rule R3).

Where a program has no dealer, there are the two owners and the link between them alone: nothing is prepared, and each
`infer` burns the next index.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import Limits
from ..errors import CorrelationError, LimitError, PeerError, SecureInferError, WireError
from ..transport.base import Address, Link
from ..transport.framing import FramedLink
from .dealing import Dealing, Undealt
from .faults import told
from .room import ROOM_BYTES, Room, room_of, unpack_room
from .statistics import Statistics

if TYPE_CHECKING:
    import torch

    from ..backends.base import Engine

COMMAND = Address("control", 0, 0, 0)
ANSWER = Address("control", 0, 0, 2)
READY = Address("control", 0, 0, 3)
"""A follower's word to the data owner that its links are up and its program is loaded; setup begins after all
have said so, so that a fault before it is read from the party that had it. The model owner's carries its Room.
"""

INDIRECT = 1.5
"""Deadlines that a wait takes where the peer itself waits for a third party."""
MAKE_ROOM = 0.5
"""Of a deadline, in which a model owner that is behind with its inferences makes room for one that is to be dealt."""
REASON_SECONDS = 0.3
GRACE_SECONDS = 1.0
"""For the data owner's word on why a session ends, before the loss of the dealer's link is taken as the reason."""
CLOSE_SECONDS = 3.0
"""What a close waits for an index that is being dealt."""

MAX_COMMAND_BYTES = 1 << 10
MAX_ANSWER_BYTES = 16 << 20

_EMPTY = b""


class DataOwnerSession:
    """The data owner's side: it drives. dealer: None where the program has none."""

    def __init__(
        self,
        engine: Engine,
        statistics: Statistics,
        model_owner: FramedLink,
        dealer: FramedLink | None,
        *,
        step: float,
        limits: Limits | None = None,
        party: str = "data_owner",
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._model_owner = model_owner
        self._dealer = dealer
        self._step = step
        self._peers = (model_owner,) if dealer is None else (model_owner, dealer)
        self._indices: Dealing | Undealt = (
            Undealt() if dealer is None else Dealing(partial(self._deal, dealer), party)
        )
        self.rooms: dict[str, Room] = {party: room_of(limits or Limits(), engine.material_bytes())}
        """By party: what material each keeps."""

    def setup(self) -> None:
        payload = self._model_owner.receive(READY, ROOM_BYTES)
        if self._dealer is not None:
            self._dealer.receive(READY, 0)
        self.rooms[self._model_owner.peer] = unpack_room(payload, self._model_owner.peer)
        if isinstance(self._indices, Dealing):
            self._indices.room = min(room.inferences for room in self.rooms.values())
        with self._statistics.run("setup", 0):
            self._engine.setup()

    @property
    def ready(self) -> int:
        """How many inferences are prepared; 0 where nothing is ever to be."""
        return self._indices.ready

    @property
    def busy(self) -> bool:
        return self._indices.busy

    def prepare(self, count: int = 1, *, wait: bool = True) -> None:
        """Deal for so many more inferences; in the background, as there is room, unless `wait`. No dealer: nothing."""
        self._indices.order(count)
        if wait:
            self._indices.wait(self.check, for_all=True)

    def await_ready(self) -> None:
        """Until an inference that was ordered is ready."""
        self._indices.wait(self.check, for_all=False)

    def _deal(self, dealer: FramedLink, index: int) -> None:
        with self._statistics.run("offline", index):
            dealer.send(Address("offline", index, 0, 0), _EMPTY)
            self._engine.prepare(index)
            # The dealer waits for the model owner meanwhile: its own deadline comes first, and names that one.
            dealer.receive(Address("offline", index, 0, 1), 0, timeout=INDIRECT * self._step)

    def infer(self, inputs: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, torch.Tensor]]:
        """Run one inference on this party's inputs; returns its index and the outputs that are revealed here.

        Raises CorrelationError if nothing is prepared, where there is a dealer.
        """
        times: dict[int, float] = {}
        with self._indices.take() as index, self._statistics.run("online", index, times):
            try:
                self._model_owner.send(Address("online", index, 0, 0), _EMPTY)
                outputs = self._engine.run(index, inputs) or {}
            except PeerError as error:
                # It may have gone while this party was sending: what it said before is still to be read.
                if error.peer == self._model_owner.peer:
                    self._model_owner.receive_any(REASON_SECONDS, limit=0)
                raise
            times.update(self._engine.step_times())
        return index, outputs

    def check(self) -> None:
        """Raise why the session cannot go on, if it cannot: also where no call needs who is missing. Not for use while
        an inference runs.
        """
        failed = self._indices.error or next((p.failure for p in reversed(self._peers) if p.failure), None)
        if failed is None:
            return
        if failed is self._model_owner.failure:
            # What it said before it went is still to be read, and nothing else is.
            self._model_owner.receive_any(REASON_SECONDS, limit=0)
        raise failed from None

    def report(self) -> list[dict[str, Any]]:
        """Statistics of all parties."""
        with self._indices.pause():
            self.check()
            found = [self._statistics.to_json()]
            for link in self._peers:
                link.send(COMMAND, json.dumps({"command": "report"}).encode())
                found.append(_json(link.receive(ANSWER, limit=MAX_ANSWER_BYTES), link.peer))
        return found

    def close(self) -> None:
        with self._indices.pause(CLOSE_SECONDS):
            self._indices.close()
            for link in self._peers:
                if link.failure is None:
                    link.send(COMMAND, json.dumps({"command": "close"}).encode())


class ModelOwnerSession:
    """The model owner's side: it follows the data owner in one thread, and the dealer, if there is one, in another."""

    def __init__(
        self,
        engine: Engine,
        statistics: Statistics,
        data_owner: FramedLink,
        dealer: FramedLink | None,
        *,
        idle: float,
        step: float,
        limits: Limits | None = None,
        party: str = "model_owner",
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._data_owner = data_owner
        self._dealer = dealer
        self._idle = idle
        self._step = step
        self._party = party
        self.room = room_of(limits or Limits(), engine.material_bytes())
        self._changed = threading.Condition()
        self._next = 0
        self._next_online = 0
        self._ready: set[int] = set()
        self._preparing = False
        self._ended = threading.Event()
        self._heard = time.monotonic()

    def setup(self) -> None:
        self._data_owner.send(READY, self.room.pack())
        with self._statistics.run("setup", 0):
            self._engine.setup()

    def serve(self) -> None:
        """Follow until the data owner closes the session. Raises PeerError and WireError."""
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        if self._dealer is not None:
            args = (self._dealer,)
            threading.Thread(target=self._follow_dealer, args=args, name="follow_dealer", daemon=True).start()
        try:
            while True:
                address, payload = self._data_owner.receive_any(None, limit=MAX_COMMAND_BYTES)
                if address == COMMAND:
                    if not _command(self._data_owner, payload, self._statistics):
                        return
                elif address == Address("online", address.inference, 0, 0) and not len(payload):
                    self._run(address.inference)
                else:
                    raise WireError(f"{self._data_owner.peer}: {address} begins nothing here")
                self._heard = time.monotonic()
        finally:
            self._ended.set()

    def _run(self, index: int) -> None:
        with self._changed:
            usable = index == self._next_online if self._dealer is None else index in self._ready
            if not usable or index < self._next_online:
                why = (
                    f"the next is {self._next_online}"
                    if self._dealer is None
                    else "it is not prepared or was used"
                )
                raise CorrelationError(
                    f"{self._data_owner.peer} asks for inference {index}: {why}",
                    public_detail=f"inference {index}",
                )
            self._next_online = index + 1
            self._ready = {i for i in self._ready if i > index}  # those before it are burnt with it
            self._changed.notify_all()
        times: dict[int, float] = {}
        with self._statistics.run("online", index, times):
            self._engine.run(index, None)
            times.update(self._engine.step_times())

    # --- the dealer's link, in a thread of its own ---

    def _follow_dealer(self, dealer: FramedLink) -> None:
        """Take what is dealt until the dealer closes the session; a fault ends it for both threads."""
        try:
            while True:
                address, payload = dealer.receive_any(None, limit=MAX_COMMAND_BYTES)
                if address == COMMAND:
                    if _json(payload, dealer.peer) != {"command": "close"}:
                        raise WireError(f"{dealer.peer}: an unknown command")
                    return
                if address != Address("offline", self._next, 0, 0) or len(payload):
                    raise WireError(f"{dealer.peer}: {address} begins nothing here")
                self._preparing = True
                self._prepare(dealer, address.inference)
                self._preparing = False
                self._heard = time.monotonic()
        except BaseException as error:
            # A dealer that goes while nothing is dealt was told to, perhaps, by a data owner who tells this party too.
            if isinstance(error, PeerError) and not self._preparing and self._ended.wait(GRACE_SECONDS):
                return
            self._abort(told(error, self._party))

    def _prepare(self, dealer: FramedLink, index: int) -> None:
        self._next = index + 1
        with self._changed:
            # A data owner waits until there is room, but may be ahead of this party's last inference.
            if not self._changed.wait_for(
                lambda: len(self._ready) < self.room.inferences, MAKE_ROOM * self._step
            ):
                text = f"{self.room.inferences} inferences may be prepared at once ({self.room})"
                raise LimitError(
                    f"{self._data_owner.peer} asks for more material than is kept here: {text}",
                    public_detail=text,
                )
        with self._statistics.run("offline", index):
            self._engine.prepare(index)
            with self._changed:
                self._ready.add(index)
            dealer.send(Address("offline", index, 0, 1), _EMPTY)

    def _watch(self) -> None:
        """End a session in which nobody asks for anything."""
        while not self._ended.wait(min(1.0, self._idle / 4)):
            if time.monotonic() - self._heard > self._idle and not self._statistics.active:
                text = f"sent nothing within {self._idle:g} s (deadlines.idle)"
                self._abort(PeerError(self._data_owner.peer, text))
                return

    def _abort(self, error: SecureInferError) -> None:
        """End the session from another thread than the one that follows the data owner, which then raises this."""
        if not self._ended.is_set():
            self._data_owner.interrupt(error)
            if self._dealer is not None:
                self._dealer.send_error(error)


class DealerSession:
    """The dealer's side: it deals an index once, when the data owner asks for it, and says when the model owner has it."""

    def __init__(
        self,
        engine: Engine,
        statistics: Statistics,
        data_owner: Link,
        model_owner: Link,
        *,
        idle: float,
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
                    with contextlib.suppress(
                        PeerError
                    ):  # it may have gone, since the data owner tells it first
                        self._model_owner.send(COMMAND, json.dumps({"command": "close"}).encode())
                    return
            elif address == Address("offline", self._next, 0, 0) and not len(payload):
                self._deal(address.inference)
            else:
                raise WireError(f"{self._data_owner.peer}: {address} begins nothing here")

    def _deal(self, index: int) -> None:
        self._next = index + 1
        done = Address("offline", index, 0, 1)
        with self._statistics.run("offline", index):
            self._model_owner.send(Address("offline", index, 0, 0), _EMPTY)
            self._engine.prepare(index)
            self._model_owner.receive(done, 0)
            self._data_owner.send(done, _EMPTY)


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
