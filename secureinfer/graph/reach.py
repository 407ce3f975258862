"""How great a value can get whatever input is accepted, as far as that says more than examples do.

Examples with head-room size the rings of a computation. An input is accepted up to its own head-room in every element at
once, though, and so a first layer can add up to far more than 16 times what it gave on examples. From the inputs to the
first product with weights the greatest possible value is therefore computed: |W| times the inputs' bounds. Behind a second
such product it would exceed any value that ever comes by orders of magnitude, and examples decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .ir import Edge, Graph, Node
from .ops import OPS

Bounds = Sequence[torch.Tensor]

_MOVES = (
    "reshape",
    "rescale",
    "permute",
    "expand",
    "slice",
    "select",
    "cat",
    "index_select",
    "gather",
    "flip",
)
_MONOTONE = ("sum", "mean", "cumsum", "amax", "max_pool2d", "avg_pool2d", "mul")
"""Operators of which |f(x)| <= f(|x|), and f grows with |x|: as they are."""

_BOUNDED = frozenset((
    "sigmoid", "tanh", "erf", "softmax", "masked_softmax", "sign", "one_hot", "any", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_not", "logical_and", "logical_or",
))  # fmt: skip
"""Operators whose results lie in [-1, 1], whatever comes in."""

PRODUCTS = ("linear", "convolution", "matmul")


def greatest_values(
    graph: Graph, tensors: Mapping[str, torch.Tensor], edges: Mapping[str, Edge]
) -> dict[str, float]:
    """Edge -> a bound that holds for every input within its own edge's bound; only edges of which one is known.

    tensors: weights and constants by edge name. edges: with the bounds of the inputs.
    """
    bounds: dict[str, torch.Tensor] = {}
    behind: dict[str, int] = {}
    """Products with weights between the inputs and an edge."""
    for name, tensor in tensors.items():
        bounds[name] = tensor if tensor.dtype == torch.bool else tensor.double().abs()
    for name in graph.inputs:
        edge = edges[name]
        if edge.bound is not None:
            bounds[name] = torch.full((), edge.bound, dtype=torch.float64).expand(edge.shape)
    found: dict[str, float] = {}
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    for i, node in enumerate(graph.nodes):
        name = node.outputs[0]
        products = max([behind.get(n, 0) for n in node.inputs], default=0) + (node.op in PRODUCTS)
        products = 0 if node.op in _BOUNDED else products
        known = products <= 1 and (node.op != "div" or node.inputs[1] in tensors)
        bound = _bound(node, bounds, graph) if known else None
        if bound is not None and bool(torch.isfinite(bound).all()):
            bounds[name], behind[name] = bound, products
            found[name] = float(bound.max()) if bound.numel() else 0.0
        for used in set(node.inputs):
            if last[used] == i and used not in tensors:
                bounds.pop(used, None)
    return found


def _bound(node: Node, bounds: Mapping[str, torch.Tensor], graph: Graph) -> torch.Tensor | None:
    """Elementwise bound of a node's result, or None where nothing is known of it."""
    out = graph.edge(node.outputs[0])
    if node.op in _BOUNDED:
        return _full(out, 1.0)
    if node.op == "argmax":
        shape = graph.edge(node.inputs[0]).shape
        return _full(out, float(max(shape[node.attrs["dim"]] - 1, 0)) if shape else 0.0)
    special = _OF.get(node.op)
    if special is not None:
        known = [bounds.get(n) for n in node.inputs]
        return special(node, known, out)
    if node.op not in _MONOTONE and node.op not in _MOVES and node.op not in PRODUCTS:
        return None
    operands = [bounds[n] for n in node.inputs if n in bounds]
    if len(operands) < len(node.inputs):
        return None
    if node.op in ("index_select", "gather"):
        operands[1] = operands[1].long()
    return OPS[node.op](node.attrs, operands)


Known = Sequence[torch.Tensor | None]
Rule = Callable[[Node, Known, Edge], torch.Tensor | None]


def _full(edge: Edge, value: float) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float64).expand(edge.shape)


def _same(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    return x[0]


def _sum(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    return None if x[0] is None or x[1] is None else x[0] + x[1]


def _rows(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    """Any row of the table may come."""
    if x[1] is None:
        return None
    table = x[1] * x[2] if node.attrs.get("quantized") and x[2] is not None else x[1]
    greatest: torch.Tensor = table.amax(0).expand(out.shape)
    return greatest


def _quotient(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    """By a weight or a constant: see greatest_values."""
    return None if x[0] is None or x[1] is None else x[0] / x[1]


def _power(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    return None if x[0] is None else x[0] ** node.attrs["exponent"]


def _pad(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    return (
        None if x[0] is None else OPS["pad"]({**node.attrs, "value": abs(node.attrs["value"] or 0.0)}, [x[0]])
    )


def _clamp(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    low, high = node.attrs["min"], node.attrs["max"]
    if low is not None and high is not None:
        return _full(out, max(abs(low), abs(high)))
    return None if x[0] is None else x[0].clamp(min=abs(low if low is not None else high))


def _where(node: Node, x: Known, out: Edge) -> torch.Tensor | None:
    return None if x[1] is None or x[2] is None else torch.maximum(x[1], x[2])


_OF: dict[str, Rule] = {
    "neg": _same, "abs": _same, "relu": _same, "cast": _same, "silu": _same, "gelu": _same,
    "add": _sum, "sub": _sum, "div": _quotient, "pow": _power, "pad": _pad, "clamp": _clamp, "where": _where,
    "embedding": _rows,
}  # fmt: skip
