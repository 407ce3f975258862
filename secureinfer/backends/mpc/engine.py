"""The MPC engine: a compute party's and the dealer's side of one session (backends/base.Engine)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import CorrelationError, InputError, SessionError
from ...graph.int8 import quantized_nodes
from ...graph.ir import MODEL_OWNER, Graph, Visibility
from ...transport.base import Address, Clock, Link
from ..base import Engine
from . import generic, runtime
from .correlations import FixedProduct, MaskedWeight, SessionWeight
from .dealer import Dealer, draw, mask_of_weight
from .fast import attention, choices, curves, matrices, norms
from .kernels import StepCall, encode_weight, factored_weight, lookup
from .packing import pack, packed_bytes, unpack
from .party import Opening, Parts, Party, Request
from .randomness import Seed
from .seeds import agree
from .spool import Spool
from .values import Operand, Share

if TYPE_CHECKING:
    from ...plan.program import Program

__all__ = ["DealerEngine", "MpcEngine", "make_engine", "trace"]

_ = generic, attention, choices, curves, matrices, norms  # importing them binds the kernels to their rows


def make_engine(
    role: str,
    program: Program,
    *,
    me: str,
    compute_parties: Sequence[str],
    dealer: str,
    links: Mapping[str, Link],
    clock: Clock,
    session_id: bytes,
    spool_folder: Path | None = None,
    audit: Callable[[Opening], None] | None = None,
    cores: int | None = None,
) -> Engine:
    """The engine of one party of one MPC session. compute_parties: names in rank order; rank 0 is the model owner.

    cores: threads for what a party computes while the others wait.
    """
    if role == "dealer":
        return DealerEngine(program, compute_parties, links, session_id)
    if me not in compute_parties:
        raise SessionError(f"{me!r} is not among the compute parties {list(compute_parties)}")
    return MpcEngine(program, me, compute_parties, dealer, links, session_id, spool_folder, audit, cores)


def trace(
    program: Program, names: Sequence[str]
) -> tuple[list[Request], dict[MaskedWeight, tuple[int, ...]]]:
    """Run the program on shapes alone.

    Returns the correlations that one inference asks for, in order, and the shapes of the weights with a session mask.
    Every party and the dealer compute the same lists from the public program.
    """
    party = Party(rank=0, names=tuple(names), tracing=True, device=torch.device("meta"))
    runner = _Runner(program, party)
    inputs = {
        name: torch.empty(edge.shape, dtype=getattr(torch, edge.dtype), device="meta")
        for name in program.graph.inputs
        for edge in (program.graph.edge(name),)
    }
    with runtime.activate(party):
        runner.run(0, inputs)
    weights: dict[MaskedWeight, tuple[int, ...]] = {}
    for request in party.requests:
        if isinstance(request.kind, FixedProduct):
            weights.setdefault(request.kind.mask, program.graph.edge(request.kind.weight).shape)
    return party.requests, weights


class _Runner:
    """Runs the steps of a program for one party."""

    def __init__(self, program: Program, party: Party) -> None:
        self.program = program
        self.graph: Graph = program.graph
        self.party = party
        self.weights: dict[str, torch.Tensor] = {}  # at their owner only
        self.encoded: dict[tuple[str, bool], SessionWeight] = {}  # the same as ring elements
        self.times: dict[int, float] = {}
        self._last_use = self._uses()

    def _uses(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for step in self.program.plan.steps:
            for name in step.node.inputs:
                last[name] = step.index
        return last

    def run(self, inference: int, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        party, graph = self.party, self.graph
        env: dict[str, Share | torch.Tensor | None] = {}
        for name in graph.inputs:
            env[name] = inputs.get(name)
        result: dict[str, torch.Tensor] | None = None
        for step in self.program.plan.steps:
            started = time.perf_counter()
            party.at("online", inference, step.index)
            if step.node.op != "begin":
                operands = tuple(self._operand(name, env) for name in step.node.inputs)
                outputs = tuple(graph.edge(name) for name in step.node.outputs)
                call = StepCall(
                    party, step.node, operands, outputs, self.program.options, self.weights, self.encoded
                )
                values = lookup(step.kernel)(call)
                if step.node.op == "reveal":
                    result = self._revealed(values)
                else:
                    for name, value in zip(step.node.outputs, values, strict=True):
                        env[name] = value
                for name in step.node.inputs:
                    if self._last_use[name] == step.index:
                        env.pop(name, None)
            self.times[step.index] = time.perf_counter() - started
        return result

    def _revealed(self, values: Sequence[Share | torch.Tensor | None]) -> dict[str, torch.Tensor] | None:
        if any(self.graph.rank_of(name) == self.party.rank for name in self.graph.reveal_to):
            return {
                name: value
                for name, value in zip(self.graph.outputs, values, strict=True)
                if isinstance(value, torch.Tensor)
            }
        return None

    def _operand(self, name: str, env: Mapping[str, Share | torch.Tensor | None]) -> Operand:
        edge = self.graph.edge(name)
        party = self.party
        if edge.visibility is Visibility.SHARED:
            value = env[name]
            return Operand(edge, share=value if isinstance(value, Share) else None)
        if name in self.graph.constants:
            tensor = self.program.constants[name]
            return Operand(edge, plain=tensor.to("meta") if party.tracing else tensor)
        if edge.visibility is Visibility.PUBLIC:
            value = env[name]
            return Operand(edge, plain=value if isinstance(value, torch.Tensor) else None)
        rank = self.graph.rank_of(edge.owner or MODEL_OWNER)
        if name in self.graph.weights:
            if party.tracing:
                plain = torch.empty(edge.shape, dtype=getattr(torch, edge.dtype), device="meta")
                return Operand(edge, plain=plain, owner_rank=rank)
            return Operand(edge, plain=self.weights.get(name), owner_rank=rank)
        value = env.get(name)
        return Operand(edge, plain=value if isinstance(value, torch.Tensor) else None, owner_rank=rank)


class MpcEngine(Engine):
    """A compute party. spool_folder: where material waits, encrypted, instead of in memory."""

    def __init__(
        self,
        program: Program,
        me: str,
        names: Sequence[str],
        dealer: str,
        links: Mapping[str, Link],
        session_id: bytes,
        spool_folder: Path | None = None,
        audit: Callable[[Opening], None] | None = None,
        cores: int | None = None,
    ) -> None:
        self.program = program
        self._dealer = dealer
        self._links = links
        self._session_id = session_id
        self.party = Party(names.index(me), tuple(names), links, audit=audit, cores=cores)
        self._requests, self._masked_weights = trace(program, names)
        self._runner = _Runner(program, self.party)
        self._spool = None if spool_folder is None else Spool(spool_folder, session_id)
        self._seed: Seed | None = None
        self._deltas: dict[MaskedWeight, SessionWeight] = {}
        self._next = 0
        if self.party.rank == 0:
            if program.weights is None:
                raise SessionError(
                    "the model owner's program file has no private weights; give it the private .si file"
                )
            self._runner.weights = dict(program.weights)

    def setup(self) -> None:
        """Seeds with the dealer and with every peer (one frame each way), then the masked weights from rank 0."""
        digest = self.program.manifest_digest
        self._seed = agree(self.party, self._links[self._dealer], self._session_id, digest)
        self._open_weights()

    def _open_weights(self) -> None:
        """W - B for each weight, from rank 0 to the others: opened once, for a value that never changes (R1)."""
        party = self.party
        if self._seed is None:
            raise SessionError("setup has not agreed a seed")
        for i, (weight, shape) in enumerate(self._masked_weights.items()):
            address = Address("setup", 0, 0, i + 1)
            if party.rank == 0:
                delta = self._encoded(weight) - mask_of_weight(self._seed, weight, shape)
                for peer in party.communicator.peers():
                    self._links[party.names[peer]].send(address, pack(delta, weight.bits))
            else:
                size = packed_bytes(math.prod(shape), weight.bits)
                payload = self._links[party.names[0]].receive(address, size)
                self._deltas[weight] = SessionWeight(unpack(payload, shape, weight.bits))

    def _encoded(self, weight: MaskedWeight) -> torch.Tensor:
        edge = self.program.graph.edge(weight.name)
        node = quantized_nodes(self.program.graph).get(weight.name) if edge.dtype == "int8" else None
        if weight.factored and node is not None:
            return factored_weight(self._runner.weights, node, self.program.graph.edge(node.inputs[-1]))
        return encode_weight(edge, self._runner.weights, node, int(self.program.options["precision_bits"]))

    def prepare(self, index: int) -> None:
        if self._seed is None:
            raise SessionError("prepare was called before setup")
        if index < self._next:
            raise CorrelationError(f"inference {index} was already prepared; the next index is {self._next}")
        self._next = index + 1
        if self._spool is None:
            self.party.material[index] = {
                (r.step, r.record): (r.kind, self._dealt(index, r, self._seed)) for r in self._requests
            }
        else:
            writer = self._spool.begin(index)
            try:
                for r in self._requests:
                    writer.write(r.step, r.record, r.kind, self._dealt(index, r, self._seed))
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        self._seed.forget(index)

    @torch.inference_mode()
    def _dealt(self, index: int, request: Request, seed: Seed) -> Parts:
        """This party's shares of one record."""
        kind, rank = request.kind, self.party.rank
        parts = draw(kind, seed, rank, (index, request.step, request.record))
        if rank == 0:
            payload = self._links[self._dealer].receive(
                Address("offline", index, request.step, request.record + 1), kind.correction_bytes()
            )
            parts.update(kind.read_correction(payload))
        elif isinstance(kind, FixedProduct):
            # The share of op(x, W) of everyone but the owner does not depend on the input.
            parts["c"] = parts["c"] + kind.apply(parts["A"], self._deltas[kind.mask])
        return parts

    def material_bytes(self) -> int:
        return sum(
            math.prod(part.shape) * part.dtype.itemsize
            for request in self._requests
            for part in request.kind.parts()
        )

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        party, spool = self.party, self._spool
        if index not in (party.material if spool is None else spool):
            raise CorrelationError(
                f"inference {index} has no material; call prepare first, and use each index once"
            )
        for skipped in [i for i in list(party.material) if i < index]:
            party.burn(skipped)  # indices only go up (R3)
        if spool is not None:
            spool.burn_below(index)
        given = dict(inputs or {})
        for name in self.program.graph.inputs:
            edge = self.program.graph.edge(name)
            mine = edge.owner is not None and self.program.graph.rank_of(edge.owner) == party.rank
            if mine and name not in given:
                raise InputError(f"input {name!r} is missing; this party owns it")
        try:
            if spool is not None:
                party.material[index] = spool.take(index)
            with runtime.activate(party), torch.inference_mode():
                return self._runner.run(index, given)
        finally:
            party.burn(index)

    def step_times(self) -> dict[int, float]:
        return dict(self._runner.times)

    def close(self) -> None:
        if self._seed is not None:
            self._seed.erase()
        for seed in self.party.pair_seeds.values():
            seed.erase()
        self.party.material.clear()
        if self._spool is not None:
            self._spool.close()
        self._deltas.clear()
        self._runner.weights = {}
        self._runner.encoded = {}


class DealerEngine(Engine):
    """The dealer's side: it deals when asked and never runs."""

    def __init__(
        self, program: Program, names: Sequence[str], links: Mapping[str, Link], session_id: bytes
    ) -> None:
        if program.weights is not None:
            raise SessionError("the dealer must not hold private weights; give it the public .si file")
        requests, weights = trace(program, names)
        self._links = links
        self._dealer = Dealer(
            names, requests, weights, session_id=session_id, manifest_digest=program.manifest_digest
        )

    def setup(self) -> None:
        self._dealer.agree(self._links)

    def prepare(self, index: int) -> None:
        self._dealer.deal(index, self._links[self._dealer.names[0]])

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        raise SessionError("the dealer takes no part in an inference")

    def step_times(self) -> dict[int, float]:
        return {}

    def close(self) -> None:
        self._dealer.erase()
