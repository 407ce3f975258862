"""How large values get in all slots, those included that hold no value: a coefficient beyond the modulus spoils every slot.

A fold leaves sums of parts of a row in other slots. They can be far greater than the row, where it is small because its
parts cancel out, and a polynomial makes them greater still. Here a few inputs are followed slot by slot.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .matrices import Array, follow
from .schedule import Made
from .stages import INPUTS, Stages

MOST_FOLLOWED = 16
MARGIN_BITS = 1
"""Other inputs than those that are followed may leave greater sums."""


def head_bits(stages: Stages, made: Made, inputs: torch.Tensor, scale_bits: int) -> float:
    """Bits that the first modulus must exceed the scale by. inputs: [s, n]; infinite where float64 is too small.

    No coefficient is greater than the mean of the slots, and at each level the modulus has scale_bits more.
    """
    picked = torch.linspace(0, len(inputs) - 1, min(len(inputs), MOST_FOLLOWED)).long()
    given = inputs[picked].numpy()
    held = {INPUTS: np.stack([made.schedule.inputs.pack(x) for x in given])}
    most = 0.0
    for stage, plan in zip(stages.stages, made.schedule.stages, strict=True):
        slots = plan.layout.pack(stage.bias.numpy()) + sum(
            follow(part.plan, made.products[stage.name, part.base], held[part.base]) for part in plan.parts
        )
        level = plan.level - 1
        most = max(most, _needed(slots, scale_bits * level))
        if most == math.inf:
            break
        if stage.kind != "output":
            slots, greatest = _polynomial(plan.coefficients, plan.depth, slots, scale_bits, level)
            most = max(most, greatest)
            if most == math.inf:
                break
        held[stage.name] = slots
    return most


def _needed(slots: Array, bits: int) -> float:
    """slots: [s, ciphertexts, slots]. bits: of the modulus beyond first modulus."""
    mean = float(np.abs(slots).mean(-1).max())
    if not math.isfinite(mean):
        return math.inf
    return (math.log2(mean) if mean else -math.inf) - bits + 1 + MARGIN_BITS


def _polynomial(
    coefficients: tuple[float, ...], depth: int, x: Array, scale_bits: int, level: int
) -> tuple[Array, float]:
    """Its values, and the bits that these, the sizes of its terms, and the powers that they are made of need."""
    with np.errstate(over="ignore", invalid="ignore"):
        most, power = 0.0, x
        for i in range(1, depth):
            power = power * power
            most = max(most, _needed(power, scale_bits * (level - i)))
        value, size = np.zeros_like(x), np.zeros_like(x)
        for c in reversed(coefficients):
            value, size = value * x + c, size * np.abs(x) + abs(c)
        return value, max(most, _needed(size, scale_bits * (level - depth)))
