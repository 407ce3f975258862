"""Many inferences, none of them wrong: 500 in `make test`, 10,000 with the slow tests, and some between real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.plan.program import Program

from .harness import Operand, one_step, run
from .parties import Parties

FEW, MANY, SESSION = 500, 10_000, 20
LARGEST_ERROR = 2e-3
"""Of a logit, for inputs up to 16 in every feature: 30 inputs each rounded by 2**-17, and weights by the same times 16."""


def fraud_mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)]
    return nn.Sequential(*layers).eval()


def inputs(count: int, seed: int) -> list[torch.Tensor]:
    """Random features, and now and then extremes of the range that calibration gave: all, some, one sign, zeros, units."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        x = torch.randn(1, 30, generator=generator)
        signs = torch.sign(torch.randn(1, 30, generator=generator))
        kind = i % 10
        if kind == 5:
            x = 16.0 * signs
        elif kind == 6:
            x = torch.where(torch.rand(1, 30, generator=generator) < 0.3, 16.0 * signs, x)
        elif kind == 7:
            x = torch.full((1, 30), 16.0 * float(signs[0, 0]))
        elif kind == 8:
            x = torch.zeros(1, 30)
        elif kind == 9:
            x = signs * 2.0**-16
        found.append(x)
    return found


def compiled(model: nn.Module) -> Program:
    calibration = [torch.full((1, 30), v) for v in (16.0, -16.0)]
    calibration += [16.0 * torch.sign(model[0].weight.detach()[i : i + 1]) for i in range(64)]  # type: ignore[index]
    return si.compile(model, torch.zeros(1, 30), calibration=calibration)


def wrong(infer: Any, model: nn.Module, given: list[torch.Tensor]) -> list[tuple[int, float]]:
    """Places whose answer is off, and by how much."""
    faults = []
    with torch.no_grad():
        expected = model(torch.cat(given)).split(1)
    for i, (x, y) in enumerate(zip(given, expected, strict=True)):
        error = float((infer(x) - y).abs().max())
        if not error <= LARGEST_ERROR:
            faults.append((i, error))
    return faults


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_not_one_of_many_inferences_is_wrong(count: int) -> None:
    model = fraud_mlp()
    with Parties(compiled(model)) as parties:
        assert wrong(lambda x: parties.infer(x)[0], model, inputs(count, seed=count)) == []


def test_an_inference_that_wraps_is_seen() -> None:
    """The twin: a range from small inputs alone is left by large ones, and the answers are wrong."""
    model = fraud_mlp()
    program = si.compile(model, torch.full((1, 30), 1e-3))
    with torch.no_grad(), Parties(program) as parties:
        given = [300.0 * x for x in inputs(20, seed=1)]
        assert wrong(lambda x: parties.infer(x)[0], model, given)


def test_not_one_of_some_inferences_between_processes_is_wrong() -> None:
    model = fraud_mlp()
    with si.local_session(compiled(model)) as session:
        assert wrong(session.infer, model, inputs(SESSION, seed=2)) == []


@pytest.mark.parametrize("protocol", ["mul.beaver", "mul.weight"])
def test_19_products_are_right_on_average(protocol: str) -> None:
    """100,000 products: the mean signed error is 0 within five of its standard deviations, which is 0.002 units."""
    generator = torch.Generator().manual_seed(19)
    a, b = (
        torch.randint(-(2**18), 2**18, (100_000,), generator=generator).double() / 2**16 for _ in range(2)
    )
    kind = "weight" if protocol == "mul.weight" else "shared"
    operands = [Operand(a.float(), bound=4.0), Operand(b.float(), kind, 4.0)]
    program, given, _ = one_step("mul", operands, {}, (100_000,), kernel=protocol, output_bound=16.0)
    error = (run(program, given).outputs["y"].double() - a * b) * 2**16
    assert float(error.abs().max()) < 1.5
    assert abs(float(error.mean())) < 5 * float(error.std()) / 100_000**0.5


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
def test_19_a_layers_results_are_right_on_average(protocol: str) -> None:
    """The same for a hidden layer's values: their sum, in a product with ones, is off by nothing in the mean."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.ones = nn.Linear(1, 1000), nn.Linear(1000, 1)
            with torch.no_grad():
                self.first.weight.copy_(torch.randint(-(2**16), 2**16, (1000, 1)) / 2**16)
                self.first.bias.fill_(4.0)
                self.ones.weight.fill_(1.0)
                self.ones.bias.zero_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.ones(torch.relu(self.first(x)))
            return out

    torch.manual_seed(19)
    model, x = Hidden().eval(), torch.randint(-(2**16), 2**16, (100, 1)).float() / 2**16
    (got,) = run(
        program := si.compile(model, x, protocol=protocol), {program.graph.inputs[0]: x}
    ).outputs.values()
    with torch.no_grad():
        units = (got.double() - model.double()(x.double())) * 2**16 / 1000
    assert abs(float(units.mean())) < 0.01


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
def test_7_gelu_and_erf_are_right_in_a_model(protocol: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = x + y
            gelu = nn.functional.gelu
            return gelu(z), gelu(z, approximate="tanh"), torch.erf(z)

    x = torch.cat([torch.linspace(-10, 10, 401), torch.tensor([1.0, 2.0, 3.0, 5.0, -60.0, 60.0])])
    program = si.compile(
        Model(), (x, torch.zeros(407)), protocol=protocol, owners={"x": "a", "y": "b"}, reveal_to=["a"]
    )
    outputs = run(
        program, dict(zip(program.graph.inputs, (x, torch.zeros(407)), strict=True)), parties=3
    ).outputs
    for name, expected in zip(program.graph.outputs, Model()(x.double(), torch.zeros(407)), strict=True):
        assert float((outputs[name] - expected).abs().max()) < 5e-4


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
@pytest.mark.parametrize("parties", [2, 3])
def test_18_a_convolution_is_right_in_a_model_of_two_and_three_parties(protocol: str, parties: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(18)
            self.layer = nn.Conv2d(1, 16, 5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x + y)
            return out

    x, y = torch.randn(2, 1, 12, 12), torch.randn(2, 1, 12, 12)
    owners = {"x": "a", "y": "a" if parties == 2 else "b"}
    program = si.compile(Model().eval(), (x, y), protocol=protocol, owners=owners, reveal_to=["a"])
    given = dict(zip(program.graph.inputs, (x, y), strict=True))
    (got,) = run(program, given, parties=parties).outputs.values()
    with torch.no_grad():
        assert float((got - Model()(x, y)).abs().max()) < 5e-4


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
def test_17_times_one_is_right_for_large_values_in_a_model(protocol: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.one

    generator = torch.Generator().manual_seed(17)
    x = (torch.randint(0, 2, (20_000,), generator=generator) * 2 - 1) * 1e5
    x += torch.randint(0, 2**16, (20_000,), generator=generator) / 2**7
    program = si.compile(Scale().eval(), x / 16, protocol=protocol)
    for _ in range(2):
        (got,) = run(program, {program.graph.inputs[0]: x}).outputs.values()
        assert float((got.double() - x.double()).abs().max()) <= 2.0**-7
