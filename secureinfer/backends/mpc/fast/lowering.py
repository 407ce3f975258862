"""Graph → Graph: products keep their double scale in a window of their own, and are cut where it is cheapest.

A product edge becomes *raw*: scale s of both operands together, ring bits k from its bound. Raw edges flow through what is
linear (additions, reshapes) into kernels that cut and compare from one opening (ReLU and its kind), or only compare
(argmax); before anything else a `rescale` node cuts them. The cut is exact where what follows up to an output of the graph
computes exactly: else answers to equal inputs would show how it was rounded (R5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ....graph.ir import Edge, Graph, Node, Visibility
from .. import attention, curves, norms, windows
from .indices import argmax_bits, argmax_fits, index_bits

PRODUCTS = ("linear", "matmul", "convolution", "embedding")
PASSES_ON = ("add", "sub", "neg", "reshape", "permute", "slice", "select", "cat", "flip", "expand")
CUTS = ("relu", "clamp", "abs")
"""Operators whose kernels take a raw operand and cut it."""

CURVES = ("gelu", "silu", "tanh", "sigmoid", "erf")
"""Operators whose kernels take a raw operand that curves.refusal accepts."""

WHOLE: Mapping[str, int] = MappingProxyType({"layer_norm": 1, "attention": 2})
"""Operators whose kernels take raw operands in the whole ring, and how many of their first operands."""


def refusal(graph: Graph, node: Node, operands: list[Edge]) -> str | None:
    """Why the kernel of an operator in WHOLE cannot run on these operands, or None."""
    output = graph.edge(node.outputs[0])
    if node.op == "attention":
        plan: object = attention.attention(node, operands, output, 1 + max(1, len(graph.owners())))
    else:
        plan = norms.norm(node, operands, output)
    return plan if isinstance(plan, str) else None


EXACT = frozenset((
    *PASSES_ON, *CUTS, "rescale", "amax", "argmax", "max_pool2d", "sign", "where", "pad", "index_select", "sum", "cumsum",
    "cast", "any", "lt", "le", "gt", "ge", "eq", "ne", "logical_not", "logical_and", "logical_or",
))  # fmt: skip
"""Operators that compute exactly: how their operand was rounded shows in their result."""

RAW = ".raw"


def lower(graph: Graph, options: Mapping[str, Any]) -> Graph:
    """The same function with raw edges and rescale nodes. options: precision_bits, and exact_cuts for exact cuts alone."""
    return _Lowering(fused(graph), options).run()


def can_be_exact(graph: Graph) -> bool:
    """Whether every step on shared values computes exactly or is a product, which an exact cut may follow."""
    shared = (n for n in graph.nodes if graph.edge(n.outputs[0]).visibility is Visibility.SHARED)
    return all(n.op in EXACT or n.op in PRODUCTS for n in shared)


def fused(graph: Graph) -> Graph:
    """The graph with softmax(q k) v as one step, wherever nothing else sees the scores and the kernel fits."""
    users: dict[str, int] = {}
    for name in (*graph.outputs, *(e for n in graph.nodes for e in n.inputs)):
        users[name] = users.get(name, 0) + 1
    made = {n.outputs[0]: n for n in graph.nodes}
    gone: set[str] = set()
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        parts = _attention(node, made, graph, users)
        if parts is not None:
            nodes[node.outputs[0]], inner = parts
            gone |= inner
    if not gone:
        return graph
    kept = tuple(nodes.get(n.outputs[0], n) for n in graph.nodes if n.outputs[0] not in gone)
    edges = MappingProxyType({name: edge for name, edge in graph.edges.items() if name not in gone})
    return replace(graph, nodes=kept, edges=edges)


def _attention(
    node: Node, made: Mapping[str, Node], graph: Graph, users: Mapping[str, int]
) -> tuple[Node, set[str]] | None:
    """The step that a product of probabilities and values is the end of, and the edges inside of it."""
    weights = made.get(node.inputs[0]) if node.op == "matmul" else None
    if weights is None or weights.op not in ("softmax", "masked_softmax"):
        return None
    scores = made.get(weights.inputs[0])
    if scores is None or scores.op != "matmul":
        return None
    inner = {weights.outputs[0], scores.outputs[0]}
    edge = graph.edge(scores.outputs[0])
    last = weights.attrs["dim"] in (-1, len(edge.shape) - 1)
    shared = all(graph.edge(e).visibility is Visibility.SHARED for e in (*scores.inputs, node.inputs[1]))
    if not last or not shared or edge.bound is None or any(users[e] != 1 for e in inner):
        return None
    operands = (*scores.inputs, node.inputs[1], *weights.inputs[1:])
    whole = replace(node, op="attention", inputs=operands, attrs={"scores": edge.bound})
    if refusal(graph, whole, [graph.edge(e) for e in operands]) is not None:
        return None
    return whole, inner


class _Lowering:
    def __init__(self, graph: Graph, options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._precision = int(options["precision_bits"])
        self._all_exact = bool(options.get("exact_cuts", False))
        self._edges = dict(graph.edges)
        self._users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self._users.setdefault(name, []).append(node)
        self._takes: dict[tuple[str, int], bool] = {}
        self._exposed = exposed(graph, options)
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
        taken = not final and self._takes_raw(name, scale)
        if taken and node.op == "embedding" and self._is_widened(name):
            # One-hot rows are a model's longest message: a table's product stays in a ring as small as its values, and is
            # extended from there into the whole one, with all its fraction bits.
            self._edges[name] = replace(raw, ring_bits=64)
            self._raw.add(name)
            return self._rescaled(node, raw, exact=False)
        if taken:
            self._edges[name] = raw
            self._raw.add(name)
            return [node]
        if final:  # what is revealed is reduced to the bits in use (R5)
            self._edges[name] = replace(edge, ring_bits=windows.width_of(edge.bound or 0.0, edge.scale))
        return self._rescaled(node, raw, exact=name in self._exposed)

    def _rescaled(self, node: Node, raw: Edge, *, exact: bool) -> Iterable[Node]:
        """The node with its raw result, and the step behind it that gives its output the scale and ring of that edge."""
        name, hidden = raw.name, raw.name + RAW
        self._edges[hidden] = replace(raw, name=hidden)
        self._raw.add(hidden)
        cut = Node(f"{node.name}{RAW}", "rescale", (hidden,), (name,), {"exact": exact}, node.path)
        return [replace(node, outputs=(hidden,)), cut]

    def _cut_operands(self, node: Node) -> Iterable[Node]:
        """A node whose result is not raw: operands that are, and that its kernel does not take, are cut first."""
        if node.op in CUTS:
            return [node]
        takes = node.inputs[: WHOLE.get(node.op, 1)]
        left = [e for e in takes if e in self._raw and self._takes_itself(node, e, self._edges[e].scale)]
        exact = self._all_exact or (node.op in EXACT and node.outputs[0] in self._exposed)
        out, inputs = [], []
        for name in node.inputs:
            if name in self._raw and name not in left:
                cut = f"{name}.for.{node.name}"
                self._edges[cut] = replace(self._graph.edge(name), name=cut)
                out.append(Node(cut, "rescale", (name,), (cut,), {"exact": exact}, node.path))
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

    def _takes_raw(self, name: str, scale: int) -> bool:
        """Whether every user of an edge takes it raw, at `scale` fraction bits."""
        if (name, scale) not in self._takes:
            users = self._users.get(name, [])
            taken = bool(users) and all(self._takes_operand(user, name, scale) for user in users)
            self._takes[name, scale] = taken
        return self._takes[name, scale]

    def _is_widened(self, name: str) -> bool:
        """Whether a raw value would be computed in the whole ring, for a step behind it."""
        users = self._users.get(name, [])
        return any(u.op in WHOLE or (u.op in PASSES_ON and self._is_widened(u.outputs[0])) for u in users)

    def _takes_operand(self, user: Node, name: str, scale: int) -> bool:
        output = user.outputs[0]
        if user.op in CUTS:
            return output not in self._exposed and _limits_inside(user, self._graph.edge(name))
        if user.op == "argmax" or user.op in CURVES or user.op in WHOLE:
            return self._takes_itself(user, name, scale)
        if user.op not in PASSES_ON:
            return False
        edge, scale = self._graph.edge(output), max(scale, 2 * self._precision + 8)
        fits = edge.bound is not None and windows.fits(edge.bound, scale)
        return fits and (output in self._graph.outputs or self._takes_raw(output, scale))

    def _takes_itself(self, node: Node, name: str, scale: int) -> bool:
        """Whether the kernel of a node takes its operand raw, at `scale` fraction bits, though it does more than cut it."""
        edge = self._graph.edge(name)
        if node.op == "argmax":
            return self._fits_argmax(node, scale)
        if edge.bound is None or node.outputs[0] in self._exposed:
            return False
        if node.op in CURVES:
            raw = replace(edge, scale=scale, ring_bits=windows.width_of(edge.bound, scale))
            return curves.refusal(node, raw, self._precision) is None
        if node.op in WHOLE and name in node.inputs[: WHOLE[node.op]]:
            raw = replace(edge, scale=scale)
            operands = [raw if e == name else self._graph.edge(e) for e in node.inputs]
            return refusal(self._graph, node, operands) is None
        return False

    def _fits_argmax(self, node: Node, scale: int) -> bool:
        """Whether an argmax takes its operand raw: where it only compares, and no value is carried on."""
        edge, dim = self._graph.edge(node.inputs[0]), node.attrs["dim"]
        return not index_bits(edge, dim) and argmax_fits(edge, dim, scale)

    def _widen(self, nodes: list[Node]) -> None:
        """A raw operand of a raw sum, or of an argmax, is computed in the ring that this takes, where that is wider."""
        for node in reversed(nodes):
            out = self._edges[node.outputs[0]]
            if node.op == "argmax":
                bits = argmax_bits(self._edges[node.inputs[0]], node.attrs["dim"])
            elif node.op in PASSES_ON and out.name in self._raw:
                bits = out.ring_bits
            elif node.op in WHOLE:
                bits = 64
            else:
                continue
            for name in node.inputs:
                if name in self._raw and self._edges[name].ring_bits < bits:
                    self._edges[name] = replace(self._edges[name], ring_bits=bits)


def exposed(graph: Graph, options: Mapping[str, Any]) -> frozenset[str]:
    """Edges that must be cut exactly: those of which the graph's outputs show how they were rounded, or all of them."""
    if options.get("exact_cuts", False):
        return frozenset(graph.edges)
    found = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.op in EXACT and node.outputs[0] in found:
            found.update(node.inputs)
    return frozenset(found)


def _limits_inside(node: Node, edge: Edge) -> bool:
    """Whether a clamp's limits leave something between them within the range of its operand, as clamp.window needs."""
    if node.op != "clamp":
        return True
    low, high, bound = node.attrs["min"], node.attrs["max"], max(edge.bound or 0.0, 1.0)
    if low is not None and high is not None and low > high:
        return False
    return (low is None or low < bound) and (high is None or high > -bound)


def product_scale(node: Node, operands: list[Edge]) -> int:
    """Fraction bits of a product: those of its factors together. A quantised weight has those of its scale operand."""
    if node.op == "embedding":
        return operands[-1].scale if node.attrs.get("quantized") else operands[1].scale
    right = operands[-1].scale if node.attrs.get("quantized") else operands[1].scale
    return operands[0].scale + right
