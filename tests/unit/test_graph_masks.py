"""Masks in every spelling become masked_softmax; what is not proved to be a mask stays what it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from secureinfer.graph.ir import Node, Visibility
from secureinfer.graph.ops import evaluate

from .graph_oracle import Exported, error

GENERATOR = torch.Generator().manual_seed(3)
Q = torch.randn(2, 3, 4, 5, generator=GENERATOR)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])
MIN = torch.finfo(torch.float32).min

Bias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """softmax over scores to which a spelling of the mask is applied."""

    def __init__(self, apply: Bias) -> None:
        super().__init__()
        self.apply_mask = apply

    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = q @ q.transpose(-1, -2)
        return torch.softmax(self.apply_mask(scores, mask), -1) @ q


def four(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, None, None, :]


def inverted(mask: torch.Tensor) -> torch.Tensor:
    flag = 1.0 - four(mask).expand(2, 1, 4, 4).to(torch.float32)
    return flag.masked_fill(flag.to(torch.bool), MIN)


PRIVATE: dict[str, Bias] = {
    "where kept": lambda s, m: s + torch.where(four(m).bool(), 0.0, -math.inf),
    "where dropped": lambda s, m: s + torch.where(four(m) == 0, -1e4, 0.0),
    "where finfo.min": lambda s, m: s + torch.where(four(m).bool(), 0.0, MIN),
    "(1 - m) * -1e4": lambda s, m: s + (1.0 - four(m).float()) * -10000.0,
    "(1 - m) * finfo.min": lambda s, m: s + (1.0 - four(m)) * MIN,
    "bool * NEG": lambda s, m: s + (four(m) == 0).float() * -1e9,
    "masked_fill on scores": lambda s, m: s.masked_fill(four(m) == 0, -math.inf),
    "masked_fill finfo.min": lambda s, m: s.masked_fill(four(m) == 0, MIN),
    "where on scores": lambda s, m: torch.where(four(m).bool(), s, -1e4),
    "masked_fill of the inverted mask": lambda s, m: s + inverted(m),
    "expand, view and slice of a mask": lambda s, m: (
        s + torch.where(four(m).expand(2, 1, 6, 4).reshape(2, 1, 6, 4)[:, :, :4].bool(), 0.0, MIN)
    ),
    "a mask added to a mask": lambda s, m: (
        s + (torch.where(four(m).bool(), 0.0, MIN) + torch.where(torch.ones(4, 4).tril().bool(), 0.0, MIN))
    ),
    "two masks, one after the other": lambda s, m: (s + torch.where(four(m).bool(), 0.0, -1e4)).masked_fill(
        torch.ones(4, 4).triu(1).bool(), -math.inf
    ),
    "a mask and a bias of its own": lambda s, m: (
        s + (torch.arange(4) * 0.1 + torch.where(four(m).bool(), 0.0, -1e9))
    ),
}

PUBLIC: dict[str, Bias] = {
    "causal where": lambda s, m: s + torch.where(torch.ones(4, 4).tril().bool(), 0.0, -math.inf),
    "causal fill": lambda s, m: s.masked_fill(torch.ones(4, 4).triu(1).bool(), MIN),
    "causal triu": lambda s, m: s + torch.full((4, 4), -math.inf).triu(1),
}


class Spellings(nn.Module):
    """Every spelling at once, one submodule each: one export for many small tests."""

    def __init__(self, spellings: dict[str, Bias]) -> None:
        super().__init__()
        self.names = list(spellings)
        self.each = nn.ModuleList(Attention(apply) for apply in spellings.values())

    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: model(q, mask) for name, model in zip(self.names, self.each, strict=True)}


@functools.cache
def recovered() -> Exported:
    return Exported(Spellings({**PRIVATE, **PUBLIC}), Q, MASK)


@functools.cache
def left_alone() -> Exported:
    return Exported(Spellings(NOT_MASKS), Q, MASK)


def softmax_of(exported: Exported, name: str) -> Node:
    """The softmax behind one spelling's output (two spellings that mean the same share one)."""
    makers = {n.outputs[0]: n for n in exported.graph.nodes}
    output = dict(exported.graph.output_spec["dict"])[name]["edge"]
    return makers[makers[output].inputs[0]]


