"""What a program's graph says of packing: layouts and matrix plans, from its constants and attributes.

A file is somebody else's bytes: every index is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...graph.ir import Graph, Node
from .layouts import NOTHING, Layout
from .matrices import MatrixPlan, make, only_rows
from .params import Parameters

MOST_CIPHERTEXTS = 1 << 14
OUTPUTS = "outputs"


class BadPlan(ValueError):
    """The graph is none that compiling gives; the text says where."""


def read_layout(constants: Mapping[str, torch.Tensor], name: str, size: int, slots: int) -> Layout:
    """Raises BadPlan unless every value of the layout is one of `size`."""
    if name not in constants:
        raise BadPlan(f"there is no {name}")
    where = constants[name].numpy()
    if where.ndim != 2 or where.shape[1] != slots or not 0 < where.shape[0] <= MOST_CIPHERTEXTS:
        raise BadPlan(f"{name} is no layout of ciphertexts with {slots} slots")
    if where.min(initial=0) < NOTHING or where.max(initial=0) >= size:
        raise BadPlan(f"{name} names values that do not exist")
    return Layout(where, size)


def inputs_of(graph: Graph) -> int:
    """Values of all inputs of one sample."""
    first = graph.edge(graph.inputs[0])
    batch = batch_of(graph)
    if any(graph.edge(n).numel % batch for n in graph.inputs) or first.numel == 0:
        raise BadPlan("its inputs are no batch of samples")
    return sum(graph.edge(n).numel // batch for n in graph.inputs)


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
    return sum(graph.edge(n).numel for n in graph.outputs) // batch_of(graph)


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
    try:
        at, pairs = constants[f"{node.name}.rows"].numpy(), constants[f"{node.name}.offsets"].numpy()
    except KeyError as error:
        raise BadPlan(f"there is no {error.args[0]}") from None
    if at.shape != (rows,) or at.min(initial=0) < 0 or at.max(initial=0) >= MOST_CIPHERTEXTS * slots:
        raise BadPlan(f"the rows of {node.name} stand nowhere")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise BadPlan(f"the offsets of {node.name} are none")
    offsets: list[list[int]] = [[] for _ in range(source.ciphertexts)]
    for ciphertext, d in pairs.tolist():
        if not 0 <= ciphertext < len(offsets) or not -slots <= d <= slots:
            raise BadPlan(f"the offsets of {node.name} leave its ciphertexts")
        offsets[ciphertext].append(d)
    stride, blocks = attribute(node, "stride", 0, slots), attribute(node, "blocks", 1, slots)
    babies = attribute(node, "babies", 1, 2 * slots)
    plan = make(source, at, offsets, stride=stride, blocks=blocks)
    if plan is None or blocks & (blocks - 1):
        raise BadPlan(f"the rows of {node.name} overlap")
    return MatrixPlan(source, plan.target, at, stride, blocks, plan.offsets, babies, sums, whole)


def _sums(node: Node) -> tuple[tuple[int, int], ...]:
    flat = node.attrs.get("sums", [])
    if (
        not isinstance(flat, list)
        or len(flat) % 2
        or not all(type(v) is int and 0 < v < 1 << 20 for v in flat)
    ):
        raise BadPlan(f"the sums of {node.name} are none")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def target_of(plans: list[MatrixPlan]) -> Layout:
    return plans[0].target if len(plans) == 1 else only_rows(plans[0])


def rotations_of(plans: list[MatrixPlan]) -> set[int]:
    return set().union(*(p.steps() for p in plans)) if plans else set()


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
            return
        slots = parameters.slots
        self.inputs = read_layout(constants, "inputs.layout", self.values, slots)
        self.outputs = read_layout(constants, "outputs.layout", self.rows, slots)
        if (self.outputs.places() == NOTHING).any():
            raise BadPlan("an output stands in no slot")
        layouts: dict[str, Layout] = {"inputs": self.inputs}
        stages: dict[str, list[MatrixPlan]] = {}
        for node in graph.nodes:
            if node.op != "linear":
                continue
            base, stage = node.attrs.get("base"), node.attrs.get("stage")
            if not isinstance(base, str) or not isinstance(stage, str) or base not in layouts:
                raise BadPlan(f"{node.name} has no stage or no base")
            rows = graph.edge(node.outputs[0]).shape[1]
            plan = read_matrix(node, layouts[base], constants, parameters, rows)
            self.plans[node.name] = plan
            stages.setdefault(stage, []).append(plan)
            layouts[stage] = target_of(stages[stage])
        if not np.array_equal(layouts[OUTPUTS].where, self.outputs.where):
            raise BadPlan("its outputs do not stand where they are read")

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
        return sorted(rotations_of(list(self.plans.values())))
