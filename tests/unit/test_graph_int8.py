"""Int8 weights through export: which patterns keep them, what a factor does to their scales, and whole models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secureinfer as si
from secureinfer.graph.int8 import scale_bits
from secureinfer.graph.ir import MODEL_OWNER, Edge, Graph, Node, Visibility
from secureinfer.plan.manifest import Fault, check_graph

from .graph_oracle import Exported, agree

hf = pytest.mark.needs("hf")


class Held(nn.Module):
    """An int8 tensor with scales, as a user holds them, and a function of both and x."""

    def __init__(
        self, function: Callable[..., torch.Tensor], shape: tuple[int, ...] = (6, 4), dim: int = 0
    ) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.register_buffer("values", torch.randint(-127, 128, shape, generator=g).to(torch.int8))
        self.register_buffer("scales", torch.rand(shape[dim], generator=g) * 0.01 + 0.001)
        self.bias = nn.Parameter(torch.randn(shape[0], generator=g))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

KEPT: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "cast times scale": (
        Held(lambda m, x: F.linear(x, m.values.to(x.dtype) * m.scales.to(x.dtype)[:, None], m.bias)), X,
    ),
    "scale first": (Held(lambda m, x: F.linear(x, m.scales.view(-1, 1) * m.values.to(x.dtype))), X),
    "divided": (Held(lambda m, x: F.linear(x, m.values.to(x.dtype) / m.scales[:, None] / 1e4)), X),
    "one scale": (Held(lambda m, x: F.linear(x, m.values.to(x.dtype) * 0.02, m.bias)), X),
    "scale after the product": (Held(lambda m, x: F.linear(x, m.values.to(x.dtype)) * m.scales + m.bias), X),
    "a matmul of the transposed": (Held(lambda m, x: x @ (m.values.to(x.dtype) * m.scales[:, None]).t()), X),
    "transposed before the cast": (Held(lambda m, x: x @ (m.values.t().to(x.dtype) * m.scales)), X),
    "half of the rows": (Held(lambda m, x: F.linear(x, (m.values.to(x.dtype) * m.scales[:, None])[:3])), X),
    "negated": (Held(lambda m, x: F.linear(x, -(m.values.to(x.dtype) * m.scales[:, None])) / 8), X),
    "a line": (
        Held(lambda m, x: F.conv1d(x, m.values.to(x.dtype) * m.scales[:, None, None]), (6, 4, 2)),
        torch.randn(2, 4, 5),
    ),
    "a table": (
        Held(lambda m, x: F.embedding(x, m.values.to(m.bias.dtype) * m.scales), (6, 4), 1),
        torch.tensor([[0, 5]]),
    ),
}  # fmt: skip

FLOAT: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "a scale for each input": (
        Held(lambda m, x: F.linear(x, m.values.to(x.dtype) * m.scales), (6, 4), 1), X,
    ),
    "a scale for each row of a table": (
        Held(lambda m, x: F.embedding(x, m.values.to(m.bias.dtype) * m.scales[:, None])), torch.tensor([[0, 5]]),
    ),
    "a zero point": (
        Held(lambda m, x: F.linear(x, (m.values.to(x.dtype) - m.bias[:, None]) * m.scales[:, None])), X,
    ),
    "scales that are too large": (Held(lambda m, x: F.linear(x, m.values.to(x.dtype) * 1e5)), X),
    "no layer": (Held(lambda m, x: x + m.values.to(x.dtype)[0] * m.scales[0]), X),
}  # fmt: skip


def of(exported: Exported) -> list[Node]:
    return [n for n in exported.graph.nodes if n.attrs.get("quantized")]


@pytest.mark.parametrize("name", KEPT)
def test_int8_values_times_scales_stay_int8(name: str) -> None:
    model, x = KEPT[name]
    exported = agree(model, x)
    (node,) = of(exported)
    assert "mul" not in exported.operators and "div" not in exported.operators
    _, weight, *bias, scale = (exported.graph.edge(e) for e in node.inputs)
    assert (weight.dtype, weight.scale, weight.bound) == ("int8", 0, 128.0)
    assert exported.weights[weight.name].dtype == torch.int8
    for edge in (weight, scale):
        assert (edge.visibility, edge.owner) == (Visibility.PRIVATE, MODEL_OWNER)
    assert scale.dtype == "float32" and scale.shape == (weight.shape[0 if node.op != "embedding" else 1],)
    assert 512 <= round(float(exported.weights[scale.name].abs().max()) * 2**scale.scale) <= 2047
    assert node.attrs.get("has_bias", False) == bool(bias)
    assert scale.bound == 2.0 ** (11 - scale.scale)


@pytest.mark.parametrize("name", FLOAT)
def test_other_uses_of_int8_values_become_floats(name: str) -> None:
    exported = agree(*FLOAT[name], tolerance=1e-2 if "large" in name else 1e-5)
    assert of(exported) == [] and all(t.dtype == torch.float32 for t in exported.weights.values())


def test_a_batch_norm_moves_into_the_scales() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5)
    nn.init.normal_(norm.weight)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    model, _ = si.compress(nn.Sequential(nn.Conv2d(3, 5, 3), norm, nn.ReLU()).eval(), [si.Quantize()])
    exported = agree(model, torch.randn(2, 3, 6, 6))
    assert exported.operators == {"convolution": 1, "relu": 1}
    (node,) = of(exported)
    expected = model[0].weight_scale * norm.weight / (norm.running_var + norm.eps).sqrt()
    assert torch.allclose(exported.weights[node.inputs[-1]], expected)
    assert torch.equal(exported.weights[node.inputs[1]], model[0].weight_int8)


def test_a_layer_that_is_used_with_two_factors_has_two_pairs() -> None:
    """An int8 edge belongs to one scale edge: what hides it in a session is drawn for their product."""
    layer, _ = si.compress(nn.Linear(4, 4), [si.Quantize()])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 3 + self.layer(x.flip(0)).relu() + self.layer(x.flip(1)).relu()

    nodes = of(agree(Twice(), X))
    assert [n.inputs[1] for n in nodes] == ["layer.weight_int8"] + ["layer.weight_int8#1"] * 2
    assert [n.inputs[-1] for n in nodes] == ["layer.weight_scale"] + ["layer.weight_scale#1"] * 2


@pytest.mark.parametrize("greatest", [1e-9, 0.0123, 0.5, 1.0, 1.9995, 2047 / 2**20, 2047.9 / 2**20, 2000.0])
def test_the_greatest_scale_gets_eleven_bits(greatest: float) -> None:
    bits = scale_bits(torch.tensor([greatest / 7, -greatest]))
    assert bits is not None and 1024 <= round(greatest * 2**bits) <= 2047


@pytest.mark.parametrize("greatest", [1e-17, 3000.0, float("nan"), float("inf")])
def test_a_scale_without_a_place_has_no_bits(greatest: float) -> None:
    assert scale_bits(torch.tensor([greatest])) is None


# Whole models: the graph gives what the quantised module gives.

IDS = torch.tensor([[5, 17, 80, 9, 33, 2], [7, 61, 12, 40, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def whole(model: nn.Module, *args: Any, **kwargs: Any) -> Exported:
    small, report = si.compress(model.eval(), [si.Quantize()])
    exported = agree(small, *args, **kwargs)
    layers = [n for n in exported.graph.nodes if n.op in ("linear", "convolution", "embedding")]
    assert of(exported) == layers and layers
    assert all("norm" in r.type.lower() for r in report.transforms[0].kept)
    return exported


@hf
def test_bert() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40,
    )  # fmt: skip
    exported = whole(transformers.BertModel(config), input_ids=IDS, attention_mask=MASK)
    # The scale 1/sqrt(8) of attention moved into the query's scales.
    assert exported.operators["mul"] == 0 and len(of(exported)) == 14


@hf
def test_gpt2_with_conv1d_and_a_tied_head() -> None:
    """Field report 47: its Conv1D layers are quantised like any linear layer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=16, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    exported = whole(transformers.GPT2LMHeadModel(config), IDS)
    assert exported.graph.edge("transformer.h.0.attn.c_attn.weight_int8").shape == (48, 16)


