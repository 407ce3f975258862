"""What one opening of a k-bit window gives: the value without its low bits, comparisons, and values gated by them.

c = x + 2**(k-2) + r modulo 2**k is public, r is dealt and uniform. Everything dealt about r comes from one record (R1).
Threat model: semi-honest parties, of whom at least one is honest, and a dealer that colludes with nobody.

Truncation: Escudero et al. (CRYPTO 2020), section 4, in a window of k bits, with output shares in the 64-bit ring.
Comparison: [x >= t] = 1 ^ msb(u) ^ msb(r) ^ [u mod 2**(k-1) < r mod 2**(k-1)] with u = x - t + r; see tables.py.
Gates: with a dealt random bit b, z = [x >= t] ^ b is opened (one bit); [x >= t] and [x >= t] (x / 2**cut) are then linear
in dealt shares of b and of b times what truncation deals, so that no product follows. Where few values are compared the last
merge's truth table holds additive shares of [x >= t], and of it times what truncation deals, and z is not needed (direct).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .. import ring, windows
from ..correlations import Correlation, MaskedWeight, Part, SessionWeight, Shares, combine
from ..party import Parts, Party, Place
from . import fused, tables
from .talk import Talk, run


@dataclass(frozen=True)
class Window(Correlation):
    """A mask modulo 2**bits and what is dealt about it.

    cut: bits that a truncation cuts; None where the value itself is not needed. low, high: bits low..high-1 are
    compared, none where they are equal; with high = bits - 1 it is a comparison of the whole value, without the low bits.
    thresholds: comparisons. gate: each comparison also multiplies the truncated value.
    """

    shape: tuple[int, ...]
    bits: int
    cut: int | None = None
    low: int = 0
    high: int = 0
    thresholds: int = 0
    gate: bool = False

    @property
    def signed(self) -> bool:
        """Whether the mask's top bit takes part: a comparison of the whole value."""
        return self.thresholds > 0 and self.high == self.bits - 1

    @property
    def direct(self) -> bool:
        """Whether the last merge gives additive shares at once."""
        count = self.thresholds * math.prod(self.shape)
        return self.thresholds > 0 and windows.is_direct(count, self.high - self.low, self.gate)

    @property
    def chunk_bits(self) -> int:
        return windows.chunk_bits(self.high - self.low, self.direct)

    @property
    def chunks(self) -> int:
        return windows.chunks(self.high - self.low, self.direct)

    @property
    def top_bits(self) -> int:
        """Bits of the top bit's shares that matter: it is multiplied by 2**(bits - cut)."""
        return min(64, 64 - self.bits + (self.cut or 0))

    def parts(self) -> tuple[Part, ...]:
        many = (self.thresholds, *self.shape)
        parts = [Part("r", self.shape, torch.int32 if self.bits <= 32 else torch.int64)]
        top = 8 * ((self.top_bits + 7) // 8)
        if self.cut is not None:
            parts.append(Part("quotient", self.shape, bound=True))
            if top:
                parts.append(Part("top", self.shape, bound=True, bits=top))
        if self.thresholds:
            shape, dtype = (self.chunks, *self.shape), torch.int32
            if self.chunk_bits > windows.CHUNK_BITS:
                shape, dtype = (2, windows.table_words(self.chunk_bits), *shape), torch.int64
            parts.append(Part("tables", shape, dtype, xor=True, bound=True))
            if self.signed:
                parts.append(Part("sign", self.shape, torch.uint8, xor=True, bound=True, bits=1))
            # b: the masks of the last merge's index bits, or of the one bit that is opened
            parts.append(Part("b", many, torch.uint8, xor=True))
            if self.direct:
                many = (windows.direct_entries(self.high - self.low), *many)
            parts.append(Part("bit", many, bound=True))
            if self.gate:
                parts.append(Part("bit_quotient", many, bound=True))
                if top:
                    parts.append(Part("bit_top", many, bound=True, bits=top))
        return tuple(parts)

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False).long() & _mask(self.bits)
        quotient, top = ring.logical_shift(r, self.cut or 0), ring.logical_shift(r, self.bits - 1)
        out = {"quotient": quotient, "top": top}
        if self.thresholds:
            bit = self._bits(combine(free["b"], True)).long()
            out["tables"] = tables.chunk_tables(r, self.low, self.high, self.chunk_bits)
            out |= {"bit": bit, "sign": top.to(torch.uint8)}
            out |= {"bit_quotient": bit * quotient, "bit_top": bit * top}
        names = {p.name for p in self.parts()}
        return {name: value for name, value in out.items() if name in names}

    def _bits(self, b: torch.Tensor) -> torch.Tensor:
        """b itself; or for each index of the last merge the bit that it stands for under the mask b."""
        if not self.direct:
            return b & 1
        entries = windows.direct_entries(self.high - self.low)
        truth = tables.direct_truth(windows.last_merge(self.chunks)).to(b.device)
        return truth[(b & (entries - 1)).long()].movedim(-1, 0)


