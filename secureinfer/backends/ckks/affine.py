"""Graph → stages: everything linear between two activations becomes one matrix, whatever operators it was made of.

A value that depends on the inputs is kept as an affine map of *bases*: the inputs, and the results of the activations before
it. A linear operator is applied to all columns of the map at once; batch norms, poolings, residual additions and reshapes
thus cost nothing when the model runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...errors import UnsupportedModelError, UnsupportedNode
from ...graph.ir import Graph, Node
from ...graph.ops import evaluate_op
from ...graph.polynomials import KINDS, MOST_DEGREE, SQUARE, Fit, choose, evaluate
from ...graph.ranges import quarter_octave
from .pooling import find_pooling
from .stages import INPUTS, Stage, Stages

LINEAR = frozenset((
    "add", "sub", "neg", "mul", "div", "reshape", "permute", "expand", "slice", "select", "cat", "pad", "flip", "cumsum",
    "sum", "mean", "linear", "matmul", "convolution", "avg_pool2d", "index_select", "rescale",
))  # fmt: skip
"""Operators that are linear in each operand that depends on the inputs (mul, matmul and div: in one of them)."""
BILINEAR = frozenset(("mul", "matmul", "div", "linear", "convolution"))
MOST_ELEMENTS = 1 << 27
MOST_VALUES = 1 << 14
"""Of a base: the map of its values onto themselves, whose square this is, is where every matrix on it begins."""
CHUNK = 1 << 23
ROUNDING = 1e-12
"""Of an entry, relative to the greatest of its matrix: what is less is what was added and taken away again."""

FEWER = "Take smaller images, fewer channels or fewer features, or backend='mpc'"

HINTS = {
    "max_pool2d": "CKKS has no comparison; use average pooling",
    "amax": "CKKS has no comparison", "argmax": "CKKS has no comparison; take the greatest of the outputs after decryption",
    "softmax": "leave it out of the model and apply it to the decrypted outputs",
    "layer_norm": "CKKS has no division; use batch norm, which folds into the layer before it",
    "embedding": "look-ups of secret ids need MPC: backend='mpc'",
    "clamp": "CKKS has no comparison",
}  # fmt: skip


@dataclass(frozen=True)
class Affine:
    """columns: [1 + all values of the bases in their order, *shape], float64; the first is the constant part."""

    bases: tuple[str, ...]
    columns: torch.Tensor


def to_stages(
    graph: Graph,
    known: Mapping[str, torch.Tensor],
    samples: torch.Tensor,
    *,
    error: float,
    greatest_degree: int,
) -> Stages:
    """graph: of one sample. known: weights and constants. samples: [s, values of all inputs], what ranges are taken from.

    error, greatest_degree: of the polynomials that stand for activations.
    Raises UnsupportedModelError with every node that CKKS cannot compute.
    """
    return _Stager(graph, known, samples, error, greatest_degree).run()


class _Stager:
    def __init__(
        self,
        graph: Graph,
        known: Mapping[str, torch.Tensor],
        samples: torch.Tensor,
        error: float,
        greatest_degree: int,
    ) -> None:
        self.graph = graph
        self.error, self.greatest_degree = error, greatest_degree
        self.values: dict[str, torch.Tensor] = {
            n: (t.double() if t.is_floating_point() else t) for n, t in known.items()
        }
        # The same maps with other weights, drawn at random: where they have an entry, and which of their columns are
        # equal, is what layouts may depend on. They are public, and say nothing of the weights (rule R6).
        self.generator = torch.Generator().manual_seed(0)
        self.private = set(graph.weights)
        self.others: dict[str, torch.Tensor] = {
            n: self._other(t) if n in self.private else self.values[n] for n, t in known.items()
        }
        self.affine: dict[str, Affine] = {}
        self.generic: dict[str, Affine] = {}
        self.base_values: dict[str, torch.Tensor] = {INPUTS: samples}
        self.sizes: dict[str, int] = {INPUTS: samples.shape[1]}
        self.stages: list[Stage] = []
        self.problems: list[UnsupportedNode] = []
        self.poisoned: set[str] = set()

    def run(self) -> Stages:
        total, at = self.sizes[INPUTS], 0
        if (wide := _too_many(total)) is not None:
            raise UnsupportedModelError([UnsupportedNode(self.graph.inputs[0], "input", "", wide)])
        for name in self.graph.inputs:
            edge = self.graph.edge(name)
            columns = torch.zeros(1 + total, edge.numel, dtype=torch.float64)
            columns[1 + at : 1 + at + edge.numel] = torch.eye(edge.numel, dtype=torch.float64)
            self.affine[name] = self.generic[name] = Affine(
                (INPUTS,), columns.reshape(1 + total, *edge.shape)
            )
            at += edge.numel
        for node in self.graph.nodes:
            self._node(node)
        if self.problems:
            raise UnsupportedModelError(self.problems)
        return self._finish()

    # --- nodes ---

    def _node(self, node: Node) -> None:
        if any(e in self.poisoned for e in node.inputs):
            self.poisoned.add(node.outputs[0])
            # What no operand would make computable; the rest may be well.
            if "reason" in node.attrs or node.op in HINTS:
                self._refuse(node, str(node.attrs.get("reason") or HINTS[node.op]))
            return
        secret = [e for e in node.inputs if e in self.affine]
        try:
            reason = self._known(node) if not secret else self._dependent(node, secret)
        except Exception as error:
            reason = f"it could not be folded ({type(error).__name__}: {error})"
        if reason is not None:
            self._refuse(node, reason)
            self.poisoned.add(node.outputs[0])

    def _refuse(self, node: Node, reason: str) -> None:
        self.problems.append(UnsupportedNode(node.name, node.operator or node.op, node.path, reason))

    def _known(self, node: Node) -> str | None:
        if "reason" in node.attrs:
            return str(node.attrs["reason"])
        out = node.outputs[0]
        self.values[out] = evaluate_op(
            node.op, node.attrs, [self.values[e] for e in node.inputs], torch.float64
        )
        self.others[out] = self.values[out]
        if not self.private.isdisjoint(node.inputs):
            self.private.add(out)
            self.others[out] = self._other(self.values[out])
            if node.op in LINEAR:  # where it is zero whatever the weights are is kept
                given = [self.others[e] for e in node.inputs]
                self.others[out] = evaluate_op(node.op, node.attrs, given, torch.float64)
        return None

    def _other(self, weight: torch.Tensor) -> torch.Tensor:
        """Random values, none of them zero, in the shape of a weight."""
        if weight.is_floating_point():
            return torch.rand(weight.shape, generator=self.generator, dtype=torch.float64) + 0.5
        if weight.dtype == torch.int8:
            return torch.randint(1, 127, weight.shape, generator=self.generator, dtype=torch.int8)
        return weight

    def _dependent(self, node: Node, secret: list[str]) -> str | None:
        if "reason" in node.attrs:
            return str(node.attrs["reason"])
        op = node.op
        n = self.graph.edge(node.outputs[0]).numel
        ends = self._ends(node, secret)
        if ends is not None:
            return _too_many(n) or ends(node)
        if op not in LINEAR or (op == "div" and node.inputs[1] in self.affine):
            return HINTS.get(op, "CKKS computes sums and products alone, and no kernel approximates this")
        if op in BILINEAR and len(secret) > 1:
            return "a product of two secret values, element by element, is all that CKKS does with two"
        wide = _too_wide(n, sum(self.sizes[b] for b in self._bases(secret)))
        if wide is not None:
            return wide
        found = self._apply(node, self.affine, self.values)
        generic = self._apply(node, self.generic, self.others)
        sizes = generic.columns[1:].abs()
        rounded = sizes <= ROUNDING * sizes.amax()
        for columns in (found.columns, generic.columns):
            columns[1:].masked_fill_(rounded, 0.0)
        if bool(generic.columns[1:].any()):
            self.affine[node.outputs[0]], self.generic[node.outputs[0]] = found, generic
        else:
            self._constant(node, found.columns[0])
        return None

    def _ends(self, node: Node, secret: Sequence[str]) -> Callable[[Node], str | None] | None:
        """What makes a stage of the node, or None if it is linear or nothing that CKKS computes."""
        if node.op in ("polynomial", "pow"):
            return self._polynomial if node.op == "polynomial" else self._power
        if node.op in KINDS or (node.op == "gelu" and node.attrs.get("approximate") == "tanh"):
            return self._activation
        return self._product if node.op == "mul" and len(secret) == 2 else None

    def _constant(self, node: Node, value: torch.Tensor) -> None:
        """What turned out not to depend on the inputs."""
        out = node.outputs[0]
        self.private.add(out)
        self.values[out], self.others[out] = value, self._other(value)

    def _bases(self, edges: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b for e in edges for b in self.affine[e].bases))

    def _aligned(self, table: Mapping[str, Affine], edge: str, bases: tuple[str, ...]) -> torch.Tensor:
        """The columns of an edge over more bases than its own."""
        affine = table[edge]
        if affine.bases == bases:
            return affine.columns
        shape = affine.columns.shape[1:]
        columns = torch.zeros(1 + sum(self.sizes[b] for b in bases), *shape, dtype=torch.float64)
        columns[0] = affine.columns[0]
        starts, at = {}, 1
        for base in bases:
            starts[base] = at
            at += self.sizes[base]
        at = 1
        for base in affine.bases:
            n = self.sizes[base]
            columns[starts[base] : starts[base] + n] = affine.columns[at : at + n]
            at += n
        return columns

    def _apply(self, node: Node, table: Mapping[str, Affine], values: Mapping[str, torch.Tensor]) -> Affine:
        secret = [e for e in node.inputs if e in self.affine]
        bases = self._bases(secret)
        columns = {e: self._aligned(table, e, bases) for e in secret}
        count = 1 + sum(self.sizes[b] for b in bases)

        def one(*given: torch.Tensor) -> torch.Tensor:
            at = dict(zip(columns, given, strict=True))
            operands = [at[e] if e in at else values[e] for e in node.inputs]
            return evaluate_op(node.op, node.attrs, operands, torch.float64)

        constant = one(*[c[0] for c in columns.values()])
        zero = one(*[torch.zeros_like(c[0]) for c in columns.values()])
        step = max(1, CHUNK // max(1, constant.numel()))
        parts = [constant[None]]
        mapped = torch.vmap(one)
        for start in range(1, count, step):
            parts.append(mapped(*[c[start : start + step] for c in columns.values()]) - zero)
        return Affine(bases, torch.cat(parts))

    # --- what ends a stage ---

    def _matrix(self, edge: str) -> tuple[list[tuple[str, torch.Tensor]], torch.Tensor, list[torch.Tensor]]:
        """By base the matrix and the generic one, and the constant part."""
        affine = self.affine[edge]
        flat = affine.columns.reshape(affine.columns.shape[0], -1)
        other = self.generic[edge].columns.reshape(flat.shape)
        parts, generic, at = [], [], 1
        for base in affine.bases:
            n = self.sizes[base]
            if bool((other[at : at + n] != 0).any()):
                parts.append((base, flat[at : at + n].T.contiguous()))
                generic.append(other[at : at + n].T.contiguous())
            at += n
        return parts, flat[0].clone(), generic

    def _evaluate(self, parts: Sequence[tuple[str, torch.Tensor]], bias: torch.Tensor) -> torch.Tensor:
        """[samples, rows]."""
        total = bias[None].expand(self.base_values[INPUTS].shape[0], -1)
        for base, matrix in parts:
            total = total + self.base_values[base] @ matrix.T
        return total

    def _image(self, edge: str) -> tuple[int, int, int] | None:
        shape = self.graph.edge(edge).shape
        return (
            (shape[-3], shape[-2], shape[-1]) if len(shape) in (3, 4) and math.prod(shape[:-3]) == 1 else None
        )

    def _input_image(self) -> tuple[int, int, int] | None:
        return self._image(self.graph.inputs[0]) if len(self.graph.inputs) == 1 else None

    def _new_base(self, node: Node, stage: Stage, result: torch.Tensor, scale: float, offset: float) -> None:
        """The node's output is scale * base + offset. result: [samples, rows] of the base."""
        name, out, n = stage.name, node.outputs[0], result.shape[1]
        self._base(stage, result)
        shape = self.graph.edge(out).shape
        columns = torch.cat(
            [torch.full((1, n), offset, dtype=torch.float64), scale * torch.eye(n, dtype=torch.float64)]
        )
        self.affine[out] = Affine((name,), columns.reshape(1 + n, *shape))
        self.generic[out] = Affine((name,), (columns != 0).double().reshape(1 + n, *shape))

    def _base(self, stage: Stage, result: torch.Tensor) -> None:
        self.stages.append(stage)
        self.base_values[stage.name], self.sizes[stage.name] = result, result.shape[1]

    def _stage(
        self, node: Node, coefficients: Sequence[float], *, label: str = "", fit: Fit | None = None
    ) -> None:
        """A polynomial sum c_i (x / radius)^i of the node's operand; radius 1 where there is no fit."""
        parts, bias, generic = self._matrix(node.inputs[0])
        radius = fit.radius if fit is not None else 1.0
        c = [*coefficients]
        while len(c) > 1 and c[-1] == 0:
            c.pop()
        if len(c) <= 2:
            self._linear(node, c, radius)
            return
        outside = int((self._evaluate(parts, bias).abs() > radius).sum()) if fit is not None else 0
        if len(c) == 3:
            # c2 t^2 + c1 t + c0 = ±(sqrt|c2| (t + c1 / 2 c2))^2 + rest: one square, the rest goes into the matrices.
            root = math.sqrt(abs(c[2]))
            parts = [(b, root / radius * m) for b, m in parts]
            bias = root * (bias / radius + c[1] / (2 * c[2]))
            middle, reach = root * c[1] / (2 * c[2]), root
            given: tuple[float, ...] = SQUARE
            scale, offset = math.copysign(1.0, c[2]), c[0] - c[1] ** 2 / (4 * c[2])
        else:
            parts = [(b, m / radius) for b, m in parts]
            bias = bias / radius
            scale, offset = max(abs(v) for v in c[1:]), c[0]
            middle, reach = 0.0, 1.0
            given = (0.0, *(v / scale for v in c[1:]))
        if fit is not None:
            label = f"{fit.kind}, degree {len(coefficients) - 1}"
        stage = Stage(
            node.name, "polynomial", parts, bias, node.path, given, label, fit, self._image(node.inputs[0]),
            self._input_image(), generic, outside=outside, middle=middle, reach=reach if fit is not None else math.inf,
        )  # fmt: skip
        result = evaluate(given, 1.0, self._evaluate(parts, bias))
        self._new_base(node, stage, result, scale, offset)

    def _linear(self, node: Node, c: list[float], radius: float) -> None:
        """A polynomial of degree one is no stage of its own."""
        affine = self.affine[node.inputs[0]]
        if len(c) < 2:
            self._constant(node, torch.full(affine.columns.shape[1:], c[0], dtype=torch.float64))
            return
        columns = c[1] / radius * affine.columns
        columns[0] += c[0]
        self.affine[node.outputs[0]] = Affine(affine.bases, columns)
        other = self._other(torch.ones(1))  # the slope is of the weights and the calibration
        self.generic[node.outputs[0]] = Affine(affine.bases, other * self.generic[node.inputs[0]].columns)

    def _polynomial(self, node: Node) -> str | None:
        a = node.attrs
        fit = Fit(str(a["kind"]), float(a["radius"]), tuple(map(float, a["coefficients"])), float(a["error"]))
        if not any(fit.coefficients[1:]):
            return "a polynomial without a variable part"
        self._stage(node, fit.coefficients, fit=fit)
        return None

    def _activation(self, node: Node) -> str | None:
        kind = "gelu_tanh" if node.op == "gelu" and node.attrs.get("approximate") == "tanh" else node.op
        parts, bias, _ = self._matrix(node.inputs[0])
        seen = float(self._evaluate(parts, bias).abs().max())
        fit = choose(kind, _radius(seen), self.error, self.greatest_degree)
        self._stage(node, fit.coefficients, fit=fit)
        return None

    def _power(self, node: Node) -> str | None:
        exponent = node.attrs["exponent"]
        if float(exponent) != int(exponent) or not 1 <= int(exponent) <= MOST_DEGREE:
            return f"a power of {exponent}: CKKS takes whole exponents from 1 to {MOST_DEGREE}"
        n = int(exponent)
        if n == 1:
            self.affine[node.outputs[0]] = self.affine[node.inputs[0]]
            self.generic[node.outputs[0]] = self.generic[node.inputs[0]]
            return None
        self._stage(node, (*[0.0] * n, 1.0), label=f"power {n}")
        return None

    def _product(self, node: Node) -> str | None:
        """a · b = ((a + b) / 2)² - ((a - b) / 2)²: a product is one square of twice the values, at the same level."""
        a, b = node.inputs
        if a == b:
            self._stage(node, SQUARE, label="square")
            return None
        out, halves = node.outputs[0], f"{node.name}.halves"
        bases, shape = self._bases((a, b)), self.graph.edge(out).shape
        for table in (self.affine, self.generic):
            x, y = (_broadcast(self._aligned(table, e, bases), shape) for e in (a, b))
            table[halves] = Affine(bases, torch.stack([x + y, x - y], 1) / 2)
        parts, bias, generic = self._matrix(halves)
        n, image = len(bias) // 2, self._image(out)
        pair = None if image is None else (2 * image[0], *image[1:])
        stage = Stage(
            node.name, "polynomial", parts, bias, node.path, SQUARE, "product", None, pair, self._input_image(),
            generic,
        )  # fmt: skip
        self._base(stage, self._evaluate(parts, bias) ** 2)
        one = torch.eye(n, dtype=torch.float64)
        columns = torch.cat([torch.zeros(1, n, dtype=torch.float64), one, -one]).reshape(1 + 2 * n, *shape)
        self.affine[out] = self.generic[out] = Affine((stage.name,), columns)
        return None

    def _finish(self) -> Stages:
        outputs, at = [], 0
        parts: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        biases = []
        flats = []
        for edge in self.graph.outputs:
            if edge not in self.affine:
                raise UnsupportedModelError(
                    [UnsupportedNode(edge, "output", "", "an output that does not depend on the inputs")]
                )
            flats.append((edge, *self._matrix(edge)))
        total = sum(len(bias) for _, _, bias, _ in flats)
        for edge, given, bias, generic in flats:
            for (base, matrix), other in zip(given, generic, strict=True):
                for table, rows in ((parts, matrix), (others, other)):
                    whole = table.setdefault(base, torch.zeros(total, rows.shape[1], dtype=torch.float64))
                    whole[at : at + len(bias)] = rows
            biases.append(bias)
            outputs.append((edge, at, len(bias)))
            at += len(bias)
        last = Stage(
            "outputs", "output", list(parts.items()), torch.cat(biases), generic=list(others.values())
        )
        self.stages.append(last)
        images = {stage.name: stage.image for stage in self.stages}
        for stage in self.stages:
            find_pooling(stage, images)
        return Stages(self.stages, self.sizes, outputs)


def _too_many(values: int) -> str | None:
    if values <= MOST_VALUES:
        return None
    return f"too wide for CKKS: {values:,} values where at most {MOST_VALUES:,} fit. {FEWER}"


def _too_wide(values: int, columns: int) -> str | None:
    if values * columns <= MOST_ELEMENTS:
        return None
    return (
        f"too wide for CKKS: {values:,} values that each may depend on {columns:,}; at most {MOST_ELEMENTS:,} pairs fit. "
        + FEWER
    )


def _broadcast(columns: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """[columns, *shape] of columns whose own shape goes into that one."""
    own = columns.shape[1:]
    return columns.reshape(len(columns), *[1] * (len(shape) - len(own)), *own).expand(-1, *shape)


MARGIN = 1.25


def _radius(seen: float) -> float:
    """With a margin, rounded: the manifest shows no more of what calibration saw (rule R6)."""
    return quarter_octave(max(seen * MARGIN, 2.0**-10))
