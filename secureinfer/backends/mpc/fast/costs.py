"""Closed formulas for the cost of windows, comparisons by tables, and products with masked weights in a window.

p: compute parties, n: elements, k: bits of the window. The protocols are in opening.py and tables.py, in the same order.
"""

from __future__ import annotations

import math

from ....graph.ir import Edge
from ....plan.spec import Cost
from ....transport.base import HEADER_BYTES
from .. import ranges, windows
from ..attention import (
    ARGUMENT_WINDOW,
    INVERSE_BITS,
    RESULT_BITS,
    TOURNAMENT_WINDOW,
    VALUE_WINDOW,
    Attention,
)
from ..costs import dealt, exchange, to_one, weight_label
from ..curves import SERIES_WINDOW, Curve
from ..norms import WINDOW as NORM_WINDOW
from ..norms import Norm
from ..pieces import DEGREE, PIECES_BITS, SLOPE_BITS, VALUE_BITS, Pieces
from ..windows import packed_bytes


def merges(p: int, n: int, count: int, most: int = 1) -> Cost:
    """The rounds that merge the `count` chunks of n comparisons, until there are at most `most`."""
    total = Cost()
    for opened, corrected in zip(*merge_rounds(n, count, most), strict=True):
        total = total + exchange(p, opened) + dealt(corrected)
    return total


