"""How wide each edge is: the greatest value on example inputs, with head-room, as a power of two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from ..errors import CompileError
from .int8 import SCALE_BITS, quantized_nodes
from .ir import Edge, Graph, Visibility
from .ops import run_reference
from .reach import greatest_values

HEAD_ROOM = 16
LEAST = 16.0
"""No float edge claims less: a bound says nothing then about weights or data that happen to be small."""


def power_of_two(x: float) -> float:
    """The least power of two that is not below x (rule R6: what is public about a width is this)."""
    return 0.0 if x <= 0 else 2.0 ** math.ceil(math.log2(x))


def quarter_octave(x: float) -> float:
    """The least quarter power of two that is not below x > 0: for a width that must be known more closely (rule R6)."""
    return float(2.0 ** (math.ceil(4 * math.log2(x)) / 4))


def with_ranges(
    graph: Graph, tensors: Mapping[str, torch.Tensor], batches: Sequence[Mapping[str, torch.Tensor]]
) -> Graph:
    """The graph with a bound on every edge that computes with finite values: where it is known, the greatest that any
    accepted input can reach (reach.py), and else what examples give, with head-room.

    batches: input edge -> tensor, of the compiled shapes. Raises CompileError where a shape differs or where
    a shared edge is not finite on one of them.
    """
    greatest: dict[str, float] = {}

    def observe(name: str, t: torch.Tensor) -> None:
        if t.dtype == torch.bool or t.numel() == 0:
            return
        greatest[name] = max(greatest.get(name, 0.0), _greatest(t))

    for batch in batches:
        for name in graph.inputs:
            if name not in batch or tuple(batch[name].shape) != graph.edge(name).shape:
                came = tuple(batch[name].shape) if name in batch else "nothing"
                raise CompileError(
                    f"calibration gives {came} for {name!r}; the shape is {graph.edge(name).shape}"
                )
        try:
            run_reference(graph, tensors, batch, observe=observe)
        except (IndexError, RuntimeError) as error:
            raise CompileError(f"the model does not run on example or calibration inputs: {error}") from error
    wild = sorted(n for n, g in greatest.items() if not math.isfinite(g) and _shared(graph, n))
    if wild:
        paths = {o: n.path for n in graph.nodes for o in n.outputs}
        where = ", ".join(f"{n} ({paths[n]})" if paths.get(n) else n for n in wild[:5])
        raise CompileError(f"values are not finite on example or calibration inputs at {where}")
    fixed = {*graph.weights, *graph.constants}
    edges = {name: _bounded(edge, greatest.get(name), name in fixed) for name, edge in graph.edges.items()}
    for weight, node in quantized_nodes(graph).items():  # both follow from what is public anyway
        edges[weight] = dataclasses.replace(edges[weight], bound=128.0)
        scale = edges[node.inputs[-1]]
        edges[scale.name] = dataclasses.replace(scale, bound=2.0 ** (SCALE_BITS - scale.scale))
    for name, rows in _rows_behind(graph).items():
        edges[name] = dataclasses.replace(edges[name], bound=power_of_two(max(rows - 1, 1)))
    for name, value in greatest_values(graph, tensors, edges).items():
        edge = edges[name]
        if edge.dtype != "bool":
            least = LEAST if edge.dtype.startswith("float") else 1.0
            edges[name] = dataclasses.replace(edge, bound=power_of_two(max(value, least)))
    return dataclasses.replace(graph, edges=MappingProxyType(edges))


_MOVES = ("reshape", "permute", "expand", "slice", "select", "cat", "flip")


def _rows_behind(graph: Graph) -> dict[str, int]:
    """Edges that only select rows of tables -> rows of the largest: any row may come, whatever the examples picked."""
    rows: dict[str, int] = {}
    for node in reversed(graph.nodes):
        if node.op == "embedding":
            ids, table = node.inputs[:2]
            rows[ids] = max(rows.get(ids, 0), graph.edge(table).shape[0])
        elif node.op in _MOVES and node.outputs[0] in rows:
            for name in node.inputs:
                rows[name] = max(rows.get(name, 0), rows[node.outputs[0]])
    return {name: n for name, n in rows.items() if not graph.edge(name).dtype.startswith("float")}


def _greatest(t: torch.Tensor) -> float:
    low, high = torch.aminmax(t)
    value = max(abs(float(low)), abs(float(high)))
    return math.inf if math.isnan(value) else value


def _shared(graph: Graph, name: str) -> bool:
    return graph.edge(name).visibility is Visibility.SHARED or name in graph.inputs


def _bounded(edge: Edge, greatest: float | None, fixed: bool) -> Edge:
    if edge.dtype == "bool":
        return dataclasses.replace(edge, bound=1.0)
    if greatest is None:  # no element
        return dataclasses.replace(edge, bound=LEAST)
    if not math.isfinite(greatest):
        return edge
    wanted = max(greatest * (1 if fixed else HEAD_ROOM), LEAST)
    return dataclasses.replace(edge, bound=power_of_two(wanted))
