"""The canonical operators: one table of reference functions, exact in float64, that every backend is held to.

A new operator is a row here, its ATen overloads in graph/aten.py, and one kernel per backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from .int8 import dequantized
from .ir import Graph, Node
from .polynomials import evaluate as evaluate_polynomial

Attrs = Mapping[str, Any]
Reference = Callable[[Attrs, Sequence[torch.Tensor]], torch.Tensor]

OPS: dict[str, Reference] = {}
"""Canonical operator -> reference function of (attributes, operands)."""

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


def op(name: str) -> Callable[[Reference], Reference]:
    def register(function: Reference) -> Reference:
        if name in OPS:
            raise ValueError(f"operator {name!r} has two rows")
        OPS[name] = function
        return function

    return register


def _simple(name: str, function: Callable[..., Any]) -> None:
    op(name)(lambda attrs, x: function(*x))


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "logical_not": torch.logical_not, "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "where": torch.where, "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": F.silu,
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "abs": torch.abs, "sign": torch.sign, "erf": torch.erf, "matmul": torch.matmul,
}.items():  # fmt: skip
    _simple(_name, cast(Callable[..., Any], _function))


@op("reshape")
def _reshape(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].reshape(a["shape"])


@op("rescale")
def _rescale(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    """The identity: fraction bits of a fixed-point value are cut. exact: rounded to the nearest, else at random."""
    return x[0]


@op("permute")
def _permute(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].permute(a["dims"])


@op("expand")
def _expand(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].expand(a["shape"])


@op("slice")
def _slice(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.slice.Tensor(x[0], a["dim"], a["start"], a["end"], a["step"])
    return result


@op("select")
def _select(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].select(a["dim"], a["index"])


@op("cat")
def _cat(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(x), a["dim"])


@op("index_select")
def _index_select(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].index_select(a["dim"], x[1])


@op("gather")
def _gather(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].gather(a["dim"], x[1])


@op("pad")
def _pad(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.pad(x[0], a["pad"], value=a["value"])


@op("flip")
def _flip(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].flip(a["dims"])


@op("cumsum")
def _cumsum(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].cumsum(a["dim"])


@op("cast")
def _cast(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return x[0].to(_DTYPES[a["dtype"]])


@op("one_hot")
def _one_hot(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    classes = torch.arange(a["num_classes"], device=x[0].device)
    return (x[0].unsqueeze(-1) == classes).to(torch.int64)


@op("gelu")
def _gelu(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.gelu(x[0], approximate=a["approximate"])


@op("clamp")
def _clamp(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.clamp(x[0], a["min"], a["max"])


@op("pow")
def _pow(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.pow(x[0], a["exponent"])


@op("polynomial")
def _polynomial(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    """What stands in for the function `kind` on [-radius, radius], with at most `error` between them; see polynomials.py."""
    return evaluate_polynomial(a["coefficients"], a["radius"], x[0])


@op("any")
def _any(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.any(x[0], a["dims"], a["keepdim"])


@op("sum")
def _sum(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.sum(x[0], a["dims"], a["keepdim"])


@op("mean")
def _mean(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.mean(x[0], a["dims"], a["keepdim"])


@op("amax")
def _amax(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.amax(x[0], a["dims"], a["keepdim"])


@op("argmax")
def _argmax(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    """Index of the greatest value along a dimension, int64; of equal values the first."""
    if x[0].is_meta:
        return torch.argmax(x[0], a["dim"], a["keepdim"])
    greatest = torch.amax(x[0], a["dim"], True)
    return torch.argmax((x[0] == greatest).to(torch.uint8), a["dim"], a["keepdim"])


@op("softmax")
def _softmax(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.softmax(x[0], a["dim"])


@op("masked_softmax")
def _masked_softmax(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    """Softmax over the places that `keep` keeps; the others are exactly 0, and so is a row that keeps
    nothing."""
    scores, keep = x
    kept = torch.softmax(scores.masked_fill(~keep, -torch.inf), a["dim"])
    return torch.where(keep, kept, torch.zeros((), dtype=kept.dtype, device=kept.device))


@op("attention")
def _attention(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    """softmax(x0 @ x1) @ x2 over the places that x3, if it is there, keeps. scores: a bound of |x0 @ x1|."""
    scores = x[0] @ x[1]
    if len(x) > 3:
        return _masked_softmax({"dim": -1}, [scores, x[3].expand(scores.shape)]) @ x[2]
    return torch.softmax(scores, -1) @ x[2]


def _weights(name: str, a: Attrs, x: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, dequantised if it is int8, and the bias of operands [x, weight, bias?] or [x, int8, bias?, scales]."""
    if not a.get("quantized", False):
        return x[1], x[2] if len(x) > 2 else None
    if len(x) != 3 + bool(a.get("has_bias", False)):
        raise ValueError(f"a quantised {name} with {len(x)} operands")
    return dequantized(name, x[1], x[-1]), x[2] if len(x) > 3 else None


