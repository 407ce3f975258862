"""Weights that their owner declares public: everybody holds them, and they cost less (field report 74)."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.graph.ir import Visibility
from secureinfer.plan.program import Program

from .harness import run

X, Y = torch.randn(4, 30), torch.randn(4, 30)


class Model(nn.Module):
    """Two owners' features, so that hidden values are shared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Linear(30, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x + y))
        return out


def compiled(**options: Any) -> tuple[Program, Model]:
    model = Model().eval()
    return si.compile(model, (X, Y), owners={"x": "a", "y": "b"}, reveal_to=["a"], **options), model


def answer(program: Program) -> torch.Tensor:
    parties = 1 + len(program.graph.owners())
    inputs = dict(zip(program.graph.inputs, (X, Y), strict=False))
    return next(iter(run(program, inputs, parties=parties).outputs.values()))


@pytest.mark.parametrize("protocol", ["fast", "crypten"])
@pytest.mark.parametrize("public", [True, ["body"], ["body.0.weight", "head"]])
def test_public_weights_give_the_same_answer_for_fewer_bytes(protocol: str, public: bool | list[str]) -> None:
    program, model = compiled(protocol=protocol, public_weights=public)
    private, _ = compiled(protocol=protocol)
    assert any(s.kernel.endswith(".public") for s in program.plan.steps)
    with torch.no_grad():
        assert float((answer(program) - model(X, Y)).abs().max()) < 1e-3
    ours, theirs = program.plan.totals, private.plan.totals
    assert ours.bytes < theirs.bytes and ours.dealt_bytes < theirs.dealt_bytes
    assert ours.setup_bytes < theirs.setup_bytes


def test_only_what_is_named_becomes_public(tmp_path: Path) -> None:
    program, model = compiled(public_weights=["body"])
    assert sorted(program.graph.weights) == ["head.bias", "head.weight"]
    assert all(program.graph.edge(n).visibility is Visibility.PUBLIC for n in program.graph.constants)
    program.public().save(tmp_path / "public.si")
    raw = (tmp_path / "public.si").read_bytes()
    assert model.body[0].weight.detach().numpy().tobytes() in raw
    assert model.head.weight.detach().numpy().tobytes()[:16] not in raw
    head = json.loads(zipfile.ZipFile(tmp_path / "public.si").read("manifest.json"))
    assert sorted(head["manifest"]["graph"]["weights"]) == ["head.bias", "head.weight"]


def test_without_the_word_nothing_is_public() -> None:
    program, _ = compiled()
    assert len(program.graph.weights) == 4
    assert not any(t.numel() > 1 for t in program.constants.values())


def test_a_tied_weight_is_public_under_each_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    program = si.compile(model.eval(), torch.randn(2, 4), public_weights=["2.weight"])
    assert not program.graph.weights


def test_a_data_owner_computes_a_public_model_alone() -> None:
    model = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    program = si.compile(model, X, public_weights=True)
    assert {s.kernel.partition(".")[0] for s in program.plan.steps} == {"begin", "private", "reveal"}
    got = next(iter(run(program, {program.graph.inputs[0]: X}).outputs.values()))
    with torch.no_grad():
        assert torch.allclose(got, model(X), atol=1e-5)


def test_a_public_int8_layer_computes_with_its_rounded_weights() -> None:
    model = si.compress(Model().eval(), [si.Quantize()])[0]
    program = si.compile(model, (X, Y), owners={"x": "a", "y": "b"}, reveal_to=["a"], public_weights=["body"])
    assert {program.graph.edge(w).dtype for w in program.graph.weights} == {"int8", "float32"}
    with torch.no_grad():
        assert float((answer(program) - model(X, Y)).abs().max()) < 2e-3


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(si.SettingsError, match="body.7.weight"):
        compiled(public_weights=["head", "body.7.weight"])
