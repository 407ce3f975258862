"""Closed formulas for the cost of the protocols that kernels are made of; plain integers, no cryptography.

p: compute parties. n: elements. Words are 64 bits, and every frame has HEADER_BYTES of header. One frame from the dealer
corrects one record of correlated randomness; what a seed can expand is not sent. protocols.py and generic/common.py hold
the protocols, in the same order.
"""

from __future__ import annotations

from ...graph.ir import Edge
from ...plan.spec import Cost
from ...transport.base import HEADER_BYTES
from . import ranges
from .ranges import EXP_SCALE, INVERSE_SCALE

WORD = 8

SERIES_BITS = 54
"""Fraction bits of an evaluated series before it is truncated."""

TERMS = {
    "gelu": 10,
    "gelu_tanh": 10,
    "exp": 14,
    "tanh": 20,
    "erf": 18,
    "silu": 20,
    "unit": 6,  # 1/u, 1/sqrt(u), sqrt(u), log(u)
    "exp_unit": 5,
}
"""Terms of each series in series.py; a test compares them."""


def exchange(p: int, payload: int) -> Cost:
    """Every party sends every other one frame at once."""
    return Cost("x", p * (p - 1) * (payload + HEADER_BYTES), parties=p)


def to_one(p: int, payload: int, rank: int = 0) -> Cost:
    """Every party but one sends that one a frame."""
    return Cost(str(rank), (p - 1) * (payload + HEADER_BYTES), parties=p)


def dealt(payload: int) -> Cost:
    """One record's correction, to rank 0."""
    return Cost(dealt_bytes=payload + HEADER_BYTES)


def truncation(p: int, n: int, bits: int) -> Cost:
    if bits == 0:
        return Cost()
    return exchange(p, WORD * n) + dealt(n * (WORD + (4 if bits <= 32 else 8)))


def masked(p: int, n: int, *, compare: bool = False, terms: int = 0) -> Cost:
    return exchange(p, WORD * n) + dealt(n * (WORD * compare + 2 * WORD * terms))


def comparison(p: int, n: int) -> Cost:
    """n thresholds tested on values that are open under a mask: six levels of the borrow tree, then the bit's conversion."""
    tree = Cost()
    for payload in (12 * n, 6 * n, 3 * n, 2 * n, n, n):
        tree = tree + exchange(p, payload)
    return tree + dealt(19 * n) + exchange(p, n) + dealt(WORD * n)


def product(p: int, left: int, right: int, result: int) -> Cost:
    """Beaver: both operands opened at once."""
    return exchange(p, WORD * (left + right)) + dealt(WORD * result)


def square(p: int, n: int) -> Cost:
    return exchange(p, WORD * n) + dealt(WORD * n)


def weight_label(name: str, bits: int = 64, *, factored: bool = False) -> str:
    """What tells the masked weights of a session apart: see correlations.MaskedWeight."""
    ring = "" if bits == 64 else f" modulo 2**{bits}"
    return f"weight {name}{' factored' if factored else ''}{ring}"


def fixed_product(p: int, left: int, result: int, weight: Edge) -> Cost:
    """A product with a weight that rank 0 knows: one message one way, and the masked weight once a session."""
    once = (weight_label(weight.name), (p - 1) * (WORD * weight.numel + HEADER_BYTES))
    return to_one(p, WORD * left) + dealt(WORD * result) + Cost(setup=frozenset({once}))


def series_value(p: int, n: int, terms: int, bits: int) -> Cost:
    return masked(p, n, terms=terms) + truncation(p, n, bits)


def normalised(p: int, n: int, lowest: int, highest: int, *, base: bool = False) -> Cost:
    """Bring n values into [1, 2): a comparison with each power of two, and a product."""
    thresholds = highest - lowest + (0 if base else 1)
    if thresholds == 0:
        return Cost()
    return masked(p, n, compare=True) + comparison(p, thresholds * n) + product(p, n, n, n)


def maximum(p: int, rows: int, n: int) -> Cost:
    total = Cost()
    for pairs in ranges.tournament(n):
        m = rows * pairs
        total = total + masked(p, m, compare=True) + comparison(p, m) + product(p, m, m, m)
    return total


def greatest_index(p: int, rows: int, n: int) -> Cost:
    """A tournament in which each value's index moves with it."""
    total = Cost()
    for pairs in ranges.tournament(n):
        m = rows * pairs
        total = total + masked(p, m, compare=True) + comparison(p, m) + product(p, m, 2 * m, 2 * m)
    return total


def softmax_core(p: int, rows: int, n: int, f: int, *, guard: bool) -> Cost:
    """Maximum, exponential, inverse of the sum, product. guard: one more candidate keeps a fully masked row finite."""
    m = rows * n
    levels = ranges.log2_ceil(n)
    exponential = (
        masked(p, m, compare=True, terms=TERMS["exp"])
        + truncation(p, m, SERIES_BITS - EXP_SCALE)
        + comparison(p, m)
        + product(p, m, m, m)
    )
    inverse = normalised(p, rows, EXP_SCALE, EXP_SCALE + levels, base=True) + series_value(
        p, rows, TERMS["unit"], SERIES_BITS - INVERSE_SCALE
    )
    if levels:
        inverse = inverse + product(p, rows, rows, rows)
    probabilities = product(p, m, rows, m) + truncation(p, m, EXP_SCALE + INVERSE_SCALE + levels - f)
    return maximum(p, rows, n + guard) + exponential + inverse + probabilities
