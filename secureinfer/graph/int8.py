"""Int8 weights: what a float weight is made of, followed through shape work and factors, and the nodes that keep it so.

A quantised node is `linear`, `convolution` or `embedding` with the attribute `quantized`: its operand 1 is int8, and its
last operand is one float32 scale for each output channel: rows of a linear layer or convolution, columns of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from .ir import Graph, Node

if TYPE_CHECKING:
    from .draft import Draft, DraftNode, Rule, Value

CHANNEL_DIM: Mapping[str, int] = MappingProxyType({"linear": 0, "convolution": 0, "embedding": 1})
"""Operators that have a quantised form -> the dimension of their weight that has a scale for each index.

A table's scales belong to its columns: which row is looked up is secret, so a scale of that row would be as well.
"""

SCALE_BITS = 11
"""The greatest scale of a weight has so many bits as an integer round(scale · 2**e), e the fraction bits of its edge."""

MOST_FRACTION_BITS = 62


@dataclass(frozen=True)
class Int8:
    """values · scale. values: int8, of the weight's shape. scale: float64, as many dimensions, of size 1 or the weight's."""

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> Int8:
        return cls(values, torch.ones((1,) * values.dim(), dtype=torch.float64))

    def moved(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Int8:
        """After shape work."""
        return Int8(function(self.values), _narrow(function(self.scale.expand(self.values.shape))))

    def times(self, factor: torch.Tensor | float) -> Int8 | None:
        """After a product with a factor that broadcasts into it; None where the factor has many values a channel."""
        factor = torch.as_tensor(factor, dtype=torch.float64)
        if torch.broadcast_shapes(factor.shape, self.values.shape) != self.values.shape:  # type: ignore[no-untyped-call]
            return None
        scale = _narrow(self.scale * factor)
        return Int8(self.values, scale) if sum(n != 1 for n in scale.shape) <= 1 else None


def _narrow(scale: torch.Tensor) -> torch.Tensor:
    """Dimensions along which nothing changes become 1."""
    for dim in range(scale.dim()):  # what is an expansion, first, so that little is left to compare
        if scale.stride(dim) == 0 and scale.shape[dim]:
            scale = scale.narrow(dim, 0, 1)
    for dim in range(scale.dim()):
        if scale.shape[dim] > 1 and bool((scale == scale.narrow(dim, 0, 1)).all()):
            scale = scale.narrow(dim, 0, 1)
    return scale


_MOVES = frozenset((
    "reshape", "permute", "expand", "slice", "select", "flip", "view", "_unsafe_view", "t", "transpose", "unsqueeze",
    "squeeze", "clone", "alias", "detach", "contiguous",
))  # fmt: skip
_CASTS = frozenset(("cast", "_to_copy", "to"))


def follow(op: str, arguments: Sequence[Any], function: Callable[..., Any], is_float: bool) -> Int8 | None:
    """What the result of an operator on known values is made of, where that is int8 values times a scale a channel.

    op: canonical or ATen name, without overload. arguments: Values and numbers; function takes tensors in their place.
    is_float: whether the result is.
    """
    if not is_float:
        return None
    x, *others = arguments
    if op in _CASTS:
        tensor = getattr(x, "tensor", None)
        return Int8.of(tensor) if tensor is not None and tensor.dtype == torch.int8 else _parts(x)
    if op in _MOVES:
        parts = _parts(x)
        return None if parts is None else parts.moved(lambda t: function(t, *others))
    if op == "neg" and (parts := _parts(x)) is not None:
        return parts.times(-1.0)
    if op not in ("mul", "div") or len(others) != 1:
        return None
    for a, b in ((x, others[0]), (others[0], x)) if op == "mul" else ((x, others[0]),):
        parts, factor = _parts(a), getattr(b, "tensor", b)
        if parts is not None and factor is not None:
            factor = torch.as_tensor(factor, dtype=torch.float64)
            return parts.times(factor if op == "mul" else factor.reciprocal())
    return None


def _parts(x: Any) -> Int8 | None:
    parts: Int8 | None = getattr(x, "int8", None)
    return parts


def scale_bits(scale: torch.Tensor) -> int | None:
    """Fraction bits at which the greatest scale is an integer of SCALE_BITS bits; None where no edge can have so many.

    What is public about scales is this number: a width, rounded to a power of two (rule R6).
    """
    greatest = float(scale.abs().max()) if scale.numel() else 0.0
    if not math.isfinite(greatest):
        return None
    if greatest == 0.0:
        return 0
    bits = SCALE_BITS - math.frexp(greatest)[1]  # greatest · 2**bits lies in [1024, 2048)
    if round(math.ldexp(greatest, bits)) == 1 << SCALE_BITS:
        bits -= 1
    return bits if 0 <= bits <= MOST_FRACTION_BITS else None


def keep_int8() -> Rule:
    """Layers whose weight is int8 values times one scale an output channel take both as they are."""
    seen: dict[object, tuple[Value, Value]] = {}

    def rule(d: Draft, n: DraftNode) -> Value | None:
        if n.op not in CHANNEL_DIM or "quantized" in n.attrs or n.inputs[1].kind != "weight":
            return None
        weight, dim = n.inputs[1], CHANNEL_DIM[n.op]
        parts = weight.int8
        if parts is None or any(size != 1 for i, size in enumerate(parts.scale.shape) if i != dim):
            return None
        scale = parts.scale.reshape(-1).expand(weight.shape[dim]).float().cpu().contiguous()
        if scale_bits(scale) is None or not weight.known.numel():
            return None
        values = parts.values
        key = (values.data_ptr(), values.shape, values.stride(), scale.numpy().tobytes())
        if key not in seen:
            seen[key] = (
                d.int8_weight(values, weight.name),
                d.weight(scale, f"{weight.name.removesuffix('_int8')}_scale"),
            )
        known = seen[key]
        attrs = {**n.attrs, "quantized": True}
        if n.op != "embedding":
            attrs["has_bias"] = len(n.inputs) > 2
        return d.emit(n.op, [n.inputs[0], known[0], *n.inputs[2:], known[1]], **attrs)

    return rule


def dequantized(op: str, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values · scale along the channels of this operator's weight, in the type of the scale."""
    shape = [1] * values.dim()
    shape[CHANNEL_DIM[op]] = -1
    return values.to(scale.dtype) * scale.reshape(shape)


def is_quantized(node: Node) -> bool:
    return bool(node.attrs.get("quantized", False))


def quantized_nodes(graph: Graph) -> dict[str, Node]:
    """Int8 weight edge -> a node that uses it. All its nodes have the same scales."""
    return {n.inputs[1]: n for n in graph.nodes if is_quantized(n)}


def as_float(node: Node) -> Node:
    """The same node on a dequantised weight: without the scale and its attributes."""
    if not is_quantized(node):
        return node
    attrs = {k: v for k, v in node.attrs.items() if k not in ("quantized", "has_bias")}
    return Node(
        node.name, node.op, node.inputs[:-1], node.outputs, MappingProxyType(attrs), node.path, node.operator
    )
