"""The two engines of a CKKS session, each party in a thread of its own, over in-memory links; either may be hostile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from secureinfer.backends import make_engine
from secureinfer.backends.base import Engine
from secureinfer.plan.program import Program
from secureinfer.transport.base import Address
from secureinfer.transport.memory import MemoryLink, memory_links

OWNER, MODEL = "data_owner", "model_owner"
NAMES = (MODEL, OWNER)


@dataclass(frozen=True)
class Frame:
    sender: str
    address: Address
    payload: bytes


class Pair:
    """Engines and links by name, from `make_engine` as a worker makes them. frames: all that was sent, in order.

    tamper: given each frame before it leaves; what it returns leaves in its place.
    """

    def __init__(
        self,
        program: Program,
        *,
        public: Program | None = None,
        session_id: bytes | None = None,
        tamper: Callable[[Frame], bytes] | None = None,
        deadline: float = 20.0,
        set_up: bool = True,
    ) -> None:
        self.program = program
        self.frames: list[Frame] = []
        self.tamper = tamper
        session = session_id or os.urandom(16)
        made = memory_links(NAMES, session, deadline=deadline)
        self.links: dict[str, MemoryLink] = {OWNER: made[OWNER][MODEL], MODEL: made[MODEL][OWNER]}
        for name, link in self.links.items():
            self._record(name, link)
        self._next = 0
        self._pool = ThreadPoolExecutor(2)
        self.engines: dict[str, Engine] = {
            name: make_engine(
                name,
                program if name == MODEL else (public or program.public()),
                me=name,
                compute_parties=NAMES,
                dealer="",
                links=made[name],
                clock=self.links[name].clock,
                session_id=session,
                threads=1,
            )
            for name in NAMES
        }
        if set_up:
            self.setup()

    def _record(self, name: str, link: MemoryLink) -> None:
        send = link.send

        def record(address: Address, payload: Any) -> None:
            frame = Frame(name, address, bytes(payload))
            if self.tamper is not None:
                frame = Frame(name, address, self.tamper(frame))
            self.frames.append(frame)
            send(address, frame.payload)

        link.send = record  # type: ignore[method-assign]

    def both(self, call: Callable[[str], Any]) -> dict[str, Any]:
        """What the call gives for each party; an error in place of a result. A party that fails tells the other, as its
        worker would."""
        found = self._pool.map(lambda name: self._one(call, name), NAMES)
        return dict(zip(NAMES, found, strict=True))

    def _one(self, call: Callable[[str], Any], name: str) -> Any:
        try:
            return call(name)
        except Exception as error:
            self.links[name].close()
            return error

    def setup(self) -> None:
        raised(self.both(lambda name: self.engines[name].setup()))

    def run(self, *inputs: torch.Tensor) -> dict[str, Any]:
        """The next inference: of each party the outputs or the error."""
        index, graph = self._next, self.program.graph
        self._next += 1
        given = dict(zip(graph.inputs, inputs, strict=True))
        return self.both(lambda name: self.engines[name].run(index, given if name == OWNER else None))

    def infer(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        answer = raised(self.run(*inputs))[OWNER]
        return [answer[name] for name in self.program.graph.outputs]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        for link in self.links.values():
            link.close()
        self._pool.shutdown()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def raised(found: dict[str, Any]) -> dict[str, Any]:
    """The results, unless one of them is an error: then that is raised, the first cause before its consequence."""
    errors = [e for e in found.values() if isinstance(e, Exception)]
    if errors:
        raise min(errors, key=lambda e: type(e).__name__ == "PeerError")
    return found


class Spied:
    """What stands in for an object of SEAL and counts the calls of its methods."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._inner, name)
