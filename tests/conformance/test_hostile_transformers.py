"""A program file with odd attention, layer norm or GELU steps is refused with a typed error, or runs harmlessly."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.backends import catalog
from secureinfer.backends.mpc import attention, norms
from secureinfer.errors import ProgramFileError
from secureinfer.plan.manifest import write_manifest
from secureinfer.plan.program import Program

from .test_hostile_programs import BOUND, RING, SCALE, loaded, node_of, survive

IDS = torch.tensor([[3, 7, 10, 5, 0], [8, 8, 1, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])


class Block(nn.Module):
    """A table, a norm, two heads of attention with a padding mask, GELU between two layers, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table, self.norm, self.last = nn.Embedding(11, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        q, k, v = (f(x).view(2, 5, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        keep = mask[:, None, None, :].bool()
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = self.last(x + self.o(a.transpose(1, 2).reshape(2, 5, 8)))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        out: torch.Tensor = self.head(torch.tanh(x[:, 0]))
        return out


def block() -> Program:
    return si.compile(Block().eval(), (IDS, MASK))


@pytest.fixture(scope="module")
def compiled() -> tuple[Program, dict[str, Any]]:
    program = block()
    assert {"attention.window", "layer_norm.window", "gelu.window", "tanh.window"} <= {
        step.kernel for step in program.plan.steps
    }
    return program, write_manifest(program.graph, program.plan, "mpc", "fast", program.options)


def edge_of(raw: dict[str, Any], name: str) -> list[Any]:
    return next(r for r in raw["graph"]["edges"] if r[0] == name)


def attribute(op: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: node_of(raw, op)[4].update({name: value})


def without(op: str, name: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: node_of(raw, op)[4].pop(name) and None


def operand(op: str, index: int, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        edge_of(raw, node_of(raw, op)[2][index])[place] = value

    return change


def result(op: str, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        edge_of(raw, node_of(raw, op)[3][0])[place] = value

    return change


def instead(op: str, index: int, other_op: str, other_index: int) -> Callable[[dict[str, Any]], None]:
    """An operand becomes another's."""
    return lambda raw: node_of(raw, op)[2].__setitem__(index, node_of(raw, other_op)[2][other_index])


def shape_of_mask(shape: list[int]) -> Callable[[dict[str, Any]], None]:
    """The mask gets another shape all along, so that only attention can object."""

    def change(raw: dict[str, Any]) -> None:
        cast = edge_of(raw, node_of(raw, "attention")[2][3])
        reshaped = next(n for n in raw["graph"]["nodes"] if n[1] == "cast")[2][0]
        reshape = next(n for n in raw["graph"]["nodes"] if n[3] == [reshaped])
        reshape[4]["shape"] = shape
        for row in (cast, edge_of(raw, reshaped)):
            row[row.index([2, 1, 1, 5])] = shape

    return change


INFINITY, NAN = {"float": "inf"}, {"float": "nan"}
REFUSED: dict[str, Callable[[dict[str, Any]], None]] = {
    "attention without a bound of scores": without("attention", "scores"),
    "negative scores": attribute("attention", "scores", -1.0),
    "scores of zero": attribute("attention", "scores", 0.0),
    "scores that are no number": attribute("attention", "scores", NAN),
    "infinite scores": attribute("attention", "scores", INFINITY),
    "scores of 1e308": attribute("attention", "scores", 1e308),
    "scores of 1e30": attribute("attention", "scores", 1e30),
    "scores in words": attribute("attention", "scores", "16"),
    "scores that are a list": attribute("attention", "scores", [16.0]),
    "scores that are true": attribute("attention", "scores", True),
    "no scores": attribute("attention", "scores", None),
    "a mask of another width": shape_of_mask([2, 1, 5, 1, 1]),
    "a mask that repeats nothing": shape_of_mask([10]),
    "queries for values": instead("attention", 2, "attention", 0),
    "values that were not cut": instead("attention", 2, "permute", 0),
    "a mask that is a score": instead("attention", 3, "attention", 2),
    "queries in a small ring": operand("attention", 0, RING, 40),
    "keys in a small ring": operand("attention", 1, RING, 32),
    "queries at another scale": operand("attention", 0, SCALE, 24),
    "values at another scale": operand("attention", 2, SCALE, 12),
    "values in a small ring": operand("attention", 2, RING, 40),
    "values of no bound": operand("attention", 2, BOUND, None),
    "values of any size": operand("attention", 2, BOUND, 2.0**45),
    "attention's result at another scale": result("attention", SCALE, 20),
    "attention's result in a small ring": result("attention", RING, 32),
    "attention's result of no bound": result("attention", BOUND, None),
    "a norm over nothing": attribute("layer_norm", "normalized_shape", []),
    "a norm over no values": attribute("layer_norm", "normalized_shape", [0]),
    "a norm over another width": attribute("layer_norm", "normalized_shape", [4]),
    "a norm over a negative width": attribute("layer_norm", "normalized_shape", [-8]),
    "a norm over a width in words": attribute("layer_norm", "normalized_shape", "8"),
    "a norm over a fraction": attribute("layer_norm", "normalized_shape", [8.0]),
    "a norm over a batch": attribute("layer_norm", "normalized_shape", [5, 8]),
    "eps that is no number": attribute("layer_norm", "eps", NAN),
    "an infinite eps": attribute("layer_norm", "eps", INFINITY),
    "a negative eps": attribute("layer_norm", "eps", -1.0),
    "an eps of 1e30": attribute("layer_norm", "eps", 1e30),
    "eps in words": attribute("layer_norm", "eps", "1e-5"),
    "no eps": attribute("layer_norm", "eps", None),
    "a norm that forgets its gain": attribute("layer_norm", "has_weight", False),
    "a norm that forgets its bias": attribute("layer_norm", "has_bias", False),
    "a norm whose gain is neither": attribute("layer_norm", "has_weight", 2),
    "a norm in a small ring": operand("layer_norm", 0, RING, 40),
    "a norm of no bound": operand("layer_norm", 0, BOUND, None),
    "a norm of any size": operand("layer_norm", 0, BOUND, 2.0**40),
    "a norm's result at another scale": result("layer_norm", SCALE, 24),
    "a norm's gain at another scale": operand("layer_norm", 1, SCALE, 24),
    "GELU in another form": attribute("gelu", "approximate", "cubic"),
    "GELU of no bound": operand("gelu", 0, BOUND, None),
    "GELU at a scale that is not its factors'": operand("gelu", 0, SCALE, 30),
    "GELU's result at another scale": result("gelu", SCALE, 20),
    "GELU of values beyond every ring": operand("gelu", 0, BOUND, 2.0**40),
    "GELU by SiLU's kernel": lambda raw: next(r for r in raw["plan"] if r[0] == "gelu.window").__setitem__(
        0, "silu.window"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_odd_step_is_refused_before_anything_is_sent(
    what: str, compiled: tuple[Program, dict[str, Any]]
) -> None:
    program, raw = compiled[0], copy.deepcopy(compiled[1])
    REFUSED[what](raw)
    with pytest.raises(ProgramFileError):
        loaded(program, raw)


def test_what_compiling_gives_is_accepted(compiled: tuple[Program, dict[str, Any]]) -> None:
    program, raw = compiled
    assert loaded(program, raw).manifest_digest == program.manifest_digest


@pytest.mark.parametrize(
    ("module", "what"),
    [(norms, "a negative eps"), (norms, "a norm that forgets its gain"), (attention, "negative scores")],
)
def test_without_its_check_an_odd_step_would_be_planned(
    module: Any, what: str, compiled: tuple[Program, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin."""
    program, raw = compiled[0], copy.deepcopy(compiled[1])
    REFUSED[what](raw)
    monkeypatch.setattr(module, "_odd", lambda *_: None)
    loaded(program, raw)


class Scaled(nn.Module):
    """A layer norm whose gain is an input's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.layer(x), (8,), gain)


def test_a_gain_that_is_no_weight_is_refused_in_words() -> None:
    """It was planned, and ended the session with a KeyError."""
    with pytest.raises(si.UnsupportedModelError, match="the gain is neither a weight"):
        si.compile(Scaled().eval(), (torch.ones(2, 8), torch.ones(8)))


# -- fuzz

NUMBERS = [
    None, -1, 0, 1, 2, 7, 8, 0.5, 16.0, 64.0, 1e-300, 1e9, 1e308, -1e30, math.pi, True, False, INFINITY, NAN,
    {"float": "-inf"}, [], [0], [8], [5, 8], [8, 1], "x", "tanh", "none",
]  # fmt: skip
OPS = ("attention", "layer_norm", "gelu", "tanh")


def mutated(raw: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One or two attributes, operands, edges or kernels of the steps of a transformer become others."""
    raw = copy.deepcopy(raw)
    graph = raw["graph"]
    for _ in range(chance.randint(1, 2)):
        node = chance.choice([n for n in graph["nodes"] if n[1] in OPS])
        row = edge_of(raw, chance.choice([*node[2], *node[3]]))
        kind = chance.choice(
            ["attribute", "attribute", "bound", "ring", "scale", "operand", "drop", "kernel"]
        )
        if kind == "attribute" and node[4]:
            node[4][chance.choice(list(node[4]))] = chance.choice(NUMBERS)
        elif kind == "bound":
            row[BOUND] = chance.choice([None, 0.0, 1e-30, 0.5, 1.0, 3.0, 64.0, 2.0**20, 2.0**46, 1e300])
        elif kind == "ring":
            row[RING] = chance.choice([8, 24, 32, 40, 48, 56, 63, 64])
        elif kind == "scale":
            row[SCALE] = chance.choice([0, 8, 15, 16, 17, 24, 32, 48])
        elif kind == "operand" and node[2]:
            node[2][chance.randrange(len(node[2]))] = chance.choice(graph["edges"])[0]
        elif kind == "drop" and node[2]:
            node[2].pop()
        elif kind == "kernel":
            names = [s.name for s in catalog("mpc", "fast").specs.values() if s.op == node[1]]
            chance.choice(raw["plan"])[0] = chance.choice(names)
    return raw


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_other_step_of_a_transformer_is_refused_or_harmless(
    count: int, compiled: tuple[Program, dict[str, Any]]
) -> None:
    chance = random.Random(f"transformers {count}")
    found = [survive(compiled[0], mutated(compiled[1], chance), IDS, MASK) for _ in range(count)]
    assert found.count("refused") > count // 3
