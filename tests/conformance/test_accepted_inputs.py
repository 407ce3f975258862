"""An input that a data owner's own check accepts cannot leave the windows of the first layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.graph import ranges
from secureinfer.plan.program import Program
from secureinfer.session.inputs import check_inputs

from .harness import run

X = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(2))


class Scaled(nn.Module):
    """An image is normalised before the first convolution, as data loaders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 11, padding=5)
        with torch.no_grad():
            self.layer.weight *= 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer((x - 0.45) / 0.225))


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(300, 8), nn.ReLU()), X


def linear_int8() -> tuple[nn.Module, torch.Tensor]:
    model, x = linear()
    return si.compress(model, [si.Quantize()])[0], x


def convolution() -> tuple[nn.Module, torch.Tensor]:
    return Scaled(), IMAGE


MODELS = {"linear": linear, "linear_int8": linear_int8, "convolution": convolution}


def built(name: str) -> tuple[nn.Module, torch.Tensor, Program]:
    torch.manual_seed(7)
    model, x = MODELS[name]()
    return model.eval(), x, si.compile(model, x)


def worst_input(model: nn.Module, x: torch.Tensor, program: Program) -> torch.Tensor:
    """The accepted input of which the greatest pre-activation is greatest: the gradient's signs times the input's range."""
    probe = torch.zeros_like(x).requires_grad_()
    layers: list[torch.Tensor] = []
    hook = next(m for m in model.modules() if not list(m.children()) and getattr(m, "bias", None) is not None)
    handle = hook.register_forward_hook(lambda m, i, o: layers.append(o))
    model(probe)
    handle.remove()
    layers[0].reshape(-1)[layers[0].numel() // 2].backward()
    bound = program.graph.edge(program.graph.inputs[0]).bound
    assert probe.grad is not None and bound is not None
    return torch.sign(probe.grad) * bound


def error(model: nn.Module, x: torch.Tensor, program: Program) -> float:
    (name,) = program.graph.inputs
    given = check_inputs(program.graph, {name: x})
    (got,) = run(program, given).outputs.values()
    with torch.no_grad():
        expected = model(x)
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_the_worst_accepted_input_does_not_wrap_in_the_first_layer(name: str) -> None:
    model, x, program = built(name)
    assert error(model, worst_input(model, x, program), program) < 3e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_window_from_examples_alone_is_seen_to_wrap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: 16 times the values on examples, and nothing of what accepted inputs can reach."""
    monkeypatch.setattr(ranges, "greatest_values", lambda *_: {})
    model, x, program = built(name)
    assert error(model, worst_input(model, x, program), program) > 0.1


def test_any_row_of_a_table_fits_whichever_the_examples_look_up() -> None:
    table = nn.Embedding(50, 4)
    with torch.no_grad():
        table.weight[49] = 3000.0
    model = nn.Sequential(table, nn.Linear(4, 3)).eval()
    program = si.compile(model, torch.tensor([[1, 2, 3]]))
    bound = program.graph.edge(next(n for n in program.graph.nodes if n.op == "embedding").outputs[0]).bound
    assert bound == 4096.0
    ids = torch.tensor([[49, 0, 49]])
    assert error(model, ids, program) < 1e-3


@pytest.mark.parametrize("model", [nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1)])
def test_what_is_bounded_by_1_sizes_the_layer_behind_it(model: nn.Module) -> None:
    second = nn.Linear(40, 2)
    with torch.no_grad():
        second.weight.fill_(9.0)
    whole = nn.Sequential(nn.Linear(4, 40), model, second).eval()
    program = si.compile(whole, torch.zeros(1, 4))
    assert (program.graph.edge(program.graph.outputs[0]).bound or 0) >= 40 * 9


def test_a_count_of_classes_bounds_an_argmax_whatever_the_examples_give() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 0.0).argmax(-1)

    program = si.compile(Model(), torch.eye(1, 1000))
    assert program.graph.edge(program.graph.outputs[0]).bound == 1024.0


# -- what is refused (field report 16)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda x: x.index_fill(1, torch.tensor([5]), float("nan")), si.InputError),
        (lambda x: x.index_fill(1, torch.tensor([5]), float("-inf")), si.InputError),
        (lambda x: x.index_fill(1, torch.tensor([5]), 1e15), si.RangeError),
        (lambda x: x.index_fill(1, torch.tensor([5]), -64.5), si.RangeError),
    ],
)
def test_a_value_that_does_not_fit_is_refused_at_the_data_owner(
    change: Callable[[torch.Tensor], torch.Tensor], refusal: type[Exception]
) -> None:
    program = built("linear")[2]
    (name,) = program.graph.inputs
    assert program.graph.edge(name).bound == 64.0
    with pytest.raises(refusal, match="input 'input' has 3 values"):
        check_inputs(program.graph, {name: change(X)})
    edge = dataclasses.replace(
        program.graph.edge(name), bound=None
    )  # the twin: without a range it would go on
    unknown = dataclasses.replace(program.graph, edges=MappingProxyType({**program.graph.edges, name: edge}))
    if refusal is si.RangeError:
        check_inputs(unknown, {name: change(X)})


def test_a_product_that_would_wrap_is_refused_when_planned() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y

    given = (torch.tensor([1e5]), torch.tensor([1e6]))
    with pytest.raises(si.UnsupportedModelError, match="precision_bits"):
        si.compile(Product(), given, owners={"x": "a", "y": "b"}, reveal_to=["a"])
