"""What the export refuses and why, who owns what, and how wide edges are."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secureinfer.errors import CompileError, SettingsError, UnsupportedModelError
from secureinfer.graph.export import export_graph
from secureinfer.graph.ir import DATA_OWNER, MODEL_OWNER, Visibility
from secureinfer.graph.ops import OPS, run_reference

from .graph_oracle import Exported, error

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return self.run(self, x) if y is None else self.run(self, x, y)


def refusal(model: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(CompileError) as caught:
        export_graph(model, args, **options)
    return str(caught.value)


def test_every_unsupported_node_is_listed_with_operator_path_and_reason() -> None:
    class Deep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x)[0] + torch.rand(4)

    model = nn.Sequential(nn.Linear(4, 4), Deep(), nn.Sequential(nn.ConvTranspose1d(3, 3, 1), nn.ReLU()))
    with pytest.raises(UnsupportedModelError) as caught:
        export_graph(model, (X,))
    found = {(n.operator, n.path): n.reason for n in caught.value.nodes}
    assert set(found) == {
        ("aten.sort.default", "1"), ("aten.rand.default", "1"), ("aten.convolution.default", "2.0"),
    }  # fmt: skip
    assert "random" in found["aten.rand.default", "1"]
    assert "transposed" in found["aten.convolution.default", "2.0"]
    assert all(n.operator in str(caught.value) for n in caught.value.nodes)


def test_what_the_output_does_not_need_is_not_held_against_the_model() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.sort(x)
        return x + 1

    assert Exported(Model(forward), X).operators == {"add": 1}


@pytest.mark.parametrize("file", ["model.pt", Path("model.pt")])
def test_a_model_file_is_refused_with_what_to_do(file: Any) -> None:
    """Field report 6."""
    text = refusal(file, X)
    assert "state_dict" in text and "pickle" in text and "load_state_dict" in text


def test_a_state_dict_and_other_things_are_refused() -> None:
    assert "load it" in refusal(nn.Linear(4, 2).state_dict(), X)
    assert "function" in refusal(lambda x: x, X)


def test_torchs_own_refusals_become_one_clear_error() -> None:
    branch = Model(lambda self, x: x * 2 if x.sum() > 0 else x)
    assert "branches on a value" in refusal(branch, X)
    assert "could not export" in refusal(nn.Linear(5, 2), X)
    assert "depends on values" in refusal(
        Model(lambda self, x: x[:, torch.tensor([True, False, True, True])]), X
    )


def test_a_model_that_changes_its_own_state_is_refused() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.seen

    assert "changes its own state" in refusal(Model(forward, seen=torch.zeros(4)), X)


def test_an_output_that_would_hand_out_a_weight_is_refused() -> None:
    assert "weight" in refusal(Model(lambda self, x: (x, self.w), w=torch.ones(4)), X)
    assert "weight" in refusal(Model(lambda self, x: (x, self.w * 2 + 1), w=torch.ones(4)), X)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    assert "weight" in refusal(model, X) and "finite" in refusal(model, X)


def test_values_that_are_not_finite_are_refused_by_place() -> None:
    assert "log" in refusal(Model(lambda self, x: (x @ self.w).log(), w=torch.eye(4)), X)


def test_examples_given_twice_or_too_many_are_refused() -> None:
    assert "twice" in refusal(nn.Linear(4, 2), X, example_kwargs={"input": X})
    assert "positional" in refusal(nn.Linear(4, 2), X, X)


def test_weights_belong_to_the_model_owner_and_inputs_to_the_data_owner() -> None:
    exported = Exported(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), X)
    graph = exported.graph
    assert set(exported.weights) == set(graph.weights) == {"0.weight", "0.bias"}
    for name in graph.weights:
        assert (graph.edge(name).visibility, graph.edge(name).owner) == (Visibility.PRIVATE, MODEL_OWNER)
    assert graph.inputs == ("input",) and graph.edge("input").owner == DATA_OWNER
    assert graph.owners() == (DATA_OWNER,) and graph.reveal_to == (DATA_OWNER,)
    assert graph.edge("relu_0").visibility is Visibility.SHARED
    assert graph.edge("input").scale == 16


def test_buffers_are_private_unless_the_code_alone_says_them() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.arange(4))
            self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))
            self.register_buffer("secret", torch.tensor([3, 1, 4, 1]))
            self.register_buffer("zero_point", torch.tensor(37))
            self.register_buffer("zero_points", torch.full((4,), 5))
            self.register_buffer("causal", torch.ones(4).bool(), persistent=False)
            self.register_buffer("flags", torch.ones(4).bool())
            self.register_buffer("floats", torch.ones(4), persistent=False)
            self.attribute = torch.full((4,), 2.5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            literal = torch.tensor([1.0, 2.0, 3.0, 4.0])
            used = (
                self.positions,
                self.zeros,
                self.secret,
                self.zero_point,
                self.zero_points,
                self.causal,
                self.flags,
                self.floats,
                self.attribute,
            )
            return (x * literal, *(x - 2 * b for b in used))

    exported = Exported(Buffers(), X)
    assert set(exported.weights) == {"secret", "zero_point", "zero_points", "flags", "floats", "attribute"}
    public = [t.tolist() for t in exported.constants.values()]
    assert [1.0, 2.0, 3.0, 4.0] in public  # the literal
    assert error(Buffers()(X), exported(X)) < 1e-5


def test_public_and_weight_only_work_is_folded() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(4).float() / 4
        return x @ (self.w.t() * 2 + position) + torch.sin(position)

    exported = Exported(Model(forward, w=torch.randn(4, 4)), X)
    assert exported.operators["linear"] == 1 and len(exported.graph.nodes) == 1


def test_owners_and_reveal_to_are_in_the_graph() -> None:
    model = Model(lambda self, x, y: x.exp() * self.w + y, w=torch.rand(4))
    graph, weights, constants = export_graph(
        model, (X, X + 1), owners={"x": "bank", "y": "shop"}, reveal_to=("bank",)
    )
    assert graph.owners() == ("bank", "shop") and graph.reveal_to == ("bank",)
    assert graph.edge("exp_0").owner == "bank"  # runs in plain at the bank
    assert graph.edge("mul_0").visibility is Visibility.SHARED
    only = run_reference(graph, {**weights, **constants}, {"x": X, "y": X + 1})
    assert error(model(X, X + 1), only[graph.outputs[0]]) < 1e-6


@pytest.mark.parametrize(
    ("owners", "reveal_to", "names"),
    [
        ({"z": "bank"}, None, "z"),
        ({"x": "model_owner"}, None, "model_owner"),
        ({"x": "dealer"}, None, "dealer"),
        ({"x": "bank", "y": "shop"}, None, "reveal_to"),
        ({"x": "bank", "y": "shop"}, ("thief",), "thief"),
        ({"x": "bank", "y": "shop"}, (), "reveal_to"),
    ],
)
def test_owners_that_cannot_be_are_refused(owners: Any, reveal_to: Any, names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        export_graph(Model(lambda self, x, y: x + y), (X, X + 1), owners=owners, reveal_to=reveal_to)


def test_the_only_data_owner_may_have_any_name_and_gets_the_output() -> None:
    graph, _, _ = export_graph(nn.Linear(4, 2), (X,), owners={"input": "clinic"})
    assert graph.reveal_to == ("clinic",)


def test_one_tensor_given_twice_makes_two_inputs() -> None:
    exported = Exported(Model(lambda self, x, y: x - 2 * y), X, X)
    assert exported.graph.inputs == ("x", "y")
    assert error(X - 2 * (X + 1), exported(X, X + 1)) < 1e-6


def test_a_compiled_module_is_taken_and_a_scripted_one_refused() -> None:
    assert set(Exported(torch.compile(nn.Linear(4, 2)), X).weights) == {"weight", "bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(nn.Linear(4, 2), X)
    assert "scripted" in refusal(traced, X)


def test_ids_may_be_any_row_of_their_table_whatever_the_examples_were() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(30_522, 2)

        def forward(self, ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.rows(ids[:, 1:]) * other[0, 0]

    graph, _, _ = export_graph(Table(), (torch.tensor([[1, 2]]), torch.tensor([[1, 2]])))
    assert graph.edge("ids").bound == 32_768
    assert graph.edge("other").bound == 32


def test_bounds_have_head_room_and_are_powers_of_two() -> None:
    graph, _, _ = export_graph(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), (X * 40,))
    for edge in graph.edges.values():
        assert edge.bound is not None and math.log2(edge.bound).is_integer() and edge.bound >= 16
    greatest = (X * 40).abs().max().item()
    assert 16 * greatest <= graph.edge("input").bound < 32 * greatest


def test_calibration_widens_bounds() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    narrow, _, _ = export_graph(model, (X,))
    wide, _, _ = export_graph(model, (X,), calibration=[X, (X * 1000,), {"input": X}])
    assert wide.edge("relu_0").bound > narrow.edge("relu_0").bound * 100
    assert "shape" in refusal(model, X, calibration=[X[:2]])


def test_a_bound_tells_nothing_of_small_weights() -> None:
    model = nn.Linear(4, 2)
    bounds = []
    for size in (0.01, 1.0, 15.0):
        with torch.no_grad():
            model.weight.uniform_(-size, size)
        bounds.append(export_graph(model, (X,))[0].edge("weight").bound)
    assert bounds == [16.0, 16.0, 16.0]


def test_half_precision_and_double_models_are_stored_as_float32() -> None:
    for dtype in (torch.float16, torch.float64, torch.bfloat16):
        model = nn.Sequential(nn.Linear(4, 2), nn.Tanh()).to(dtype)
        exported = Exported(model, X.to(dtype))
        assert all(w.dtype == torch.float32 for w in exported.weights.values())
        assert exported.graph.edge("input").dtype == str(dtype).removeprefix("torch.")
        assert error(model.double()(X.to(dtype).double()), exported(X.to(dtype))) < 1e-5


def test_the_graphs_weights_do_not_follow_the_model() -> None:
    model = nn.Linear(4, 2)
    exported = Exported(model, X)
    before = exported.weights["weight"].clone()
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(exported.weights["weight"], before)


def test_the_operator_list_is_closed() -> None:
    exported = Exported(nn.Sequential(nn.Linear(4, 2), nn.Softplus(), nn.LogSoftmax(-1)), X)
    assert set(exported.operators) <= set(OPS)
    assert all(n.operator.startswith("aten.") for n in exported.graph.nodes)


def test_a_model_that_cannot_be_exported_gives_one_error_and_no_noise(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.stdout.write("the model's own words\n")
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CompileError, match="torch.where"):
        export_graph(Branches(), (torch.ones(3),))
    out, err = capfd.readouterr()
    assert err == "" and set(out.split("\n")) == {"the model's own words", ""}
