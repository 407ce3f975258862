"""The protocols that the generic kernels are made of, for any number of parties and a dealer.

Shares are int64 tensors. Everything that is opened carries a dealt mask that is uniform over the ring and belongs to that
one value (R1). Threat model: semi-honest parties, of whom at least one is honest, and a dealer that colludes with nobody.

Sources: truncation, Escudero, Ghosh, Keller, Rachuri and Scholl, "Improved primitives for MPC over mixed arithmetic-binary
circuits" (CRYPTO 2020), section 4; comparison from a masked opening, Catrina and de Hoogh, "Improved primitives for secure
multiparty integer computation" (SCN 2010); products, Beaver (CRYPTO 1991); series, see series.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import SecureInferError
from . import ring, series
from .correlations import TREE_LEVELS, BitPair, BorrowTree, Masked, Truncation
from .party import Parts, Party


def truncate(p: Party, x: torch.Tensor, bits: int) -> torch.Tensor:
    """Divide a shared value by 2**bits, exact to one unit in the last place, rounding at random without bias.

    x: int64 shares, any shape, |value| < 2**62. bits: 0 to 61; 0 is the identity and costs nothing.
    Opens x + r + 2**62 (8 bytes an element, one round). Source: Escudero et al., CRYPTO 2020, section 4.
    """
    if bits == 0:
        return x
    parts = p.take(Truncation(tuple(x.shape), bits))
    if p.tracing:
        return torch.empty_like(x)
    shift = 1 << 62
    (c,) = p.open([x + parts["r"] + (shift if p.first else 0)], "truncation")
    # x + 2**62 is below 2**63, so the sum wrapped if and only if r has its top bit and c has not.
    wrapped = parts["top"].long() * (1 - ring.logical_shift(c, 63))
    out = (wrapped << (64 - bits)) - parts["quotient"]
    if p.first:
        out += ring.logical_shift(c, bits) - (shift >> bits)
    return out


@dataclass
class Opened:
    """The public c = x + r and this party's shares of what was dealt about r."""

    c: torch.Tensor
    parts: Parts
    terms: int = 0
    period_bits: int = 0


def open_masked(
    p: Party, x: torch.Tensor, *, compare: bool = False, terms: int = 0, period_bits: int = 0
) -> Opened:
    """Open x + r, with what was dealt about r for comparisons and series: 8 bytes an element, one round."""
    parts = p.take(Masked(tuple(x.shape), compare, terms, period_bits))
    (c,) = p.open([x + parts["r"]], "masked value")
    return Opened(c, parts, terms, period_bits)


def at_least(p: Party, opened: Opened, thresholds: Sequence[int]) -> torch.Tensor:
    """Additive shares of [x >= t] for each threshold, scale 0: int64, shape [len(thresholds), *x.shape].

    x - t as a signed 64-bit number must not wrap: |x|, |t| < 2**62. Six AND rounds and one to convert the bits.

    With u = c - t = (x - t) + r: msb(x - t) = msb(u) + msb(r) + [u mod 2**63 < r mod 2**63] modulo 2. The last is the
    borrow of u - r, from generate and propagate bits: g = r & ~u, p = ~(r ^ u). The bits are kept in the order of
    ring.reverse_bits, in which joining neighbours means joining the halves of a word, at every level.
    """
    if p.tracing:
        shape = (len(thresholds), *opened.c.shape)
        p.take(BorrowTree(shape))
        return bits_to_arithmetic(p, torch.empty(shape, dtype=torch.uint8, device="meta"))
    t = torch.tensor(list(thresholds), dtype=torch.int64, device=opened.c.device)
    u = opened.c.unsqueeze(0) - t.reshape(-1, *([1] * opened.c.dim()))
    r_bits = opened.parts["bits"]
    u_bits = ring.reverse_bits(u)
    # Bit 63 keeps its place under reverse_bits: it is the sign, not part of the borrow. Neutral there: g = 0, p = 1.
    low = (1 << 63) - 1
    generate = (r_bits & ~u_bits) & low
    propagate = (r_bits.expand_as(u_bits) & low) if not p.first else ((~(r_bits ^ u_bits)) | ~low)
    borrow = _borrow(p, torch.stack([generate, propagate]))
    sign_of_r = ring.logical_shift(r_bits, 63).to(torch.uint8)
    negative = borrow ^ sign_of_r
    if p.first:
        negative = negative ^ 1 ^ ring.logical_shift(u, 63).to(torch.uint8)
    return bits_to_arithmetic(p, negative & 1)


