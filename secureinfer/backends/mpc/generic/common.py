"""What several kernels share: Beaver products through CrypTen, products with masked weights, normalisation, maxima."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....errors import SessionError
from .. import protocols, ranges, ring, runtime, series
from ..correlations import FixedProduct, frozen
from ..kernels import StepCall
from ..party import Party
from ..values import Operand, Share


def beaver(op: str, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """op(a, b) of two shared tensors by CrypTen's Beaver protocol: both openings in one frame, one round.

    Fraction bits add up; nothing is truncated.
    """
    shared = runtime.ArithmeticSharedTensor
    left, right = shared.from_shares(a, precision=0), shared.from_shares(b, precision=0)
    return getattr(runtime.beaver, op)(left, right, **options).share  # type: ignore[no-any-return]


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise product of shares; shapes broadcast."""
    return beaver("mul", a, b)


def squared(x: torch.Tensor) -> torch.Tensor:
    """Elementwise square of a share, by CrypTen's protocol."""
    return runtime.beaver.square(runtime.ArithmeticSharedTensor.from_shares(x, precision=0)).share  # type: ignore[no-any-return]


def fixed_product(
    call: StepCall, x: torch.Tensor, weight: Operand, op: str, result: Sequence[int], **options: Any
) -> torch.Tensor:
    """op(x, W) with W known to rank 0: one message from each other party to rank 0, one round; nothing is truncated.

    x: share (a value that one party holds in plain, with zeros at the others, may be given: what is sent is masked).
    Rank 0 learns x - A, and A is the others' alone; c + A (W - B) was computed offline by the others.
    """
    party = call.party
    kind = FixedProduct(op, tuple(x.shape), tuple(result), weight.edge.name, 0, frozen(options))
    parts = party.take(kind)
    opened = party.open_to([x - parts["A"]], 0, "masked operand")
    if opened is None or party.tracing:
        return parts["c"]
    if weight.plain is None:
        raise SessionError(f"the model owner does not hold weight {weight.edge.name!r}")
    return call.encoded(weight).apply(op, opened[0], options) + parts["c"]


def add_plain(call: StepCall, x: torch.Tensor, operand: Operand, scale: int) -> torch.Tensor:
    """x plus a PUBLIC operand, or a PRIVATE one that its owner adds to its own share; no communication."""
    owner = 0 if operand.is_public else operand.owner_rank
    if call.party.rank != owner or operand.plain is None:
        return x
    return x + ring.encode(operand.plain, scale, operand.edge.name)


def align(x: Share, scale: int) -> torch.Tensor:
    """The share's tensor at `scale`, which is not below its own."""
    if scale < x.scale:
        raise SessionError(
            f"a share of {x.scale} fraction bits cannot be taken to {scale} without a truncation"
        )
    return x.tensor << (scale - x.scale) if scale != x.scale else x.tensor


def maximum(party: Party, x: torch.Tensor) -> torch.Tensor:
    """The greatest value along the last dimension, by a tournament of comparisons; exact."""
    while x.shape[-1] > 1:
        pairs = x.shape[-1] // 2
        left, right, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
        difference = left - right
        (wins,) = protocols.at_least(party, protocols.open_masked(party, difference, compare=True), [0])
        x = torch.cat([right + multiply(wins, difference), rest], dim=-1)
    return x.squeeze(-1)


def greatest_index(party: Party, x: torch.Tensor) -> torch.Tensor:
    """Index of the greatest value along the last dimension, of equal ones the first, by a tournament; exact.

    Neighbours meet, so that what is left of another has the lower index at every level.
    """
    places = torch.arange(x.shape[-1], device=x.device) * (1 if party.first else 0)
    both = torch.stack([x, places.expand_as(x)])
    while both.shape[-1] > 1:
        even = both.shape[-1] // 2 * 2
        left, right, rest = both[..., 0:even:2], both[..., 1:even:2], both[..., even:]
        difference = (left - right).contiguous()
        opened = protocols.open_masked(party, difference[0].contiguous(), compare=True)
        (wins,) = protocols.at_least(party, opened, [0])
        both = torch.cat([right + multiply(wins, difference), rest], dim=-1)
    return both[1].squeeze(-1)


class Normalised:
    """X = u 2**j with u in [1, 2): u at `highest` fraction bits, and one-hot shares of j for lowest..highest.

    A value below 2**lowest has no exponent: all its one-hots are 0, and so is u. With base=True the lowest exponent
    takes whatever is below 2**(lowest + 1).
    """

    def __init__(
        self, party: Party, x: torch.Tensor, lowest: int, highest: int, *, base: bool = False
    ) -> None:
        """x: share of integers X, 0 <= X < 2**(highest + 1)."""
        self.party = party
        self.lowest, self.highest = lowest, highest
        exponents = range(lowest + (1 if base else 0), highest + 1)
        if not exponents:
            self.one_hot = [torch.ones_like(x) if party.first else torch.zeros_like(x)]
            self.u = x
            return
        opened = protocols.open_masked(party, x, compare=True)
        reached = list(protocols.at_least(party, opened, [1 << j for j in exponents]).unbind())
        if base:
            reached.insert(0, torch.ones_like(x) if party.first else torch.zeros_like(x))
        if party.tracing:
            self.one_hot = reached
        else:
            self.one_hot = [a - b for a, b in zip(reached, [*reached[1:], torch.zeros_like(x)], strict=True)]
        self.u = multiply(x, self.weighted([1 << (highest - j) for j in range(lowest, highest + 1)]))

    def weighted(self, constants: Sequence[int]) -> torch.Tensor:
        """sum_j one_hot[j] * constants[j]: a share of the constant that belongs to j; no communication."""
        if self.party.tracing:
            return torch.empty_like(self.one_hot[0])
        total = torch.zeros_like(self.one_hot[0])
        for bit, constant in zip(self.one_hot, constants, strict=True):
            total = total + bit * constant
        return total

    def function(self, f: series.Series, scale: int) -> torch.Tensor:
        """f(u) at `scale` fraction bits, for a series fitted on [1, 2]."""
        opened = protocols.open_for_series(self.party, self.u, self.highest, f)
        return protocols.truncate(
            self.party, protocols.evaluate(self.party, opened, f), protocols.SERIES_BITS - scale
        )


def reciprocal(call: StepCall, index: int) -> Share:
    """1 / operand[index] for 2**-precision <= |x| < 2**22, either sign; 1 / 0 gives 0. Relative error 2**-17."""
    party, f, x = call.party, call.scale, call.share(index)
    opened = protocols.open_masked(party, x.tensor, compare=True)
    (positive,) = protocols.at_least(party, opened, [0])
    sign = 2 * positive - (1 if party.first else 0)
    lowest, highest = ranges.magnitude_range(f, call.operands[index].edge)
    n = Normalised(party, multiply(sign, x.tensor), lowest, highest)
    inverse = n.function(series.INVERSE, 20)
    scaled = multiply(inverse, n.weighted([1 << (highest - j) for j in range(lowest, highest + 1)]))
    scale = 20 + highest - x.scale
    if scale > f:
        scaled, scale = protocols.truncate(party, scaled, scale - f), f
    return Share(multiply(scaled, sign), scale)
