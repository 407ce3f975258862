"""The graph that CKKS runs, from stages and their schedule.

It is an ordinary graph (linear, polynomial, sum pooling, reshape), so that the plaintext backend runs it as the
oracle; where values stand in slots is in its constants, and what a step costs in its nodes' attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...graph.ir import MODEL_OWNER, Edge, Graph, Node, Visibility
from .found import Found, Source
from .layouts import Layout
from .matrices import product_ms
from .schedule import StagePlan, activation_ms, levels_of
from .stages import INPUTS, Stage, depth_of


def write(
    source: Source, found: Found, bounds: Mapping[str, float], signed: Mapping[str, bool]
) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Graph, weights and constants. bounds, signed: of each input, its greatest absolute value, and whether it may be
    below 0."""
    return _Writer(source, found, bounds, signed).write()


class _Writer:
    def __init__(
        self, source: Source, found: Found, bounds: Mapping[str, float], signed: Mapping[str, bool]
    ) -> None:
        self.signed = signed
        self.source, self.found = source, found
        self.batch = source.batch if source.independent else 1
        self.edges: dict[str, Edge] = {}
        self.nodes: list[Node] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs = source.graph.inputs
        for name in self.inputs:
            edge = source.graph.edge(name)
            self.edges[name] = dataclasses.replace(edge, shape=self._batched(edge.shape), bound=bounds[name])
        self.degree = found.parameters.degree
        self.split = found.parameters.split

    def _batched(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self.batch * shape[0], *shape[1:]) if self.source.independent and shape else tuple(shape)

    def write(self) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        graph = self.source.graph
        flat = [self._values(n, (self.batch, graph.edge(n).numel)) for n in self.inputs]
        if len(flat) > 1:
            total = sum(graph.edge(n).numel for n in self.inputs)
            joined = self._node(f"{INPUTS}.joined", "cat", tuple(flat), (self.batch, total), {"dim": 1})
        names = {INPUTS: joined if len(flat) > 1 else flat[0]}
        plans = {s.stage: s for s in self.found.schedule.stages} if self.found.schedule else {}
        _, at = levels_of(self.found.stages)
        if self.found.schedule:
            self._layout(f"{INPUTS}.layout", self.found.schedule.inputs)
            self._layout("outputs.layout", self.found.schedule.outputs)
        for stage in self.found.stages.stages:
            names[stage.name] = self._stage(stage, names, at[stage.name], plans.get(stage.name))
        outputs = []
        for edge, first, rows in self.found.stages.outputs:
            name = names["outputs"]
            if rows != self.found.stages.stages[-1].rows:
                attrs = {"dim": 1, "start": first, "end": first + rows, "step": 1}
                name = self._node(f"{edge}.rows", "slice", (name,), (self.batch, rows), attrs)
            shape = self._batched(graph.edge(edge).shape)
            outputs.append(self._node(f"{edge}.out", "reshape", (name,), shape, {"shape": list(shape)}))
        spec = _renamed(graph.output_spec, dict(zip(graph.outputs, outputs, strict=True)))
        made = Graph(
            tuple(self.nodes), MappingProxyType(self.edges), self.inputs, tuple(self.weights), tuple(self.constants),
            tuple(outputs), graph.input_spec, spec, graph.reveal_to,
        )  # fmt: skip
        return made, self.weights, self.constants

    def _node(
        self,
        name: str,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        attrs: Mapping[str, Any],
        path: str = "",
    ) -> str:
        private = all(self.edges[e].visibility is Visibility.PRIVATE for e in inputs)
        owners = {self.edges[e].owner for e in inputs}
        owner = owners.pop() if private and len(owners) == 1 else None
        visibility = Visibility.PRIVATE if owner is not None else Visibility.SHARED
        self.edges[name] = Edge(name, shape, "float32", visibility, owner)
        self.nodes.append(Node(name, op, inputs, (name,), MappingProxyType(dict(attrs)), path, ""))
        return name

    def _values(self, edge: str, shape: tuple[int, ...]) -> str:
        attrs: dict[str, Any] = {"shape": list(shape)}
        if not self.signed[edge]:
            attrs["low"] = 0.0  # what calibration saw, and inputs are held to
        return self._node(f"{edge}.values", "reshape", (edge,), shape, attrs)

    def _weight(self, name: str, tensor: torch.Tensor) -> str:
        self.weights[name] = tensor.float().contiguous()
        self.edges[name] = Edge(name, tuple(tensor.shape), "float32", Visibility.PRIVATE, MODEL_OWNER)
        return name

    def _constant(self, name: str, array: npt.NDArray[np.int64]) -> str:
        copied = np.array(array, dtype=np.int64, order="C")  # plans share rows
        self.constants[name] = torch.from_numpy(copied)
        self.edges[name] = Edge(name, tuple(array.shape), "int64", Visibility.PUBLIC)
        return name

    def _layout(self, name: str, layout: Layout) -> None:
        if name not in self.constants:
            self._constant(name, layout.where)

    def _stage(self, stage: Stage, names: Mapping[str, str], level: int, plan: StagePlan | None) -> str:
        parts = list(zip(stage.parts, stage.windows, stage.shapes, stage.masks, strict=True))
        if plan is not None:
            parts.sort(key=lambda p: [q.base for q in plan.parts].index(p[0][0]))
        total = ""
        for i, ((base, matrix), window, image, mask) in enumerate(parts):
            node = f"{stage.name}.matrix{i}"
            edge = names[base]
            if window != (1, 1) and image is not None:
                edge = self._pool(f"{node}.pool", edge, image, window, stage.path)
            operands: tuple[str, ...] = (edge, self._weight(f"{node}.weight", matrix))
            if not i:
                operands += (self._weight(f"{node}.bias", stage.bias),)
            attrs: dict[str, Any] = {"stage": stage.name, "base": base, "level": level}
            attrs |= self._packed(node, plan, i) if plan is not None else self._spread(mask, level)
            made = self._node(node, "linear", operands, (self.batch, stage.rows), attrs, stage.path)
            total = (
                made
                if not i
                else self._node(f"{node}.sum", "add", (total, made), (self.batch, stage.rows), {}, stage.path)
            )
        if stage.kind == "output":
            return total
        depth = depth_of(stage)
        outs = plan.layout.ciphertexts if plan is not None else stage.rows
        primes = level * self.split
        fit = stage.fit
        attrs = {
            "kind": stage.label,
            "radius": 1.0,
            "coefficients": list(stage.coefficients),
            "error": fit.error if fit is not None else 0.0,
            "range": fit.radius if fit is not None else 0.0,
            "outside": stage.outside,
            "level": level - 1,
            "depth": depth,
            "ciphertexts": outs,
            "estimate_ms": round(outs * activation_ms(depth, stage.coefficients, self.degree, primes), 1),
        }
        return self._node(stage.name, "polynomial", (total,), (self.batch, stage.rows), attrs, stage.path)

    def _pool(
        self, name: str, edge: str, image: tuple[int, int, int], window: tuple[int, int], path: str
    ) -> str:
        c, h, w = image
        shape = (self.batch, c, h // window[0], w // window[1])
        as_image = self._node(
            f"{name}.image", "reshape", (edge,), (self.batch, c, h, w), {"shape": [self.batch, c, h, w]}, path
        )
        attrs = {
            "kernel_size": list(window), "stride": list(window), "padding": [0, 0], "ceil_mode": False,
            "count_include_pad": True, "divisor_override": 1,
        }  # fmt: skip
        summed = self._node(name, "avg_pool2d", (as_image,), shape, attrs, path)
        flat = (self.batch, c * shape[2] * shape[3])
        return self._node(f"{name}.values", "reshape", (summed,), flat, {"shape": list(flat)}, path)

    def _packed(self, node: str, plan: StagePlan, i: int) -> dict[str, Any]:
        part = plan.parts[i]
        p, primes = part.plan, (plan.level + 1) * self.split
        whole = p.whole or p.source
        self._layout(f"{part.base}.layout", whole)
        if p.sums:
            self._layout(f"{node}.pooled", p.source)
        self._constant(f"{node}.rows", p.rows)
        pairs = [(ct, d) for ct, offsets in enumerate(p.offsets) for d in offsets]
        self._constant(f"{node}.offsets", np.array(pairs, dtype=np.int64).reshape(-1, 2))
        return {
            "stride": p.stride, "blocks": p.blocks, "babies": p.babies, "sums": [v for pair in p.sums for v in pair],
            "rotations": p.rotations, "products": p.products, "ciphertexts": whole.ciphertexts,
            "results": p.target.ciphertexts,
            "estimate_ms": round(p.estimate_ms(self.degree, primes), 1),
        }  # fmt: skip

    def _spread(self, mask: torch.Tensor, level: int) -> dict[str, Any]:
        entries = int(mask.sum())
        primes = (level + 1) * self.split
        return {
            "rotations": 0, "products": entries, "ciphertexts": mask.shape[1], "results": mask.shape[0],
            "estimate_ms": round(entries * product_ms(self.degree, primes), 1),
        }  # fmt: skip


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """An output structure with other edge names."""
    if isinstance(tree, dict):
        return {k: names.get(v, v) if k == "edge" else _renamed(v, names) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_renamed(v, names) for v in tree]
    return tree
