"""Softmax, plain and masked: exact maximum, exponentials from one opening, one inverse a row.

A masked place is selected away before the maximum (never by adding -1e4), so it gets exactly 0; a row that is masked
entirely gives zeros. Right for any row length up to 8192: the sum is normalised before it is inverted.
"""

from __future__ import annotations

import torch

from .. import protocols, ranges, series
from ..kernels import StepCall, kernel
from ..party import Party
from ..ranges import EXP_LOWEST, EXP_SCALE, INVERSE_SCALE, MASKED_SCORE
from ..values import Share
from .common import Normalised, maximum, multiply
from .local import Values


def _core(party: Party, x: torch.Tensor, scale: int, precision: int, *, guard: bool) -> torch.Tensor:
    """Softmax over the last dimension. guard: places at -MASKED_SCORE are masked."""
    n = x.shape[-1]
    candidates = x
    if guard:
        # Half-way between real and masked scores: the greatest of a fully masked row, so that all its places vanish.
        half = (MASKED_SCORE // 2) << scale
        row = torch.zeros_like(x[..., :1]) - (half if party.first else 0)
        candidates = torch.cat([x, row], dim=-1)
    below = x - maximum(party, candidates).unsqueeze(-1)
    opened = protocols.open_for_series(party, below, scale, series.EXP, compare=True)
    exponential = protocols.truncate(
        party, protocols.evaluate(party, opened, series.EXP), protocols.SERIES_BITS - EXP_SCALE
    )
    (inside,) = protocols.at_least(party, opened, [EXP_LOWEST << scale])
    exponential = multiply(inside, exponential)
    levels = ranges.log2_ceil(n)
    total = Normalised(party, exponential.sum(-1), EXP_SCALE, EXP_SCALE + levels, base=True)
    inverse = total.function(series.INVERSE, INVERSE_SCALE)
    if levels:
        inverse = multiply(inverse, total.weighted([1 << (levels - j) for j in range(levels + 1)]))
    product = multiply(exponential, inverse.unsqueeze(-1))
    return protocols.truncate(party, product, EXP_SCALE + INVERSE_SCALE + levels - precision)


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(dim, -1).contiguous()


@kernel("softmax.series")
def _softmax(call: StepCall) -> Values:
    x, dim = call.share(0), call.attr("dim")
    out = _core(call.party, _rows(x.tensor, dim), x.scale, call.scale, guard=False)
    return [Share(out.movedim(-1, dim).contiguous(), call.scale)]


@kernel("masked_softmax.series")
def _masked_softmax(call: StepCall) -> Values:
    x, dim = call.share(0), call.attr("dim")
    floor = MASKED_SCORE << x.scale
    lifted = x.tensor + (floor if call.party.first else 0)
    keep = call.operands[1]
    if keep.is_public:
        plain = torch.zeros(keep.edge.shape) if keep.plain is None else keep.plain
        chosen = lifted * plain.long()
    else:
        chosen = multiply(lifted, call.share(1).tensor)
    chosen = chosen - (floor if call.party.first else 0)
    out = _core(call.party, _rows(chosen, dim), x.scale, call.scale, guard=True)
    return [Share(out.movedim(-1, dim).contiguous(), call.scale)]
