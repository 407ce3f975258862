"""Fraction bits, buckets and rings of scaled dot-product attention, for its kernel and its cost; plain numbers.

Scores have score_bits fraction bits, in the ring of their product. They lie within +-reach; where a mask drops a place,
`penalty` is taken from its score, so that it lies below every score that is kept and its exponential is exactly 0. A row's
maximum is needed only to one `step`: a count of the scores in each bucket of that width has it in its highest bucket that is
not empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...graph.ir import Edge, Node
from . import windows
from .pieces import Pieces
from .ranges import log2_ceil

SCORE_BITS = (26, 24)
"""Fraction bits of queries and keys together, best first: rounding moves a score by some 2**-13 times the other's norm."""

LEAST_OPERAND_BITS = 10
LEAST_BOUND = 16.0
HEAD_ROOM = 4
"""Of the sixteen times that bounds of edges leave, scores get a quarter: their range costs dealt tables."""

DROPPED = 32
"""By how much a dropped score lies below the lowest that is kept: exp(-24) is 0 in an exponential's table."""

ARGUMENT_BITS = 12
"""Fraction bits of the exponent."""

ARGUMENT_WINDOW = 24
PIECE_BITS = 3
"""log2 of the width of the pieces of exp: its table has those of [-16, 16), and nothing is left of exp below."""

POWER_BITS, FACTOR_BITS = 26, 12
"""Fraction bits of the dealt powers of e and of the public factors that multiply them."""

VALUE_WINDOW, MOST_VALUE_BITS, LEAST_VALUE_BITS = 24, 14, 13
"""An exponential is opened in so many bits, with as many fraction bits as the product with the values leaves."""

RESULT_BITS, INVERSE_BITS = 12, 20
"""Fraction bits of the product with the values before the division, and of the inverse."""

MOST_COUNTED = 255
"""Counts of a bucket are bytes."""

MOST_BUCKETS = 72
TOURNAMENT_BITS, TOURNAMENT_WINDOW = 2, 16


@dataclass(frozen=True)
class Attention:
    """query_bits, key_bits, score_bits: fraction bits of the product that gives the scores, and product_ring: its bits.

    reach, penalty: of scores, in units. step: log2 of a bucket's width. first, buckets: those of scores that are kept.

    index_bits: of a score's bucket, dropped ones included. inside_bits: of the piece of an exponent. counted: whether the
    maximum is read off counts; else a tournament finds it. value_bits: of exponentials. values_cut: taken from the values.
    ring: of the product with the values.
    """

    query_bits: int
    key_bits: int
    score_bits: int
    product_ring: int
    width: int
    rows: int
    reach: int
    penalty: int
    step: int
    first: int
    buckets: int
    index_bits: int
    inside_bits: int
    counted: bool
    value_bits: int
    values_cut: int
    ring: int
    cut: int
    pieces: Pieces
    result_ring: int