@op("linear")
def _linear(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.linear(x[0], *_weights("linear", a, x))


@op("embedding")
def _embedding(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.embedding(x[0], _weights("embedding", a, x)[0])


@op("convolution")
def _convolution(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    weight, bias = _weights("convolution", a, x)
    zeros = [0] * len(a["stride"])
    return torch.convolution(
        x[0], weight, bias, a["stride"], a["padding"], a["dilation"], False, zeros, a["groups"]
    )


@op("layer_norm")
def _layer_norm(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    weight = x[1] if a["has_weight"] else None
    bias = x[-1] if a["has_bias"] else None
    return F.layer_norm(x[0], a["normalized_shape"], weight, bias, a["eps"])


@op("max_pool2d")
def _max_pool2d(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.max_pool2d(x[0], a["kernel_size"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"])


@op("avg_pool2d")
def _avg_pool2d(a: Attrs, x: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.avg_pool2d(
        x[0],
        a["kernel_size"],
        a["stride"],
        a["padding"],
        a["ceil_mode"],
        a["count_include_pad"],
        a["divisor_override"],
    )


def evaluate_op(
    name: str, attrs: Attrs, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One operator on plaintext tensors. dtype: what `cast` to a float gives."""
    result = OPS[name](attrs, tensors)
    return result.to(dtype) if name == "cast" and attrs["dtype"] == "float32" else result


def evaluate(node: Node, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The oracle of one node: its operands in plaintext, its output in plaintext.

    dtype: floating type of the computation; the operands must have it already.
    Raises KeyError for an operator that has no row.
    """
    return evaluate_op(node.op, node.attrs, tensors, dtype)


def run_reference(
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
    trace: dict[str, torch.Tensor] | None = None,
    observe: Callable[[str, torch.Tensor], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Run the whole graph in plaintext: output edge -> tensor, in the order of graph.outputs.

    tensors: weights and constants by edge name. inputs: one tensor for each of graph.inputs.
    trace: filled with every edge's tensor. observe: called with every edge's tensor, which is not kept.
    """

    def convert(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    values: dict[str, torch.Tensor] = {}
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}

    def put(name: str, tensor: torch.Tensor) -> None:
        values[name] = tensor
        if trace is not None:
            trace[name] = tensor
        if observe is not None:
            observe(name, tensor)

    for name in (*graph.weights, *graph.constants):
        put(name, convert(tensors[name]))
    for name in graph.inputs:
        put(name, convert(inputs[name]))
    keep = set(graph.outputs)
    with torch.no_grad():
        for i, node in enumerate(graph.nodes):
            put(node.outputs[0], evaluate(node, [values[e] for e in node.inputs], dtype))
            for name in set(node.inputs):
                if last_use[name] == i and name not in keep:
                    del values[name]
    return {name: values[name] for name in graph.outputs}
