"""The operator `polynomial` in graphs: exported as one node, kept in files, taken apart where a backend has no kernel."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import secureinfer as si
from secureinfer.backends.plaintext.engine import PlaintextEngine
from secureinfer.compression.activations import PolynomialActivation, polynomial
from secureinfer.graph.expand import needed_powers
from secureinfer.graph.ir import Visibility
from secureinfer.graph.polynomials import Fit, fit
from secureinfer.plan.manifest import Fault, check_graph, read_manifest, write_manifest

from .graph_oracle import Exported, agree

X = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) * 2 - 1
GELU = fit("gelu", 3.0, 6)


def model_with(found: Fit) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 5), PolynomialActivation(found), nn.Linear(5, 4)).eval()


def two() -> nn.Module:
    """One polynomial on an input, and one whose operand is used twice, so that its scale folds into no layer."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.first, self.second = (
                nn.Linear(6, 5),
                PolynomialActivation(GELU),
                PolynomialActivation(GELU),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(self.first(x))
            return y + self.second(y)

    torch.manual_seed(3)
    return Two().eval()


# The layer.


def test_the_layer_is_one_operator_in_an_export_and_has_no_state() -> None:
    model = model_with(GELU)
    exported = agree(model, X)
    assert exported.operators == {"linear": 2, "polynomial": 1}
    (node,) = (n for n in exported.graph.nodes if n.op == "polynomial")
    assert dict(node.attrs) == GELU.attrs() and node.path == "1"
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "gelu, degree=6, range=±3, error=0.0092" in repr(model)


@pytest.mark.parametrize("found", [GELU, fit("tanh", 2.0, 5), fit("abs", 1.0, 1)], ids=lambda f: f.kind)
def test_the_gradient_is_that_of_the_polynomial(found: Fit) -> None:
    x = torch.linspace(-2, 2, 7, dtype=torch.float64).requires_grad_()
    layer = PolynomialActivation(found)
    assert torch.autograd.gradcheck(layer, (x,)) and torch.autograd.gradgradcheck(layer, (x,))


def test_torch_takes_the_operator_for_a_proper_one() -> None:
    arguments = (list(GELU.coefficients), GELU.radius, GELU.kind, GELU.error)
    for x in (X, X.double().t().requires_grad_(), torch.rand(2, 3, 4).permute(2, 0, 1), torch.rand(())):
        torch.library.opcheck(polynomial, (x, *arguments))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("other", [copy.deepcopy, saved_and_loaded])
def test_copies_compute_the_same(other: Callable[[nn.Module], nn.Module]) -> None:
    model = model_with(GELU)
    assert torch.equal(other(model)(X), model(X))
    twin = model_with(GELU)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.double()(X.double()).float(), model.double()(X.double()).float())


# In a program.


def test_a_program_with_polynomials_is_read_from_its_file_as_it_was(tmp_path: Path) -> None:
    model = model_with(GELU)
    program = si.compile(model, X, backend="plaintext")
    program.save(tmp_path / "p.si")
    loaded = si.Program.load(tmp_path / "p.si")
    assert [dict(n.attrs) for n in loaded.graph.nodes] == [dict(n.attrs) for n in program.graph.nodes]
    name = loaded.graph.outputs[0]
    assert torch.allclose(PlaintextEngine(loaded).run(0, {"input": X})[name], model(X), atol=1e-6)


def manifest() -> Any:
    program = si.compile(model_with(GELU), X, backend="plaintext")
    return json.loads(
        json.dumps(write_manifest(program.graph, program.plan, "plaintext", "plaintext", program.options))
    )


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("coefficients", []),
        ("coefficients", [0.0] * 65),
        ("coefficients", ["1"]),
        ("coefficients", 3.0),
        ("radius", 0.0),
        ("radius", -1.0),
        ("radius", "wide"),
        ("radius", None),
    ],
)
def test_a_file_whose_polynomial_is_none_is_refused(attribute: str, value: Any) -> None:
    sound = manifest()
    read_manifest(sound)
    (node,) = (n for n in sound["graph"]["nodes"] if n[1] == "polynomial")
    node[4][attribute] = value
    with pytest.raises(Fault):
        read_manifest(sound)


# Taken apart.


@settings(max_examples=200)
@given(st.lists(st.integers(1, 63), min_size=1, max_size=9))
def test_every_power_is_made_of_two_that_are_there(degrees: list[int]) -> None:
    needed = needed_powers(degrees)
    assert {*degrees, 1} <= set(needed) and needed == sorted(needed)
    for k in needed[1:]:
        h = 2 ** ((k - 1).bit_length() - 1)
        assert h in needed and k - h in needed and h < k <= 2 * h


