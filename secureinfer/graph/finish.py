"""Draft → Graph: names, types, visibility, and the tensors as they are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..errors import CompileError
from .draft import Draft, Value, nominal
from .int8 import is_quantized, scale_bits
from .ir import Edge, Graph, Node, Visibility
from .visibility import PUBLIC, WEIGHT, Seen, result_visibility


def finish(
    draft: Draft, *, input_spec: Any, output_tree: Any, reveal_to: tuple[str, ...], precision_bits: int
) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The immutable graph with its weights and constants; what nothing reaches is left out."""
    nodes = draft.order()
    taken: set[str] = set()
    names: dict[Value, str] = {}
    edges: dict[str, Edge] = {}
    weights: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}

    def unique(wanted: str) -> str:
        name, i = wanted, 0
        while name in taken:
            i += 1
            name = f"{wanted}#{i}"
        taken.add(name)
        return name

    def add(value: Value, name: str, dtype: torch.dtype, seen: Seen) -> None:
        names[value] = name
        scale = precision_bits if value.is_float else 0
        kind = str(dtype).removeprefix("torch.")
        edges[name] = Edge(name, value.shape, kind, visibility=seen[0], owner=seen[1], scale=scale)

    for value in draft.inputs:
        add(value, unique(value.name), value.dtype, (Visibility.PRIVATE, value.owner))

    def known(value: Value) -> None:
        if value in names or value.tensor is None:
            return
        stored = torch.int8 if value.dtype == torch.int8 else nominal(value.dtype)
        tensor = value.tensor.to("cpu", stored).contiguous().clone()
        if value.kind == "weight":
            if not bool(torch.isfinite(tensor).all()):
                raise CompileError(f"weight {value.name} holds values that are not finite")
            name = unique(value.name)
            weights[name] = tensor
            add(value, name, tensor.dtype, WEIGHT)
        else:
            name = unique(f"constant_{len(constants)}")
            constants[name] = tensor
            add(value, name, tensor.dtype, PUBLIC)

    counts: dict[str, int] = {}
    listed: list[Node] = []
    for node in nodes:
        for value in node.inputs:
            known(value)
        counts[node.op] = counts.get(node.op, -1) + 1
        name = unique(f"{node.op}_{counts[node.op]}")
        operands = [edges[names[v]] for v in node.inputs]
        add(
            node.output, name, node.output.dtype, result_visibility((e.visibility, e.owner) for e in operands)
        )
        listed.append(
            Node(
                name,
                node.op,
                tuple(e.name for e in operands),
                (name,),
                MappingProxyType(node.attrs),
                node.path,
                node.operator,
            )  # fmt: skip
        )
        if is_quantized(listed[-1]):
            name = operands[-1].name
            edges[name] = dataclasses.replace(edges[name], scale=scale_bits(weights[name]) or 0)
    for value in draft.outputs:
        if value.kind == "weight":
            raise CompileError(
                f"an output is the weight {value.name}; running it would hand it to the data owner"
            )
        known(value)
    outputs = [names[v] for v in draft.outputs]
    graph = Graph(
        nodes=tuple(listed),
        edges=MappingProxyType(edges),
        inputs=tuple(names[v] for v in draft.inputs),
        weights=tuple(weights),
        constants=tuple(constants),
        outputs=tuple(outputs),
        input_spec=input_spec,
        output_spec=_named(output_tree, {f"out.{i}": name for i, name in enumerate(outputs)}),
        reveal_to=reveal_to,
    )
    return graph, weights, constants


def _named(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, dict):
        return {k: names[v] if k == "edge" else _named(v, names) for k, v in tree.items()}
    return [_named(t, names) for t in tree] if isinstance(tree, list) else tree
