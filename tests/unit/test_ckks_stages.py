"""A model's graph as stages: everything linear is one matrix, activations are polynomials, and what cannot be is told."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secureinfer as si
from secureinfer.backends.ckks.affine import to_stages
from secureinfer.backends.ckks.headroom import head_bits
from secureinfer.backends.ckks.noise import hard_inputs, in_range, predicted_error
from secureinfer.backends.ckks.params import fitted
from secureinfer.backends.ckks.schedule import Made, Schedule, levels_of, make_schedule
from secureinfer.backends.ckks.server import Matrix, Polynomial
from secureinfer.backends.ckks.stages import INPUTS, Stages, run_stages
from secureinfer.compression.activations import PolynomialActivation
from secureinfer.errors import CompileError, UnsupportedModelError
from secureinfer.graph.export import export_graph
from secureinfer.graph.ir import Graph
from secureinfer.graph.ops import run_reference
from secureinfer.graph.polynomials import fit
from tests.conformance.models import Of

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
        self.model: Any = model
        self.graph, self.known = graph, {**weights, **constants}
        self.sizes = [graph.edge(n).numel for n in graph.inputs]
        samples = torch.rand(6, sum(self.sizes), generator=generator, dtype=torch.float64) * 2 - 1
        self.samples = samples
        self.stages = self.again(error=error, degree=degree)

    def again(
        self,
        *,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
        error: float = 1e-4,
        degree: int = 7,
    ) -> Stages:
        """Of the same graph with other weights, or other fits."""
        known = {n: change(t) if n in self.graph.weights else t for n, t in self.known.items()}
        return to_stages(self.graph, known, self.samples, error=error, greatest_degree=degree)

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


def trained_norm(n: int, kind: type[nn.BatchNorm1d | nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.Module:
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
        "mlp": (
            nn.Sequential(lin(6, 7), lin(7, 8), nn.ReLU(), nn.Dropout(), lin(8, 5), nn.Tanh(), lin(5, 3)), [(1, 6)], 3,
        ),
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
        "powers": (
            Of(lambda s, x: (s.a(x) * s.a(x), x**2 + 1, 2 - s.a(x) ** 3, s.a(x) ** 1, (s.a(x) ** 2 - 1) ** 2, x * x * x),
                a=lin(4, 4)), [(1, 4)], 6,
        ),
        "slices, flips, sums and constants": (
            Of(lambda s, x: (
                    (s.a(x)[:, 1:4].flip(1) - x[:, ::2].cumsum(1)) ** 2 / 3,
                    torch.stack([x[:, 0], -x[:, 2]], 1) @ s.b.weight.T,
                    s.a(x)[:, :3] * torch.arange(3.0) + torch.ones(3).softmax(0) * s.b.bias.exp(),
                    s.a(x)[:, :1].expand(1, 5) ** 2,
                ), a=lin(6, 5), b=lin(2, 3)),
            [(1, 6)], 3,
        ),
        "nothing but inputs": (Of(lambda s, x, y: {"x": x, "y": y}), [(1, 4), (1, 2)], 1),
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
            Of(lambda s, x: F.pad(s.a(x), (1, 2, 0, 1)).mean((2, 3)) ** 2 + x.sum(), a=nn.Conv2d(1, 3, 2)),
            [(1, 1, 4, 4)], 2,
        ),
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
        "gates": (Of(lambda s, x: s.c(F.silu(s.a(x)) * s.b(x)), a=lin(4, 5), b=lin(4, 5), c=lin(5, 2)), [(1, 4)], 3),
        "channels weighed by what is in them": (
            Of(lambda s, x: (s.a(x) * torch.sigmoid(x.mean((2, 3), keepdim=True))).sum((2, 3)), a=nn.Conv2d(2, 2, 3)),
            [(1, 2, 4, 4)], 3,
        ),
        "a sum of products": (Of(lambda s, x, y: (s.a(x) * y[:, :3]).sum(1, keepdim=True) * x, a=lin(4, 3)),
            [(1, 4), (1, 5)], 3),
        "an input that comes in later": (
            Of(lambda s, x, y: F.relu(s.a(x)) + s.b(F.relu(s.c(y))) ** 2, a=lin(4, 3), b=lin(4, 3), c=lin(70, 4)),
            [(1, 4), (1, 70)], 4,
        ),
        "one step after the other": (
            Of(lambda s, x: functools.reduce(lambda h, t: torch.tanh(s.a(t) + s.b(h)), x.unbind(1), x[:, 0]),
                a=lin(4, 4), b=lin(4, 4)), [(1, 3, 4)], 4,
        ),
        "what takes itself away": (Of(lambda s, x: s.a(x) - x + torch.tanh(x / 50) - x / 50, a=lin(4, 4)), [(1, 4)], 1),
        "far apart in size": (Of(lambda s, x: (torch.cat([x * 1e-10, s.a(x)], 1)[:, :4] * 1e10) ** 2, a=lin(4, 4)),
            [(1, 4)], 2),
        "nothing of it": (Of(lambda s, x: s.a(F.relu(x * 0 + 0.5)) + x, a=lin(4, 4)), [(1, 4)], 1),
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
    lines = 1e-5 if name == "what takes itself away" else 0.0  # the fit of an activation that became a line
    assert agree(found) < 1e-9 + lines
    assert len(found.stages.stages) == models()[name][2]
    assert found.stages.stages[-1].kind == "output"


def run_schedule(
    schedule: Schedule, stages: Stages, x: torch.Tensor, slots: int, head_bits: int = 20
) -> tuple[torch.Tensor, ClearContext]:
    """The outputs as the model owner computes them, with keys for the schedule's rotations alone."""
    context = ClearContext(slots, schedule.levels, scale_bits=30, first_bits=30 + head_bits)
    a, scale = arithmetic(context, schedule.steps()), context.parameters.scale
    held = {INPUTS: [context.encrypted(v) for v in schedule.inputs.pack(x.numpy())]}
    scales = {INPUTS: scale}
    for stage, plan in zip(stages.stages, schedule.stages, strict=True):
        known = {part.base: part.plan for part in plan.parts}
        total: list[Any] = []
        for i, (base, matrix) in enumerate(stage.parts):
            bias = stage.bias.numpy() if not i else None
            seal: Any = context
            work = Matrix(seal, known[base], matrix.numpy(), bias, plan.level, scale, scales[base])
            out = work.apply(a, held[base])
            total = [a.add(*pair) for pair in zip(total, out, strict=True)] if i else out
        assert {c.level for c in total} == {plan.level - 1}
        if stage.kind != "output":
            polynomial = Polynomial(plan.coefficients, plan.depth)
            scales[stage.name] = polynomial.result_scale(context, plan.level - 1, scale)  # type: ignore[arg-type]
            total = polynomial.apply(a, total)
            assert {c.level for c in total} == {plan.level - 1 - plan.depth}
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


