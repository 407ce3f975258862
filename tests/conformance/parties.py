"""Engines of one session that live for many inferences, each party in a thread of its own, over in-memory links."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from secureinfer.backends.mpc.engine import make_engine
from secureinfer.backends.mpc.party import Opening
from secureinfer.plan.program import Program
from secureinfer.transport.memory import memory_links

NAMES = ("model_owner", "data_owner", "second_owner")


@dataclass(frozen=True)
class Frame:
    """One message: from whom, to whom, where it belongs, and what it holds."""

    sender: str
    receiver: str
    address: Any
    payload: bytes


class Parties:
    """audit: keep the openings that each compute party sees. record: keep every frame."""

    def __init__(
        self, program: Program, *, parties: int = 2, audit: bool = False, record: bool = False
    ) -> None:
        self.program = program
        self.names = NAMES[:parties]
        self.openings: dict[str, list[Opening]] = {name: [] for name in self.names}
        self.frames: list[Frame] = []
        session = os.urandom(16)
        self.links = memory_links([*self.names, "dealer"], session, deadline=30)
        if record:
            self._record()
        self._next = 0
        self._pool = ThreadPoolExecutor(parties + 1)
        torch.set_num_threads(1)
        self.engines = {
            name: make_engine(
                name,
                program if name == "model_owner" else program.public(),
                me=name,
                compute_parties=self.names,
                dealer="dealer",
                links=links,
                clock=next(iter(links.values())).clock,
                session_id=session,
                **({"audit": self.openings[name].append} if audit and name != "dealer" else {}),
            )
            for name, links in self.links.items()
        }
        self._all(lambda name: self.engines[name].setup())

    def _record(self) -> None:
        for sender, peers in self.links.items():
            for receiver, link in peers.items():

                def send(
                    address: Any, payload: Any, *, s: str = sender, r: str = receiver, to: Any = link.send
                ) -> None:
                    self.frames.append(Frame(s, r, address, bytes(payload)))
                    to(address, payload)

                link.send = send  # type: ignore[method-assign]

    def _all(self, call: Callable[[str], Any]) -> dict[str, Any]:
        futures = {name: self._pool.submit(self._one, call, name) for name in self.links}
        first: BaseException | None = None
        results = {}
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
        return results

    def _one(self, call: Callable[[str], Any], name: str) -> Any:
        try:
            return call(name)
        except BaseException:
            for link in self.links[name].values():
                link.close()
            raise

    def infer(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Prepare and run the next inference; the data owner's outputs in the order of the graph's."""
        graph, index = self.program.graph, self._next
        self._next += 1
        given: Mapping[str, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))

        def run(name: str) -> Any:
            engine = self.engines[name]
            engine.prepare(index)
            if name == "dealer":
                return None
            rank = self.names.index(name)
            return engine.run(
                index, {n: t for n, t in given.items() if graph.rank_of(graph.edge(n).owner or "") == rank}
            )

        answer = self._all(run)["data_owner"]
        return [answer[name] for name in graph.outputs] if answer else []

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._pool.shutdown()

    def __enter__(self) -> Parties:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
