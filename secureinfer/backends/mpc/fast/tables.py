"""Dealt truth tables: comparison of a public number with a mask by look-ups, and the merge of its chunks.

[c < r] for public c and a dealt mask r: for each 4-bit chunk D deals XOR-shares of two 16-entry bit tables, of [j < r_i]
and [j = r_i] (chunks are wider where few values are compared); looking c_i up needs no communication. Neighbouring chunks
then merge like carries, (g, p) with g = g_hi ^ p_hi g_lo and p = p_hi p_lo: up to four at a time in one round, by a dealt
truth table of the masked bits (a one-time truth table). So a comparison of up to 16 bits takes one round, of up to 64 two.

Sources: Ishai, Kushilevitz, Meldgaard, Orlandi and Paskin-Cherniavsky, "On the power of correlated randomness in secure
computation" (TCC 2013), section 3, for truth tables; Catrina and de Hoogh (SCN 2010) for comparison with a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..correlations import Correlation, MaskedWeight, Part, SessionWeight, Shares, combine
from ..party import Party
from ..windows import CHUNK_BITS, group_shape, table_words
from . import fused
from .talk import Talk

_INDEX_DTYPES = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 64: torch.int64}
"""Type of a truth table by its number of entries."""


def chunk(x: torch.Tensor, low: int, high: int, width: int) -> torch.Tensor:
    """The chunks of bits low..high-1 of x, lowest first, in a new first dimension: int64."""
    shifts = torch.arange(low, high, width, device=x.device).reshape(-1, *([1] * x.dim()))
    chunks = (x.unsqueeze(0) >> shifts) & ((1 << width) - 1)
    spare = (high - low) % width
    if spare and len(chunks):
        chunks[-1] &= (1 << spare) - 1
    return chunks


def chunk_tables(r: torch.Tensor, low: int, high: int, width: int) -> torch.Tensor:
    """Bit tables of r's chunks r_i. 4 bits wide: int32 [chunks, *shape], bit j is [j < r_i], bit 16 + j is [j = r_i].

    Wider: int64 [2, words, chunks, *shape], bit j of the words is [j < r_i] in the first half and [j = r_i] in the second.
    """
    chunks = chunk(r, low, high, width)
    one = torch.ones((), dtype=torch.int64, device=r.device)
    if width == CHUNK_BITS:
        return (((one << chunks) - 1) | (one << (chunks + 16))).int()
    words = torch.arange(table_words(width), device=r.device).reshape(-1, *([1] * chunks.dim()))
    place = chunks.unsqueeze(0) - 64 * words
    inside = (place >= 0) & (place < 64)
    bit = torch.where(inside, one << place.clamp(0, 63), 0)
    less = torch.where(inside, bit - 1, torch.where(place >= 64, -1, 0))
    return torch.stack([less, bit])


def look_up(
    tables: torch.Tensor, c: torch.Tensor, low: int, high: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """XOR-shares (uint8, lowest bit) of [c_i < r_i] and [c_i = r_i] for each chunk of the public c: [chunks, many, *shape].

    tables: of the elements [*shape]; c: [many, *shape].
    """
    if width == CHUNK_BITS:
        many, shape = c.shape[0], (tables.shape[0], *c.shape)
        found = fused.run(
            _look_up_narrow, tables.reshape(tables.shape[0], -1), c.reshape(many, -1), low, high
        )
        return found[0].view(shape), found[1].view(shape)
    chunks = chunk(c, low, high, width)
    wide = tables.unsqueeze(3).expand(*tables.shape[:3], *chunks.shape[1:])
    index = (chunks >> 6).expand(2, 1, *chunks.shape)
    words = wide.gather(1, index).squeeze(1)
    less, equal = ((words >> (chunks & 63)) & 1).to(torch.uint8).unbind()
    return less, equal


def _look_up_narrow(
    tables: torch.Tensor, c: torch.Tensor, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunk by chunk, so that what one needs stays in the processor's cache: three times as fast as all at once."""
    less, equal = [], []
    base = c >> low
    if high - low <= 32:
        base = base.int()
    for i in range(tables.shape[0]):
        width = min(CHUNK_BITS, high - low - i * CHUNK_BITS)
        entry = tables[i].unsqueeze(0) >> ((base >> (i * CHUNK_BITS)) & ((1 << width) - 1)).int()
        less.append((entry & 1).to(torch.uint8))
        equal.append(((entry >> 16) & 1).to(torch.uint8))
    return torch.stack(less), torch.stack(equal)


@functools.cache
def direct_truth(size: int) -> torch.Tensor:
    """bool [entries, entries], row rho: entry j is the carry of `size` chunks, its top g included, of index j ^ rho.

    Bits 0..2 size - 3 of an index are carry_index's; the top one is g of the top chunk.
    """
    count = 1 << (2 * size - 1)
    words = _truth(2 * size - 2, False)[0] if size > 1 else torch.zeros((), dtype=torch.int64)
    index = torch.arange(count)
    carry = (words >> (index & ((count >> 1) - 1))) & 1
    values = carry ^ (index >> (2 * size - 2))
    return values[index.unsqueeze(0) ^ index.unsqueeze(1)].bool()