# Head-room: what a fold leaves in other slots must fit below the modulus too.


def cancelling(size: float) -> nn.Module:
    """Every value of the hidden layer comes twice, and the last layer takes it away again."""
    first, last = nn.Linear(4, 16), nn.Linear(16, 3)
    with torch.no_grad():
        first.weight[8:], first.bias[8:] = first.weight[:8], first.bias[:8]
        last.weight[:, :8] = torch.rand(3, 8) * size
        last.weight[:, 8:] = -last.weight[:, :8]
    return nn.Sequential(first, square(), last)


@pytest.mark.parametrize(
    "model", [cancelling(1000.0), nn.Sequential(nn.Linear(4, 9), Of(lambda s, x: x**15), nn.Linear(9, 3))]
)
def test_the_head_room_is_enough_for_what_stands_in_all_slots(model: nn.Module) -> None:
    slots, found = 64, Staged(model, (1, 4))
    schedule = make_schedule(found.stages, 2 * slots, 1)
    needed = math.ceil(head_bits(found.stages, Made.of(found.stages, schedule), found.samples, 30))
    wanted, _ = run_stages(found.stages, found.samples)
    for x, row in zip(found.samples, wanted, strict=True):
        came, _ = run_schedule(schedule, found.stages, x, slots, max(needed, 1))
        assert float((came - row).abs().max()) < 1e-6


