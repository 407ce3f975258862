"""Inputs by name or position, outputs in the model's own structure."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest
import torch
from torch import nn

from secureinfer.errors import InputError
from secureinfer.graph.structure import check_tree, flatten_inputs, unflatten_output

from .graph_oracle import Exported, error

Pair = collections.namedtuple("Pair", ["left", "right"])
A, B, C = torch.rand(2), torch.rand(2) + 1, torch.rand(2) + 2


class Nested(nn.Module):
    def forward(
        self, x: torch.Tensor, parts: dict[str, Any], *, flag: bool = False, extra: Any = None
    ) -> Any:
        total = x + parts["a"] * parts["list"][0]
        return {"total": total, "pair": Pair(x * 2, [total, None, 3]), 7: (total - 1,), "flag": flag}


@pytest.fixture(scope="module")
def nested() -> Exported:
    return Exported(Nested(), A, {"a": B, "list": [C]}, flag=True)


def test_nested_inputs_and_outputs_come_back_as_the_model_has_them(nested: Exported) -> None:
    expected = Nested()(A, {"a": B, "list": [C]}, flag=True)
    came = nested(A, {"a": B, "list": [C]}, flag=True)
    assert list(came) == list(expected) and error(expected, came) < 1e-6
    assert came["pair"]._fields == Pair._fields and came["pair"].right[1:] == [None, 3]
    assert came["flag"] is True and isinstance(came[7], tuple)
    assert nested.graph.inputs == ("x", "parts.a", "parts.list.0")


def test_a_spec_is_json_and_survives_it(nested: Exported) -> None:
    for spec in (nested.graph.input_spec, nested.graph.output_spec):
        assert json.loads(json.dumps(spec)) == spec


def test_inputs_may_be_named_and_fixed_ones_left_out(nested: Exported) -> None:
    found = flatten_inputs(nested.graph.input_spec, (), {"parts": {"a": B, "list": [C]}, "x": A})
    assert found["x"] is A and found["parts.list.0"] is C


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {"parts": {"a": B, "list": [C]}}, "'x' is missing"),
        ((A,), {}, "'parts' is missing"),
        ((A, {"a": B, "list": [C]}), {"x": A}, "twice"),
        ((A, {"a": B, "list": [C]}, 1), {}, "positional"),
        ((A, {"a": B, "list": [C]}), {"colour": A}, "unknown input 'colour'"),
        ((A, {"a": B}), {}, "keys a, list"),
        ((A, {"a": B, "list": [C, C]}), {}, "sequence of 1"),
        ((A, {"a": B, "list": C}), {}, "sequence of 1"),
        ((A, [B]), {}, "mapping"),
        ((3.0, {"a": B, "list": [C]}), {}, "a tensor is expected"),
        (({"x": A, "parts": {"a": B, "list": [C]}},), {}, r"came as one dict; .* infer\(\*\*inputs\)"),
        ((A, {"a": B, "list": [C]}), {"flag": False}, "fixed to True"),
        ((A, {"a": B, "list": [C]}), {"flag": A}, "a tensor was given"),
    ],
)
def test_a_wrong_call_is_refused_by_name(nested: Exported, args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        flatten_inputs(nested.graph.input_spec, args, kwargs)


def test_variadic_positional_inputs() -> None:
    class Variadic(nn.Module):
        def forward(self, *xs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            return xs[0] - xs[1] * named["scale"]

    exported = Exported(Variadic(), A, B, scale=C)
    assert exported.graph.inputs == ("xs_0", "xs_1", "scale")
    assert error(Variadic()(A, B, scale=C), exported(A, B, scale=C)) < 1e-6


@pytest.mark.needs("hf")
def test_only_model_outputs_of_transformers_are_rebuilt() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    fields = [["last_hidden_state", {"edge": "y"}]]
    built = unflatten_output(
        {"model_output": "transformers.modeling_outputs.BaseModelOutput", "fields": fields}, {"y": A}
    )
    assert type(built) is BaseModelOutput and built.last_hidden_state is A
    for other in (
        "subprocess.Popen",
        "os.system",
        "transformers.modeling_outputs.OrderedDict",
        "transformers.pipeline",
    ):
        assert unflatten_output({"model_output": other, "fields": fields}, {"y": A}) == {
            "last_hidden_state": A
        }


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        {"edge": "unknown"},
        {"edge": "y", "value": 1},
        {"value": [1]},
        {"list": {"edge": "y"}},
        {"dict": [["k"]]},
        {"namedtuple": "class", "fields": []},
        {"namedtuple": "a b", "fields": []},
        {"namedtuple": "T", "fields": [["_x", {"edge": "y"}]]},
        {"model_output": "os;system", "fields": []},
    ],
)
def test_a_foreign_tree_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="structure"):
        check_tree(tree, ("y",))


def test_a_deep_tree_is_refused() -> None:
    tree: Any = {"edge": "y"}
    for _ in range(100):
        tree = {"list": [tree]}
    with pytest.raises(ValueError, match="not a tree"):
        check_tree(tree, ("y",))
