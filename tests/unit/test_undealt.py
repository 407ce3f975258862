"""Sessions without a dealer: an index for each inference, up by one, burnt at both ends before a frame leaves, used once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
import torch

from secureinfer.backends.base import Engine
from secureinfer.config import Limits
from secureinfer.errors import CorrelationError, PeerError, SecureInferError, SessionError, WireError
from secureinfer.session.dealing import Undealt
from secureinfer.session.room import ROOM_BYTES
from secureinfer.session.session import DataOwnerSession, ModelOwnerSession
from secureinfer.session.statistics import Statistics
from secureinfer.transport.base import Address
from secureinfer.transport.memory import MemoryLink, memory_links

C, S = "data_owner", "model_owner"
READY = Address("control", 0, 0, 3)


class Echo(Engine):
    """C sends a number and gets it back. fails: indices that go wrong at this party, before it sends anything."""

    def __init__(self, role: str, links: Mapping[str, MemoryLink]) -> None:
        self.role, self.links = role, links
        self.ran: list[int] = []
        self.fails: set[int] = set()

    def setup(self) -> None:
        """Nothing is exchanged."""

    def prepare(self, index: int) -> None:
        raise AssertionError("there is nothing to prepare")

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        self.ran.append(index)
        if index in self.fails:
            raise ValueError("31415")
        at = Address("online", index, 1, 0)
        if self.role == S:
            self.links[C].send(at, self.links[C].receive(at))
            return None
        self.links[S].send(at, (inputs or {})["x"].numpy().tobytes())
        return {"y": torch.frombuffer(self.links[S].receive(at), dtype=torch.float32)}

    def step_times(self) -> dict[int, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


class Duo:
    """Two sessions over one link in memory. The model owner runs in a thread; the data owner's is the test's."""

    def __init__(self, idle: float) -> None:
        self.links = memory_links([C, S], bytes(16), deadline=4.0)
        self.engines = {name: Echo(name, self.links[name]) for name in (C, S)}
        c, s = self.links[C][S], self.links[S][C]
        least = Limits(prepared_inferences=1, material_bytes=0)
        self.owner = DataOwnerSession(
            self.engines[C], Statistics(C, C, self.links[C], c.clock, 1), c, None, step=4.0, limits=least
        )
        self.follower = ModelOwnerSession(
            self.engines[S],
            Statistics(S, S, self.links[S], s.clock, 1),
            s,
            None,
            idle=idle,
            step=4.0,
            limits=least,
        )
        self.error: SecureInferError | None = None
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        """As a worker does."""
        try:
            self.follower.setup()
            self.follower.serve()
        except Exception as error:
            self.error = error if isinstance(error, SecureInferError) else SessionError("unexpected error")
            self.links[S][C].send_error(self.error)
        self.links[S][C].close()

    def ended(self) -> SecureInferError | None:
        self.thread.join(8)
        assert not self.thread.is_alive(), "the model owner goes on"
        return self.error


@contextlib.contextmanager
def duo(idle: float = 60.0) -> Iterator[Duo]:
    made = Duo(idle)
    try:
        yield made
    finally:
        for links in made.links.values():
            for link in links.values():
                link.close()
        made.thread.join(5)


@contextlib.contextmanager
def raw() -> Iterator[tuple[Duo, MemoryLink]]:
    """A data owner that does not keep to the protocol: its link."""
    with duo() as made:
        made.links[C][S].receive(READY, ROOM_BYTES)
        yield made, made.links[C][S]


def ask(owner: DataOwnerSession) -> int:
    index, outputs = owner.infer({"x": torch.tensor([1.5])})
    assert outputs["y"].tolist() == [1.5]
    return index


def begin(link: MemoryLink, index: int) -> None:
    link.send(Address("online", index, 0, 0), b"")
    link.send(Address("online", index, 1, 0), bytes(4))


def test_each_inference_has_the_next_index_whatever_was_prepared() -> None:
    with duo() as made:
        made.owner.setup()
        for count in (0, 1, 1000):
            made.owner.prepare(count)
            made.owner.prepare(count, wait=False)
            made.owner.await_ready()
        assert [ask(made.owner) for _ in range(3)] == [0, 1, 2]
        made.owner.prepare(5)
        assert ask(made.owner) == 3
        assert made.engines[C].ran == made.engines[S].ran == [0, 1, 2, 3]
        stats = made.owner.report()
        assert [s["party"] for s in stats] == [C, S]
        assert all(len(s["phases"]["online"]) == 4 and not s["phases"]["offline"] for s in stats)
        made.owner.close()
        assert made.ended() is None


def test_an_index_is_burnt_by_an_inference_that_fails() -> None:
    indices = Undealt()
    with pytest.raises(ValueError), indices.take() as index:
        assert index == 0
        raise ValueError
    with indices.take() as index:
        assert index == 1


@pytest.mark.parametrize(
    ("begun", "says"),
    [([0, 0], "inference 0: the next is 1"), ([1], "inference 1: the next is 0"), ([0, 1, 0], "inference 0")],
)
def test_a_data_owner_that_asks_for_another_index_is_refused_before_anything_is_computed(
    begun: list[int], says: str
) -> None:
    with raw() as (made, link):
        for index in begun:
            begin(link, index)
        error = made.ended()
        assert isinstance(error, CorrelationError) and says in str(error)
        assert made.engines[S].ran == begun[:-1]
        for index in begun[:-1]:
            link.receive(Address("online", index, 1, 0), 4)
        with pytest.raises(PeerError, match=f"model_owner: ended the session: .*inference {begun[-1]}"):
            link.receive_any(2.0)


def test_the_next_index_is_taken_from_the_same_hand() -> None:
    """The twin of the test above."""
    with raw() as (made, link):
        for index in range(4):
            begin(link, index)
            link.receive(Address("online", index, 1, 0), 4)
        assert made.engines[S].ran == [0, 1, 2, 3] and made.error is None


def test_an_offline_frame_begins_nothing() -> None:
    with raw() as (made, link):
        link.send(Address("offline", 0, 0, 0), b"")
        error = made.ended()
        assert isinstance(error, WireError) and "begins nothing here" in str(error)


def test_a_fault_inside_the_model_owner_reaches_the_data_owner_without_its_text() -> None:
    with duo() as made:
        made.owner.setup()
        made.engines[S].fails = {1}
        ask(made.owner)
        start = time.monotonic()
        with pytest.raises(PeerError, match="model_owner: ended the session") as caught:
            ask(made.owner)
        assert "31415" not in str(caught.value) and time.monotonic() - start < 2


def test_a_session_that_nobody_uses_is_ended_by_the_model_owner_and_one_in_use_is_not() -> None:
    with duo(idle=0.6) as made:
        made.owner.setup()
        for _ in range(4):
            ask(made.owner)
            time.sleep(0.3)
        assert made.error is None
        error = made.ended()
        assert isinstance(error, PeerError) and error.peer == C and "deadlines.idle" in str(error)
        with pytest.raises(PeerError, match="model_owner"):
            ask(made.owner)