def _mask(bits: int) -> int:
    return (1 << bits) - 1 if bits < 64 else -1


@dataclass(frozen=True)
class Opened:
    """The public c of one window, in [0, 2**bits) (64 bits: signed), and this party's parts."""

    kind: Window
    c: torch.Tensor
    parts: Parts
    mask: Place | None = None


def masked_by(p: Party, x: torch.Tensor, r: torch.Tensor, bits: int) -> torch.Tensor:
    """The share of x + 2**(bits-2) + r that is opened in a window."""
    if p.tracing:
        return x
    masked = x + r
    return masked.add_(1 << (bits - 2)) if p.first else masked


def opening(p: Party, x: torch.Tensor, kind: Window) -> Talk[Opened]:
    """Open x + 2**(bits-2) + r in the window: bits / 8 bytes an element, one round. x: share with |x| < 2**(bits-2)."""
    parts, mask = p.take(kind), p.mask
    masked = masked_by(p, x, parts["r"], kind.bits)
    (c,) = yield [p.word("window", (masked, kind.bits))]
    return Opened(kind, c, parts, mask)


def open_window(p: Party, x: torch.Tensor, kind: Window) -> Opened:
    """`opening` by itself."""
    return run(p, opening(p, x, kind))


def truncated(p: Party, opened: Opened) -> torch.Tensor:
    """Share of x / 2**cut in the 64-bit ring, rounded at random without bias; no communication."""
    kind, parts = opened.kind, opened.parts
    if p.tracing:
        return torch.empty_like(parts["quotient"])
    one = 1 if p.first else 0
    return _affine(opened.c, one, kind.bits, kind.cut or 0, parts["quotient"], parts.get("top"))


def _affine(
    c: torch.Tensor,
    factor: torch.Tensor | int,
    bits: int,
    cut: int,
    quotient: torch.Tensor,
    top: torch.Tensor | None,
) -> torch.Tensor:
    """factor (c / 2**cut less the offset) - quotient + top [c has no top bit] 2**(bits-cut): what dealt parts make of c."""
    out = -quotient
    if top is not None:
        wrapped = 1 - ring.logical_shift(c, bits - 1)
        out = out + ((top.long() * wrapped) << (bits - cut))
    if isinstance(factor, int) and not factor:
        return out
    return out + factor * (ring.logical_shift(c, cut) - (1 << (bits - 2 - cut)))


class Comparison(Protocol):
    """A compared bit w for each threshold, as what was dealt gives shares of it; no communication follows."""

    def bits(self) -> torch.Tensor:
        """Shares of w, scale 0: int64 [thresholds, *shape]."""

    def values(self) -> torch.Tensor:
        """Shares of w (x / 2**cut), of a window with gates: int64 [thresholds, *shape]."""


@dataclass(frozen=True)
class _ByBit:
    """z = w ^ b is public: w = z + (1 - 2 z) b."""

    p: Party
    opened: Opened
    z: torch.Tensor

    def bits(self) -> torch.Tensor:
        bit = self.opened.parts["bit"]
        out = torch.where(self.z, -bit, bit)
        return out + self.z if self.p.first else out

    def values(self) -> torch.Tensor:
        parts, kind = self.opened.parts, self.opened.kind
        dealt = parts["bit"], parts["bit_quotient"], parts["quotient"]
        tops = parts.get("bit_top"), parts.get("top")
        return gated(self.p, self.opened.c, self.z, kind.bits, kind.cut or 0, *dealt, *tops)


