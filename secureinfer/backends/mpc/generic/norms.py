"""Layer norm: mean, sum of squares, 1/sigma by normalisation and a series, gain and bias."""

from __future__ import annotations

import math

import torch

from .. import protocols, ranges, ring, series
from ..kernels import StepCall, kernel
from ..ranges import INVERSE_SCALE
from ..values import Operand, Share
from .common import Normalised, add_plain, fixed_product, multiply, squared
from .local import Values

_MEAN_BITS = 24


@kernel("layer_norm.series")
def _layer_norm(call: StepCall) -> Values:
    """(x - mean) / sqrt(var + eps) * gain + bias over the last dimensions.

    The sum of squares stays at twice the scale, untruncated, so that small variances keep their bits.
    A row with sigma below about 1e-4 is constant to the precision of its inputs and gives its bias.
    """
    party, f, x = call.party, call.scale, call.share(0)
    width = math.prod(call.attr("normalized_shape"))
    rows = x.tensor.reshape(-1, width)
    guard = ranges.norm_guard(f, width, call.operands[0].edge)
    scale = x.scale + guard
    total = rows.sum(-1) * round((1 << _MEAN_BITS) / width)
    mean = protocols.truncate(party, total, _MEAN_BITS - guard)
    centred = (rows << guard) - mean.unsqueeze(-1)
    squares = squared(centred).sum(-1)
    lowest, highest = ranges.variance_range(scale, width)
    if party.first:
        epsilon = round(float(call.attr("eps")) * width * 2.0 ** (2 * scale))
        squares = squares + max(epsilon, 1)
    n = Normalised(party, squares, lowest, highest)
    # 1/sigma = sqrt(width) 2**scale X**(-1/2) with X = u 2**j
    powers = [
        round(math.sqrt(width) * 2.0 ** (scale - j / 2 + INVERSE_SCALE)) for j in range(lowest, highest + 1)
    ]
    inverse = multiply(n.function(series.INVERSE_SQRT, INVERSE_SCALE), n.weighted(powers))
    inverse = protocols.truncate(party, inverse, INVERSE_SCALE)
    normal = multiply(centred, inverse.unsqueeze(-1))
    has_weight, has_bias = call.attr("has_weight"), call.attr("has_bias")
    # Four more bits before the gain, where one follows: its truncation then is the one that counts.
    kept = f + 4 if has_weight else f
    value = Share(protocols.truncate(party, normal, scale + INVERSE_SCALE - kept), kept)
    shape = call.outputs[0].shape
    tensor = value.tensor.reshape(shape)
    scale = f
    if has_weight:
        tensor = _gain(call, tensor, call.operands[1])
        scale = kept + call.operands[1].edge.scale
    if has_bias:
        bias = call.operands[2 if has_weight else 1]
        zero = torch.zeros(bias.edge.shape, dtype=torch.int64, device=tensor.device)
        tensor = tensor + (zero if party.tracing else add_plain(call, zero, bias, scale))
    return [Share(protocols.truncate(party, tensor, scale - f), f)]


def _gain(call: StepCall, x: torch.Tensor, gain: Operand) -> torch.Tensor:
    if gain.is_public and gain.plain is not None:
        encoded = ring.encode(gain.plain, gain.edge.scale, gain.edge.name)
        return x * encoded
    return fixed_product(call, x, gain, "mul", call.outputs[0].shape)
