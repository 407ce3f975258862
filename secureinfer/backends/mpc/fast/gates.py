"""A value in a window times a bit that is shared by XOR: both are opened at once, and what is dealt of their masks gates.

c = x + 2**(k-2) + r and z = w ^ b are public; w x is linear in dealt shares of b, of r and its top bit, and of b times them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import ring
from ..correlations import Correlation, MaskedWeight, Part, SessionWeight, Shares, combine
from ..party import Party
from . import opening
from .opening import masked_by
from .talk import Talk


@dataclass(frozen=True)
class Gate(Correlation):
    """A mask r modulo 2**bits, a mask b of a bit, and b times what r is."""

    shape: tuple[int, ...]
    bits: int

    def parts(self) -> tuple[Part, ...]:
        top = 64 - self.bits
        return (
            Part("r", self.shape, torch.int32 if self.bits <= 32 else torch.int64),
            Part("b", self.shape, torch.uint8, xor=True),
            Part("value", self.shape, bound=True),
            Part("bit", self.shape, bound=True),
            Part("bit_value", self.shape, bound=True),
            Part("top", self.shape, bound=True, bits=top),
            Part("bit_top", self.shape, bound=True, bits=top),
        )

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        bit = (combine(free["b"], True) & 1).long()
        value, top = value_and_top(combine(free["r"], False), self.bits)
        return {"value": value, "bit": bit, "bit_value": bit * value, "top": top, "bit_top": bit * top}


def value_and_top(r: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask modulo 2**bits, and its top bit."""
    value = r.long() & ((1 << bits) - 1)
    return value, ring.logical_shift(value, bits - 1)


def gated(p: Party, x: torch.Tensor, w: torch.Tensor, bits: int) -> Talk[torch.Tensor]:
    """A share of w x in the 64-bit ring: one round. x: share with |x| < 2**(bits-2); w: XOR-share, uint8, lowest bit."""
    parts = p.take(Gate(tuple(x.shape), bits))
    mask = p.mask
    masked = masked_by(p, x, parts["r"], bits)
    hidden = w if p.tracing else (w ^ parts["b"]) & 1
    c, z = yield [
        p.word("window", (masked, bits), mask=mask),
        p.word("bit", (hidden, 1), xor=True, mask=mask),
    ]
    if p.tracing:
        return torch.empty_like(x)
    dealt = (parts[n] for n in ("bit", "bit_value", "value", "bit_top", "top"))
    return opening.gated(p, c, z.bool().unsqueeze(0), bits, 0, *dealt)[0]