def gated(
    p: Party, c: torch.Tensor, z: torch.Tensor, bits: int, cut: int, bit: torch.Tensor, bit_quotient: torch.Tensor,
    quotient: torch.Tensor, bit_top: torch.Tensor | None, top: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Shares of w (x / 2**cut) for each w = z ^ b: z is bool [many, *shape], and so is what was dealt times b."""
    many = len(z)
    flat = [bit.reshape(many, -1), bit_quotient.reshape(many, -1), quotient.reshape(-1)]
    if bit_top is not None and top is not None:
        flat += [bit_top.reshape(many, -1), top.reshape(-1)]
    one = 1 if p.first else 0
    result: torch.Tensor = fused.run(gate, c.reshape(-1), z.reshape(many, -1), one, bits, cut, *flat)
    return result.view(z.shape)


def gate(
    c: torch.Tensor, z: torch.Tensor, one: int, bits: int, cut: int, bit: torch.Tensor, bit_quotient: torch.Tensor,
    quotient: torch.Tensor, bit_top: torch.Tensor | None = None, top: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """What was dealt times b where z is 0, and times 1 - b where z is 1, as _affine combines it."""
    chosen_top = None if bit_top is None or top is None else torch.where(z, top - bit_top, bit_top)
    chosen = torch.where(z, quotient - bit_quotient, bit_quotient)
    return _affine(c, torch.where(z, one - bit, bit), bits, cut, chosen, chosen_top)


@dataclass(frozen=True)
class _ByTable:
    """The masked index into the last merge's tables is public: the entry there is w."""

    opened: Opened
    index: torch.Tensor

    def _entry(self, name: str) -> torch.Tensor:
        return self.opened.parts[name].gather(0, self.index).squeeze(0)

    def bits(self) -> torch.Tensor:
        return self._entry("bit")

    def values(self) -> torch.Tensor:
        kind = self.opened.kind
        top = self._entry("bit_top") if "bit_top" in self.opened.parts else None
        quotient = self._entry("bit_quotient")
        return _affine(self.opened.c, self._entry("bit"), kind.bits, kind.cut or 0, quotient, top)


@dataclass(frozen=True)
class _Traced:
    """The shape alone; the merges have been asked for."""

    shape: tuple[int, ...]

    def bits(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=torch.int64, device="meta")

    values = bits


def _trace(p: Party, opened: Opened) -> Talk[Comparison]:
    kind = opened.kind
    many = (kind.thresholds, *kind.shape)
    empty = torch.empty((kind.chunks, *many), dtype=torch.uint8, device="meta")
    yield from tables.merged(p, empty, empty, windows.MOST_MERGED if kind.direct else 1)
    yield [p.word("bit", (empty[0], 8 if kind.direct else 1), xor=True)]
    return _Traced(many)


def _compared(
    p: Party, opened: Opened, less: torch.Tensor, equal: torch.Tensor, public: torch.Tensor | None, what: str
) -> Talk[Comparison]:  # fmt: skip
    """The bit [c < r], with what `public` adds to it. At most two rounds of merges, and one unless direct."""
    kind, parts = opened.kind, opened.parts
    hidden = parts["sign"] & 1 if kind.signed else None
    if p.first and public is not None:
        hidden = public if hidden is None else hidden ^ public
    if not kind.direct:
        bit = (yield from tables.borrow(p, less, equal)) ^ (parts["b"] & 1)
        (z,) = yield [p.word(what, (bit if hidden is None else bit ^ hidden, 1), xor=True, mask=opened.mask)]
        return _ByBit(p, opened, z.bool())
    less, equal = yield from tables.merged(p, less, equal, windows.MOST_MERGED)
    top = less[-1] if hidden is None else less[-1] ^ hidden
    width = 2 * less.shape[0] - 2
    index = (parts["b"] & ((2 << width) - 1)) ^ tables.carry_index(less, equal) ^ (top << width)
    (found,) = yield [p.word(what, (index, 8), xor=True, mask=opened.mask)]
    return _ByTable(opened, found.long().unsqueeze(0))


def comparing(p: Party, opened: Opened, thresholds: Sequence[int]) -> Talk[Comparison]:
    """[x >= t] for each threshold."""
    if p.tracing:
        return (yield from _trace(p, opened))
    kind, parts = opened.kind, opened.parts
    c = opened.c - (1 << (kind.bits - 2))  # of x alone
    t = torch.tensor(list(thresholds), dtype=torch.int64, device=c.device)
    u = c.unsqueeze(0) - t.reshape(-1, *([1] * c.dim()))
    less, equal = tables.look_up(parts["tables"], u, kind.low, kind.high, kind.chunk_bits)
    public = 1 ^ (ring.logical_shift(u, kind.bits - 1).to(torch.uint8) & 1)
    return (yield from _compared(p, opened, less, equal, public, "bit"))


def compare(p: Party, opened: Opened, thresholds: Sequence[int]) -> Comparison:
    """`comparing` by itself."""
    return run(p, comparing(p, opened, thresholds))


def exactly_truncated(p: Party, opened: Opened) -> torch.Tensor:
    """Share of floor(x / 2**cut): the random rounding taken back by a comparison of the low bits; for what is revealed (R5).

    opened: with low = 0, high = cut and one threshold.
    """
    kind = opened.kind
    if p.tracing:
        carry = run(p, _trace(p, opened))
    else:
        c = opened.c.unsqueeze(0)
        less, equal = tables.look_up(opened.parts["tables"], c, kind.low, kind.high, kind.chunk_bits)
        carry = run(p, _compared(p, opened, less, equal, None, "carry"))
    return truncated(p, opened) - carry.bits()[0]
