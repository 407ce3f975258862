"""Dealt material of real engines: for one place of one program, once, from memory and disk, dealt while another runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.backends.mpc.correlations import Square
from secureinfer.backends.mpc.engine import make_engine
from secureinfer.errors import CorrelationError, WireError
from secureinfer.plan.program import Program
from secureinfer.transport.base import Address
from secureinfer.transport.framing import FramedLink
from secureinfer.transport.memory import MemoryLink, memory_links

S, C, D = "model_owner", "data_owner", "dealer"
X = torch.linspace(-2.0, 2.0, 24).reshape(3, 8)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.Linear(6, 2)).eval()


@pytest.fixture(scope="module")
def program(model: torch.nn.Module) -> Program:
    return si.compile(model, (X,))


Engines = dict[str, Any]


@contextmanager
def engines(program: Program, folder: Path | None = None) -> Iterator[tuple[Engines, Any]]:
    """Set up, over links in memory. folder: where both owners keep material."""
    links = memory_links([S, C, D], bytes(16), deadline=3.0)
    made = {
        name: make_engine(
            name,
            program if name == S else program.public(),
            me=name,
            compute_parties=(S, C),
            dealer=D,
            links=links[name],
            clock=next(iter(links[name].values())).clock,
            session_id=bytes(16),
            spool_folder=None if name == D else folder,
        )
        for name in links
    }
    together({name: engine.setup for name, engine in made.items()})
    yield made, links
    for engine in made.values():
        engine.close()
    assert not made[S].party.material and not made[C].party.material


def together(calls: dict[str, Any]) -> dict[str, Any]:
    """Each party's call in a thread of its own; raises the first error of any."""
    results: dict[str, Any] = {}
    errors: list[BaseException] = []

    def call(name: str) -> None:
        try:
            results[name] = calls[name]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return results


def prepare(made: Engines, index: int) -> None:
    together({name: lambda e=engine: e.prepare(index) for name, engine in made.items()})


def infer(made: Engines, program: Program, index: int) -> torch.Tensor:
    given = {program.graph.inputs[0]: X}
    found = together({S: lambda: made[S].run(index, None), C: lambda: made[C].run(index, given)})
    return next(iter(found[C].values()))


def error_of(answer: torch.Tensor, model: torch.nn.Module) -> float:
    return float((answer - model(X)).abs().max().detach())


@pytest.mark.parametrize("disk", [False, True])
def test_material_is_dealt_while_an_earlier_index_runs(
    program: Program, model: torch.nn.Module, tmp_path: Path, disk: bool
) -> None:
    with engines(program, tmp_path if disk else None) as (made, _):
        prepare(made, 0)
        for index in range(6):
            ahead = threading.Thread(target=prepare, args=(made, index + 1))
            ahead.start()
            assert error_of(infer(made, program, index), model) < 1e-2
            ahead.join(30)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [S, C])
def test_what_an_inference_takes_is_known_beforehand(program: Program, rank: str) -> None:
    with engines(program) as (made, _):
        prepare(made, 0)
        held = [t for _, parts in made[rank].party.material[0].values() for t in parts.values()]
        assert sum(t.numel() * t.element_size() for t in held) == made[rank].material_bytes() > 0
        assert made[D].material_bytes() == 0


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("name", [S, C])
def test_an_index_serves_once_and_those_before_it_are_burnt(
    program: Program, tmp_path: Path, name: str, disk: bool
) -> None:
    with engines(program, tmp_path if disk else None) as (made, _):
        for index in range(3):
            prepare(made, index)
        infer(made, program, 1)
        given = {program.graph.inputs[0]: X} if name == C else None
        for index in (1, 0, 7):
            with pytest.raises(CorrelationError, match=f"inference {index} has no material"):
                made[name].run(index, given)
        for index in (2, 0):
            with pytest.raises(CorrelationError, match="already"):
                made[name].prepare(index)
        infer(made, program, 2)


def test_a_seed_gives_no_stream_of_an_index_again_even_to_an_engine_that_forgot_it(program: Program) -> None:
    """Planted fault: the engine's own count is set back. The seed still knows, until the index is burnt everywhere."""
    with engines(program) as (made, _):
        engine = made[C]
        engine._dealt(0, engine._requests[0], engine._seed)
        engine._next = 0
        with pytest.raises(CorrelationError, match="a mask belongs to one value"):
            engine.prepare(0)


def test_material_of_another_kind_or_shape_is_refused(program: Program) -> None:
    with engines(program) as (made, _):
        prepare(made, 0)
        party = made[C].party
        step, record = next(iter(party.material[0]))
        party.at("online", 0, step)
        party._record = record
        with pytest.raises(CorrelationError, match="dealt for another kind or shape"):
            party.take(Square((1, 2, 3)))
        party.at("online", 0, step)
        party._record = record
        with pytest.raises(CorrelationError, match="never dealt or was already used"):
            party.take(Square((1, 2, 3)))  # it went with the refusal


CHANGES = {
    "inference": lambda a: Address(a.phase, a.inference + 1, a.step, a.value),
    "step": lambda a: Address(a.phase, a.inference, a.step + 1, a.value),
    "record": lambda a: Address(a.phase, a.inference, a.step, a.value + 1),
    "phase": lambda a: Address("online", a.inference, a.step, a.value),
}


def readdressed(link: MemoryLink, what: str) -> None:
    """The dealer's first correction goes out for another place, of another size, or in another session."""
    send, begun = link.send, threading.Event()

    def changed(address: Address, payload: Any = b"") -> None:
        if begun.is_set():
            return send(address, payload)
        begun.set()
        if what == "size":
            return send(address, bytes(payload) + bytes(8))
        if what == "session":
            link._session_id = b"another session!"
        return send(CHANGES.get(what, lambda a: a)(address), payload)

    link.send = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("what", [*CHANGES, "size", "session"])
def test_a_correction_for_another_place_is_refused(program: Program, what: str) -> None:
    with engines(program) as (made, links):
        readdressed(links[D][S], what)
        with pytest.raises(WireError):
            prepare(made, 0)
        assert 0 not in made[S].party.material


def test_corrections_that_were_taken_for_another_place_would_spoil_the_answer(
    program: Program, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the model owner does not look at addresses, and the dealer's second inference comes twice."""
    receive = FramedLink.receive

    def blind(self: FramedLink, address: Address, size: int | None = None, **limit: Any) -> memoryview:
        if address.phase != "offline":
            return receive(self, address, size, **limit)
        return self.receive_any(3.0)[1]

    monkeypatch.setattr(FramedLink, "receive", blind)
    with engines(program) as (made, _):
        prepare(made, 0)
        together({S: lambda: made[S].prepare(1), D: lambda: made[D].prepare(2)})
        made[C].prepare(1)
        assert error_of(infer(made, program, 1), model) > 1.0