@pytest.mark.parametrize("name", [*PRIVATE, *PUBLIC])
def test_a_mask_in_this_spelling_is_recovered(name: str) -> None:
    exported, apply = recovered(), {**PRIVATE, **PUBLIC}[name]
    soft = softmax_of(exported, name)
    assert soft.op == "masked_softmax"
    keep = exported.graph.edge(soft.inputs[1])
    assert keep.dtype == "bool"
    assert keep.visibility is (Visibility.PUBLIC if name in PUBLIC else Visibility.PRIVATE)
    for mask in (MASK, 1 - MASK.flip(0), torch.ones_like(MASK)):
        mask = mask.clone()
        mask[:, 0] = 1
        assert error(Attention(apply)(Q.double(), mask), exported(Q, mask)[name]) < 1e-5


def test_no_number_that_means_minus_infinity_is_left_to_encode() -> None:
    assert not any((t.double().abs() >= 1e4).any() for t in recovered().constants.values())


def test_a_mask_that_keeps_all_is_no_mask() -> None:
    exported = Exported(Attention(lambda s, m: s + torch.where(torch.ones(4, 4).bool(), 0.0, MIN)), Q, MASK)
    assert exported.operators["softmax"] == 1 and exported.operators["masked_softmax"] == 0


NOT_MASKS: dict[str, Bias] = {
    "bias": lambda s, m: s + torch.where(four(m).bool(), 0.5, -5.0),
    "mild": lambda s, m: s + torch.where(four(m).bool(), 0.0, -100.0),
    "positions": lambda s, m: s + torch.arange(4.0),
    "not an indicator": lambda s, m: s + four(m) * -1e4,
    "product": lambda s, m: s * four(m),
}


@pytest.mark.parametrize("name", NOT_MASKS)
def test_what_is_not_proved_to_be_a_mask_stays(name: str) -> None:
    exported = left_alone()
    assert softmax_of(exported, name).op == "softmax"
    assert error(Attention(NOT_MASKS[name])(Q.double(), MASK), exported(Q, MASK)[name]) < 1e-5


def test_the_safe_softmax_tail_disappears() -> None:
    """What torch makes of attention where a row may be empty: the tail's comparison with -inf cannot run in fixed point."""

    def tail(scores: torch.Tensor) -> torch.Tensor:
        kept = (~(scores == -math.inf)).any(-1, keepdim=True)
        return torch.where(~kept, torch.zeros_like(scores), torch.softmax(scores, -1))

    class Safe(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = q @ q.transpose(-1, -2)
            private = scores + torch.where(four(mask).bool(), 0.0, -math.inf)
            public = scores + torch.full((4, 4), -math.inf).triu(-1)
            return tail(private), tail(public), tail(scores)

    exported = Exported(Safe(), Q, MASK)
    assert exported.operators["masked_softmax"] == 2 and exported.operators["softmax"] == 1
    assert not {"eq", "any", "where"} & set(exported.operators)
    empty = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1]])
    came = exported(Q, empty)
    assert error(Safe()(Q.double(), empty), came) < 1e-5
    assert (came[0][0] == 0).all() and (came[1][:, :, 0] == 0).all()


@pytest.mark.parametrize("name", ["where kept", "where finfo.min", "(1 - m) * -1e4"])
def test_a_row_that_keeps_nothing_is_zero(name: str) -> None:
    """Field report 12, whatever the mask's number was; torch gives nan for -inf and a uniform row for finfo.min."""
    came = recovered()(Q, torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]]))[name]
    assert (came[0] == 0).all() and torch.isfinite(came).all() and (came[1] != 0).all()


def test_masked_places_are_exactly_zero_in_the_oracle() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, 1e6]], dtype=torch.float64)
    node = Node("n", "masked_softmax", ("x", "k"), ("y",), {"dim": 1})
    soft = evaluate(node, [scores, torch.tensor([[True, True, False, False]])])
    assert torch.equal(soft[0, 2:], torch.zeros(2, dtype=torch.float64))
    assert torch.allclose(soft[0, :2], torch.softmax(torch.tensor([0.0, 1.0], dtype=torch.float64), 0))


def test_a_planted_ignored_mask_is_noticed() -> None:
    """Twin of the tests above: the same comparison fails for a graph whose mask is dropped."""
    apply = PRIVATE["where kept"]
    plain = Exported(Attention(lambda s, m: s), Q, MASK)
    assert error(Attention(apply)(Q.double(), MASK), plain(Q, MASK)) > 1e-2