def merge_rounds(n: int, count: int, most: int = 1) -> tuple[list[int], list[int]]:
    """Bytes that each round of `merges` opens, and those that its record corrects."""
    opened, records = [], []
    while count > most:
        groups, size = windows.group_shape(count)
        table = math.ceil((1 << (2 * size - 2)) / 8)
        propagate = max(1, (1 << size) // 8) if groups > 1 else 0
        opened.append(groups * n)
        records.append(groups * n * (table + propagate))
        count = groups
    return opened, records


def side_by_side(p: int, *talks: list[int]) -> Cost:
    """Protocols that open so many bytes in each of their rounds, and share the frames of equal rounds."""
    total = Cost()
    for i in range(max(map(len, talks))):
        total = total + exchange(p, sum(t[i] for t in talks if i < len(t)))
    return total


def record(
    n: int, k: int, *, cut: int | None = None, compared: int = 0, thresholds: int = 0, signed: bool = True,
    gate: bool = False, direct: bool = False,
) -> int:  # fmt: skip
    """Bytes of a window's correction."""
    top = math.ceil(min(64, 64 - k + (cut or 0)) / 8)
    size = n * (8 + top) if cut is not None else 0
    m = thresholds * n
    if thresholds:
        width = windows.chunk_bits(compared, direct)
        table = 4 if width == windows.CHUNK_BITS else 16 * windows.table_words(width)
        size += n * table * windows.chunks(compared, direct) + (packed_bytes(n, 1) if signed else 0)
        entries = windows.direct_entries(compared) if direct else 1
        size += entries * m * (8 + (8 + top if gate else 0))
    return size


def window(
    p: int, n: int, k: int, *, cut: int | None = None, compared: int = 0, thresholds: int = 0,
    signed: bool = True, gate: bool = False, extra: int = 0,
) -> Cost:  # fmt: skip
    """One opening in a window of k bits, and what follows from it. compared: bits of each comparison.

    extra: bytes that its record corrects beside a window's.
    """
    m = thresholds * n
    direct = thresholds > 0 and windows.is_direct(m, compared, gate)
    corrected = record(
        n, k, cut=cut, compared=compared, thresholds=thresholds, signed=signed, gate=gate, direct=direct
    )
    total = exchange(p, packed_bytes(n, k)) + dealt(corrected + extra)
    if direct:
        total = total + merges(p, m, windows.chunks(compared, direct), windows.MOST_MERGED) + exchange(p, m)
    elif thresholds:
        total = total + merges(p, m, windows.chunks(compared)) + exchange(p, packed_bytes(m, 1))
    return total


def curve(p: int, n: int, c: Curve) -> Cost:
    """Two comparisons, and beside them a series' value under a mask of its own."""
    compared = c.bits - 1 - c.low
    corrected = record(n, c.bits, cut=c.cut, compared=compared, thresholds=2, gate=c.gate)
    corrected += n * 2 * c.terms * c.word_bits // 8 + gate_record(n, SERIES_WINDOW)
    opened, records = merge_rounds(2 * n, windows.chunks(compared))
    value = [packed_bytes(n, SERIES_WINDOW)]
    total = exchange(p, packed_bytes(n, c.bits)) + dealt(corrected)
    total = total + side_by_side(p, [*opened, packed_bytes(2 * n, 1)], value)
    for corrected in records:
        total = total + dealt(corrected)
    return total


def gate_record(n: int, k: int) -> int:
    """Bytes about a second mask of k bits: itself, a bit, their product, and the top bit with and without it."""
    return n * (3 * 8 + 2 * (8 - k // 8))


def scaled_record(n: int, k: int, cut: int, rows: int = 0) -> int:
    """Bytes of the correction of a cut and a product. rows: of which the sums of squares are dealt too."""
    top = math.ceil(max(0, 64 - k + cut) / 8)
    return n * (16 + 2 * top) + (8 * rows + top * n if rows else 0)


def multiplied(p: int, n: int, factors: int, k: int, cut: int) -> Cost:
    """A cut and a product in one round."""
    return exchange(p, packed_bytes(n, k) + 8 * factors) + dealt(scaled_record(n, k, cut))


def pieces(p: int, n: int, plan: Pieces, scale: int) -> Cost:
    """A function of n positive values, by pieces."""
    tables = n * plan.zones * (DEGREE + 1) * 8 << PIECES_BITS
    compared = plan.bits - 1 - plan.compared_low
    opened = window(
        p, n, plan.bits, compared=compared, thresholds=plan.zones - 1, signed=plan.zones > 1, extra=tables
    )
    m = plan.zones * n
    return opened + multiplied(p, m, m, 64, VALUE_BITS + SLOPE_BITS - scale)


def layer_norm(p: int, n: int, plan: Norm, gain: Edge | None) -> Cost:
    """gain: the model owner's, if it is not public."""
    rows = n // plan.width
    total = exchange(p, packed_bytes(n, NORM_WINDOW)) + dealt(scaled_record(n, NORM_WINDOW, 0, rows))
    total = total + pieces(p, rows, plan.pieces, plan.inverse) + exchange(p, 8 * rows)
    if gain is not None:
        total = total + fixed_product(p, n, n, gain, plan.ring)
    return total + window(p, n, plan.ring, cut=plan.cut)


def attention(p: int, plan: Attention, q: Edge, k: Edge, v: Edge, out: Edge) -> Cost:
    """The rounds of fast/attention.py in their order."""
    n = plan.rows * plan.width
    total = product(p, q.numel, k.numel, n, plan.product_ring)
    if plan.counted:
        m = plan.rows * plan.buckets
        total = total + exchange(p, n) + dealt(n << plan.index_bits)
        total = total + exchange(p, m) + exchange(p, packed_bytes(m, 1)) + dealt(40 * m)
    else:
        pairs = ranges.tournament(plan.width + 1)
        total = total + maximum(p, plan.rows, pairs, TOURNAMENT_WINDOW)
    words = max(1, (1 << plan.inside_bits) // 64)
    total = total + exchange(p, packed_bytes(n, ARGUMENT_WINDOW)) + dealt(n * 8 * (4 + words))
    gate = gate_record(n, VALUE_WINDOW)
    total = total + exchange(p, packed_bytes(n, VALUE_WINDOW) + packed_bytes(n, 1)) + dealt(gate)
    inverse = pieces(p, plan.rows, plan.pieces, INVERSE_BITS)
    opened = packed_bytes(n, plan.ring) + packed_bytes(v.numel, plan.ring)
    # The product's frame is that of the row sums' opening: one header less.
    both = p * (p - 1) * opened
    total = total + dealt(packed_bytes(out.numel, plan.ring)) + inverse + Cost(bytes=both)
    total = total + multiplied(p, out.numel, plan.rows, plan.ring, plan.cut)
    return total + window(p, out.numel, plan.result_ring, cut=RESULT_BITS + INVERSE_BITS - out.scale)


def maximum(p: int, rows: int, pairs: list[int], k: int) -> Cost:
    """A tournament: at each level one gated comparison of the differences, in full."""
    total = Cost()
    for count in pairs:
        total = total + window(p, rows * count, k, cut=0, compared=k - 1, thresholds=1, gate=True)
    return total


def fixed_product(p: int, left: int, result: int, weight: Edge, k: int) -> Cost:
    """A product with a weight that rank 0 knows, modulo 2**k: one message one way; the masked weight once a session."""
    label = weight_label(weight.name, k, factored=weight.dtype == "int8")
    once = (label, (p - 1) * (packed_bytes(weight.numel, k) + HEADER_BYTES))
    return to_one(p, packed_bytes(left, k)) + dealt(packed_bytes(result, k)) + Cost(setup=frozenset({once}))


def product(p: int, left: int, right: int, result: int, k: int) -> Cost:
    """Beaver, modulo 2**k: both operands opened at once."""
    opened = packed_bytes(left, k) + packed_bytes(right, k)
    return exchange(p, opened) + dealt(packed_bytes(result, k))
