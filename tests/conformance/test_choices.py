"""Classifiers that end in a choice, and limits wherever they lie: whole models, on both protocols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.plan.program import Program

from .harness import run

PROTOCOLS = ("fast", "crypten")


class Chooses(nn.Module):
    """A layer, and what a function makes of its scores."""

    def __init__(self, classes: int, choice: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.choice = nn.Linear(6, classes), choice

    def forward(self, x: torch.Tensor) -> object:
        return self.choice(self.layer(x))


def answers(program: Program, *inputs: torch.Tensor) -> list[torch.Tensor]:
    outputs = run(program, dict(zip(program.graph.inputs, inputs, strict=True))).outputs
    return [outputs[name] for name in program.graph.outputs]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("classes", [2, 10, 40])
def test_a_classifier_that_ends_in_argmax_gives_the_class_as_int64(protocol: str, classes: int) -> None:
    model, x = Chooses(classes, lambda y: y.argmax(-1)).eval(), torch.randn(20, 6)
    program = si.compile(model, x, protocol=protocol)
    (edge,) = (program.graph.edge(name) for name in program.graph.outputs)
    assert edge.dtype == "int64"
    (got,) = answers(program, x)
    scores = model.layer(x).detach()
    clear = (scores.topk(2, -1).values @ torch.tensor([1.0, -1.0])) > 1e-3
    assert clear.sum() > 15
    assert got.dtype == torch.int64 and torch.equal(got[clear], scores.argmax(-1)[clear])


def test_an_argmax_of_few_classes_needs_no_cut_and_few_rounds() -> None:
    program = si.compile(Chooses(10, lambda y: y.argmax(-1)).eval(), torch.randn(8, 6))
    assert [s.kernel for s in program.plan.steps[1:-1]] == ["linear.window.weight", "argmax.window"]
    assert program.plan.totals.rounds <= 8


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("classes", [3, 16, 17])
def test_of_equal_scores_the_first_is_chosen(protocol: str, classes: int) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x + y).argmax(1), (x - y).argmin(1)

    x, y = torch.randint(-1, 2, (40, classes)).float(), torch.zeros(classes)
    program = si.compile(Model(), (x, y), protocol=protocol, owners={"x": "a", "y": "b"}, reveal_to=["a"])
    given = dict(zip(program.graph.inputs, (x, y), strict=True))
    outputs = run(program, given, parties=3).outputs
    for name, expected in zip(program.graph.outputs, Model()(x, y), strict=True):
        assert torch.equal(outputs[name], expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_max_and_min_give_values_and_indices(protocol: str) -> None:
    def choice(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*y.max(dim=1), *y.min(dim=0, keepdim=True), y.argmax(), torch.sign(y))

    model, x = Chooses(7, choice).eval(), torch.randn(5, 6)
    got = answers(si.compile(model, x, protocol=protocol), x)
    with torch.no_grad():
        expected = model(x)
    for a, b in zip(got, expected, strict=True):  # type: ignore[call-overload]
        assert a.dtype == b.dtype and a.shape == b.shape
        assert float((a.double() - b.double()).abs().max()) <= 1e-4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_greater_and_the_lesser_of_two_tensors(protocol: str) -> None:
    def choice(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.maximum(y, y.flip(0)), torch.minimum(y, y.flip(0)), torch.max(y, -y), torch.min(y, 2 * y)

    model, x = Chooses(4, choice).eval(), torch.randn(5, 6)
    got = answers(si.compile(model, x, protocol=protocol), x)
    with torch.no_grad():
        expected = model(x)
    for a, b in zip(got, expected, strict=True):  # type: ignore[call-overload]
        assert float((a - b).abs().max()) <= 2e-4


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "limits", [(-100.0, 100.0), (-1e9, 1e9), (-16.0, 16.0), (-1.0, 1e4), (2.0, 3.0), (50.0, 60.0)]
)
def test_limits_far_beyond_a_layers_values_limit_nothing(protocol: str, limits: tuple[float, float]) -> None:
    """A raw product once reached a generic clamp, which read it at the wrong scale: Hardtanh(-100, 100) gave 116."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Hardtanh(*limits), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    (got,) = answers(si.compile(model, x, protocol=protocol), x)
    with torch.no_grad():
        assert float((got - model(x)).abs().max()) < 1e-3
