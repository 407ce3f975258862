"""Draft: the graph while it is built and rewritten. Values know their producer; work on known values is
folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from .int8 import Int8, follow
from .ops import evaluate_op

Kind = Literal["input", "weight", "constant", "node"]


class Value:
    """One tensor of the draft. `tensor` is there for weights and constants; `node` for computed values.

    int8: what a weight is made of, where that is int8 values times scales.
    """

    __slots__ = ("dtype", "int8", "kind", "name", "node", "owner", "shape", "tensor")

    def __init__(
        self,
        kind: Kind,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        name: str = "",
        tensor: torch.Tensor | None = None,
        owner: str | None = None,
    ) -> None:
        self.kind = kind
        self.shape = tuple(shape)
        self.dtype = dtype
        self.name = name
        self.tensor = tensor
        self.owner = owner
        self.node: DraftNode | None = None
        self.int8: Int8 | None = None

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def known(self) -> torch.Tensor:
        """The tensor of a weight or constant."""
        if self.tensor is None:
            raise ValueError(f"{self.kind} value {self.name!r} has no tensor")
        return self.tensor

    def made_by(self, op: str) -> bool:
        return self.node is not None and self.node.op == op


class DraftNode:
    """One operator application; one output."""

    __slots__ = ("attrs", "inputs", "op", "operator", "output", "path")

    def __init__(
        self, op: str, inputs: Sequence[Value], attrs: dict[str, Any], output: Value, path: str, operator: str
    ) -> None:
        self.op = op
        self.inputs = list(inputs)
        self.attrs = attrs
        self.output = output
        self.path = path
        self.operator = operator


def nominal(dtype: torch.dtype) -> torch.dtype:
    """The draft knows three types: float32 stands for every float, int64 for every integer, and bool."""
    if dtype.is_floating_point:
        return torch.float32
    return torch.bool if dtype == torch.bool else torch.int64


def _common(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Integers as int64; floats as float64 if one of them is, so that folding loses nothing."""
    double = any(t.dtype == torch.float64 for t in tensors)
    return [
        (t.double() if double else t) if t.is_floating_point() else t if t.dtype == torch.bool else t.long()
        for t in tensors
    ]


UNSUPPORTED = "unsupported"
"""Operator of a node that no canonical operator expresses; its attribute `reason` says why."""

Rule = Callable[["Draft", DraftNode], "Value | None"]


