"""Runs one kernel, or any graph, between real engines in threads: n compute parties and a dealer over in-memory links."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from secureinfer.backends.mpc.engine import make_engine
from secureinfer.backends.mpc.fast.catalog import CATALOG
from secureinfer.backends.mpc.party import Opening
from secureinfer.graph.int8 import scale_bits
from secureinfer.graph.ir import MODEL_OWNER, Edge, Graph, Node, Visibility
from secureinfer.plan.spec import Cost, Step, step_context
from secureinfer.transport.base import Address
from secureinfer.transport.memory import memory_links

NAMES = ("model_owner", "data_owner", "second_owner", "third_owner")


@dataclass
class Operand:
    """An operand of the kernel under test. kind: shared, public, weight or data. scale, ring_bits: of a raw one."""

    value: torch.Tensor
    kind: str = "shared"
    bound: float | None = None
    scale: int | None = None
    ring_bits: int = 64


@dataclass
class MiniPlan:
    steps: tuple[Step, ...]


@dataclass
class MiniProgram:
    """What an engine needs of a Program."""

    graph: Graph
    plan: MiniPlan
    weights: dict[str, torch.Tensor] | None
    constants: dict[str, torch.Tensor]
    options: dict[str, Any]
    manifest_digest: str = "00" * 32


@dataclass
class Measured:
    """What a run gave and cost."""

    outputs: dict[str, torch.Tensor]
    rounds: int = 0
    bytes: int = 0
    dealt_bytes: int = 0
    setup_bytes: int = 0
    openings: list[list[Opening]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def dtype_name(t: torch.Tensor) -> str:
    return "float32" if t.dtype.is_floating_point else str(t.dtype).removeprefix("torch.")


def one_step(
    op: str,
    operands: Sequence[Operand],
    attrs: Mapping[str, Any],
    output_shape: Sequence[int],
    *,
    kernel: str | None = None,
    output_dtype: str = "float32",
    output_bound: float | None = None,
    output_scale: int | None = None,
    output_ring_bits: int = 64,
    parties: int = 2,
    precision: int = 16,
    private: bool = False,
) -> tuple[MiniProgram, dict[str, torch.Tensor], Step]:
    """A program of one kernel step. Shared operands come in as data-owner inputs and are shared by an `add` of zero."""
    edges: dict[str, Edge] = {}
    nodes: list[tuple[Node, str]] = []
    inputs, weights, constants, names = {}, {}, {}, []
    for zero, dtype, scale in (("zero_float32", "float32", precision), ("zero_int", "int64", 0)):
        constants[zero] = torch.zeros((), dtype=getattr(torch, dtype))
        edges[zero] = Edge(zero, (), dtype, Visibility.PUBLIC, None, scale=scale)
    for i, operand in enumerate(operands):
        if any(operand is earlier for earlier in operands[:i]):  # one edge, twice
            names.append(names[next(j for j, o in enumerate(operands) if o is operand)])
            continue
        dtype = dtype_name(operand.value)
        scale = precision if dtype == "float32" else 0
        scale = scale if operand.scale is None else operand.scale
        name, shape = f"x{i}", tuple(operand.value.shape)
        bound = operand.bound
        if operand.kind == "public":
            constants[name] = operand.value
            edges[name] = Edge(name, shape, dtype, Visibility.PUBLIC, None, scale=scale, bound=bound)
        elif operand.kind == "weight":
            weights[name] = operand.value
            edges[name] = Edge(name, shape, dtype, Visibility.PRIVATE, MODEL_OWNER, scale=scale, bound=bound)
        else:
            source = name if operand.kind == "data" else f"{name}_plain"
            inputs[source] = operand.value
            edges[source] = Edge(
                source, shape, dtype, Visibility.PRIVATE, "data_owner", scale=scale, bound=bound
            )
            if operand.kind == "shared":
                edges[name] = Edge(
                    name, shape, dtype, Visibility.SHARED, None, operand.ring_bits, scale, bound
                )
                nodes.append(
                    (
                        Node(
                            f"share_{name}", "add", (source, "zero_float32" if scale else "zero_int"), (name,)
                        ),
                        "linear.add",
                    )
                )
        names.append(name)
    out_scale = precision if output_dtype == "float32" else 0
    out_scale = out_scale if output_scale is None else output_scale
    visibility, owner = (Visibility.PRIVATE, "data_owner") if private else (Visibility.SHARED, None)
    edges["y"] = Edge(
        "y", tuple(output_shape), output_dtype, visibility, owner, output_ring_bits, out_scale, output_bound
    )
    node = Node("y", op, tuple(names), ("y",), dict(attrs))
    if attrs.get("quantized"):
        scales = names[-1]
        edges[scales] = dataclasses.replace(
            edges[scales], scale=scale_bits({**weights, **constants, **inputs}[scales]) or 0
        )
    options = {"precision_bits": precision}
    graph = Graph(
        nodes=tuple(n for n, _ in nodes) + (node,),
        edges=edges,
        inputs=tuple(inputs),
        weights=tuple(weights),
        constants=tuple(constants),
        outputs=("y",),
    )
    begin, reveal = (
        Node("begin", "begin", (), ()),
        Node("reveal", "reveal", ("y",), (), {"ranks": [1], "owners": [1 if private else None]}),
    )
    context = step_context(graph, node, parties, options)
    spec = (
        CATALOG.specs[kernel] if kernel else next(s for s in CATALOG.for_op(op) if s.accepts(context) is None)
    )
    if (reason := spec.accepts(context)) is not None:
        raise ValueError(f"{spec.name} refuses this step: {reason}")
    steps = [Step(0, begin, "begin", Cost())]
    for n, k in nodes:
        steps.append(Step(len(steps), n, k, Cost()))
    tested = Step(len(steps), node, spec.name, spec.cost(context))
    steps.append(tested)
    steps.append(Step(len(steps), reveal, "reveal", Cost()))
    program = MiniProgram(graph, MiniPlan(tuple(steps)), weights, constants, options)
    return program, inputs, tested


def run(
    program: Any,
    inputs: Mapping[str, torch.Tensor],
    *,
    parties: int = 2,
    step: int | None = None,
    audit: bool = False,
    inference: int = 0,
    links: Any = None,
    deadline: float = 60.0,
) -> Measured:
    """Run one inference. step: count the bytes of this plan step alone; rounds are always those of the whole run.

    links: of all parties and the dealer, where a test has something on them; else new ones.
    """
    names = NAMES[:parties]
    session = os.urandom(16)
    links = links or memory_links([*names, "dealer"], session)
    clocks = {name: next(iter(links[name].values())).clock for name in links}
    openings: list[list[Opening]] = [[] for _ in names]
    public = MiniProgram(
        program.graph, program.plan, None, program.constants, program.options, program.manifest_digest
    )
    results: dict[str, Any] = {}
    errors: list[BaseException] = []
    engines: dict[str, Any] = {}

    def party(name: str) -> None:
        try:
            engine = make_engine(
                "dealer" if name == "dealer" else name,
                program if name == names[0] else public,  # type: ignore[arg-type]
                me=name,
                compute_parties=names,
                dealer="dealer",
                links=links[name],
                clock=clocks[name],
                session_id=session,
                **({"audit": openings[names.index(name)].append} if audit and name != "dealer" else {}),
            )
            engines[name] = engine
            engine.setup()
            engine.prepare(inference)
            if name != "dealer":
                rank, edge = names.index(name), program.graph.edge
                given = {n: t for n, t in inputs.items() if program.graph.rank_of(edge(n).owner) == rank}
                results[name] = engine.run(inference, given)
        except BaseException as e:
            errors.append(e)
            for link in links[name].values():
                link.close()

    torch.set_num_threads(1)
    threads = [threading.Thread(target=party, args=(n,), daemon=True) for n in links]
    for t in threads:
        t.start()
    for t in threads:
        t.join(deadline)
    if errors:
        raise errors[0]
    if any(t.is_alive() for t in threads):
        raise TimeoutError("the parties did not end")
    measured = Measured(results["data_owner"] or {}, openings=openings, results=results)
    for _name, peers in links.items():
        for _peer, link in peers.items():
            for (phase, _, at), counter in link.counters().items():
                if phase == "setup":
                    measured.setup_bytes += counter.bytes_sent
                elif phase == "offline" and (step is None or at == step):
                    measured.dealt_bytes += counter.bytes_sent
                elif phase == "online" and (step is None or at == step):
                    measured.bytes += counter.bytes_sent
    measured.rounds = max(clocks[n].rounds("online", inference) for n in names)
    for engine in engines.values():
        engine.close()
    return measured


def exact_grid(x: torch.Tensor, precision: int = 16) -> torch.Tensor:
    """x rounded to the fixed-point grid, so that encoding it is exact."""
    return torch.round(x.double() * 2**precision) / 2**precision


__all__ = ["Address", "Measured", "MiniProgram", "Operand", "exact_grid", "one_step", "run"]
