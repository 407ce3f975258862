"""Polynomials as powers and one linear layer, for backends that have no kernel for them.

Powers are made by doubling, all those of one level in one product, so that a polynomial of degree n takes ceil(log2 n)
products one after the other. Their sum is a linear layer with public weights, which costs a cut and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from .draft import Draft, DraftNode, Value
from .ir import Edge, Graph, Node, Visibility
from .ranges import LEAST, power_of_two


def on_unit_ranges(d: Draft, n: DraftNode) -> Value | None:
    """A rule: the range becomes [-1, 1], by a factor that other rules move into the layer before."""
    if n.op != "polynomial" or n.attrs["radius"] == 1.0:
        return None
    x, radius = n.inputs[0], float(n.attrs["radius"])
    return d.emit(
        "polynomial", [d.emit("mul", [x, d.scalar(1.0 / radius, x.dtype)])], **{**n.attrs, "radius": 1.0}
    )


def expand_polynomials(
    graph: Graph, constants: Mapping[str, torch.Tensor]
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The same function without polynomials, and the constants with their coefficients."""
    edges, known, nodes = dict(graph.edges), dict(constants), list[Node]()
    for node in graph.nodes:
        if node.op == "polynomial":
            nodes.extend(_Expansion(node, edges, known).run())
        else:
            nodes.append(node)
    expanded = dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        edges=MappingProxyType(edges),
        constants=(*graph.constants, *(n for n in known if n not in constants)),
    )
    return expanded, known


def needed_powers(degrees: Sequence[int]) -> list[int]:
    """These powers, all above 0, and those that they are made of: k = h + (k - h), h the greatest power of two below k."""
    needed, open_ = {1}, [k for k in degrees if k > 1]
    while open_:
        k = open_.pop()
        if k not in needed:
            needed.add(k)
            h = _half(k)
            open_ += [h, k - h]
    return sorted(needed)


def _half(k: int) -> int:
    return 1 << (k - 1).bit_length() - 1


class _Expansion:
    """One node. Its values are columns: [elements, 1] for a power, [elements, n] for several."""

    def __init__(self, node: Node, edges: dict[str, Edge], constants: dict[str, torch.Tensor]) -> None:
        self._node, self._edges, self._constants = node, edges, constants
        self._output = edges[node.outputs[0]]
        self._nodes: list[Node] = []

    def run(self) -> list[Node]:
        scale = [c / self._node.attrs["radius"] ** i for i, c in enumerate(self._node.attrs["coefficients"])]
        used = [k for k, c in enumerate(scale) if k and c] or [1]
        n = self._output.numel
        x = self._emit(
            "reshape",
            self._node.inputs,
            (n, 1),
            {"shape": [n, 1]},
            bound=self._edges[self._node.inputs[0]].bound,
        )
        powers = self._powers(x, needed_powers(used))
        weight = self._constant("coefficients", [[scale[k] for k in used]] if len(scale) > 1 else [[0.0]])
        bias = self._constant("offset", scale[:1])
        total = self._emit(
            "linear",
            (self._columns([powers[k] for k in used]), weight, bias),
            (n, 1),
            {},
            bound=self._output.bound,
        )
        shape = list(self._output.shape)
        self._nodes.append(self._made("reshape", (total,), self._output.name, {"shape": shape}))
        return self._nodes

    def _powers(self, x: str, needed: Sequence[int]) -> dict[int, str]:
        powers, n = {1: x}, self._output.numel
        while rest := [k for k in needed if k not in powers]:
            h = _half(rest[0])
            level = [k for k in rest if k <= 2 * h]
            if level == [2 * h]:
                powers[2 * h] = self._emit("pow", (powers[h],), (n, 1), {"exponent": 2})
                continue
            left = self._columns([powers[k - h] for k in level])
            product = self._emit("mul", (left, powers[h]), (n, len(level)), {})
            for i, k in enumerate(level):
                cut = {"dim": 1, "start": i, "end": i + 1, "step": 1}
                powers[k] = self._emit("slice", (product,), (n, 1), cut) if len(level) > 1 else product
        return powers

    def _columns(self, names: Sequence[str]) -> str:
        if len(names) == 1:
            return names[0]
        return self._emit("cat", names, (self._output.numel, len(names)), {"dim": 1})

    def _emit(
        self,
        op: str,
        inputs: Sequence[str],
        shape: tuple[int, ...],
        attrs: dict[str, Any],
        bound: float | None = LEAST,
    ) -> str:
        """bound: of a power it is that of every edge whose values lie in [-1, 1] on examples."""
        name = self._free(op)
        if self._output.bound is None:
            bound = None
        self._edges[name] = dataclasses.replace(self._output, name=name, shape=shape, bound=bound)
        self._nodes.append(self._made(op, inputs, name, attrs))
        return name

    def _made(self, op: str, inputs: Sequence[str], output: str, attrs: dict[str, Any]) -> Node:
        node = self._node
        return Node(output, op, tuple(inputs), (output,), MappingProxyType(attrs), node.path, node.operator)

    def _constant(self, what: str, values: list[Any]) -> str:
        name, tensor = self._free(what), torch.tensor(values, dtype=torch.float32)
        self._constants[name] = tensor
        self._edges[name] = Edge(
            name, tuple(tensor.shape), "float32", Visibility.PUBLIC, scale=self._output.scale,
            bound=power_of_two(max(float(tensor.abs().max()), LEAST)),
        )  # fmt: skip
        return name

    def _free(self, what: str) -> str:
        """A name that no edge has."""
        i = 0
        while (name := f"{self._node.name}.{what}_{i}") in self._edges:
            i += 1
        return name
