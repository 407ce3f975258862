"""Closed formulas for the cost of windows, comparisons by tables, and products with masked weights in a window.

p: compute parties, n: elements, k: bits of the window. The protocols are in opening.py and tables.py, in the same order.
"""

from __future__ import annotations

import math

from ....graph.ir import Edge
from ....plan.spec import Cost
from ....transport.base import HEADER_BYTES
from .. import windows
from ..costs import dealt, exchange, to_one, weight_label
from ..windows import packed_bytes


def merges(p: int, n: int, count: int, most: int = 1) -> Cost:
    """The rounds that merge the `count` chunks of n comparisons, until there are at most `most`."""
    total = Cost()
    while count > most:
        groups, size = windows.group_shape(count)
        table = math.ceil((1 << (2 * size - 2)) / 8)
        propagate = max(1, (1 << size) // 8) if groups > 1 else 0
        total = total + exchange(p, groups * n) + dealt(groups * n * (table + propagate))
        count = groups
    return total


def window(
    p: int, n: int, k: int, *, cut: int | None = None, compared: int = 0, thresholds: int = 0,
    signed: bool = True, gate: bool = False,
) -> Cost:  # fmt: skip
    """One opening in a window of k bits, and what follows from it. compared: bits of each comparison."""
    top = math.ceil(min(64, 64 - k + (cut or 0)) / 8)
    record = 0
    if cut is not None:
        record += n * (8 + top)
    m = thresholds * n
    direct = thresholds > 0 and windows.is_direct(m, compared, gate)
    if thresholds:
        width = windows.chunk_bits(compared, direct)
        table = 4 if width == windows.CHUNK_BITS else 16 * windows.table_words(width)
        record += n * table * windows.chunks(compared, direct) + (packed_bytes(n, 1) if signed else 0)
        entries = windows.direct_entries(compared) if direct else 1
        record += entries * m * (8 + (8 + top if gate else 0))
    total = exchange(p, packed_bytes(n, k)) + dealt(record)
    if direct:
        total = total + merges(p, m, windows.chunks(compared, direct), windows.MOST_MERGED) + exchange(p, m)
    elif thresholds:
        total = total + merges(p, m, windows.chunks(compared)) + exchange(p, packed_bytes(m, 1))
    return total


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