class Draft:
    """Inputs, outputs and everything that the outputs reach."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.path = ""
        self.operator = ""
        self.uses: dict[Value, int] = {}

    @contextmanager
    def at(self, path: str, operator: str) -> Iterator[None]:
        """Nodes emitted inside carry this module path and original operator."""
        before = (self.path, self.operator)
        self.path, self.operator = path, operator
        try:
            yield
        finally:
            self.path, self.operator = before

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype, owner: str) -> Value:
        value = Value("input", shape, dtype, name=name, owner=owner)
        self.inputs.append(value)
        return value

    def constant(self, tensor: torch.Tensor) -> Value:
        return Value("constant", tensor.shape, nominal(tensor.dtype), tensor=tensor.detach())

    def scalar(self, number: float | bool, dtype: torch.dtype) -> Value:
        """A public 0-dim value; floats are kept in float64 until the end."""
        return self.constant(torch.tensor(number, dtype=torch.float64 if dtype.is_floating_point else dtype))

    def weight(self, tensor: torch.Tensor, name: str) -> Value:
        return Value("weight", tensor.shape, nominal(tensor.dtype), tensor=tensor.detach(), name=name)

    def int8_weight(self, tensor: torch.Tensor, name: str) -> Value:
        """The one kind of value that stays int8: a weight of a quantised node."""
        return Value("weight", tensor.shape, torch.int8, tensor=tensor.detach(), name=name)

    def moved(self, value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
        """A known value after shape work."""
        result = self.known(function(value.known), [value])
        result.int8 = value.int8.moved(function) if value.int8 is not None else None
        return result

    def known(self, tensor: torch.Tensor, sources: Iterable[Value]) -> Value:
        """What was computed from weights and constants only: a weight if one of the sources is."""
        weights = [v for v in sources if v.kind == "weight"]
        if not weights:
            return self.constant(tensor)
        return self.weight(tensor, max(weights, key=lambda v: v.known.numel()).name)

    def emit(self, op: str, inputs: Sequence[Value], **attrs: Any) -> Value:
        """Apply a canonical operator; folded at once when no input of the caller is involved."""
        if all(v.tensor is not None for v in inputs):

            def run(*tensors: torch.Tensor) -> torch.Tensor:
                return evaluate_op(op, attrs, tensors, torch.float64)

            with torch.no_grad():
                result = self.known(run(*_common([v.known for v in inputs])), inputs)
                result.int8 = follow(op, inputs, run, result.is_float)
            return result
        operands = [torch.empty(v.shape, dtype=nominal(v.dtype), device="meta") for v in inputs]
        shaped = evaluate_op(op, attrs, operands)
        return self._add(op, inputs, attrs, shaped.shape, shaped.dtype)

    def unsupported(
        self, inputs: Sequence[Value], shape: Sequence[int], dtype: torch.dtype, reason: str
    ) -> Value:
        return self._add(UNSUPPORTED, inputs, {"reason": reason}, shape, dtype)

    def _add(
        self,
        op: str,
        inputs: Sequence[Value],
        attrs: dict[str, Any],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Value:
        value = Value("node", shape, nominal(dtype))
        value.node = DraftNode(op, inputs, attrs, value, self.path, self.operator)
        return value

    # Forms that several canonicalisers and passes share.

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.shape == tuple(shape) else self.emit("reshape", [x], shape=list(shape))

    def permute(self, x: Value, dims: Sequence[int]) -> Value:
        dims = [d % max(len(x.shape), 1) for d in dims]
        return x if dims == list(range(len(x.shape))) else self.emit("permute", [x], dims=dims)

    def transpose(self, x: Value) -> Value:
        """Swap the last two dimensions."""
        n = len(x.shape)
        return self.permute(x, [*range(n - 2), n - 1, n - 2])

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.shape == tuple(shape) else self.emit("expand", [x], shape=list(shape))

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        target = nominal(dtype)
        if nominal(x.dtype) == target:
            return x
        return self.emit("cast", [x], dtype=str(target).removeprefix("torch."))

    def slice(self, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
        if (start, end, step) == (0, x.shape[dim], 1):
            return x
        return self.emit("slice", [x], dim=dim, start=start, end=end, step=step)

    def order(self) -> list[DraftNode]:
        """Every node that the outputs reach, producers first."""
        done: set[Value] = set()
        result: list[DraftNode] = []
        stack: list[tuple[Value, bool]] = [(v, False) for v in reversed(self.outputs)]
        while stack:
            value, ready = stack.pop()
            node = value.node
            if node is None or value in done:
                continue
            if ready:
                done.add(value)
                result.append(node)
            else:
                stack.append((value, True))
                stack.extend((v, False) for v in reversed(node.inputs))
        return result

    def rewrite(self, *rules: Rule) -> bool:
        """One sweep, producers first: the first rule that returns another value replaces the node's output.

        Rules build new nodes and leave the old ones as they are; what nothing reaches any more is gone.
        `uses` counts consumers before the sweep, so a rule that wants a value used once may miss a chance
        until the next one.
        """
        nodes = self.order()
        self.uses = {}
        for value in [*self.outputs, *(v for n in nodes for v in n.inputs)]:
            self.uses[value] = self.uses.get(value, 0) + 1
        replaced: dict[Value, Value] = {}
        for node in nodes:
            node.inputs = [replaced.get(v, v) for v in node.inputs]
            with self.at(node.path, node.operator):
                for rule in rules:
                    new = rule(self, node)
                    if new is not None and new is not node.output:
                        replaced[node.output] = new
                        self.uses[new] = self.uses.get(new, 0) + self.uses.get(node.output, 1)
                        break
        self.outputs = [replaced.get(v, v) for v in self.outputs]
        return bool(replaced)

    def used_once(self, value: Value) -> bool:
        return self.uses.get(value, 1) <= 1
