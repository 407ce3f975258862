"""Products, quotients, roots, powers, exponentials and logarithms of shared values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import protocols, ranges, ring, series
from ..kernels import StepCall, kernel, share_plain
from ..ranges import INVERSE_SCALE
from ..values import Operand, Share
from .common import Normalised, fixed_product, multiply, reciprocal, squared

Values = Sequence[Share | torch.Tensor | None]


def scaled_by(call: StepCall, x: Share, constant: torch.Tensor, scale: int) -> Values:
    """x times a public constant given as float: encoded with `scale` bits, which are cut again."""
    encoded = ring.encode(constant, scale, "constant")
    if call.party.tracing:
        encoded = encoded.to("meta")
    return [Share(protocols.truncate(call.party, x.tensor * encoded, scale), x.scale)]


def _plain(operand: Operand) -> torch.Tensor:
    return operand.plain if operand.plain is not None else torch.zeros(operand.edge.shape)


@kernel("mul.public")
def _mul_public(call: StepCall) -> Values:
    constant, other = (0, 1) if call.operands[0].is_public else (1, 0)
    x, c = call.share(other), call.operands[constant]
    if c.edge.scale == 0:
        factor = _plain(c).long()
        return [Share(x.tensor * factor, x.scale)]
    scale = ranges.constant_scale(call.scale, call.outputs[0])
    if x.scale == 0:  # an integer or a bit: the product already has the constant's own scale
        encoded = ring.encode(_plain(c), scale, "constant")
        product = x.tensor * encoded
        return [Share(protocols.truncate(call.party, product << call.scale, scale), call.scale)]
    return scaled_by(call, x, _plain(c), scale)


def _cut(call: StepCall, product: torch.Tensor, a: int, b: int) -> Values:
    """A product of scales a and b, back at the program's scale."""
    if a and b:
        return [Share(protocols.truncate(call.party, product, call.scale), call.scale)]
    return [Share(product, a + b)]


@kernel("mul.weight")
def _mul_weight(call: StepCall) -> Values:
    first = call.operands[0]
    weight_first = first.share is None and first.owner_rank == 0
    x = call.share(1 if weight_first else 0)
    weight = call.operands[0 if weight_first else 1]
    product = fixed_product(call, x.tensor, weight, "mul", call.outputs[0].shape)
    return _cut(call, product, x.scale, weight.edge.scale)


@kernel("mul.square")
def _mul_square(call: StepCall) -> Values:
    x = call.share(0)
    return _cut(call, squared(x.tensor), x.scale, x.scale)


@kernel("mul.beaver")
def _mul_beaver(call: StepCall) -> Values:
    a, b = call.share(0), call.share(1)
    return _cut(call, multiply(a.tensor, b.tensor), a.scale, b.scale)


@kernel("div.public")
def _div_public(call: StepCall) -> Values:
    scale = ranges.constant_scale(call.scale, call.outputs[0])
    x = Share(call.share(0).tensor << (call.scale - call.share(0).scale), call.scale)
    return scaled_by(call, x, 1.0 / _plain(call.operands[1]).double(), scale)


@kernel("div.private")
def _div_private(call: StepCall) -> Values:
    divisor = call.operands[1]
    inverse = None if divisor.plain is None else 1.0 / divisor.plain.double()
    scale = ranges.constant_scale(call.scale, call.outputs[0])
    factor = share_plain(call.party, Operand(divisor.edge, None, inverse, divisor.owner_rank), scale)
    x = call.share(0)
    product = multiply(x.tensor << (call.scale - x.scale), factor.tensor)
    return [Share(protocols.truncate(call.party, product, scale), call.scale)]


@kernel("div.shared")
def _div_shared(call: StepCall) -> Values:
    inverse = reciprocal(call, 1)
    x = call.share(0)
    return _cut(call, multiply(x.tensor, inverse.tensor), x.scale, inverse.scale)


@kernel("reciprocal.series")
def _reciprocal(call: StepCall) -> Values:
    return [reciprocal(call, 0)]


def _root(call: StepCall, f: series.Series, exponent: float) -> Values:
    """x**exponent for exponent 1/2 or -1/2: f(u), and the power of two by a table over the exponent of x."""
    x = call.share(0)
    lowest, highest = ranges.magnitude_range(call.scale, call.operands[0].edge)
    n = Normalised(call.party, x.tensor, lowest, highest)
    value = n.function(f, INVERSE_SCALE)
    powers = [round(2.0 ** ((j - x.scale) * exponent + 20)) for j in range(lowest, highest + 1)]
    product = multiply(value, n.weighted(powers))
    return [Share(protocols.truncate(call.party, product, INVERSE_SCALE + 20 - call.scale), call.scale)]


@kernel("sqrt.series")
def _sqrt(call: StepCall) -> Values:
    return _root(call, series.SQRT, 0.5)


@kernel("rsqrt.series")
def _rsqrt(call: StepCall) -> Values:
    return _root(call, series.INVERSE_SQRT, -0.5)


@kernel("log.series")
def _log(call: StepCall) -> Values:
    x, f = call.share(0), call.scale
    lowest, highest = ranges.magnitude_range(f, call.operands[0].edge)
    n = Normalised(call.party, x.tensor, lowest, highest)
    value = n.function(series.LOG, f)
    exponents = [round((j - x.scale) * math.log(2) * (1 << f)) for j in range(lowest, highest + 1)]
    return [Share(value + n.weighted(exponents), f)]


@kernel("exp.series")
def _exp(call: StepCall) -> Values:
    """exp(j) exp(x - j) for the integer part j, by a table over one-hot shares of j."""
    party, x = call.party, call.share(0)
    lowest, highest = ranges.exp_range(call.outputs[0])
    unit, power = ranges.exp_scales(highest)
    opened = protocols.open_masked(party, x.tensor, compare=True)
    exponents = range(lowest, highest + 1)
    reached = list(protocols.at_least(party, opened, [j << x.scale for j in exponents]))
    one_hot = [a - b for a, b in zip(reached, [*reached[1:], torch.zeros_like(x.tensor)], strict=True)]
    integer = sum(
        (bit * (j << x.scale) for bit, j in zip(one_hot, exponents, strict=True)), start=x.tensor * 0
    )
    table = sum(
        (bit * round(math.exp(j) * 2.0**power) for bit, j in zip(one_hot, exponents, strict=True)),
        start=x.tensor * 0,
    )
    rest = protocols.open_for_series(party, x.tensor - integer, x.scale, series.EXP_UNIT)
    value = protocols.truncate(
        party, protocols.evaluate(party, rest, series.EXP_UNIT), protocols.SERIES_BITS - unit
    )
    return [Share(protocols.truncate(party, multiply(value, table), unit + power - call.scale), call.scale)]


@kernel("pow.square")
def _pow(call: StepCall) -> Values:
    x, exponent = call.share(0), call.attr("exponent")
    party, f = call.party, call.scale
    power = protocols.truncate(party, squared(x.tensor), f)
    if exponent == 3:
        power = protocols.truncate(party, multiply(power, x.tensor), f)
    elif exponent == 4:
        power = protocols.truncate(party, squared(power), f)
    return [Share(power, f)]