def test_with_the_results_head_room_alone_a_sum_of_parts_would_not_fit() -> None:
    """The twin: results are small, and what is left of their parts spoils them."""
    slots, found = 64, Staged(cancelling(1000.0), (1, 4))
    schedule = make_schedule(found.stages, 2 * slots, 1)
    outputs, _ = run_stages(found.stages, found.samples)
    assert (
        float(outputs.abs().max()) < 1
        and head_bits(found.stages, Made.of(found.stages, schedule), found.samples, 30) > 6
    )
    with pytest.raises(OverflowError):
        for x in found.samples:
            run_schedule(schedule, found.stages, x, slots, 3)


def test_what_no_number_holds_needs_infinite_head_room() -> None:
    found = Staged(nn.Sequential(nn.Linear(4, 9), Of(lambda s, x: x**63), nn.Linear(9, 3)), (1, 4))
    schedule = make_schedule(found.stages, 128, 1)
    assert head_bits(found.stages, Made.of(found.stages, schedule), found.samples * 1e6, 30) == math.inf


# The plan is public: it depends on layers, and not on weights (rule R6).


@pytest.mark.parametrize(
    "name", ["mlp", "conv, norm, pool, conv", "residual", "conv with groups and dilation", "gates"]
)
def test_layouts_are_the_same_for_other_weights(name: str, staged: Callable[[str], Staged]) -> None:
    """Zeros and equal weights too, which leave nothing of a matrix, or columns that look like a pooling's."""
    found = staged(name).stages
    for change in (torch.randn_like, torch.zeros_like, torch.ones_like):
        other = staged(name).again(change=change, degree=3)
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


# What an activation becomes.


def test_an_activation_on_a_small_range_is_a_line_and_takes_no_level() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.05)
    found = Staged(model, (1, 4), error=1e-2)
    assert found.kinds == ["output"] and levels_of(found.stages)[0] == 1
    came, _ = run_stages(found.stages, found.samples)
    assert 0 < float((came - found.reference()).abs().max()) < 1e-2


def test_a_fit_is_of_the_least_degree_that_meets_the_error_on_what_calibration_saw() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    staged = Staged(model, (1, 4))
    found = [staged.again(error=error).stages[0] for error in (3e-2, 1e-3, 1e-5)]
    degrees = [len(s.coefficients) - 1 for s in found]
    assert degrees == sorted(degrees) and degrees[0] < degrees[-1]
    for stage, error in zip(found, (3e-2, 1e-3, 1e-5), strict=True):
        assert stage.fit is not None and (stage.fit.error <= error or len(stage.coefficients) == 8)
        assert stage.outside == 0


def test_a_range_is_rounded_so_that_the_plan_tells_no_more_of_the_calibration() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    fit_of = Staged(model, (1, 4)).stages.stages[0].fit
    assert fit_of is not None
    assert math.log2(fit_of.radius) * 4 == pytest.approx(round(math.log2(fit_of.radius) * 4), abs=1e-9)


