"""Dealing ahead: bounded at every party, beside running inferences, once for each index; and what a fault of it ends."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secureinfer.backends.base import Engine
from secureinfer.config import Limits
from secureinfer.errors import (
    CorrelationError,
    LimitError,
    PeerError,
    SecureInferError,
    SessionError,
    WireError,
)
from secureinfer.session.room import ROOM_BYTES, Room, least, unpack_room
from secureinfer.session.session import DataOwnerSession, DealerSession, ModelOwnerSession
from secureinfer.session.statistics import Statistics
from secureinfer.transport.base import HEADER_BYTES, Address
from secureinfer.transport.memory import MemoryLink, memory_links

C, S, D = "data_owner", "model_owner", "dealer"
SIZE = 1000
STEP = 4.0


class Counting(Engine):
    """Deals SIZE bytes an inference from D to S; online, C sends a number and gets it back. Keeps count of what it holds."""

    def __init__(self, role: str, links: Mapping[str, MemoryLink]) -> None:
        self.role, self.links = role, links
        self.held: dict[int, bytes] = {}
        self.most = 0
        self.ran: list[int] = []
        self.gates: dict[tuple[str, int], threading.Event] = {}
        self.faults: dict[tuple[str, int], BaseException] = {}
        self.frames = 1

    def hold(self, phase: str, index: int) -> threading.Event:
        return self.gates.setdefault((phase, index), threading.Event())

    def _at(self, phase: str, index: int) -> None:
        if (gate := self.gates.get((phase, index))) is not None:
            gate.wait(30)
        if (fault := self.faults.get((phase, index))) is not None:
            raise fault

    def setup(self) -> None:
        """Nothing is exchanged."""

    def prepare(self, index: int) -> None:
        self._at("offline", index)
        for i in range(self.frames):
            at = Address("offline", index, 1, i + 1)
            if self.role == D:
                self.links[S].send(at, bytes(SIZE))
            elif self.role == S:
                self.held[index] = bytes(self.links[D].receive(at, SIZE))
        if self.role == C:
            self.held[index] = bytes(SIZE)
        self.most = max(self.most, len(self.held))

    def material_bytes(self) -> int:
        return SIZE

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        self._at("online", index)
        self.ran.append(index)
        try:
            at = Address("online", index, 1, 0)
            if self.role == S:
                self.links[C].send(at, self.links[C].receive(at))
                return None
            self.links[S].send(at, (inputs or {})["x"].numpy().tobytes())
            return {"y": torch.frombuffer(self.links[S].receive(at), dtype=torch.float32)}
        finally:
            self.held.pop(index, None)

    def step_times(self) -> dict[int, float]:
        return {}

    def close(self) -> None:
        self.held.clear()


class Trio:
    """Three sessions over links in memory. The followers run in threads; the data owner's is the test's."""

    def __init__(self, limits: Limits | None = None, *, idle: float = 60.0, queued: int = 1 << 30) -> None:
        self.links = memory_links([C, S, D], bytes(16), deadline=STEP, limit=queued)
        self.engines = {name: Counting(name, self.links[name]) for name in (C, S, D)}
        self.errors: dict[str, SecureInferError] = {}
        limits = limits or Limits()

        def statistics(name: str) -> Statistics:
            return Statistics(name, name, self.links[name], next(iter(self.links[name].values())).clock, 1)

        s, d = self.links[S], self.links[D]
        self.sessions = {
            S: ModelOwnerSession(
                self.engines[S], statistics(S), s[C], s[D], idle=idle, step=STEP, limits=limits
            ),
            D: DealerSession(self.engines[D], statistics(D), d[C], d[S], idle=60.0),
        }
        c = self.links[C]
        self.owner = DataOwnerSession(self.engines[C], statistics(C), c[S], c[D], step=STEP, limits=limits)
        self.threads = [threading.Thread(target=self._follow, args=(name,), daemon=True) for name in (S, D)]
        for thread in self.threads:
            thread.start()

    def _follow(self, name: str) -> None:
        """As a worker does: the session, and on an error the word to all peers."""
        try:
            self.sessions[name].setup()
            self.sessions[name].serve()
        except SecureInferError as error:
            self.errors[name] = error
            for link in self.links[name].values():
                link.send_error(error)
        for link in self.links[name].values():
            link.close()

    def ended(self, within: float = 2 * STEP) -> dict[str, SecureInferError]:
        """What the followers ended with, once both have."""
        stop = time.monotonic() + within
        for thread in self.threads:
            thread.join(max(0.0, stop - time.monotonic()))
            assert not thread.is_alive(), "a follower goes on"
        return self.errors

    def close(self) -> None:
        for engine in self.engines.values():
            for gate in engine.gates.values():
                gate.set()
        for links in self.links.values():
            for link in links.values():
                link.close()
        for thread in self.threads:
            thread.join(5)


@contextlib.contextmanager
def trio(limits: Limits | None = None, **more: Any) -> Iterator[Trio]:
    made = Trio(limits, **more)
    try:
        made.owner.setup()
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def raw(limits: Limits | None = None, **more: Any) -> Iterator[tuple[Trio, MemoryLink, MemoryLink]]:
    """A data owner that does not keep to the protocol: its links to the model owner and to the dealer."""
    made = Trio(limits, **more)
    try:
        links = made.links[C]
        links[S].receive(Address("control", 0, 0, 3), ROOM_BYTES)
        links[D].receive(Address("control", 0, 0, 3), 0)
        yield made, links[S], links[D]
    finally:
        made.close()


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    stop = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > stop:
            return False
        time.sleep(0.005)
    return True


def ask(owner: DataOwnerSession, value: float = 1.5) -> int:
    index, outputs = owner.infer({"x": torch.tensor([value])})
    assert outputs["y"].tolist() == [value]
    return index


# --- limits, and how they are announced ---


@pytest.mark.parametrize(
    ("room", "fits", "says"),
    [
        (Room(64, 2 << 30, 1 << 20), 64, "prepared_inferences = 64"),
        (Room(64, 10 << 20, 1 << 20), 10, "material_bytes = 10485760, 1048576 an inference"),
        (Room(64, 1 << 20, 1 << 30), 1, "material_bytes"),  # nothing runs without its material
        (Room(3, 0, 0), 3, "prepared_inferences = 3"),
    ],
)
def test_both_limits_hold_and_one_inference_always_fits(room: Room, fits: int, says: str) -> None:
    assert room.inferences == fits and says in str(room)
    assert unpack_room(memoryview(room.pack()), S) == room
    assert least({C: Room(65, 1 << 40, 1), S: room}) == (S, room)


@given(st.binary(max_size=2 * ROOM_BYTES))
def test_an_announcement_is_a_room_that_settings_can_say_or_a_wire_error(payload: bytes) -> None:
    try:
        room = unpack_room(memoryview(payload), S)
    except WireError as error:
        assert S in str(error)
    else:
        assert 1 <= room.inferences <= room.prepared_inferences <= 1 << 20 and room.pack() == payload


@pytest.mark.parametrize("numbers", [(0, 1, 1), ((1 << 20) + 1, 1, 1), (1, 1 << 51, 1), (1, 1, 1 << 63)])
def test_an_announcement_that_no_party_can_make_ends_the_session(numbers: tuple[int, ...]) -> None:
    links = memory_links([C, S, D], bytes(16), deadline=2.0)
    links[S][C].send(Address("control", 0, 0, 3), struct.pack("<QQQ", *numbers))
    links[D][C].send(Address("control", 0, 0, 3), b"")
    clock = links[C][S].clock
    owner = DataOwnerSession(
        Counting(C, links[C]), Statistics(C, C, links[C], clock, 1), links[C][S], links[C][D], step=2.0
    )
    with pytest.raises(WireError, match="limits that no party can have"):
        owner.setup()


# --- bounds ---


def test_dealing_in_the_background_never_holds_more_than_the_limit_and_goes_on_as_it_is_used() -> None:
    with trio(Limits(prepared_inferences=3)) as made:
        made.owner.prepare(10, wait=False)
        assert until(lambda: made.owner.ready == 3)
        time.sleep(0.1)
        assert made.owner.ready == 3 and not made.owner.busy
        indices = []
        for _ in range(10):
            made.owner.await_ready()
            indices.append(ask(made.owner))
        assert indices == list(range(10))
        assert made.engines[C].most <= 3 and made.engines[S].most <= 3
        made.owner.close()
        assert made.ended() == {}


def test_bytes_bound_it_as_well() -> None:
    with trio(Limits(material_bytes=2 * SIZE + 1)) as made:
        assert {room.inferences for room in made.owner.rooms.values()} == {2}
        made.owner.prepare(4, wait=False)
        assert until(lambda: made.owner.ready == 2)
        time.sleep(0.1)
        assert made.engines[S].most == 2


def flood(made: Trio, dealer: MemoryLink, count: int) -> None:
    """Ask for more and more, whatever anybody says."""
    for i in range(count):
        with contextlib.suppress(SecureInferError):
            dealer.send(Address("offline", i, 0, 0), b"")


def test_a_data_owner_that_asks_on_is_refused_and_fills_nothing() -> None:
    with raw(Limits(prepared_inferences=3)) as (made, model_owner, dealer):
        flood(made, dealer, 50)
        start = time.monotonic()
        with pytest.raises(
            PeerError, match="model_owner: ended the session: .*3 inferences may be prepared at once"
        ):
            model_owner.receive_any(2 * STEP)
        assert time.monotonic() - start < STEP
        errors = made.ended()
        assert isinstance(errors[S], LimitError) and made.engines[S].most == 3
        assert isinstance(errors[D], PeerError) and errors[D].peer == S


def test_a_model_owner_that_believed_it_would_fill_its_memory() -> None:
    """Planted fault: its own limit is not looked at."""
    with raw(Limits(prepared_inferences=3)) as (made, _, dealer):
        made.sessions[S].room = Room(1 << 20, 1 << 50, 0)
        flood(made, dealer, 50)
        assert until(lambda: made.engines[S].most == 50)


def test_a_model_owner_that_is_behind_with_its_inferences_makes_room_and_refuses_nobody() -> None:
    with trio(Limits(prepared_inferences=1)) as made:
        made.owner.prepare()
        gate = made.engines[S].hold("online", 0)
        # As where the data owner has its answer first: it takes this inference for done, and the next is dealt.
        made.links[C][D].send(Address("offline", 1, 0, 0), b"")
        time.sleep(0.2)
        assert made.engines[S].most == 1
        made.links[C][S].send(Address("online", 0, 0, 0), b"")
        assert until(lambda: 1 in made.engines[S].held)
        gate.set()
        assert not made.errors


@pytest.mark.parametrize(("queued", "bounded"), [(20 * SIZE, True), (1 << 30, False)])
def test_a_model_owner_that_takes_corrections_slowly_does_not_grow_the_dealers_memory(
    queued: int, bounded: bool
) -> None:
    """The second row is the twin: without a bound on what waits in a link, all of it would wait."""
    with raw(queued=queued) as (made, _, dealer):
        gate = made.engines[S].hold("offline", 0)
        made.engines[D].frames = made.engines[S].frames = 500
        flood(made, dealer, 5)
        channel = made.links[D][S]._out
        assert until(lambda: channel.queued >= (queued if bounded else 500 * SIZE))
        time.sleep(0.2)
        assert (channel.queued <= 22 * (SIZE + HEADER_BYTES)) is bounded
        assert (
            made.links[D][C].total().frames_sent == 1
        )  # it said that it was ready, and has dealt nothing more
        gate.set()
        made.engines[S].frames = 500
        assert until(lambda: len(made.engines[S].held) == 5)


# --- beside online work ---


def test_inferences_run_while_the_next_index_is_dealt() -> None:
    with trio() as made:
        made.owner.prepare(2)
        gate = made.engines[D].hold("offline", 2)
        made.owner.prepare(1, wait=False)
        assert until(lambda: made.owner.busy)
        assert [ask(made.owner), ask(made.owner)] == [0, 1]
        assert made.owner.busy and not made.owner.ready
        threading.Timer(0.2, gate.set).start()
        made.owner.await_ready()  # the one that is being dealt, and no other
        assert ask(made.owner) == 2
        assert made.engines[D].ran == [] and made.sessions[D]._next == 3


def phases(made: Trio) -> dict[str, dict[str, list[dict[str, Any]]]]:
    return {stats["party"]: stats["phases"] for stats in made.owner.report()}


def test_bytes_and_rounds_are_exact_whether_phases_overlap_or_not() -> None:
    def counted(overlapping: bool) -> Any:
        with trio() as made:
            made.owner.prepare(2)
            if overlapping:
                gate = made.engines[S].hold("offline", 2)
                made.owner.prepare(3, wait=False)
                assert until(lambda: made.owner.busy)
                ask(made.owner)
                threading.Timer(0.05, gate.set).start()
                ask(made.owner)
                made.owner.prepare(0)
            else:
                ask(made.owner)
                ask(made.owner)
                made.owner.prepare(3)
            for _ in range(3):
                ask(made.owner)
            return {
                (party, phase, run["inference"]): (run["rounds"], run["links"])
                for party, found in phases(made).items()
                for phase, runs in found.items()
                for run in runs
            }

    one, other = counted(True), counted(False)
    assert one == other and len(one) == 3 + 3 * 5 + 2 * 5
    for index in range(5):
        offline = [one[party, "offline", index] for party in (C, S, D)]
        sent = sum(link["bytes_sent"] for _, links in offline for link in links.values())
        assert sent == 4 * HEADER_BYTES + HEADER_BYTES + SIZE
        assert sum(link["bytes_received"] for _, links in offline for link in links.values()) == sent
        assert max(rounds for rounds, _ in offline) == 4
        assert one[C, "online", index][0] == 2
        assert one[C, "offline", index][1][S]["frames_sent"] == 0  # none between the owners


def test_the_processors_time_of_runs_that_overlap_is_unknown_and_not_counted_twice() -> None:
    with trio() as made:
        made.owner.prepare(2)
        ask(made.owner)
        gate = made.engines[D].hold("offline", 2)
        made.owner.prepare(1, wait=False)
        assert until(lambda: made.owner.busy)
        ask(made.owner)
        gate.set()
        found = phases(made)[C]
        assert [run["cpu_seconds"] is None for run in found["online"]] == [False, True]
        assert [run["cpu_seconds"] is None for run in found["offline"]] == [False, False, True]


def test_a_report_waits_for_the_index_that_is_dealt_and_dealing_goes_on_after_it() -> None:
    with trio() as made:
        gate = made.engines[S].hold("offline", 0)
        made.owner.prepare(20, wait=False)
        assert until(lambda: made.owner.busy)
        threading.Timer(0.2, gate.set).start()
        found = phases(made)
        assert len({len(found[party]["offline"]) for party in (C, S, D)}) == 1 and found[C]["offline"]
        made.owner.prepare(0)
        assert made.owner.ready == 20


def test_closing_while_an_index_is_dealt_ends_every_party_without_an_error() -> None:
    with trio() as made:
        made.engines[S].hold("offline", 1)
        made.owner.prepare(10, wait=False)
        assert until(lambda: made.owner.ready == 1 and made.owner.busy)
        threading.Timer(0.3, made.engines[S].gates["offline", 1].set).start()
        made.owner.close()
        assert made.ended() == {}


# --- faults in the background ---


@pytest.mark.parametrize("role", [S, D])
def test_a_fault_while_dealing_is_raised_by_the_next_call_and_ends_every_party(role: str) -> None:
    with trio() as made:
        made.owner.prepare(1)
        made.engines[role].faults["offline", 2] = SessionError("31415", public_detail="it failed")
        made.owner.prepare(5, wait=False)
        start = time.monotonic()
        made.ended()
        assert until(lambda: made.owner._indices.error is not None)
        assert time.monotonic() - start < STEP
        with pytest.raises(PeerError) as caught:
            made.owner.check()
        assert role in str(caught.value) and "31415" not in str(caught.value)
        for call in (made.owner.await_ready, lambda: made.owner.prepare(1), made.owner.report):
            with contextlib.suppress(SecureInferError):
                call()
                pytest.fail("the session goes on")
        assert set(made.errors) == {S, D}


def test_a_fault_of_the_data_owners_own_dealing_is_its_own() -> None:
    with trio() as made:
        made.engines[C].faults["offline", 1] = ValueError("31415")
        made.owner.prepare(3, wait=False)
        assert until(lambda: made.owner._indices.error is not None)
        with pytest.raises(SessionError, match="unexpected ValueError") as caught:
            made.owner.check()
        assert "31415" not in str(caught.value)


def test_a_dealer_that_goes_while_nothing_is_dealt_is_missed_by_the_model_owner_too() -> None:
    with trio() as made:
        made.owner.prepare(1)
        made.links[D][S].close()  # that link alone
        stop = time.monotonic() + STEP
        while S not in made.errors:
            assert time.monotonic() < stop
            time.sleep(0.01)
        assert isinstance(made.errors[S], PeerError) and made.errors[S].peer == D
        with pytest.raises(PeerError, match="dealer: is gone, model_owner says"):
            made.links[C][S].receive_any(1.0)


def test_a_dealer_that_stops_while_it_deals_is_named_within_the_deadline() -> None:
    with trio() as made:
        made.engines[D].hold("offline", 0)
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            made.owner.prepare(1)
        assert caught.value.peer == D and time.monotonic() - start < 2 * STEP
        assert made.errors[S].peer == D  # type: ignore[attr-defined]


def test_a_session_in_which_nobody_asks_ends_and_one_in_which_much_is_dealt_does_not() -> None:
    with trio(idle=0.6) as made:
        gate = made.engines[S].hold("offline", 0)
        made.owner.prepare(1, wait=False)
        time.sleep(1.2)
        assert not made.errors  # the twin: the model owner heard nothing from the data owner, and works
        gate.set()
        stop = time.monotonic() + 5
        while S not in made.errors:
            assert time.monotonic() < stop
            time.sleep(0.02)
        assert made.errors[S].peer == C and "deadlines.idle" in str(made.errors[S])  # type: ignore[attr-defined]


# --- once ---


@pytest.mark.parametrize(
    "indices", [[0, 0], [1], [0, 2], [0, 1, 0]], ids=["replay", "not the first", "a gap", "back"]
)
def test_an_index_is_dealt_once_and_in_order(indices: list[int]) -> None:
    with raw() as (made, _, dealer):
        for index in indices:
            dealer.send(Address("offline", index, 0, 0), b"")
        made.threads[1].join(STEP)
        assert isinstance(made.errors[D], WireError) and "begins nothing here" in str(made.errors[D])
        assert sorted(made.engines[S].held) == sorted(set(indices[:-1]))


@pytest.mark.parametrize("indices", [[0, 0], [1], [0, 2]], ids=["replay", "not the first", "a gap"])
def test_a_model_owner_takes_an_index_once_from_the_dealer_too(indices: list[int]) -> None:
    with raw() as (made, model_owner, _):
        link, at = made.links[D][S], made.engines[D]
        for index in indices:
            link.send(Address("offline", index, 0, 0), b"")
            at.prepare(index)
        with pytest.raises(PeerError, match="model_owner: ended the session: a frame was not what"):
            model_owner.receive_any(STEP)
        made.threads[0].join(STEP)
        assert isinstance(made.errors[S], WireError)


def online(model_owner: MemoryLink, index: int) -> None:
    model_owner.send(Address("online", index, 0, 0), b"")
    model_owner.send(Address("online", index, 1, 0), bytes(4))


ORDERS = [([0, 0], 0), ([1, 0], 0), ([2, 1], 1), ([5], 5)]


@pytest.mark.parametrize(("indices", "at"), ORDERS, ids=["replay", "back", "skipped", "never dealt"])
def test_an_inference_is_run_once_and_in_order(indices: list[int], at: int) -> None:
    with raw() as (made, model_owner, dealer):
        flood(made, dealer, 3)
        assert until(lambda: made.links[C][D]._into.queued >= 3 * HEADER_BYTES)
        for index in indices:
            online(model_owner, index)
        made.threads[0].join(STEP)
        assert isinstance(made.errors[S], CorrelationError) and f"inference {at}" in str(made.errors[S])
        assert made.engines[S].ran == indices[:-1]


def test_a_session_that_burnt_nothing_would_run_it_again() -> None:
    """Planted fault: the model owner's session forgets that it ran an index."""
    with raw() as (made, model_owner, dealer):
        session = made.sessions[S]
        inner = session._run

        def forgetful(index: int) -> None:
            session._next_online, session._ready = 0, {0, 1, 2}
            inner(index)

        session._run = forgetful  # type: ignore[method-assign]
        flood(made, dealer, 3)
        assert until(lambda: made.links[C][D]._into.queued >= 3 * HEADER_BYTES)
        for index in (0, 0):
            online(model_owner, index)
        assert until(lambda: made.engines[S].ran == [0, 0])


