"""What a program's graph says of packing: layouts and matrix plans, from its constants and attributes.

A file is somebody else's bytes: every index is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...graph.ir import Graph, Node
from .layouts import NOTHING, Indices, Layout
from .limits import MOST_CIPHERTEXTS, MOST_OFFSETS, MOST_ROTATIONS, MOST_SLOTS, MOST_SPREAD
from .matrices import MatrixPlan, make, steps_of, target_of
from .params import Parameters

OUTPUTS = "outputs"


class BadPlan(ValueError):
    """The graph is none that compiling gives; the text says where."""


def read_layout(constants: Mapping[str, torch.Tensor], name: str, size: int, slots: int) -> Layout:
    """Raises BadPlan unless every value of the layout is one of `size`."""
    where = _integers(constants, name, 2)
    if where.shape[1] != slots or not 0 < where.shape[0] <= MOST_CIPHERTEXTS:
        raise BadPlan(f"{name} is no layout of ciphertexts with {slots} slots")
    if where.min(initial=0) < NOTHING or where.max(initial=0) >= size:
        raise BadPlan(f"{name} names values that do not exist")
    return Layout(where, size)


def _integers(constants: Mapping[str, torch.Tensor], name: str, dimensions: int) -> Indices:
    if name not in constants:
        raise BadPlan(f"there is no {name}")
    tensor = constants[name]
    if tensor.dtype != torch.int64 or tensor.dim() != dimensions:
        raise BadPlan(f"{name} is no table of integers")
    return tensor.numpy()


def _samples(graph: Graph, names: Sequence[str], what: str) -> int:
    batch, sizes = batch_of(graph), [graph.edge(n).numel for n in names]
    if not sizes or any(size % batch or not size for size in sizes):
        raise BadPlan(f"its {what} are no batch of samples")
    return sum(size // batch for size in sizes)


def inputs_of(graph: Graph) -> int:
    """Values of all inputs of one sample."""
    return _samples(graph, graph.inputs, "inputs")


def batch_of(graph: Graph) -> int:
    """Samples of one inference."""
    for node in graph.nodes:
        if node.op == "linear":
            shape = graph.edge(node.outputs[0]).shape
            if len(shape) == 2 and shape[0] > 0:
                return shape[0]
    raise BadPlan("it has no matrix")


def rows_of(graph: Graph) -> int:
    """Values of all outputs of one sample."""
    return _samples(graph, graph.outputs, "outputs")


def attribute(node: Node, name: str, low: int, high: int) -> int:
    value = node.attrs.get(name)
    if type(value) is not int or not low <= value <= high:
        raise BadPlan(f"{name} of {node.name} is not an integer in {low}..{high}")
    return value


def read_matrix(
    node: Node, source: Layout, constants: Mapping[str, torch.Tensor], parameters: Parameters, rows: int
) -> MatrixPlan:
    """The plan of a linear node on the layout of its operand. Raises BadPlan."""
    slots = parameters.slots
    whole, sums = None, _sums(node)
    if sums:
        whole, source = source, read_layout(constants, f"{node.name}.pooled", source.size, slots)
    at, pairs = _integers(constants, f"{node.name}.rows", 1), _integers(constants, f"{node.name}.offsets", 2)
    if at.shape != (rows,) or not rows or at.min() < 0 or at.max() >= min(MOST_CIPHERTEXTS, rows) * slots:
        raise BadPlan(f"the rows of {node.name} stand nowhere")
    if pairs.shape[1] != 2 or len(pairs) > MOST_OFFSETS:
        raise BadPlan(f"the offsets of {node.name} are none")
    offsets: list[list[int]] = [[] for _ in range(source.ciphertexts)]
    for ciphertext, d in pairs.tolist():
        if not 0 <= ciphertext < len(offsets) or not -slots <= d <= slots:
            raise BadPlan(f"the offsets of {node.name} leave its ciphertexts")
        offsets[ciphertext].append(d)
    stride, blocks = attribute(node, "stride", 0, slots), attribute(node, "blocks", 1, slots)
    babies = attribute(node, "babies", 1, 2 * slots)
    outs = int(at.max()) // slots + 1
    fits = not blocks & (blocks - 1) and rows * blocks <= outs * slots
    plan = make(source, at, offsets, stride=stride, blocks=blocks) if fits else None
    if plan is None:
        raise BadPlan(f"the rows of {node.name} overlap")
    return MatrixPlan(source, plan.target, at, stride, blocks, plan.offsets, babies, sums, whole)


def _sums(node: Node) -> tuple[tuple[int, int], ...]:
    flat = node.attrs.get("sums", [])
    if (
        not isinstance(flat, list)
        or len(flat) % 2
        or not all(type(v) is int and 0 < v < 1 << 20 for v in flat)
        or sum(flat[::2]) > MOST_ROTATIONS
    ):
        raise BadPlan(f"the sums of {node.name} are none")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


class Packing:
    """All layouts and plans of a graph. inputs, outputs: layouts, None where each sample has a slot. plans: by node name."""

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        parameters: Parameters,
    ) -> None:
        self.parameters = parameters
        self.batch = batch_of(graph)
        self.values, self.rows = inputs_of(graph), rows_of(graph)
        self.plans: dict[str, MatrixPlan] = {}
        self.inputs: Layout | None = None
        self.outputs: Layout | None = None
        self.spread = options.get("layout") == "batch"
        if self.spread:
            self._check_spread(graph)
        else:
            self._read(graph, constants)
        self._check_told(graph, options)

    def _read(self, graph: Graph, constants: Mapping[str, torch.Tensor]) -> None:
        slots = self.parameters.slots
        self.inputs = read_layout(constants, "inputs.layout", self.values, slots)
        self.outputs = read_layout(constants, "outputs.layout", self.rows, slots)
        if (self.outputs.places() == NOTHING).any():
            raise BadPlan("an output stands in no slot")
        layouts: dict[str, Layout] = {"inputs": self.inputs}
        stages: dict[str, list[MatrixPlan]] = {}
        taken = offsets = 0
        for node in graph.nodes:
            if node.op != "linear":
                continue
            base, stage = node.attrs.get("base"), node.attrs.get("stage")
            if not isinstance(base, str) or not isinstance(stage, str) or base not in layouts:
                raise BadPlan(f"{node.name} has no stage or no base")
            rows = graph.edge(node.outputs[0]).shape[1]
            plan = read_matrix(node, layouts[base], constants, self.parameters, rows)
            taken += plan.target.ciphertexts * slots
            offsets += sum(map(len, plan.offsets))
            if taken > MOST_SLOTS or offsets > MOST_OFFSETS:
                raise BadPlan("its matrices take more slots or rotations than any that compiling gives")
            self.plans[node.name] = plan
            stages.setdefault(stage, []).append(plan)
            layouts[stage] = target_of(stages[stage])
        if OUTPUTS not in layouts or not np.array_equal(layouts[OUTPUTS].where, self.outputs.where):
            raise BadPlan("its outputs do not stand where they are read")

    def _check_spread(self, graph: Graph) -> None:
        if max(self.values, self.rows) > MOST_SPREAD:
            raise BadPlan(f"it has more than {MOST_SPREAD} values, each with a ciphertext")
        first = [n for n in graph.nodes if n.op == "linear" and n.attrs.get("base") == "inputs"]
        if not first or any(n.attrs.get("ciphertexts") != self.values for n in first):
            raise BadPlan("its inputs are not those that it counts")
        known = {"inputs"}
        for node in graph.nodes:
            if node.op == "linear" and node.attrs.get("base") not in known:
                raise BadPlan(f"{node.name} has no base")
            if node.op == "polynomial":
                known.add(node.name)

    def _check_told(self, graph: Graph, options: Mapping[str, Any]) -> None:
        """What the plan's costs are computed from is what is sent."""
        steps = self.steps()
        if len(steps) > MOST_ROTATIONS:
            raise BadPlan(f"it has {len(steps)} rotations; at most {MOST_ROTATIONS} are possible")
        if options.get("galois_keys") != len(steps) or options.get("returned") != self.groups * self.returned:
            raise BadPlan("it sends other keys or results than it says")
        for node in graph.nodes:
            plan = self.plans.get(node.name)
            if plan is None:
                continue
            found = {
                "ciphertexts": (plan.whole or plan.source).ciphertexts,
                "results": plan.target.ciphertexts,
                "rotations": plan.rotations,
                "products": plan.products,
            }
            wrong = [name for name, value in found.items() if node.attrs.get(name) != value]
            if wrong:
                raise BadPlan(f"{', '.join(wrong)} of {node.name} are not what its layout makes them")

    @property
    def groups(self) -> int:
        """Parts of the batch that are computed one after the other: a sample, or as many as there are slots."""
        return -(-self.batch // self.parameters.slots) if self.spread else self.batch

    @property
    def sent(self) -> int:
        """Ciphertexts of one group's inputs."""
        return self.inputs.ciphertexts if self.inputs is not None else self.values

    @property
    def returned(self) -> int:
        return self.outputs.ciphertexts if self.outputs is not None else self.rows

    def steps(self) -> list[int]:
        return sorted(steps_of(self.plans.values()))
