"""A value that is opened in a window, and its product with another shared value: truncation and multiplication at once.

c = x + 2**(k-2) + r is opened, and e = y - a in the same round or later. x / 2**cut = C - q + m t 2**(k-cut), where C is the
public c / 2**cut less the offset, q = r / 2**cut, t the top bit of r, and m = 1 where c has no top bit. So the product is
C y - (e q + q a) + m 2**(k-cut) (e t + t a), linear in y, q, t and in the dealt q a and t a.

The same opening gives sums of squares: what is dealt of them is q t, and the sum of q**2 of each row.
Sources: Escudero et al. (CRYPTO 2020), section 4, for the truncation; Beaver (CRYPTO 1991) for the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import ring
from ..correlations import Correlation, MaskedWeight, Part, SessionWeight, Shares, combine
from ..party import Parts, Party, Place, Word
from . import fused
from .opening import masked_by
from .talk import Talk


@dataclass(frozen=True)
class Scaled(Correlation):
    """A mask r modulo 2**bits of x, a mask a of y, and their products. factor: y's shape, which broadcasts to x's.

    squares: also what sums of squares of the cut value over the last dimension need.
    """

    shape: tuple[int, ...]
    factor: tuple[int, ...]
    bits: int
    cut: int
    squares: bool = False

    @property
    def top_bits(self) -> int:
        """Bits of the top bit's shares that matter: they are multiplied by 2**(bits - cut)."""
        return 64 - self.bits + self.cut

    def parts(self) -> tuple[Part, ...]:
        top = 8 * ((self.top_bits + 7) // 8)
        parts = [
            Part("r", self.shape, torch.int32 if self.bits <= 32 else torch.int64),
            Part("a", self.factor),
            Part("quotient", self.shape, bound=True),
            Part("quotient_a", self.shape, bound=True),
        ]
        if top:
            parts.append(Part("top", self.shape, bound=True, bits=top))
            parts.append(Part("top_a", self.shape, bound=True, bits=top))
        if self.squares:
            parts.append(Part("square", self.shape[:-1], bound=True))
            if top:
                parts.append(Part("quotient_top", self.shape, bound=True, bits=top))
        return tuple(parts)

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r, a = combine(free["r"], False).long(), combine(free["a"], False)
        if self.bits < 64:
            r = r & ((1 << self.bits) - 1)
        quotient, top = ring.logical_shift(r, self.cut), ring.logical_shift(r, self.bits - 1)
        out = {"quotient": quotient, "quotient_a": quotient * a, "top": top, "top_a": top * a}
        if self.squares:
            out |= {"square": (quotient * quotient).sum(-1), "quotient_top": quotient * top}
        names = {p.name for p in self.parts()}
        return {name: value for name, value in out.items() if name in names}


@dataclass(frozen=True)
class OpenedScaled:
    """The public c, this party's parts, and the record's place."""

    kind: Scaled
    c: torch.Tensor
    parts: Parts
    mask: Place | None


def opening(p: Party, x: torch.Tensor, kind: Scaled) -> Talk[OpenedScaled]:
    """Open x + 2**(bits-2) + r, |x| < 2**(bits-2): one round."""
    parts, mask = p.take(kind), p.mask
    (c,) = yield [_window(p, x, kind, parts, mask)]
    return OpenedScaled(kind, c, parts, mask)


def times(p: Party, opened: OpenedScaled, y: torch.Tensor) -> Talk[torch.Tensor]:
    """A share of (x / 2**cut) y in the 64-bit ring: one round, of the elements of y. y: share in the 64-bit ring."""
    (e,) = yield [_factor(p, y, opened.parts, opened.mask)]
    return _product(p, opened, y, e)


def multiplied(p: Party, x: torch.Tensor, y: torch.Tensor, kind: Scaled) -> Talk[torch.Tensor]:
    """`opening` and `times` in one round."""
    parts, mask = p.take(kind), p.mask
    c, e = yield [_window(p, x, kind, parts, mask), _factor(p, y, parts, mask)]
    return _product(p, OpenedScaled(kind, c, parts, mask), y, e)


def _window(p: Party, x: torch.Tensor, kind: Scaled, parts: Parts, mask: Place | None) -> Word:
    return p.word("window", (masked_by(p, x, parts["r"], kind.bits), kind.bits), mask=mask)


def _factor(p: Party, y: torch.Tensor, parts: Parts, mask: Place | None) -> Word:
    return p.word("factor", (y if p.tracing else y - parts["a"], 64), mask=mask)


def _product(p: Party, opened: OpenedScaled, y: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    kind, parts = opened.kind, opened.parts
    if p.tracing:
        return torch.empty(kind.shape, dtype=torch.int64, device="meta")
    names = ("quotient", "quotient_a", "top", "top_a")
    flat = [parts[n] for n in names if n in parts]
    result: torch.Tensor = fused.run(_times, opened.c, y, e, kind.bits, kind.cut, *flat)
    return result


def _times(
    c: torch.Tensor, y: torch.Tensor, e: torch.Tensor, bits: int, cut: int, quotient: torch.Tensor,
    quotient_a: torch.Tensor, top: torch.Tensor | None = None, top_a: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    out = (ring.logical_shift(c, cut) - (1 << (bits - 2 - cut))) * y - e * quotient - quotient_a
    if top is not None and top_a is not None:
        wrapped = 1 - ring.logical_shift(c, bits - 1)
        out = out + ((wrapped * (e * top + top_a)) << (bits - cut))
    return out


def squares(p: Party, opened: OpenedScaled) -> torch.Tensor:
    """A share of the sum of (x / 2**cut)**2 over the last dimension, in the 64-bit ring; no communication."""
    kind, parts, c = opened.kind, opened.parts, opened.c
    if p.tracing:
        return torch.empty(kind.shape[:-1], dtype=torch.int64, device="meta")
    public = ring.logical_shift(c, kind.cut) - (1 << (kind.bits - 2 - kind.cut))
    out = parts["square"] - 2 * (public * parts["quotient"]).sum(-1)
    if p.first:
        out = out + (public * public).sum(-1)
    if "top" in parts:
        h = kind.bits - kind.cut
        wrapped = 1 - ring.logical_shift(c, kind.bits - 1)
        # (C - q + m t 2**h)**2 has, beside (C - q)**2, m (2 C t - 2 q t) 2**h + m t 2**2h
        cross = 2 * (public * parts["top"] - parts["quotient_top"])
        last = parts["top"] << h if 2 * h < 64 else torch.zeros_like(cross)
        out = out + ((wrapped * (cross + last)).sum(-1) << h)
    return out