def attention(node: Node, inputs: Sequence[Edge], output: Edge, parties: int) -> Attention | str:
    """The plan of an attention step, or why these rings hold none. inputs: queries, keys transposed, values, mask?"""
    q, k, v = inputs[:3]
    if reason := _odd(node, inputs, output):
        return reason
    if len(q.shape) < 2 or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2] or not output.numel:
        return "the operands' leading dimensions differ, or there is nothing to compute"
    if v.bound is None or output.bound is None or v.ring_bits != 64 or v.scale != output.scale:
        return "the values are not in the whole ring at the result's fraction bits"
    width = k.shape[-1]
    reach = int(max(4, 2 ** log2_ceil(float(node.attrs["scores"]) / HEAD_ROOM)))
    penalty = 2 * reach + DROPPED if len(inputs) > 3 else 0
    # from the lowest dropped score to the highest maximum, and back
    inside_bits = max(3, log2_ceil((4 * reach + penalty + 8 * parties) / (1 << PIECE_BITS) + 2))
    product = _product(q, k, reach + penalty, inside_bits + PIECE_BITS + ARGUMENT_BITS)
    if isinstance(product, str):
        return product
    query_bits, key_bits, product_ring = product
    step = 0 if reach <= 16 else 1 if reach <= 64 else 2
    index_bits = log2_ceil((2 * reach + penalty) / (1 << step) + 4 + parties)
    buckets = (2 * reach >> step) + 3
    counted = index_bits <= 8 and buckets <= MOST_BUCKETS and width <= MOST_COUNTED
    if not counted:  # a tournament is exact to a quarter
        step = 0
    over = math.ceil(parties * (1 << step) * math.log2(math.e) / 2)  # log2 of the greatest exponential
    size = log2_ceil(width) + over + log2_ceil(v.bound)
    for ring in (40, 48, 56):
        value_bits = min(MOST_VALUE_BITS, ring - 2 - size - RESULT_BITS)
        values_bits = min(v.scale, ring - 2 - size - value_bits)
        if value_bits >= LEAST_VALUE_BITS and values_bits >= RESULT_BITS:
            break
    else:
        return "no ring holds the product with the values"
    pieces = Pieces("reciprocal", value_bits - over, value_bits + log2_ceil(width) + over, value_bits)
    if not pieces.fits():
        return f"no pieces hold the sum of {width} exponentials"
    return Attention(
        query_bits=query_bits,
        score_bits=query_bits + key_bits,
        key_bits=key_bits,
        product_ring=product_ring,
        width=width,
        rows=math.prod(q.shape[:-1]),
        reach=reach,
        penalty=penalty,
        step=step,
        first=-(reach >> step) - 1,
        buckets=buckets,
        index_bits=index_bits,
        inside_bits=inside_bits,
        counted=counted,
        value_bits=value_bits,
        values_cut=v.scale - values_bits,
        ring=ring,
        cut=value_bits + values_bits - RESULT_BITS,
        pieces=pieces,
        result_ring=windows.width_of(output.bound, RESULT_BITS + INVERSE_BITS),
    )


def _product(q: Edge, k: Edge, reach: int, argument: int) -> tuple[int, int, int] | str:
    """Fraction bits of queries and keys, and the ring of their product; or why none holds scores up to reach.

    argument: bits of the exponent's window that count. What rounding one operand does is as large as the other, so that the
    one with the smaller bound gets more bits; raw operands leave a smaller ring the more is cut.
    """
    if q.ring_bits != 64 or k.ring_bits != 64:
        return "queries or keys are not in the whole ring"
    sizes = log2_ceil(k.bound or LEAST_BOUND) - log2_ceil(q.bound or LEAST_BOUND)
    found: tuple[int, int, int] | None = None
    for total in SCORE_BITS:
        for lean in (sizes // 2, (q.scale - k.scale) // 2):
            query = min(max(total // 2 + lean, LEAST_OPERAND_BITS), total - LEAST_OPERAND_BITS)
            key = total - query
            ring = min(40, 8 * ((64 - max(q.scale - query, k.scale - key, 0)) // 8))
            room = min(12, ring - 2 - total)
            fits = (
                argument <= min(ARGUMENT_WINDOW, ring - total + ARGUMENT_BITS)
                and room > 0
                and reach < 1 << room
            )
            if ring >= 32 and fits and (found is None or ring > found[2]):
                found = query, key, ring
    return found or "no ring holds the range of its scores"


def _odd(node: Node, inputs: Sequence[Edge], output: Edge) -> str | None:
    """What a step from a file has that compiling never gives it: kernels compute with these as they are."""
    scores = node.attrs["scores"]
    if isinstance(scores, bool) or not isinstance(scores, int | float) or not 0 < scores < math.inf:
        return "the bound of its scores is no positive number"
    if len(inputs) > 4:
        return f"{len(inputs)} operands"
    whole = (*output.shape[:-1], inputs[1].shape[-1])
    if len(inputs) == 4:
        mask = inputs[3].shape
        beyond = len(mask) > len(whole)
        if beyond or any(m not in (1, w) for m, w in zip(mask[::-1], whole[::-1], strict=False)):
            return f"a mask of shape {list(mask)} for scores of shape {list(whole)}"
    return None