def test_symmetry_saves_powers() -> None:
    assert needed_powers([1, 2, 4, 6]) == [1, 2, 4, 6]
    assert needed_powers([1, 3, 5, 7]) == [1, 2, 3, 4, 5, 7]


FITS = [
    fit(k, 2.5, d)
    for k, d in (("relu", 2), ("gelu", 15), ("tanh", 7), ("exp", 6), ("sigmoid", 1), ("abs", 1))
]


@pytest.mark.parametrize("found", FITS, ids=lambda f: f"{f.kind}{f.degree}")
def test_powers_and_a_linear_layer_give_the_values_of_the_polynomial(found: Fit) -> None:
    model = model_with(found)
    exported = Exported(model, X, export={"keep_polynomials": False})
    assert not {"polynomial", "div"} & set(exported.operators)
    with torch.no_grad():
        expected = model.double()(X.double())
    assert torch.allclose(exported(X).double(), expected, atol=1e-5)
    check_graph(exported.graph)


def test_the_range_goes_into_the_layer_before() -> None:
    exported = Exported(model_with(GELU), X, export={"keep_polynomials": False})
    assert exported.operators == {"linear": 3, "reshape": 2, "pow": 2, "mul": 1, "cat": 1}
    assert torch.allclose(exported.weights["0.weight"], model_with(GELU)[0].weight / 3, atol=1e-7)


def test_who_sees_the_powers_is_who_sees_the_operand() -> None:
    model = two()
    exported = Exported(model, X, export={"keep_polynomials": False})
    check_graph(exported.graph)
    with torch.no_grad():
        expected = model.double()(X.double())
    assert torch.allclose(exported(X).double(), expected, atol=1e-5)
    seen = {exported.graph.edge(n.outputs[0]).visibility for n in exported.graph.nodes if n.op == "pow"}
    assert seen == {Visibility.PRIVATE, Visibility.SHARED}


def test_the_powers_of_a_scalar_and_of_nothing() -> None:
    for x in (torch.tensor(0.5), torch.ones(0, 6), torch.ones(2, 1, 3)):
        layer = nn.Sequential(PolynomialActivation(GELU))
        exported = Exported(layer, x, export={"keep_polynomials": False})
        came = exported(x)
        assert came.shape == x.shape and torch.allclose(came.float(), layer(x), atol=1e-6)


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
def test_compiling_for_mpc_takes_polynomials_apart_and_costs_no_more_rounds(
    protocol: str, tmp_path: Path
) -> None:
    model = model_with(fit("gelu", 3.0, 3))
    program = si.compile(model, X, protocol=protocol)
    assert all(n.op != "polynomial" for n in program.graph.nodes)
    exact = si.compile(nn.Sequential(model[0], nn.GELU(), model[2]), X, protocol=protocol)
    rounds, others = program.plan.totals.rounds, exact.plan.totals.rounds
    assert rounds <= others and (protocol == "fast" or rounds < others)
    program.save(tmp_path / "p.si")
    assert si.Program.load(tmp_path / "p.si").manifest_digest == program.manifest_digest


# Polynomials that a model's own code writes.

SQUARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x * x": lambda x: x * x,
    "x ** 2": lambda x: x**2,
    "x ** 2.0": lambda x: x**2.0,
    "square": torch.square,
    "square_": lambda x: (x + 0).square_(),
    "pow": lambda x: x.pow(2),
    "mul": lambda x: torch.mul(x, x),
    "einsum": lambda x: torch.einsum("ij,ij->ij", x, x),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 5), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("name", SQUARES)
def test_a_square_is_a_power_however_it_is_written(name: str) -> None:
    exported = agree(Apply(SQUARES[name]), X)
    assert exported.operators == {"linear": 1, "pow": 1}
    assert exported.graph.nodes[1].attrs["exponent"] == 2


def test_other_powers_and_products_of_powers() -> None:
    assert agree(Apply(lambda x: x.pow(3)), X).operators == {"linear": 1, "pow": 1}
    assert agree(Apply(lambda x: x * x * x), X).operators == {"linear": 1, "pow": 1, "mul": 1}
    assert set(agree(Apply(lambda x: 0.1 * x**3 + x.square() * 0.5 - x + 1), X).operators) <= {
        "linear", "pow", "mul", "add", "sub"
    }  # fmt: skip