@pytest.mark.parametrize(
    ("address", "payload"),
    [
        (Address("offline", 0, 0, 0), b"x"),
        (Address("offline", 0, 0, 1), b""),
        (Address("offline", 0, 1, 0), b""),
        (Address("online", 0, 0, 0), b""),
    ],
)
def test_other_frames_begin_no_dealing(address: Address, payload: bytes) -> None:
    with raw() as (made, _, dealer):
        dealer.send(address, payload)
        made.threads[1].join(STEP)
        assert isinstance(made.errors[D], WireError)


@pytest.mark.parametrize("frame", [Address("offline", 0, 0, 0), Address("offline", 0, 0, 1)])
def test_offline_frames_between_the_owners_are_refused(frame: Address) -> None:
    with raw() as (made, model_owner, _):
        model_owner.send(frame, b"")
        made.threads[0].join(STEP)
        assert isinstance(made.errors[S], WireError)


def test_a_dealers_word_on_another_index_is_a_wire_error() -> None:
    with trio() as made:
        send = made.links[D][C].send

        def wrong(address: Address, payload: Any = b"") -> None:
            send(Address("offline", 7, 0, 1) if address.phase == "offline" else address, payload)

        made.links[D][C].send = wrong  # type: ignore[method-assign]
        with pytest.raises(
            WireError, match=r"expected a frame for Address\(phase='offline', inference=0, step=0, value=1\)"
        ):
            made.owner.prepare(1)


def test_an_inference_that_was_not_prepared_is_a_typed_error_at_the_data_owner() -> None:
    with trio() as made, pytest.raises(CorrelationError, match="call prepare first"):
        ask(made.owner)
