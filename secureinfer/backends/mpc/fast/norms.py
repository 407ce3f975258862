"""Layer norm: the opening of the centred values serves the sum of their squares and the product with 1/sigma.

Seven rounds: the centred values; the sum of squares, its zones' comparisons, the choice of the zone (pieces.py); the product
with 1/sigma; the gain, which the model owner knows; the cut. The mean is a local shift (rounding.py), and the raw result of
the layer before is taken as it is.
"""

from __future__ import annotations

import torch

from .. import norms, ring
from ..correlations import FixedProduct
from ..generic.common import add_plain
from ..kernels import StepCall, kernel
from ..norms import Norm
from ..party import Party
from ..values import Operand, Share
from . import opening, pieces, scaled
from .choices import Values
from .rounding import shrink
from .talk import run


@kernel("layer_norm.window")
def _layer_norm(call: StepCall) -> Values:
    p, out = call.party, call.outputs[0]
    plan = call.planned(norms.norm(call.node, [o.edge for o in call.operands], out))
    x = call.share(0)
    rows = x.tensor.reshape(-1, plan.width)
    normal = _normalised(p, rows, x.scale, plan, float(call.attr("eps")))
    normal = shrink(normal, plan.centred + plan.inverse - plan.normal).reshape(out.shape)
    has_weight, scale = call.attr("has_weight"), plan.normal
    if has_weight:
        normal, scale = _gain(call, normal, call.operands[1], plan.ring), scale + call.operands[1].edge.scale
    if call.attr("has_bias"):
        bias = call.operands[1 + has_weight]
        if bias.share is None and not p.tracing:
            zero = torch.zeros(bias.edge.shape, dtype=torch.int64, device=normal.device)
            normal = normal + add_plain(call, zero, bias, scale)
        elif bias.share is not None:
            normal = normal + (bias.share.tensor << (scale - bias.share.scale))
    kind = opening.Window(tuple(normal.shape), plan.ring, plan.cut)
    opened = opening.open_window(p, normal.contiguous(), kind)
    return [Share(opening.truncated(p, opened), out.scale)]


def _normalised(p: Party, rows: torch.Tensor, scale: int, plan: Norm, eps: float) -> torch.Tensor:
    """(x - mean) / sigma at plan.centred + plan.inverse fraction bits, in the 64-bit ring."""
    z = plan.odd * shrink(rows, scale - plan.centred)
    z = z - shrink(rows.sum(-1, keepdim=True), scale + plan.even - plan.centred)
    shape = tuple(rows.shape)
    kind = scaled.Scaled(shape, (shape[0], 1), norms.WINDOW, 0, squares=True)
    opened = run(p, scaled.opening(p, z, kind))
    total = scaled.squares(p, opened)
    if p.first and not p.tracing:
        total = total + max(1, round(eps * plan.width * plan.odd**2 * 2.0 ** (2 * plan.centred)))
    inverse = run(p, pieces.evaluate(p, total, plan.pieces, plan.inverse))
    return run(p, scaled.times(p, opened, inverse.unsqueeze(-1)))


def _gain(call: StepCall, x: torch.Tensor, gain: Operand, bits: int) -> torch.Tensor:
    """x times the gain modulo 2**bits; one message to its owner, unless it is public."""
    p = call.party
    if gain.is_public and gain.plain is not None:
        encoded = ring.encode(gain.plain, gain.edge.scale, gain.edge.name)
        return x * (encoded.to("meta") if p.tracing else encoded)
    kind = FixedProduct("mul", tuple(x.shape), tuple(x.shape), gain.edge.name, 0, (), bits)
    parts = p.take(kind)
    opened = p.open_words_to([(x if p.tracing else x - parts["A"], bits)], 0, "masked operand")
    if opened is None or p.tracing:
        return parts["c"]
    return call.encoded(gain).apply("mul", opened[0], {}, bits) + parts["c"]
