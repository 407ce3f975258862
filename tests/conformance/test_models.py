"""Whole models against plaintext on every layer, and that the comparison sees each planted fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.backends.mpc.fast.catalog import CATALOG
from secureinfer.graph.ir import Graph
from secureinfer.plan.planner import make_plan
from secureinfer.plan.program import Program

from .harness import run

pytestmark = pytest.mark.needs("hf")

LAYERS, HEADS, WIDTH = 2, 2, 16


class Hidden(torch.nn.Module):
    """A BERT that gives every layer's hidden states, one tensor a layer, at the places that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(11)
        config = BertConfig(
            vocab_size=60,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        with torch.no_grad():  # sharper than the initialisation: attention and GELU must matter
            for name, p in self.bert.named_parameters():
                if p.dim() == 2:
                    p.mul_(20.0 if "query" in name or "key" in name else 8.0)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.bert(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        keep = attention_mask.unsqueeze(-1).to(out.last_hidden_state.dtype)
        return tuple(h * keep for h in out.hidden_states)


IDS = torch.tensor([[5, 33, 12, 59, 7, 21], [40, 2, 8, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def worst(program: Program, model: torch.nn.Module) -> tuple[float, float]:
    """(greatest error, least cosine) over all layers of the secure run against the model in float64."""
    with torch.no_grad():
        plain = model.double()(IDS, MASK)
    model.float()
    measured = run(program, dict(zip(program.graph.inputs, (IDS, MASK), strict=True)))
    error, cosine = 0.0, 1.0
    got_layers = [measured.outputs[name] for name in program.graph.outputs]
    for got, expected in zip(got_layers, plain, strict=True):
        error = max(error, float((got.double() - expected).abs().max()))
        rows = MASK.bool()
        cosine = min(
            cosine, float(torch.nn.functional.cosine_similarity(got[rows].double(), expected[rows]).min())
        )
    return error, cosine


def agrees(program: Program, model: torch.nn.Module) -> bool:
    """The bound of the project: error 5e-3, cosine 0.9999."""
    error, cosine = worst(program, model)
    return error <= 5e-3 and cosine >= 0.9999


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return Hidden().eval()


@pytest.fixture(scope="module")
def program(model: torch.nn.Module) -> Program:
    return si.compile(model, (IDS, MASK))


def test_every_layer_agrees_with_plaintext(program: Program, model: torch.nn.Module) -> None:
    error, cosine = worst(program, model)
    assert error <= 1e-3 and cosine >= 0.99999


# -- planted faults


def changed(program: Program, **parts: Any) -> Program:
    """The program with another graph or other weights, planned anew."""
    graph: Graph = parts.get("graph", program.graph)
    plan = make_plan(graph, CATALOG, 2, program.options)
    return Program(
        graph,
        plan,
        backend="mpc",
        protocol="fast",
        options=dict(program.options),
        constants=program.constants,
        weights=parts.get("weights", program.weights),
    )


def replace_nodes(program: Program, path: str, changes: Mapping[str, Callable[[Any], Any]]) -> Program:
    """changes: by operator, of every node whose module path has `path` in it."""
    nodes = tuple(changes[n.op](n) if n.op in changes and path in n.path else n for n in program.graph.nodes)
    if nodes == program.graph.nodes:
        raise ValueError(
            f"no {' or '.join(changes)} in {path or 'the graph'}; the planted fault would be none"
        )
    return changed(program, graph=dataclasses.replace(program.graph, nodes=nodes))


def mask_ignored(program: Program, path: str = "") -> Program:
    """Whether attention is one step or, where that does not fit, several."""

    def fused(node: Any) -> Any:
        return dataclasses.replace(node, inputs=node.inputs[:3])

    def alone(node: Any) -> Any:
        return dataclasses.replace(node, op="softmax", inputs=node.inputs[:1])

    return replace_nodes(program, path, {"attention": fused, "masked_softmax": alone})


def gelu_to_relu(program: Program, path: str = "") -> Program:
    return replace_nodes(program, path, {"gelu": lambda n: dataclasses.replace(n, op="relu", attrs={})})


def weights_of(program: Program, *words: str) -> list[tuple[str, torch.Tensor]]:
    """The weight edges of linear layers whose module path has all the words."""
    found = []
    for node in program.graph.nodes:
        if node.op == "linear" and all(word in node.path for word in words):
            found.append((node.inputs[1], (program.weights or {})[node.inputs[1]]))
            if len(node.inputs) > 2:
                found.append((node.inputs[2], (program.weights or {})[node.inputs[2]]))
    if not found:
        raise ValueError(f"no linear layer has {words} in its path")
    return found


def uniform_attention(program: Program, path: str = "") -> Program:
    zeroed = {name: torch.zeros_like(w) for name, w in weights_of(program, path, "query")}
    return changed(program, weights={**(program.weights or {}), **zeroed})


def one_head_dropped(program: Program, path: str = "", head: int = WIDTH // HEADS) -> Program:
    """head: its width."""
    (name, weight), *_ = weights_of(program, path, "attention.output.dense")
    weight = weight.clone()
    weight[:, :head] = 0
    return changed(program, weights={**(program.weights or {}), name: weight})


@pytest.mark.parametrize("fault", [mask_ignored, uniform_attention, gelu_to_relu, one_head_dropped])
def test_the_comparison_sees_a_planted_fault(
    fault: Callable[[Program], Program], program: Program, model: torch.nn.Module
) -> None:
    assert not agrees(fault(program), model)


def test_the_comparison_sees_a_wrong_truncation(
    program: Program, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the opened sum's wrap around the ring is not put back."""
    from secureinfer.backends.mpc import protocols, ring
    from secureinfer.backends.mpc.correlations import Truncation

    def local(p: Any, x: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == 0:
            return x
        parts = p.take(Truncation(tuple(x.shape), bits))
        (c,) = p.open([x + parts["r"] + ((1 << 62) if p.first else 0)], "truncation")
        return (ring.logical_shift(c, bits) - (1 << (62 - bits)) if p.first else 0) - parts["quotient"]

    monkeypatch.setattr(protocols, "truncate", local)
    assert not agrees(program, model)


def test_changing_one_weight_moves_the_answer_as_in_plaintext(
    program: Program, model: torch.nn.Module
) -> None:
    name, weight = weights_of(program, "intermediate")[0]
    moved = weight.clone()
    moved[0, 0] += 1.0
    weights = {**(program.weights or {}), name: moved}
    other = changed(program, weights=weights)
    given = dict(zip(program.graph.inputs, (IDS, MASK), strict=True))
    secure = [list(run(p, given).outputs.values())[-1] for p in (program, other)]
    from secureinfer.graph.ops import run_reference

    plain = [
        list(run_reference(program.graph, {**program.constants, **w}, given).values())[-1]
        for w in (program.weights or {}, weights)
    ]
    assert float((secure[0] - secure[1]).abs().max()) > 1e-2
    difference = (secure[0] - secure[1]).double() - (plain[0] - plain[1])
    assert float(difference.abs().max()) < 2e-3
