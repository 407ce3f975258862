"""Comparisons, logic, selection, maxima: everything that turns on a bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ....graph.ops import OPS
from .. import protocols, ranges
from ..kernels import StepCall, kernel
from ..values import Share
from .arithmetic import scaled_by
from .common import align, greatest_index, maximum, multiply
from .local import Values

_LOWEST = -(1 << 60)
"""What a padded place of a pooling window holds: below every value."""


def _difference(call: StepCall) -> torch.Tensor:
    scale = max(call.share_scale(0), call.share_scale(1))
    left, right = align(call.share(0), scale), align(call.share(1), scale)
    return (left - right).expand(call.outputs[0].shape).contiguous()


def _one(call: StepCall) -> int:
    return 1 if call.party.first else 0


def _at_least(call: StepCall, x: torch.Tensor, thresholds: Sequence[int]) -> torch.Tensor:
    opened = protocols.open_masked(call.party, x, compare=True)
    return protocols.at_least(call.party, opened, thresholds)


def _compare(call: StepCall) -> Values:
    """On d = x - y: [d >= 0] or [d >= 1]; equality is the difference of the two."""
    op, d = call.node.op, _difference(call)
    if op in ("eq", "ne"):
        bits = _at_least(call, d, [0, 1])
        equal = bits[0] - bits[1]
        return [Share(equal if op == "eq" else _one(call) - equal, 0)]
    (bit,) = _at_least(call, d, [0 if op in ("ge", "lt") else 1])
    return [Share(bit if op in ("ge", "gt") else _one(call) - bit, 0)]


for _op in ("lt", "le", "gt", "ge", "eq", "ne"):
    kernel(f"compare.{_op}")(_compare)


@kernel("compare.any")
def _any(call: StepCall) -> Values:
    total = OPS["sum"](call.node.attrs, [call.share(0).tensor])
    (bit,) = _at_least(call, total, [1])
    return [Share(bit, 0)]


@kernel("logic.not")
def _not(call: StepCall) -> Values:
    return [Share(_one(call) - call.share(0).tensor, 0)]


def _logic(call: StepCall) -> Values:
    """a b, or a + b - a b, on shared bits; a public bit costs nothing."""
    public = next((i for i, o in enumerate(call.operands) if o.is_public), None)
    a, b = call.share(0).tensor, call.share(1).tensor
    if public is not None:
        plain = call.operands[public].plain
        known = torch.zeros(call.operands[public].edge.shape) if plain is None else plain
        both = (b if public == 0 else a) * known.long()
    else:
        both = multiply(a, b)
    return [Share(both if call.node.op == "logical_and" else a + b - both, 0)]


kernel("logic.and")(_logic)
kernel("logic.or")(_logic)


@kernel("select.where")
def _where(call: StepCall) -> Values:
    condition = call.operands[0]
    scale = max(call.share_scale(1), call.share_scale(2), call.outputs[0].scale)
    shape = call.outputs[0].shape
    a = align(call.share(1), scale).expand(shape)
    b = align(call.share(2), scale).expand(shape)
    if condition.is_public:
        if call.party.tracing or condition.plain is None:
            return [Share(torch.empty_like(a + b), scale)]
        return [Share(torch.where(condition.plain.bool(), a, b), scale)]
    return [Share(b + multiply(call.share(0).tensor, (a - b).contiguous()), scale)]


@kernel("relu.compare")
def _relu(call: StepCall) -> Values:
    x = call.share(0)
    (positive,) = _at_least(call, x.tensor, [0])
    return [Share(multiply(positive, x.tensor), x.scale)]


@kernel("abs.compare")
def _abs(call: StepCall) -> Values:
    x = call.share(0)
    (positive,) = _at_least(call, x.tensor, [0])
    return [Share(multiply(2 * positive - _one(call), x.tensor), x.scale)]


@kernel("clamp.compare")
def _clamp(call: StepCall) -> Values:
    """x + [x < low] (low - x) + [x >= high] (high - x), from one opening."""
    x = call.share(0)
    low, high = ranges.clamp_limits(call.node.attrs, x.scale)
    limits = [v for v in (low, high) if v is not None]
    if not limits:
        return [x]
    bits = list(_at_least(call, x.tensor, limits))
    if low is not None:
        bits[0] = _one(call) - bits[0]
    distances = torch.stack([limit * _one(call) - x.tensor for limit in limits])
    moves = multiply(torch.stack(bits), distances)
    if low is not None and high is not None and low > high:  # torch.clamp: the upper limit wins
        return [Share(torch.zeros_like(x.tensor) + high * _one(call), x.scale)]
    return [Share(x.tensor + moves.sum(0), x.scale)]


@kernel("amax.tournament")
def _amax(call: StepCall) -> Values:
    x = call.share(0)
    if x.tensor.numel() == 0:
        return [Share(x.tensor.reshape(call.outputs[0].shape), x.scale)]
    greatest = maximum(call.party, reduced_last(call, x.tensor))
    return [Share(greatest.reshape(call.outputs[0].shape), x.scale)]


def reduced_last(call: StepCall, x: torch.Tensor) -> torch.Tensor:
    """The dimensions that an amax reduces, as one, in the last place. x: not empty."""
    dims = [d % x.dim() for d in call.attr("dims")] or list(range(x.dim()))
    rest = [d for d in range(x.dim()) if d not in dims]
    return x.permute(*rest, *dims).reshape(*(x.shape[d] for d in rest), -1).contiguous()


@kernel("sign.compare")
def _sign(call: StepCall) -> Values:
    """[x >= 1 unit] + [x >= 0] - 1."""
    over, reached = _at_least(call, call.share(0).tensor, [1, 0])
    return [Share((over + reached - _one(call)) << call.outputs[0].scale, call.outputs[0].scale)]


def places_last(call: StepCall, x: torch.Tensor) -> torch.Tensor:
    """The values that an argmax chooses from, in the last dimension."""
    return x.movedim(call.attr("dim"), -1).contiguous() if x.dim() else x.reshape(1)


def no_index(call: StepCall, x: torch.Tensor) -> Values:
    """Where there is nothing to choose, the index is 0."""
    return [Share(torch.zeros(call.outputs[0].shape, dtype=torch.int64, device=x.device), 0)]


@kernel("argmax.tournament")
def _argmax(call: StepCall) -> Values:
    rows = places_last(call, call.share(0).tensor)
    if not rows.numel():
        return no_index(call, rows)
    return [Share(greatest_index(call.party, rows).reshape(call.outputs[0].shape), 0)]


def pooling_windows(call: StepCall, x: torch.Tensor, pad_value: int) -> torch.Tensor:
    """Pooling windows of [N, C, H, W] as [N, C, oh, ow, kh * kw]; what lies outside holds pad_value (first party)."""
    (kh, kw), (sh, sw) = call.attr("kernel_size"), call.attr("stride")
    (ph, pw), (dh, dw) = call.attr("padding"), call.node.attrs.get("dilation", [1, 1])
    oh, ow = call.outputs[0].shape[-2:]
    height, width = x.shape[-2:]
    # ceil_mode may ask for windows that start inside but end beyond the padding.
    below = max(0, (oh - 1) * sh + (kh - 1) * dh + 1 - height - ph)
    right = max(0, (ow - 1) * sw + (kw - 1) * dw + 1 - width - pw)
    value = pad_value if call.party.first else 0
    padded = torch.nn.functional.pad(x, (pw, right, ph, below), value=value)
    rows = (torch.arange(oh) * sh)[:, None] + (torch.arange(kh) * dh)[None, :]
    cols = (torch.arange(ow) * sw)[:, None] + (torch.arange(kw) * dw)[None, :]
    rows, cols = rows.to(padded.device), cols.to(padded.device)
    return padded[:, :, rows[:, None, :, None], cols[None, :, None, :]].reshape(*x.shape[:2], oh, ow, kh * kw)


@kernel("max_pool2d.tournament")
def _max_pool(call: StepCall) -> Values:
    x = call.share(0)
    return [Share(maximum(call.party, pooling_windows(call, x.tensor, _LOWEST)), x.scale)]


@kernel("avg_pool2d.public")
def _avg_pool(call: StepCall) -> Values:
    """Sums of the windows, times one over what each window counts."""
    x = call.share(0)
    total = Share(pooling_windows(call, x.tensor, 0).sum(-1), x.scale)
    counted = _counts(call, call.operands[0].edge.shape[-2:])
    return scaled_by(call, total, 1.0 / counted, ranges.constant_scale(call.scale, call.outputs[0]))


def _counts(call: StepCall, size: tuple[int, ...]) -> torch.Tensor:
    """What torch divides each window's sum by, [1, 1, oh, ow]."""
    probe = torch.ones(1, 1, *size, dtype=torch.float64)
    average = OPS["avg_pool2d"](call.node.attrs, [probe])
    inside = OPS["avg_pool2d"]({**call.node.attrs, "divisor_override": 1}, [probe])
    return inside / average


@kernel("mean.public")
def _mean(call: StepCall) -> Values:
    x = call.share(0)
    total = OPS["sum"](call.node.attrs, [x.tensor])
    count = math.prod(x.shape) / max(1, math.prod(call.outputs[0].shape))
    factor = torch.tensor(1.0 / count if count else 0.0, dtype=torch.float64)
    scale = ranges.constant_scale(call.scale, call.outputs[0])
    return scaled_by(call, Share(total, x.scale), factor, scale)
