"""What to expect of a chain: inputs that make values large, and the error that rounding makes of the results."""

from __future__ import annotations

import math

import torch

from .affine import Stage, Stages, run_stages
from .params import Parameters
from .schedule import Schedule

HARD_STEPS = 30
LEAST_NOISE = 2.0**-32
PRIVACY, PRIVACY_MARGIN = 40, 3
"""log2 of circuit privacy's noise over the worst-case noise (rule K3), and of that over the greatest that was predicted."""
ENCODING = 2.0**-51
"""Of a weight of 1, what encoding in float64 leaves in slots that were to hold zero: it is as much the model owner's secret
as noise is, and greater than the noise of a long modulus."""

Box = tuple[torch.Tensor, torch.Tensor]
"""Least and greatest value of each input."""


def hard_inputs(stages: Stages, samples: torch.Tensor, box: Box) -> torch.Tensor:
    """Inputs within the accepted range that make values large: calibration's, corners, and what gradient ascent on each
    output and each activation finds."""
    generator = torch.Generator().manual_seed(0)
    low, high = box
    pick = torch.randint(0, 2, (16, low.shape[0]), generator=generator).bool()
    corners = torch.cat([low[None], high[None], torch.where(pick, low, high)])
    starts = torch.cat([samples[:16], corners[:6]])
    found = [samples[:64], corners]
    for stage in stages.stages:
        x = starts.clone()
        for i in range(HARD_STEPS):
            x = x.detach().requires_grad_(True)
            with torch.enable_grad():
                _, before = run_stages(stages, x)
                value = before[stage.name].abs().amax(1).sum()
                (gradient,) = torch.autograd.grad(value, x, allow_unused=True)
            if gradient is None:
                break
            step = (high - low) * (0.25 if i < HARD_STEPS // 2 else 1.0)
            x = torch.maximum(torch.minimum(x.detach() + step * gradient.sign(), high), low)
        found.append(x.detach())
    return torch.cat(found)


def noise_std(parameters: Parameters) -> float:
    """Of one rescaling, in a slot: sqrt(N (1 + 2N/3) / 12) over the scale, for a ternary secret."""
    n = parameters.degree
    return math.sqrt(n * (1 + 2 * n / 3) / 12) / parameters.scale


def predicted_error(
    stages: Stages, inputs: torch.Tensor, parameters: Parameters, schedule: Schedule | None, *, early: bool
) -> float:
    """Greatest error of the outputs with the noise of every rescaling added, over several draws.

    early: rescaling comes before a fold, which then adds the noise of its blocks up.
    """
    generator = torch.Generator().manual_seed(1)
    folds = (
        {s.stage: max(p.plan.blocks for p in s.parts) for s in schedule.stages} if schedule and early else {}
    )
    std = noise_std(parameters)
    small = min(
        1.0, std / LEAST_NOISE
    )  # float64 could not tell less from none; the error grows in proportion
    std /= small

    def noise(stage: Stage, value: torch.Tensor) -> torch.Tensor:
        return (
            torch.randn(value.shape, generator=generator, dtype=torch.float64)
            * std
            * math.sqrt(folds.get(stage.name, 1))
        )

    exact, _ = run_stages(stages, inputs)
    return small * max(float((run_stages(stages, inputs, noise)[0] - exact).abs().max()) for _ in range(4))