@functools.cache
def _truth(bits: int, last: bool) -> torch.Tensor:
    """Row rho of a table over `bits` masked bits: bit j is f(j ^ rho).

    last: f is the conjunction of all bits; else the carry into the top of (bits + 2) / 2 chunks, whose own g is added
    outside: with s = (bits + 2) / 2, bits 0..s-2 are g_0..g_(s-2), bits s-1..2s-3 are p_1..p_(s-1).
    """
    count = 1 << bits
    values = []
    for j in range(count):
        if last:
            values.append(j == count - 1)
            continue
        s = (bits + 2) // 2
        g, p = [(j >> i) & 1 for i in range(s - 1)], [(j >> (s - 1 + i)) & 1 for i in range(s - 1)]
        carry = 0
        for i in range(s - 1):
            carry = (carry ^ g[i]) & p[i]
        values.append(bool(carry))
    rows = []
    for rho in range(count):
        word = sum(1 << j for j in range(count) if values[j ^ rho])
        rows.append(word - (1 << 64) if word >= 1 << 63 else word)
    return torch.tensor(rows, dtype=torch.int64)


@dataclass(frozen=True)
class Merge(Correlation):
    """Truth tables that merge `size` neighbouring chunks (2 to 4) in each of `groups` groups of every element.

    propagate: also the conjunction of the p, for a merge that follows.
    """

    shape: tuple[int, ...]
    groups: int
    size: int
    propagate: bool

    def parts(self) -> tuple[Part, ...]:
        shape = (self.groups, *self.shape)
        carry = _INDEX_DTYPES[1 << (2 * self.size - 2)]
        parts = [
            Part("index", shape, torch.uint8, xor=True),
            Part("carry", shape, carry, xor=True, bound=True),
        ]
        if self.propagate:
            parts.append(Part("all", shape, _INDEX_DTYPES[1 << self.size], xor=True, bound=True))
        return tuple(parts)

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        rho = combine(free["index"], True).long()
        width = 2 * self.size - 2
        out = {"carry": _truth(width, False).to(rho.device)[rho & ((1 << width) - 1)]}
        if self.propagate:
            index = (rho >> (self.size - 1)) & ((1 << self.size) - 1)
            out["all"] = _truth(self.size, True).to(rho.device)[index]
        return {name: value.to(_dtype(self, name)) for name, value in out.items()}


def _dtype(kind: Merge, name: str) -> torch.dtype:
    return next(p.dtype for p in kind.parts() if p.name == name)


def merged(
    p: Party, less: torch.Tensor, equal: torch.Tensor, most: int
) -> Talk[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks [chunks, *shape] merged, a round each time, until there are at most `most`."""
    while less.shape[0] > most:
        groups, size = group_shape(less.shape[0])
        merge = _merge(p, _grouped(less, groups, size), _grouped(equal, groups, size), groups > 1)
        less, equal = yield from merge
    return less, equal


def borrow(p: Party, less: torch.Tensor, equal: torch.Tensor) -> Talk[torch.Tensor]:
    """XOR-share (uint8, lowest bit) of [c < r] from its chunks, [chunks, *shape]: one round for up to 4, two up to 16."""
    less, _ = yield from merged(p, less, equal, 1)
    return less[0]


def carry_index(less: torch.Tensor, equal: torch.Tensor) -> torch.Tensor:
    """The bits that a carry over the chunks depends on, but for the top chunk's own g: see truth."""
    size = less.shape[0]
    index = torch.zeros_like(less[0])
    for i in range(size - 1):
        index = index ^ (less[i] << i) ^ (equal[i + 1] << (size - 1 + i))
    return index


def _grouped(bits: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """[size, groups, *shape]; where the chunks do not fill the groups, zeros are put below them, which carry nothing."""
    missing = groups * size - bits.shape[0]
    if missing:
        bits = torch.cat([torch.zeros_like(bits[:1]).expand(missing, *bits.shape[1:]), bits])
    return bits.reshape(groups, size, *bits.shape[1:]).transpose(0, 1)


def _merge(
    p: Party, less: torch.Tensor, equal: torch.Tensor, propagate: bool
) -> Talk[tuple[torch.Tensor, torch.Tensor]]:
    size, groups = less.shape[0], less.shape[1]
    kind = Merge(tuple(less.shape[2:]), groups, size, propagate)
    parts = p.take(kind)
    flat = [t.reshape(*t.shape[: t.dim() - len(kind.shape)], -1) for t in (less, equal, parts["index"])]
    index = flat[2] if p.tracing else fused.run(_merge_index, *flat, propagate)
    (opened,) = yield [p.word("merge", (index, 8), xor=True)]
    if p.tracing:
        return torch.empty_like(less[0]), torch.empty_like(less[0])
    tables = [parts[name].reshape(groups, -1) for name in (("carry", "all") if propagate else ("carry",))]
    carry, both = fused.run(_merge_result, opened, flat[0][size - 1], size, *tables)
    return carry.view(less.shape[1:]), both.view(less.shape[1:])


def _merge_index(
    less: torch.Tensor, equal: torch.Tensor, masks: torch.Tensor, propagate: bool
) -> torch.Tensor:
    index = masks ^ carry_index(less, equal)
    return index ^ (equal[0] << (2 * less.shape[0] - 2)) if propagate else index


def _merge_result(
    opened: torch.Tensor,
    top: torch.Tensor,
    size: int,
    carries: torch.Tensor,
    alls: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """g of each group, and p where alls has its table."""
    carry = top ^ _entry(carries, opened & ((1 << (2 * size - 2)) - 1))
    if alls is None:
        return carry, carry
    return carry, _entry(alls, (opened >> (size - 1)) & ((1 << size) - 1))


def _entry(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Bit `index` of each word, as uint8."""
    return ((table >> index.to(table.dtype)) & 1).to(torch.uint8)
