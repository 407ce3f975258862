"""Cuts, comparisons, rectifiers and maxima, each from one opening in a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....plan.spec import StepContext
from .. import windows
from ..generic.choices import no_index, places_last, pooling_windows, reduced_last
from ..generic.common import align
from ..kernels import StepCall, kernel
from ..party import Party
from ..values import Share
from . import opening
from .catalog import clamp_range, difference_bits, maximum_bits
from .indices import argmax_bits, index_bits

Values = Sequence[Share | torch.Tensor | None]


def _context(call: StepCall) -> StepContext:
    edges = tuple(o.edge for o in call.operands)
    return StepContext(call.node, edges, call.outputs, call.party.size, call.options)


def _gates(call: StepCall, thresholds: int) -> opening.Opened:
    """The operand opened for its value without the cut bits, and for comparisons without the same bits."""
    x, edge, out = call.share(0), call.operands[0].edge, call.outputs[0]
    k, cut = windows.window(edge), edge.scale - out.scale
    kind = opening.Window(tuple(x.tensor.shape), k, cut, cut, k - 1, thresholds, gate=thresholds > 0)
    return opening.open_window(call.party, x.tensor, kind)


@kernel("rescale.window")
def _rescale(call: StepCall) -> Values:
    x, out = call.share(0), call.outputs[0]
    k, cut = windows.window(call.operands[0].edge), call.operands[0].edge.scale - out.scale
    shape = tuple(x.tensor.shape)
    if call.attr("exact") and cut:
        # To the nearest: rounded down, each layer would be half a unit low on average (field report 19).
        rounded = x.tensor + ((1 << (cut - 1)) if call.party.first else 0)
        opened = opening.open_window(call.party, rounded, opening.Window(shape, k, cut, 0, cut, 1))
        return [Share(opening.exactly_truncated(call.party, opened), out.scale)]
    opened = opening.open_window(call.party, x.tensor, opening.Window(shape, k, cut))
    return [Share(opening.truncated(call.party, opened), out.scale)]


@kernel("relu.window")
def _relu(call: StepCall) -> Values:
    (value,) = opening.compare(call.party, _gates(call, 1), [0]).values()
    return [Share(value, call.outputs[0].scale)]


@kernel("abs.window")
def _abs(call: StepCall) -> Values:
    """2 [x >= 0] x - x."""
    opened = _gates(call, 1)
    (value,) = opening.compare(call.party, opened, [0]).values()
    return [Share(2 * value - opening.truncated(call.party, opened), call.outputs[0].scale)]


@kernel("clamp.window")
def _clamp(call: StepCall) -> Values:
    """low + [x >= low] (x - low) - [x >= high] (x - high)."""
    lower, upper = clamp_range(_context(call))
    limits = [v for v in (lower, upper) if v is not None]
    opened = _gates(call, len(limits))
    if not limits:
        return [Share(opening.truncated(call.party, opened), call.outputs[0].scale)]
    reached = opening.compare(call.party, opened, limits)
    scale = call.outputs[0].scale
    units = [
        round(float(call.attr(name)) * (1 << scale))
        for name, limit in (("min", lower), ("max", upper))
        if limit is not None
    ]
    over = [
        value - bit * unit for value, bit, unit in zip(reached.values(), reached.bits(), units, strict=True)
    ]
    if lower is None:
        return [Share(opening.truncated(call.party, opened) - over[0], scale)]
    out = over[0] + (units[0] if call.party.first else 0)
    return [Share(out if upper is None else out - over[1], scale)]


def _compare(call: StepCall) -> Values:
    """On d = x - y: [d >= 0] or [d >= 1]; equality is the difference of the two."""
    party, op = call.party, call.node.op
    scale = max(call.share_scale(0), call.share_scale(1))
    d = align(call.share(0), scale) - align(call.share(1), scale)
    d = d.expand(call.outputs[0].shape).contiguous()
    k = difference_bits(_context(call))
    thresholds = [0, 1] if op in ("eq", "ne") else [0 if op in ("ge", "lt") else 1]
    kind = opening.Window(tuple(d.shape), k, None, 0, k - 1, len(thresholds))
    bits = opening.compare(party, opening.open_window(party, d, kind), thresholds).bits()
    bit = bits[0] - bits[1] if len(thresholds) == 2 else bits[0]
    one = 1 if party.first else 0
    return [Share(bit if op in ("ge", "gt", "eq") else one - bit, 0)]


for _op in ("lt", "le", "gt", "ge", "eq", "ne"):
    kernel(f"compare.window.{_op}")(_compare)


@kernel("sign.window")
def _sign(call: StepCall) -> Values:
    """[x >= 1 unit] + [x >= 0] - 1."""
    x, k, scale = call.share(0).tensor, windows.window(call.operands[0].edge), call.outputs[0].scale
    kind = opening.Window(tuple(x.shape), k, None, 0, k - 1, 2)
    over, reached = opening.compare(call.party, opening.open_window(call.party, x, kind), [1, 0]).bits()
    return [Share((over + reached - (1 if call.party.first else 0)) << scale, scale)]


def maximum(party: Party, x: torch.Tensor, bits: int) -> torch.Tensor:
    """The greatest value along the last dimension, exact. bits: window of the difference of any two values.

    A tournament: right + [left >= right] (left - right), the product from the comparison's own opening.
    """
    while x.shape[-1] > 1:
        pairs = x.shape[-1] // 2
        left, right, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
        difference = (left - right).contiguous()
        kind = opening.Window(tuple(difference.shape), bits, 0, 0, bits - 1, 1, gate=True)
        (gained,) = opening.compare(party, opening.open_window(party, difference, kind), [0]).values()
        x = torch.cat([right + gained, rest], dim=-1)
    return x.squeeze(-1)


@kernel("amax.window")
def _amax(call: StepCall) -> Values:
    x = call.share(0)
    if x.tensor.numel() == 0:
        return [Share(x.tensor.reshape(call.outputs[0].shape), x.scale)]
    greatest = maximum(call.party, reduced_last(call, x.tensor), maximum_bits(call.operands[0].edge))
    return [Share(greatest.reshape(call.outputs[0].shape), x.scale)]


@kernel("argmax.window")
def _argmax(call: StepCall) -> Values:
    party, edge, dim = call.party, call.operands[0].edge, call.attr("dim")
    x, bits, low = places_last(call, call.share(0).tensor), argmax_bits(edge, dim), index_bits(edge, dim)
    if not x.numel() or x.shape[-1] == 1:
        return no_index(call, x)
    index = _lowest_bits_of_greatest(party, x, bits, low) if low else _all_pairs(party, x, bits)
    return [Share(index.reshape(call.outputs[0].shape), 0)]


def _all_pairs(party: Party, x: torch.Tensor, bits: int) -> torch.Tensor:
    """Every two values are compared at once; the greatest is the one that none beats. Of equal ones the left wins."""
    n, one = x.shape[-1], 1 if party.first else 0
    left, right = torch.triu_indices(n, n, 1, device=x.device)
    difference = (x[..., left] - x[..., right]).contiguous()
    kind = opening.Window(tuple(difference.shape), bits, None, 0, bits - 1, 1)
    (wins,) = opening.compare(party, opening.open_window(party, difference, kind), [0]).bits()
    if n == 2:
        second: torch.Tensor = one - wins.squeeze(-1)
        return second
    won = torch.zeros_like(x).index_add_(-1, left, wins).index_add_(-1, right, one - wins)
    kind = opening.Window(tuple(x.shape), 8, None, 0, 7, 1)
    (first,) = opening.compare(party, opening.open_window(party, won, kind), [n - 1]).bits()
    index: torch.Tensor = (first * torch.arange(n, device=x.device)).sum(-1)
    return index


def _lowest_bits_of_greatest(party: Party, x: torch.Tensor, bits: int, low: int) -> torch.Tensor:
    """Each value's low bits are n - 1 less its index, so that no two are equal; those of the maximum are cut exactly."""
    n = x.shape[-1]
    indices = torch.arange(n, device=x.device).flip(0) * (1 if party.first else 0)
    greatest = maximum(party, (x << low) + indices, bits)
    kind = opening.Window(tuple(greatest.shape), bits, low, 0, low, 1)
    above = opening.exactly_truncated(party, opening.open_window(party, greatest, kind))
    index = (above << low) - greatest
    return index + (n - 1) if party.first else index


@kernel("max_pool2d.window")
def _max_pool(call: StepCall) -> Values:
    x, edge = call.share(0), call.operands[0].edge
    bits = maximum_bits(edge)
    # Below every value, and its distance from each fits the window.
    lowest = -(1 << 60) if edge.bound is None else -int(edge.bound * 2**edge.scale) - 1
    return [Share(maximum(call.party, pooling_windows(call, x.tensor, lowest), bits), x.scale)]
