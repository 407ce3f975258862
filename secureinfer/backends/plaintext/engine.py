"""The plaintext engine: runs a program's graph in float32 (the baseline) or float64 (the oracle), all in view."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from ...errors import CorrelationError, ProgramFileError, SessionError
from ...graph.int8 import as_float, dequantized, quantized_nodes
from ...graph.ops import evaluate
from ...plan.program import Program
from ..base import Engine


class PlaintextEngine(Engine):
    """All roles in one: takes every input edge, holds the weights, gives every output edge.

    dtype: float type of the computation. device: where it runs.
    """

    def __init__(
        self, program: Program, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        if program.weights is None and program.graph.weights:
            raise ProgramFileError(
                "plaintext needs the program with its weights, and this is the public part"
            )
        self._graph = program.graph
        self._steps = program.plan.steps
        self._dtype = dtype
        self._device = torch.device(device)
        known = {**program.constants, **(program.weights or {})}
        self._known = {
            name: self._convert(known[name]) for name in (*self._graph.weights, *self._graph.constants)
        }
        for name, node in quantized_nodes(self._graph).items():  # once: the baseline computes with floats
            self._known[name] = dequantized(node.op, self._known[name], self._known[node.inputs[-1]])
        self._nodes = [as_float(step.node) for step in self._steps]
        self._last_use = {name: step.index for step in self._steps for name in step.node.inputs}
        self._next = 0
        self._times: dict[int, float] = {}
        self._closed = False

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def setup(self) -> None:
        """Nothing is exchanged."""

    def prepare(self, index: int) -> None:
        """Nothing is random."""

    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Run one inference. inputs: every input edge. Indices rise, as in every engine."""
        if self._closed:
            raise SessionError("this engine is closed")
        if index < self._next:
            raise CorrelationError(f"inference {index} was already run")
        self._next = index + 1
        given = inputs or {}
        values = dict(self._known)
        values.update((name, self._convert(given[name])) for name in self._graph.inputs)
        self._times = {}
        with torch.no_grad():
            for step in self._steps:
                start, node = time.perf_counter(), self._nodes[step.index]
                if node.outputs:
                    values[node.outputs[0]] = evaluate(node, [values[e] for e in node.inputs], self._dtype)
                for name in node.inputs:
                    if self._last_use[name] == step.index and node.outputs and name not in self._known:
                        values.pop(name, None)
                self._times[step.index] = time.perf_counter() - start
        return {name: values[name] for name in self._graph.outputs}

    def step_times(self) -> dict[int, float]:
        return dict(self._times)

    def close(self) -> None:
        self._closed = True
        self._known = {}