@pytest.mark.parametrize(("power", "levels"), [(2, 3), (3, 4), (4, 5), (63, 8)])
def test_levels_are_one_for_each_matrix_and_those_of_the_polynomial(power: int, levels: int) -> None:
    model = Of(lambda s, x: s.b(s.a(x) ** power), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    found = Staged(model, (1, 3)).stages
    assert levels_of(found) == (levels, {"pow_0": levels, "outputs": 1})


def test_stages_of_unequal_depth_meet_at_the_deeper_ones_level() -> None:
    model = Of(lambda s, x: (s.b(s.a(x) ** 7) + x) ** 2, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    levels, at = levels_of(Staged(model, (1, 3)).stages)
    assert (levels, at) == (7, {"pow_0": 7, "pow_1": 3, "outputs": 1})


# What cannot be computed.


def problems(function: Callable[..., Any], *shapes: tuple[int, ...], **layers: nn.Module) -> dict[str, str]:
    """Operator -> path and reason."""
    with pytest.raises(UnsupportedModelError) as caught:
        Staged(Of(function, **layers), *shapes)
    return {
        n.operator.removeprefix("aten.").split(".")[0]: f"{n.path}: {n.reason}" for n in caught.value.nodes
    }


def test_every_unsupported_node_is_told_at_once_with_its_layer_a_reason_and_what_to_do() -> None:
    def forward(s: Any, x: torch.Tensor) -> Any:
        y = s.conv(x)
        return s.pool(y).sum(), s.norm(y.flatten(1)), y.argmax(-1), y.softmax(-1), y.clamp(0, 1), y.amax(-1)

    found = problems(
        forward, (1, 1, 4, 4), conv=nn.Conv2d(1, 2, 1), pool=nn.MaxPool2d(2), norm=nn.LayerNorm(32)
    )
    expected = {
        "max_pool2d_with_indices": ("pool", "use average pooling"), "native_layer_norm": ("norm", "use batch norm"),
        "argmax": ("", "of the outputs after decryption"), "softmax": ("", "apply it to the decrypted outputs"),
        "clamp": ("", "no comparison"), "amax": ("", "no comparison"),
    }  # fmt: skip
    assert set(found) == {
        name if name != "softmax" else next(n for n in found if "softmax" in n) for name in expected
    }
    for name, (path, hint) in expected.items():
        told = next(text for operator, text in found.items() if name in operator)
        assert told.startswith(f"{path}:") and hint in told


def test_operators_that_ckks_does_not_compute_are_refused() -> None:
    def forward(s: Any, x: torch.Tensor) -> Any:
        conv = F.conv1d(x[None], x[None])
        return 1 / x, x / x.sum(), x.sqrt(), x > 0, x @ x.T, x**0.5, x**64, conv, x.log(), x.sort().values

    found = problems(forward, (1, 4))
    wanted = ("reciprocal", "div", "sqrt", "gt", "matmul", "pow", "convolution", "log", "sort")
    assert all(any(name in told for told in found) for name in wanted), found
    assert all(len(reason) > 20 for reason in found.values())


def test_of_a_chain_only_what_its_operands_do_not_excuse_is_told() -> None:
    assert list(problems(lambda s, x: (x > 0).float().cumsum(1) * 2, (1, 4))) == ["gt"]
    layers = {"pool": nn.MaxPool2d(2), "norm": nn.LayerNorm(4)}
    found = problems(lambda s, x: s.norm(s.pool(x).flatten(1)).relu().softmax(-1), (1, 1, 4, 4), **layers)
    assert [name for name in found if "relu" not in name] == list(found) and len(found) == 3


def test_outputs_that_do_not_depend_on_the_inputs_are_refused() -> None:
    """They would hand the data owner what they are made of: the weights."""
    for function in (lambda s, x: s.a(x * 0), lambda s, x: (x, s.a(x - x))):
        with pytest.raises(CompileError, match="depend|hand it to the data owner"):
            Staged(Of(function, a=nn.Linear(4, 4)), (1, 4))


# Too wide, and too deep (field reports 35, 37 and 40).


def refused(model: nn.Module, x: torch.Tensor, **settings: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        si.compile(model.eval(), x, backend="ckks", ckks=settings or None)
    return str(caught.value)


def test_too_many_values_are_refused_with_how_many_fit() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 128 * 128, 10))
    told = refused(model, torch.rand(1, 3, 128, 128))
    assert "too wide for CKKS: 49,152 values where at most 16,384 fit" in told and "smaller images" in told


def test_a_layer_with_too_many_values_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 3))
    told = refused(model, torch.rand(1, 1, 24, 24))
    assert "1: aten.relu.default" in told and "18,432 values where at most 16,384 fit" in told
    told = refused(nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()), torch.rand(1, 3, 48, 48))
    assert "0: aten.convolution.default" in told and "147,456 values that each may depend on 6,912" in told


