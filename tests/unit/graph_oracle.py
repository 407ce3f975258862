"""Exported graph against the model itself, both in float64."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch

from secureinfer.graph.export import export_graph
from secureinfer.graph.ir import Graph
from secureinfer.graph.ops import run_reference
from secureinfer.graph.structure import flatten_inputs, unflatten_output

torch.set_num_threads(2)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def tensors_of(structure: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(structure) if isinstance(t, torch.Tensor)]


class Exported:
    """A model's graph with its tensors, run by the reference functions."""

    def __init__(
        self, model: torch.nn.Module, *args: Any, export: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.graph, self.weights, self.constants = export_graph(model, args, kwargs, **(export or {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = flatten_inputs(self.graph.input_spec, args, kwargs)
        outputs = run_reference(self.graph, {**self.weights, **self.constants}, inputs)
        return unflatten_output(self.graph.output_spec, outputs)

    @property
    def operators(self) -> collections.Counter[str]:
        return collections.Counter(n.op for n in self.graph.nodes)


def error(expected: Any, came: Any) -> float:
    """Greatest difference over all tensors of two structures, which must agree in shape."""
    pairs = list(zip(tensors_of(expected), tensors_of(came), strict=True))
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    return max((a.double() - b.double()).abs().max().item() if a.numel() else 0.0 for a, b in pairs)


def agree(model: torch.nn.Module, *args: Any, tolerance: float = 1e-5, **kwargs: Any) -> Exported:
    """Export on these inputs and hold the graph to the model in float64, on them and on the same inputs again halved."""
    model.eval()
    exported = Exported(model, *args, **kwargs)
    reference = copy.deepcopy(model).double()
    for factor in (1.0, -0.5):
        these = [a * factor if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        with torch.no_grad():
            expected = reference(*map(double, these), **{k: double(v) for k, v in kwargs.items()})
        came = exported(*these, **kwargs)
        assert type(came) is type(expected)
        assert error(expected, came) < tolerance
    return exported


def private_of(graph: Graph, name: str) -> str | None:
    return graph.edge(name).owner