def _borrow(p: Party, gp: torch.Tensor) -> torch.Tensor:
    """XOR-share (uint8, lowest bit) of the generate bit of whole words; gp: [2, *shape], generate and propagate.

    Level l joins halves: g = g_hi ^ (p_hi & g_lo), p = p_hi & p_lo. The two products share p_hi, so three words are
    opened, of 32, 16, 8, 4, 2 and 1 bits; below a byte the three are packed.
    """
    shape = tuple(gp.shape[1:])
    triples = p.take(BorrowTree(shape))
    for level, (dtype, products) in enumerate(TREE_LEVELS):
        if level < 3:
            halves = _halves(gp, dtype)
            low, high = halves[..., 0], halves[..., 1]
            width = 0
        else:
            width = 4 >> (level - 3)
            low, high = gp & ((1 << width) - 1), gp >> width
        operand = low[:products]
        a, b, c = triples[f"a{level}"], triples[f"b{level}"], triples[f"c{level}"]
        if width:
            field = (1 << width) - 1
            a, b, c = a & field, b & field, c & field
        left, right = _open_pair(p, high[1] ^ a, operand ^ b, width)
        joined = c ^ (left & b) ^ (right & a)
        if p.first:
            joined = joined ^ (left & right)
        if products == 2:
            gp = torch.stack([high[0] ^ joined[0], joined[1]])
        else:
            return high[0] ^ joined[0]
    raise SecureInferError("the last level of the borrow tree must have one product")


def _halves(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each word as its low and high half, in a new last dimension."""
    return words.contiguous().unsqueeze(-1).view(dtype)


def _open_pair(
    p: Party, left: torch.Tensor, right: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Open the operands of the AND of one level. width: bits in use when below a byte, else 0."""
    if width in (0, 4):  # whole words; or a nibble each, three of them in two bytes
        if width == 4:
            left, right = p.open([left | (right[0] << 4), right[1]], "and", xor=True)
            return left & 15, torch.stack([left >> 4, right & 15])
        left, right = p.open([left, right], "and", xor=True)
        return left, right
    packed = left
    for i in range(right.shape[0]):
        packed = packed | (right[i] << (width * (i + 1)))
    (packed,) = p.open([packed], "and", xor=True)
    field = (1 << width) - 1
    rights = [(packed >> (width * (i + 1))) & field for i in range(right.shape[0])]
    return packed & field, torch.stack(rights)


def bits_to_arithmetic(p: Party, bits: torch.Tensor) -> torch.Tensor:
    """Additive shares of XOR-shared bits (uint8, lowest bit): one byte an element, one round."""
    pair = p.take(BitPair(tuple(bits.shape)))
    if p.tracing:
        return pair["arithmetic"]
    (z,) = p.open([(bits ^ pair["binary"]) & 1], "bit", xor=True)
    z = z.long()
    out = pair["arithmetic"] * (1 - 2 * z)
    return out + z if p.first else out


def evaluate(p: Party, opened: Opened, f: series.Series) -> torch.Tensor:
    """A share of f(x) with COEFFICIENT_BITS + TRIG_BITS fraction bits; no communication."""
    return series.combine(f, opened.c, opened.period_bits, opened.parts["trig"], p.first)


SERIES_BITS = series.COEFFICIENT_BITS + series.TRIG_BITS


def open_for_series(
    p: Party, x: torch.Tensor, scale: int, f: series.Series, *, compare: bool = False
) -> Opened:
    """Open a value of `scale` fraction bits for one series, and for comparisons if wanted."""
    return open_masked(p, x, compare=compare, terms=f.terms, period_bits=scale + f.period.bit_length() - 1)
