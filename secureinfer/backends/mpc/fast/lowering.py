"""Graph → Graph: products keep their double scale in a window of their own, and are cut where it is cheapest.

A product edge becomes *raw*: scale s of both operands together, ring bits k from its bound. Raw edges flow through what is
linear (additions, reshapes) into kernels that cut and compare from one opening (ReLU and its kind); before anything else
a `rescale` node cuts them, and an exact one where the graph's output is revealed (R5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ....graph.ir import Edge, Graph, Node, Visibility
from .. import windows

PRODUCTS = ("linear", "matmul", "convolution", "embedding")
PASSES_ON = ("add", "sub", "neg", "reshape", "permute", "slice", "select", "cat", "flip", "expand")
CUTS = ("relu", "clamp", "abs")
"""Operators whose kernels take a raw operand."""

RAW = ".raw"


def lower(graph: Graph, options: Mapping[str, Any]) -> Graph:
    """The same function with raw edges and rescale nodes. options: precision_bits."""
    return _Lowering(graph, int(options["precision_bits"])).run()


class _Lowering:
    def __init__(self, graph: Graph, precision: int) -> None:
        self._graph = graph
        self._precision = precision
        self._edges = dict(graph.edges)
        self._users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self._users.setdefault(name, []).append(node)
        self._takes: dict[str, bool] = {}
        self._raw: set[str] = set()

    def run(self) -> Graph:
        nodes: list[Node] = []
        for node in self._graph.nodes:
            nodes.extend(self._lowered(node))
        self._widen(nodes)
        return replace(self._graph, nodes=tuple(nodes), edges=MappingProxyType(self._edges))

    def _lowered(self, node: Node) -> Iterable[Node]:
        name = node.outputs[0]
        scale = self._raw_scale(node)
        if scale is None:
            return self._cut_operands(node)
        edge = self._edges[name]
        raw = replace(edge, scale=scale, ring_bits=windows.width_of(edge.bound or 0.0, scale))
        final = name in self._graph.outputs
        if not final and self._takes_raw(name):
            self._edges[name] = raw
            self._raw.add(name)
            return [node]
        if final:  # what is revealed is reduced to the bits in use (R5)
            self._edges[name] = replace(edge, ring_bits=windows.width_of(edge.bound or 0.0, edge.scale))
        hidden = name + RAW
        self._edges[hidden] = replace(raw, name=hidden)
        self._raw.add(hidden)
        cut = Node(f"{node.name}{RAW}", "rescale", (hidden,), (name,), {"exact": final}, node.path)
        return [replace(node, outputs=(hidden,)), cut]

    def _cut_operands(self, node: Node) -> Iterable[Node]:
        """A node whose result is not raw: operands that are, and that its kernel does not take, are cut first."""
        if node.op in CUTS:
            return [node]
        out, inputs = [], []
        for name in node.inputs:
            if name in self._raw:
                cut = f"{name}.for.{node.name}"
                self._edges[cut] = replace(self._graph.edge(name), name=cut)
                out.append(Node(cut, "rescale", (name,), (cut,), {"exact": False}, node.path))
                name = cut
            inputs.append(name)
        return [*out, replace(node, inputs=tuple(inputs)) if out else node]

    def _raw_scale(self, node: Node) -> int | None:
        """Fraction bits of the node's raw result, or None if it has none."""
        edge = self._edges[node.outputs[0]]
        if (
            edge.visibility is not Visibility.SHARED
            or not edge.dtype.startswith("float")
            or edge.bound is None
        ):
            return None
        operands = [self._edges[e] for e in node.inputs]
        if node.op in PRODUCTS:
            scale = product_scale(node, operands)
        elif node.op in PASSES_ON and any(e.name in self._raw for e in operands):
            scale = max(e.scale for e in operands)
        else:
            return None
        return scale if windows.fits(edge.bound, scale) and scale >= self._precision else None

    def _takes_raw(self, name: str) -> bool:
        """Whether every user of an edge takes it raw."""
        if name not in self._takes:
            users = self._users.get(name, [])
            self._takes[name] = bool(users) and all(self._takes_operand(user, name) for user in users)
        return self._takes[name]

    def _takes_operand(self, user: Node, name: str) -> bool:
        output = user.outputs[0]
        if user.op in CUTS:
            return True
        if user.op not in PASSES_ON:
            return False
        edge, scale = self._graph.edge(output), 2 * self._precision + 8
        fits = edge.bound is not None and windows.fits(edge.bound, scale)
        return fits and (output in self._graph.outputs or self._takes_raw(output))

    def _widen(self, nodes: list[Node]) -> None:
        """A raw operand of a raw sum is computed in the sum's ring, where that is wider."""
        for node in reversed(nodes):
            out = self._edges[node.outputs[0]]
            if node.op not in PASSES_ON or out.name not in self._raw:
                continue
            for name in node.inputs:
                if name in self._raw and self._edges[name].ring_bits < out.ring_bits:
                    self._edges[name] = replace(self._edges[name], ring_bits=out.ring_bits)


def product_scale(node: Node, operands: list[Edge]) -> int:
    """Fraction bits of a product: those of its factors together. A quantised weight has those of its scale operand."""
    if node.op == "embedding":
        return operands[-1].scale if node.attrs.get("quantized") else operands[1].scale
    right = operands[-1].scale if node.attrs.get("quantized") else operands[1].scale
    return operands[0].scale + right
