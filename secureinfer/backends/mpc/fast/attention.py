"""Scaled dot-product attention as one step: scores, a rough maximum, exponentials, the product with the values, division.

Eleven rounds, none of which depends on the length of a row:
1. Queries and keys are rounded locally (rounding.py) and multiplied (Beaver) in 32 or 40 bits.
2. Each score's bucket, of one to four units, is opened under a mask: from dealt one-hots follow shares of how many scores of
   a row every bucket holds. 3. and 4. Whether a bucket or one above it is not empty, by dealt truth tables of a byte: their
   sum is the highest bucket, and the maximum to one bucket.
5. The distance d from it is opened as d + r = 8 c_hi + c_lo: exp(d) = exp(c_lo) exp(8 (c_hi - r_hi) - r_lo). The first
   factor is public, the second is dealt for the four pieces c_hi - r_hi on which it is not 0; whether it is one of them is
   a bit from a dealt truth table. 6. The exponential, cut, and that bit are opened under masks of their own (gates.py).
7. Exponentials and values are opened for their product, and the row sums for their inverses (pieces.py, rounds 7 to 9).
10. The product with the inverse, after V: one value in place of a row of probabilities. 11. The cut.

A place that a mask drops has a score below all others and the exponential 0, exactly; so has a row without any place: the
sum of nothing times a finite inverse. Sources: Ishai et al. (TCC 2013), section 3, for truth tables and one-hots of a dealt
index; Beaver (CRYPTO 1991); the separable exponential is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import attention
from ..attention import (
    ARGUMENT_BITS,
    ARGUMENT_WINDOW,
    FACTOR_BITS,
    INVERSE_BITS,
    PIECE_BITS,
    POWER_BITS,
    RESULT_BITS,
    TOURNAMENT_BITS,
    TOURNAMENT_WINDOW,
    VALUE_WINDOW,
    Attention,
)
from ..correlations import Correlation, MaskedWeight, Part, SessionWeight, Shares, combine
from ..kernels import StepCall, kernel
from ..party import Party, Word
from ..values import Share
from . import fused, gates, opening, pieces, scaled
from .choices import Values, maximum
from .matrices import beaver
from .rounding import shrink
from .talk import Talk, run, together

NEAR = 4
"""Pieces of the exponent on which exp is not 0: -2 to 1."""

LOW_BITS = PIECE_BITS + ARGUMENT_BITS


@dataclass(frozen=True)
class Buckets(Correlation):
    """A mask r of a bucket's index, and its one-hot vector in bytes: hot[j] = [j = r]."""

    shape: tuple[int, ...]
    bits: int

    def parts(self) -> tuple[Part, ...]:
        hot = (*self.shape, 1 << self.bits)
        return (Part("r", self.shape, torch.uint8), Part("hot", hot, torch.uint8, bound=True))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False).long() & ((1 << self.bits) - 1)
        hot = torch.zeros((*self.shape, 1 << self.bits), dtype=torch.uint8, device=r.device)
        return {"hot": hot.scatter_(-1, r.unsqueeze(-1), 1)}


@dataclass(frozen=True)
class NotEmpty(Correlation):
    """A mask r of a byte, the truth table of [j - r != 0] in four words, and a random bit b, by XOR and by addition."""

    shape: tuple[int, ...]

    def parts(self) -> tuple[Part, ...]:
        return (
            Part("r", self.shape, torch.uint8),
            Part("table", (4, *self.shape), xor=True, bound=True),
            Part("b", self.shape, torch.uint8, xor=True),
            Part("bit", self.shape, bound=True),
        )

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False).long()
        return {"table": ~_one_bit(r, 4), "bit": (combine(free["b"], True) & 1).long()}


def _one_bit(place: torch.Tensor, words: int) -> torch.Tensor:
    """int64 [words, *shape]: bit `place` of the words is set."""
    word = torch.arange(words, device=place.device).reshape(-1, *([1] * place.dim()))
    return torch.where(place >> 6 == word, torch.ones_like(place) << (place & 63), 0)


