"""Whether a program's edges have the scales and rings that its kernels compute with; plain integers, no cryptography.

A program file comes from somebody else. Its edges say at how many fraction bits and in which ring a value is shared, and
kernels take that as it is said: a value read at another scale is another value, and one that is revealed before it was
cut, or that was cut at random, tells more than the declared output (R5). So every edge is held to what its node makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...graph.ir import Edge, Graph, Node, Visibility
from ...plan.spec import Step
from . import curves, windows
from .fast.indices import argmax_bits, index_bits
from .fast.lowering import CURVES, CUTS, PASSES_ON, PRODUCTS, WHOLE, exposed, product_scale, refusal

LEAST_PRECISION, MOST_PRECISION = 8, 20
"""Fraction bits. A product of two numbers carries twice as many: at 32, 3 · 4 = 12 · 2**64 is 0 in the 64-bit ring, and
above 20 too little is left for the whole part of real activations. Below 8 nothing of a model's accuracy is left."""


def check_rings(graph: Graph, steps: Iterable[Step], options: Mapping[str, Any]) -> str | None:
    """Why these edges cannot be those of a compiled program, or None. steps: with the planned kernels."""
    precision = int(options["precision_bits"])
    if not LEAST_PRECISION <= precision <= MOST_PRECISION:
        return f"{precision} fraction bits; programs have {LEAST_PRECISION} to {MOST_PRECISION}"
    return _Check(graph, options).run(steps)


class _Check:
    def __init__(self, graph: Graph, options: Mapping[str, Any]) -> None:
        self._graph = graph
        self._precision = int(options["precision_bits"])
        self._exposed = exposed(graph, options)
        self._raw: set[str] = set()
        self._factors = {n.inputs[-1] for n in graph.nodes if n.attrs.get("quantized")}

    def run(self, steps: Iterable[Step]) -> str | None:
        graph = self._graph
        for name in (*graph.inputs, *graph.weights, *graph.constants):
            if reason := self._plain(graph.edge(name)):
                return reason
        for step in steps:
            if step.node.outputs and (reason := self._step(step.node, step.kernel)):
                return f"{step.node.name}: {reason}"
        uncut = self._raw.intersection(graph.outputs)
        return f"the output {min(uncut)} is a product that was never cut" if uncut else None

    def _step(self, node: Node, kernel: str) -> str | None:
        out = self._graph.edge(node.outputs[0])
        operands = [self._graph.edge(name) for name in node.inputs]
        raw = [e for e in operands if e.name in self._raw]
        if out.visibility is not Visibility.SHARED:
            return self._plain(out)
        if node.op in PRODUCTS and ".window." in kernel:
            if raw:
                return "a product of a value that was not cut"
            return self._make_raw(out, product_scale(node, operands))
        if raw and node.op in PASSES_ON:
            narrow = [e.name for e in raw if e.ring_bits < out.ring_bits]
            if narrow:
                return f"{narrow[0]} is known in a smaller ring than {out.name}"
            return self._make_raw(out, max(e.scale for e in operands))
        for operand in raw:
            if reason := self._takes_raw(node, kernel, operand):
                return reason
        if node.op == "rescale" and not isinstance(node.attrs.get("exact"), bool):
            return "a cut that is neither exact nor not"
        extended = node.op == "rescale" and raw and out.scale == raw[0].scale and out.scale > self._precision
        if extended and out.ring_bits == 64 and out.name not in self._exposed:
            return self._make_raw(out, out.scale)
        if out.name in self._exposed and raw and not (node.op == "rescale" and node.attrs["exact"]):
            if node.op in ("rescale", *CUTS):
                return "a cut that outputs show is not exact"
        return self._plain(out)

    def _takes_raw(self, node: Node, kernel: str, operand: Edge) -> str | None:
        """Whether the kernel may take an operand that was not cut."""
        if kernel == f"{node.op}.window" and node.op in ("rescale", *CUTS):
            return None
        if kernel == f"{node.op}.window" and node.op in CURVES:
            return curves.refusal(node, operand, self._precision)
        if kernel == f"{node.op}.window" and node.op in WHOLE:
            inside = operand.name in node.inputs[: WHOLE[node.op]]
            edges = [self._graph.edge(e) for e in node.inputs]
            return refusal(self._graph, node, edges) if inside else f"{operand.name} was not cut"
        if kernel == "argmax.window" and not index_bits(operand, node.attrs["dim"]):
            enough = operand.ring_bits >= argmax_bits(operand, node.attrs["dim"])
            return None if enough else "its operand's ring is too small to compare in"
        return f"kernel {kernel} takes no value that was not cut"

    def _make_raw(self, edge: Edge, scale: int) -> str | None:
        self._raw.add(edge.name)
        if not edge.dtype.startswith("float") or edge.scale != scale or scale < self._precision:
            return f"{edge.name} does not have the {scale} fraction bits of its factors"
        return self._ring(edge)

    def _plain(self, edge: Edge) -> str | None:
        """An edge with the program's fraction bits, in the whole ring but where an output is reduced."""
        if edge.name not in self._factors:
            expected = self._precision if edge.dtype.startswith("float") else 0
            if edge.scale != expected:
                return f"{edge.name} has {edge.scale} fraction bits in place of {expected}"
        if edge.ring_bits == 64:
            return None
        if edge.visibility is not Visibility.SHARED or edge.name not in self._graph.outputs:
            return f"{edge.name} has a ring of {edge.ring_bits} bits in place of 64"
        return self._ring(edge)

    @staticmethod
    def _ring(edge: Edge) -> str | None:
        if edge.bound is None:
            return f"{edge.name} has no bound"
        if edge.ring_bits % 8 or not windows.fits(edge.bound, edge.scale):
            return f"{edge.name} has a ring of {edge.ring_bits} bits, which is no window for its bound"
        if edge.ring_bits < windows.width_of(edge.bound, edge.scale):
            return f"{edge.name} has a ring of {edge.ring_bits} bits, which is too small for its bound"
        return None