def test_a_model_that_is_too_deep_is_refused_with_what_would_fit_at_each_degree() -> None:
    layers = [layer for _ in range(24) for layer in (nn.Linear(4, 4), square())]
    told = refused(nn.Sequential(*layers), torch.rand(1, 4))
    for degree, bits, most in ((8192, 214, 6), (16384, 430, 14), (32768, 868, 31)):
        assert (
            f"degree {degree}: 49 levels" in told
            and f"the {bits} bits that it allows; about {most} levels fit" in told
        )
    assert "Take fewer layers" in told and "backend='mpc'" in told


def test_more_rows_than_slots_are_split() -> None:
    """33 values in 32 slots, as 4097 in 4096: two ciphertexts, not a wrong value."""
    found = Staged(nn.Sequential(nn.Linear(3, 33), square(), nn.Linear(33, 2)), (1, 3))
    schedule = make_schedule(found.stages, 64, 1)
    assert [s.layout.ciphertexts for s in schedule.stages] == [2, 1]
    wanted, _ = run_stages(found.stages, found.samples)
    came, _ = run_schedule(schedule, found.stages, found.samples[0], 32)
    assert float((came - wanted[0]).abs().max()) < 1e-9


# Which inputs a plan is made for.


def test_hard_inputs_reach_the_greatest_value_of_a_linear_layer() -> None:
    layer = nn.Linear(7, 3)
    found = Staged(layer, (1, 7))
    box = (torch.full((7,), -2.0, dtype=torch.float64), torch.full((7,), 2.0, dtype=torch.float64))
    hard = hard_inputs(found.stages, found.samples, box)
    assert bool((hard.abs() <= 2).all())
    outputs, _ = run_stages(found.stages, hard)
    greatest = (layer.weight.abs().sum(1) * 2 + layer.bias.abs()).detach()
    assert float(outputs.abs().max()) == pytest.approx(float(greatest.max()), rel=1e-6)


@pytest.mark.parametrize("error", [0.2, 1e-4])  # a square, and a longer polynomial
def test_inputs_beyond_the_range_of_an_activation_are_told(error: float) -> None:
    found = Staged(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (1, 4), error=error)
    (stage, _) = found.stages.stages
    assert stage.fit is not None and (stage.coefficients == (0.0, 0.0, 1.0)) == (error == 0.2)
    inputs = torch.cat([found.samples * size for size in (1.0, 1.2, 3.0, 100.0)])
    with torch.no_grad():
        values = found.model[0].double()(inputs)
    assert torch.equal(in_range(found.stages, inputs), (values.abs() <= stage.fit.radius).all(1))
    assert bool(in_range(found.stages, found.samples).all())


def test_noise_is_as_great_as_what_is_added_up() -> None:
    """A fold adds up the noise of its blocks where rescaling comes first, and a longer scale makes less of all."""
    found = Staged(nn.Sequential(nn.Linear(64, 2), square(), nn.Linear(2, 2)), (1, 64))
    made = Made.of(found.stages, make_schedule(found.stages, 8192, 1))
    chains = [fitted(8192, levels=3, scale_bits=scale, head_bits=4) for scale in (30, 35)]
    errors = {
        (p.scale_bits, early): predicted_error(found.stages, found.samples, p, made, early=early)
        for p in chains
        if p is not None
        for early in (True, False)
    }
    assert errors[30, True] > 2 * errors[30, False] and errors[35, True] > 2 * errors[35, False]
    for early in (True, False):
        assert 16 < errors[30, early] / errors[35, early] < 64