def _bit_at(table: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Bit `place` of words [words, *shape]: uint8."""
    word = table[0] if table.shape[0] == 1 else table.gather(0, (place >> 6).unsqueeze(0)).squeeze(0)
    return ((word >> (place & 63)) & 1).to(torch.uint8)


@dataclass(frozen=True)
class Exponent(Correlation):
    """A mask r of an exponent, and what exp makes of it on the pieces that matter; see the module.

    inside: truth table of [-2 <= j - r_hi <= 1], r_hi modulo 2**index_bits.
    """

    shape: tuple[int, ...]
    index_bits: int

    @property
    def words(self) -> int:
        return max(1, (1 << self.index_bits) // 64)

    def parts(self) -> tuple[Part, ...]:
        return (
            Part("r", self.shape, torch.int32),
            Part("powers", (NEAR, *self.shape), bound=True),
            Part("inside", (self.words, *self.shape), xor=True, bound=True),
        )

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False).long()
        low = (r & ((1 << LOW_BITS) - 1)).double() / (1 << ARGUMENT_BITS)
        high = (r >> LOW_BITS) & ((1 << self.index_bits) - 1)
        near = torch.arange(NEAR, device=r.device).reshape(-1, *([1] * r.dim()))
        piece = ((near - high + 2) & (NEAR - 1)) - 2
        powers = torch.round(torch.exp(piece * float(1 << PIECE_BITS) - low) * 2.0**POWER_BITS).long()
        inside = torch.zeros((self.words, *self.shape), dtype=torch.int64, device=r.device)
        for offset in range(-2, 2):
            inside |= _one_bit((high + offset) & ((1 << self.index_bits) - 1), self.words)
        return {"powers": powers, "inside": inside}


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """exp(i / 2**ARGUMENT_BITS) at FACTOR_BITS for each c_lo, in integers: every party multiplies by the same."""
    fraction = 100
    term = total = 1 << fraction
    for k in range(1, 40):
        term = (term >> ARGUMENT_BITS) // k
        total += term
    value, out = 1 << fraction, []
    for _ in range(1 << LOW_BITS):
        out.append((value + (1 << (fraction - FACTOR_BITS - 1))) >> (fraction - FACTOR_BITS))
        value = (value * total) >> fraction
    return torch.tensor(out, device=device)


@kernel("attention.window")
def _attention(call: StepCall) -> Values:
    p, out = call.party, call.outputs[0]
    edges = [o.edge for o in call.operands]
    plan = call.planned(attention.attention(call.node, edges, out, p.size))
    q, k, v = (call.share(i) for i in range(3))
    queries, keys = shrink(q.tensor, q.scale - plan.query_bits), shrink(k.tensor, k.scale - plan.key_bits)
    score = run(p, product(p, queries, keys, plan.product_ring))
    if plan.penalty:  # the owner of the mask, or everybody's share of it, takes the penalty off
        keep = call.share(3).tensor - (1 if p.first else 0)
        score = score + (keep * (plan.penalty << plan.score_bits)).expand(score.shape)
    score = score.contiguous()
    rows = score.reshape(plan.rows, plan.width)
    greatest = _by_counts(p, rows, plan) if plan.counted else _by_tournament(p, rows, plan)
    exponential = _exponentials(p, rows - greatest, plan)
    values = shrink(v.tensor, plan.values_cut)
    combined, inverse = run(
        p,
        together(
            product(p, exponential.view(score.shape), values.contiguous(), plan.ring),
            pieces.evaluate(p, exponential.sum(-1), plan.pieces, INVERSE_BITS),
        ),
    )
    kind = scaled.Scaled(tuple(out.shape), (*out.shape[:-1], 1), plan.ring, plan.cut)
    divided = run(p, scaled.multiplied(p, combined, inverse.view(*out.shape[:-1], 1), kind))
    window = opening.Window(tuple(out.shape), plan.result_ring, RESULT_BITS + INVERSE_BITS - out.scale)
    opened = opening.open_window(p, divided, window)
    return [Share(opening.truncated(p, opened), out.scale)]


def product(p: Party, x: torch.Tensor, y: torch.Tensor, bits: int) -> Talk[torch.Tensor]:
    """x @ y modulo 2**bits of two shares."""
    return beaver(p, "matmul", x, y, (*x.shape[:-1], y.shape[-1]), {}, bits)


def _by_counts(p: Party, rows: torch.Tensor, plan: Attention) -> torch.Tensor:
    """The greatest score of each row, [rows, 1], to one bucket; at least the lowest that is kept."""
    kind = Buckets(tuple(rows.shape), plan.index_bits)
    parts = p.take(kind)
    index = shrink(rows, plan.score_bits + plan.step)
    (c,) = p.open_together([_byte(p, "bucket", index, parts["r"])])
    if p.tracing:
        counts = torch.empty((plan.rows, plan.buckets), dtype=torch.uint8, device="meta")
    else:
        counts = _counts(c, parts["hot"], plan)
        counts = counts.flip(-1).cumsum(-1).flip(-1).to(torch.uint8)
    table = p.take(NotEmpty(tuple(counts.shape)))
    (c,) = p.open_together([_byte(p, "count", counts, table["r"])])
    found = table["b"] if p.tracing else (_bit_at(table["table"], c.long()) ^ table["b"]) & 1
    (z,) = p.open_words([(found, 1)], "bit", xor=True)
    if p.tracing:
        return torch.empty_like(rows[:, :1])
    sign = z.long()
    bit = table["bit"] * (1 - 2 * sign)
    highest = (bit + sign if p.first else bit).sum(-1, keepdim=True)
    if p.first:
        highest = highest + plan.first - 1
    return highest << (plan.score_bits + plan.step)


def _byte(p: Party, what: str, x: torch.Tensor, r: torch.Tensor) -> Word:
    """x + r modulo 256."""
    low = x.to(torch.uint8)
    return p.word(what, (low if p.tracing else low + r, 8))


def _counts(c: torch.Tensor, hot: torch.Tensor, plan: Attention) -> torch.Tensor:
    """Shares modulo 256 of how many scores of each row are in each bucket that is kept: uint8 [rows, buckets]."""
    bucket = torch.arange(plan.first, plan.first + plan.buckets, device=c.device)
    place = (c.unsqueeze(-1).to(torch.int64) - bucket) & ((1 << plan.index_bits) - 1)
    return hot.gather(-1, place).sum(1, dtype=torch.uint8)


def _by_tournament(p: Party, rows: torch.Tensor, plan: Attention) -> torch.Tensor:
    """The same for scores of any range, in a round or three for each doubling of the row."""
    coarse = shrink(rows, plan.score_bits - TOURNAMENT_BITS)
    least = torch.zeros_like(coarse[:, :1])
    if p.first:
        least = least - ((plan.reach + 1) << TOURNAMENT_BITS)
    greatest = maximum(p, torch.cat([coarse, least], -1), TOURNAMENT_WINDOW)
    return (greatest << (plan.score_bits - TOURNAMENT_BITS)).unsqueeze(-1)


def _exponentials(p: Party, d: torch.Tensor, plan: Attention) -> torch.Tensor:
    """exp(d) at plan.value_bits, in the 64-bit ring; exactly 0 below -24."""
    kind = Exponent(tuple(d.shape), plan.inside_bits)
    parts = p.take(kind)
    d = shrink(d, plan.score_bits - ARGUMENT_BITS)
    (c,) = p.open_words([(d if p.tracing else d + parts["r"], ARGUMENT_WINDOW)], "exponent")
    if p.tracing:
        inside, value = torch.empty(d.shape, dtype=torch.uint8, device="meta"), d
    else:
        powers, table = parts["powers"].reshape(NEAR, -1), parts["inside"].reshape(kind.words, -1)
        value, inside = fused.run(_powers, c.reshape(-1), powers, table, _factors(c.device), plan.inside_bits)
        value = shrink(value.view(d.shape), POWER_BITS + FACTOR_BITS - plan.value_bits)
    return run(p, gates.gated(p, value, inside.view(d.shape), VALUE_WINDOW))


def _powers(
    c: torch.Tensor, powers: torch.Tensor, inside: torch.Tensor, factors: torch.Tensor, index_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    high = (c >> LOW_BITS) & ((1 << index_bits) - 1)
    power = powers.gather(0, (high & (NEAR - 1)).unsqueeze(0)).squeeze(0)
    return power * factors[c & ((1 << LOW_BITS) - 1)], _bit_at(inside, high)
