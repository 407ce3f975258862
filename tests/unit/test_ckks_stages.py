"""A model's graph as stages: everything linear is one matrix, activations are polynomials, and what cannot be is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secureinfer as si
from secureinfer.backends.ckks.affine import INPUTS, Stages, depth_of, run_stages, to_stages
from secureinfer.backends.ckks.schedule import Schedule, levels_of, make_schedule
from secureinfer.backends.ckks.server import Matrix, Polynomial
from secureinfer.compression.activations import PolynomialActivation
from secureinfer.errors import UnsupportedModelError
from secureinfer.graph.export import export_graph
from secureinfer.graph.ir import Graph
from secureinfer.graph.ops import run_reference
from secureinfer.graph.polynomials import fit

from .clear_ckks import ClearContext, arithmetic, values


class Staged:
    """The stages of a model for inputs in -1..1, and its graph with each activation's polynomial in its place."""

    def __init__(
        self,
        model: nn.Module,
        *shapes: tuple[int, ...],
        error: float = 1e-4,
        degree: int = 7,
        wanted: Sequence[torch.Tensor] = (),
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        inputs = [*wanted] or [torch.rand(s, generator=generator) * 2 - 1 for s in shapes]
        graph, weights, constants = export_graph(
            model.eval(), tuple(inputs), {}, keep_unsupported=True, keep_polynomials=True
        )
        self.graph, self.known = graph, {**weights, **constants}
        self.sizes = [graph.edge(n).numel for n in graph.inputs]
        samples = torch.rand(6, sum(self.sizes), generator=generator, dtype=torch.float64) * 2 - 1
        self.samples = samples
        self.stages = to_stages(graph, self.known, samples, error=error, greatest_degree=degree)

    def reference(self) -> torch.Tensor:
        """[samples, all outputs], of the graph node by node."""
        graph = with_polynomials(self.graph, self.stages)
        rows = []
        for sample in self.samples:
            given = dict(zip(graph.inputs, sample.split(self.sizes), strict=True))
            shaped = {n: t.reshape(graph.edge(n).shape) for n, t in given.items()}
            out = run_reference(graph, self.known, shaped)
            rows.append(torch.cat([out[n].reshape(-1) for n, _, _ in self.stages.outputs]))
        return torch.stack(rows)

    @property
    def kinds(self) -> list[str]:
        return [s.label or s.kind for s in self.stages.stages]


def with_polynomials(graph: Graph, stages: Stages) -> Graph:
    fits = {s.name: s.fit for s in stages.stages if s.fit is not None}
    nodes = tuple(
        dataclasses.replace(n, op="polynomial", attrs=found.attrs()) if (found := fits.get(n.name)) else n
        for n in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes)


def agree(staged: Staged) -> float:
    """Greatest difference of the stages and the graph, relative."""
    came, _ = run_stages(staged.stages, staged.samples)
    wanted = staged.reference()
    assert came.shape == wanted.shape
    return float((came - wanted).abs().max() / wanted.abs().max())


# What models there are.


class Of(nn.Module):
    """A function of some layers, as a model."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *x: torch.Tensor) -> Any:
        return self._function(self, *x)


def trained_norm(n: int, kind: type = nn.BatchNorm2d) -> nn.Module:
    norm = kind(n)
    norm.running_mean, norm.running_var = torch.randn(n) * 0.1, torch.rand(n) + 0.5
    norm.weight.data, norm.bias.data = torch.rand(n) + 0.5, torch.randn(n) * 0.1
    return norm


def square() -> nn.Module:
    return Of(lambda s, x: x * x)


def models() -> dict[str, tuple[nn.Module, list[tuple[int, ...]], int]]:
    """Name -> model, input shapes, and how many stages it is to become, the output included."""
    lin = nn.Linear
    return {
        "linear": (lin(6, 3), [(1, 6)], 1),
        "two linear layers": (nn.Sequential(lin(6, 5), lin(5, 3)), [(1, 6)], 1),
        "mlp": (nn.Sequential(lin(6, 8), nn.ReLU(), lin(8, 5), nn.Tanh(), lin(5, 3)), [(1, 6)], 3),
        "ends in an activation": (nn.Sequential(lin(6, 3), nn.Sigmoid()), [(1, 6)], 2),
        "conv, norm, pool, conv": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1), trained_norm(4), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 3, stride=2),
                nn.SiLU(), nn.Flatten(), lin(3, 2),
            ), [(1, 2, 6, 6)], 3,
        ),
        "conv with groups and dilation": (
            nn.Sequential(nn.Conv2d(4, 4, 3, groups=2, dilation=2), square(), nn.Conv2d(4, 2, 1)), [(1, 4, 6, 6)], 2,
        ),
        "conv1d and its norm": (
            nn.Sequential(nn.Conv1d(2, 3, 3), trained_norm(3, nn.BatchNorm1d), square(), nn.Flatten(), lin(18, 2)),
            [(1, 2, 8)], 2,
        ),
        "residual": (
            Of(lambda s, x: s.b(F.gelu(s.a(x)) + x), a=lin(6, 6), b=lin(6, 3)), [(1, 6)], 2,
        ),
        "residual around two": (
            Of(lambda s, x: s.c(F.relu(s.b(F.relu(s.a(x)))) + s.a(x)), a=lin(6, 6), b=lin(6, 6), c=lin(6, 2)),
            [(1, 6)], 3,
        ),
        "functional": (
            Of(lambda s, x: torch.sigmoid(F.silu(F.relu(s.a(x)) @ s.b.weight.T + 1) * 0.5), a=lin(6, 5), b=lin(5, 4)),
            [(1, 6)], 4,
        ),
        "gelu, both forms": (
            nn.Sequential(lin(5, 4), nn.GELU(), lin(4, 4), nn.GELU(approximate="tanh"), lin(4, 2)), [(1, 5)], 3,
        ),
        "x * x": (Of(lambda s, x: s.a(x) * s.a(x), a=lin(4, 4)), [(1, 4)], 2),
        "x ** 2": (Of(lambda s, x: s.a(x) ** 2 + 1, a=lin(4, 4)), [(1, 4)], 2),
        "x ** 3": (Of(lambda s, x: 2 - s.a(x) ** 3, a=lin(4, 4)), [(1, 4)], 2),
        "x ** 1": (Of(lambda s, x: s.a(x) ** 1, a=lin(4, 4)), [(1, 4)], 1),
        "square of a square": (Of(lambda s, x: (s.a(x) ** 2 - 1) ** 2, a=lin(4, 4)), [(1, 4)], 3),
        "nothing but an input": (Of(lambda s, x: x), [(1, 4)], 1),
        "a square of the input": (Of(lambda s, x: x * x), [(1, 4)], 2),
        "tuple": (Of(lambda s, x: (s.a(x), s.b(F.relu(s.a(x)))), a=lin(4, 3), b=lin(3, 2)), [(1, 4)], 2),
        "dict": (
            Of(lambda s, x: {"logits": s.b(s.a(x) ** 2), "hidden": s.a(x)}, a=lin(4, 3), b=lin(3, 2)), [(1, 4)], 2,
        ),
        "concatenated": (
            Of(lambda s, x: torch.cat([F.relu(s.a(x)), s.b(x), x], 1), a=lin(4, 3), b=lin(4, 2)), [(1, 4)], 2,
        ),
        "two inputs": (Of(lambda s, x, y: s.c(F.relu(s.a(x) + s.b(y))), a=lin(4, 3), b=lin(5, 3), c=lin(3, 2)),
            [(1, 4), (1, 5)], 2),
        "three inputs side by side": (
            Of(lambda s, x, y, z: s.a(torch.cat([x, y, z], 1)) ** 2, a=lin(9, 3)), [(1, 4), (1, 3), (1, 2)], 2,
        ),
        "flatten, view, permute, chunk": (
            Of(lambda s, x: torch.cat([t.permute(0, 2, 1).reshape(1, -1) * w
                for w, t in zip((1.0, -2.0), s.a(x.flatten(1)).view(1, 4, 3).chunk(2, 1), strict=True)], 1) ** 2,
                a=lin(8, 12)),
            [(1, 2, 4)], 2,
        ),
        "pad and mean": (
            Of(lambda s, x: F.pad(s.a(x), (1, 2, 0, 1)).mean((2, 3)) ** 2 + x.sum(), a=nn.Conv2d(1, 3, 2)), [(1, 1, 4, 4)], 2,
        ),
        "slices, flips and sums": (
            Of(lambda s, x: (s.a(x)[:, 1:4].flip(1) - x[:, ::2].cumsum(1)) ** 2 / 3, a=lin(6, 5)), [(1, 6)], 2,
        ),
        "select and stack": (
            Of(lambda s, x: torch.stack([x[:, 0], -x[:, 2]], 1) @ s.a.weight.T, a=lin(2, 3)), [(1, 4)], 1,
        ),
        "constants": (
            Of(lambda s, x: s.a(x) * torch.arange(3.0) + torch.ones(3).softmax(0) * s.a.bias.exp(), a=lin(4, 3)), [(1, 4)], 1,
        ),
        "a scalar times a vector": (Of(lambda s, x: s.a(x).expand(1, 5) ** 2, a=lin(4, 1)), [(1, 4)], 2),
        "polynomials of its own": (
            nn.Sequential(lin(4, 4), PolynomialActivation(fit("relu", 2.0, 4)), lin(4, 4),
                PolynomialActivation(fit("tanh", 2.0, 5)), lin(4, 2)), [(1, 4)], 3,
        ),
        "one dimension": (Of(lambda s, x: s.a(x) ** 2, a=lin(4, 3)), [(4,)], 2),
        "a scalar out": (Of(lambda s, x: (s.a(x) ** 2).sum(), a=lin(4, 3)), [(1, 4)], 2),
        "adaptive pooling": (
            nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), lin(2, 2)),
            [(1, 1, 4, 4)], 2,
        ),
        "pooling that overlaps": (
            nn.Sequential(nn.Conv2d(1, 2, 3), square(), nn.AvgPool2d(3, 1, 1), nn.Conv2d(2, 1, 2)), [(1, 1, 6, 6)], 2,
        ),
        "x * x * x": (Of(lambda s, x: s.a(x) * s.a(x) * s.a(x), a=lin(4, 4)), [(1, 4)], 3),
        "gates": (Of(lambda s, x: s.c(F.silu(s.a(x)) * s.b(x)), a=lin(4, 5), b=lin(4, 5), c=lin(5, 2)), [(1, 4)], 3),
        "channels weighed by what is in them": (
            Of(lambda s, x: (s.a(x) * torch.sigmoid(x.mean((2, 3), keepdim=True))).sum((2, 3)), a=nn.Conv2d(2, 2, 3)),
            [(1, 2, 4, 4)], 3,
        ),
        "a sum of products": (Of(lambda s, x, y: (s.a(x) * y[:, :3]).sum(1, keepdim=True) * x, a=lin(4, 3)),
            [(1, 4), (1, 5)], 3),
        "what takes itself away": (Of(lambda s, x: s.a(x) - x + torch.tanh(x / 50) - x / 50, a=lin(4, 4)), [(1, 4)], 1),
        "far apart in size": (Of(lambda s, x: (torch.cat([x * 1e-10, s.a(x)], 1)[:, :4] * 1e10) ** 2, a=lin(4, 4)),
            [(1, 4)], 2),
        "nothing of it": (Of(lambda s, x: s.a(F.relu(x * 0 + 0.5)) + x, a=lin(4, 4)), [(1, 4)], 1),
        "dropout": (nn.Sequential(lin(4, 4), nn.Dropout(), nn.ReLU(), lin(4, 2)), [(1, 4)], 2),
    }  # fmt: skip


MODELS = tuple(models())


@pytest.fixture(scope="module")
def staged() -> Callable[[str], Staged]:
    known: dict[str, Staged] = {}

    def of(name: str) -> Staged:
        if name not in known:
            torch.manual_seed(0)
            model, shapes, _ = models()[name]
            known[name] = Staged(model, *shapes)
        return known[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_the_graph_with_polynomials_in_it(name: str, staged: Callable[[str], Staged]) -> None:
    found = staged(name)
    lines = 1e-6 if name == "what takes itself away" else 0.0  # the fit of an activation that became a line
    assert agree(found) < 1e-9 + lines
    assert len(found.stages.stages) == models()[name][2]
    assert found.stages.stages[-1].kind == "output"


def run_schedule(
    schedule: Schedule, stages: Stages, x: torch.Tensor, slots: int
) -> tuple[torch.Tensor, ClearContext]:
    """The outputs as the model owner computes them, with keys for the schedule's rotations alone."""
    context = ClearContext(slots, schedule.levels)
    a, scale = arithmetic(context, schedule.steps()), context.parameters.scale
    held = {INPUTS: [context.encrypted(v) for v in schedule.inputs.pack(x.numpy())]}
    scales = {INPUTS: scale}
    for stage, plan in zip(stages.stages, schedule.stages, strict=True):
        known = {part.base: part.plan for part in plan.parts}
        total: list[Any] = []
        for i, (base, matrix) in enumerate(stage.parts):
            bias = stage.bias.numpy() if not i else None
            work = Matrix(
                context,
                known[base],
                matrix.numpy(),
                bias,
                plan.level,
                scale,
                scales[base],  # type: ignore[arg-type]
            )
            out = work.apply(a, held[base])
            total = [a.add(*pair) for pair in zip(total, out, strict=True)] if i else out
        assert {c.level for c in total} == {plan.level - 1}
        if stage.kind != "output":
            polynomial = Polynomial(plan.coefficients, plan.depth)
            scales[stage.name] = polynomial.result_scale(context, plan.level - 1, scale)  # type: ignore[arg-type]
            total = polynomial.apply(a, total)
            assert {c.level for c in total} == {plan.result_level}
        held[stage.name] = total
    assert {c.level for c in total} == {0}
    return torch.from_numpy(schedule.outputs.unpack(values(total))), context


@pytest.mark.parametrize("slots", [64, 256])
@pytest.mark.parametrize("name", MODELS)
def test_a_schedule_computes_its_stages(name: str, slots: int, staged: Callable[[str], Staged]) -> None:
    found = staged(name)
    schedule = make_schedule(found.stages, 2 * slots, 1)
    wanted, _ = run_stages(found.stages, found.samples)
    levels, _ = levels_of(found.stages)
    assert schedule.levels == levels
    for x, row in list(zip(found.samples, wanted, strict=True))[:2]:
        came, context = run_schedule(schedule, found.stages, x, slots)
        assert float((came - row).abs().max()) < 1e-9 * float(1 + row.abs().max())
    plans = [p.plan for s in schedule.stages for p in s.parts]
    calls = context.evaluator.calls
    assert calls["rotate"] <= sum(p.rotations for p in plans)
    assert calls["multiply_plain"] <= sum(p.products for p in plans) + sum(
        len(s.coefficients) * s.layout.ciphertexts for s in schedule.stages if s.depth > 1
    )


# The plan is public: it depends on layers, and not on weights (rule R6).


@pytest.mark.parametrize(
    "name", ["mlp", "conv, norm, pool, conv", "residual", "conv with groups and dilation", "gates"]
)
def test_layouts_are_the_same_for_other_weights(name: str, staged: Callable[[str], Staged]) -> None:
    """Zeros and equal weights too, which leave nothing of a matrix, or columns that look like a pooling's."""
    found = staged(name).stages
    for kind in ("other", "zero", "equal"):
        torch.manual_seed(5)
        model, shapes, _ = models()[name]
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(
                    {"other": torch.randn_like(p), "zero": torch.zeros_like(p), "equal": torch.ones_like(p)}[
                        kind
                    ]
                )
        other = Staged(model, *shapes, degree=3).stages
        assert len(other.stages) <= len(found.stages)  # an activation whose range is small is a line
        if len(other.stages) < len(found.stages):
            continue
        for a, b in zip(found.stages, other.stages, strict=True):
            assert [base for base, _ in a.parts] == [base for base, _ in b.parts] and a.windows == b.windows
            for (_, matrix), mask, same in zip(b.parts, a.masks, b.masks, strict=True):
                assert torch.equal(mask, same) and not bool(matrix[~mask].any())


def test_a_pooling_is_seen_as_one(staged: Callable[[str], Staged]) -> None:
    found = staged("conv, norm, pool, conv").stages.stages
    assert [s.windows for s in found] == [[(1, 1)], [(2, 2)], [(1, 1)]]
    assert found[1].parts[0][1].shape[1] == 4 * 3 * 3
    assert [s.image for s in found] == [(4, 6, 6), (3, 1, 1), None]


def test_compiling_leaves_the_random_numbers_of_its_caller_alone() -> None:
    model, shapes, _ = models()["mlp"]
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    Staged(model, *shapes)
    assert torch.equal(torch.rand(3), wanted)