def test_resnet18() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    exported = whole(resnet18(), torch.randn(1, 3, 32, 32))
    assert exported.operators["convolution"] == 20 and exported.operators["mul"] == 0


# What a manifest may not say.


def graph() -> Graph:
    small, _ = si.compress(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4, bias=False)), [si.Quantize()]
    )
    return Exported(small, X).graph


def changed(
    edges: dict[str, dict[str, Any]] | None = None, nodes: dict[int, dict[str, Any]] | None = None
) -> Graph:
    made = graph()
    table: dict[str, Edge] = dict(made.edges)
    for name, fields in (edges or {}).items():
        table[name] = dataclasses.replace(table[name], **fields)
    listed = [dataclasses.replace(n, **(nodes or {}).get(i, {})) for i, n in enumerate(made.nodes)]
    return dataclasses.replace(made, edges=MappingProxyType(table), nodes=tuple(listed))


WRONG: dict[str, tuple[Callable[[], Graph], str]] = {
    "int8 without the flag": (
        lambda: changed(nodes={2: {"attrs": {}, "inputs": ("relu_0", "2.weight_int8")}}), "has no scales",
    ),
    "the flag on a float": (lambda: changed({"2.weight_int8": {"dtype": "float32"}}), "not private weights"),
    "scales that are int8": (lambda: changed({"2.weight_scale": {"dtype": "int8"}}), "takes an int8|not private"),
    "two lots of scales": (
        lambda: changed(nodes={2: {"inputs": ("relu_0", "0.weight_int8", "2.weight_scale")}}), "does not fit",
    ),
    "scales of another layer": (
        lambda: changed(nodes={2: {"inputs": ("relu_0", "2.weight_int8", "0.weight_scale")}}), "does not fit",
    ),
    "a bias in place of scales": (
        lambda: changed(nodes={2: {"inputs": ("relu_0", "2.weight_int8", "2.weight_scale", "2.weight_scale"),
                                   "attrs": {"quantized": True, "has_bias": True}}}), "used for something else",
    ),
    "a flag that is none": (
        lambda: changed(nodes={1: {"attrs": {"quantized": True}}}), "no quantised layer",
    ),
    "int8 that nothing uses": (lambda: _with_unused(), "no quantised layer uses"),
}  # fmt: skip


def _with_unused() -> Graph:
    made = graph()
    edge = dataclasses.replace(made.edges["2.weight_int8"], name="spare")
    return dataclasses.replace(
        made, edges=MappingProxyType({**made.edges, "spare": edge}), weights=(*made.weights, "spare")
    )


def test_the_graph_itself_passes() -> None:
    check_graph(changed())


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_that_misuses_int8_is_refused(what: str) -> None:
    make, match = WRONG[what]
    with pytest.raises(Fault, match=match):
        check_graph(make())
