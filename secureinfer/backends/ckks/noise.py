"""What to expect of a chain: inputs that make values large, and the error that rounding makes of the results."""

from __future__ import annotations

import math

import numpy as np
import torch

from .matrices import Array, Diagonals, MatrixPlan, rolled_sum
from .params import Parameters
from .schedule import Made
from .stages import Stage, Stages, run_stages

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


def in_range(stages: Stages, inputs: torch.Tensor) -> torch.Tensor:
    """[s]: whether every activation of an input is within the range of its polynomial. Beyond it a polynomial stands for
    nothing, and grows, and so does what noise makes of it."""
    _, before = run_stages(stages, inputs)
    far = [((before[s.name] - s.middle).abs() > s.reach * (1 + 1e-9)).any(1) for s in stages.stages]
    return ~torch.stack(far).any(0)


def noise_std(parameters: Parameters) -> float:
    """Of one rescaling, in a slot: sqrt(N (1 + 2N/3) / 12) over the scale, for a ternary secret."""
    n = parameters.degree
    return math.sqrt(n * (1 + 2 * n / 3) / 12) / parameters.scale


def rotation_variances(parameters: Parameters) -> Array:
    """[slots]: of one rotation. Each digit of a ciphertext, as great as its prime q, is multiplied by an error of deviation
    3.2 and divided by the special prime.

    SEAL's digits are 0 to q and not around 0: their mean, q / 2 in each coefficient, adds up in the slots whose root is near
    1, such as the first, to a hundred times what the rest makes.
    """
    n = parameters.degree
    shares = sum(4.0 ** (bits - parameters.special_bits) for bits in parameters.moduli[:-1])
    roots = np.array([pow(3, j, 2 * n) for j in range(parameters.slots)])
    digits = n / 12 + 0.25 / np.sin(np.pi * roots / (2 * n)) ** 2
    switched = 3.2**2 * n * shares * digits / 2 / parameters.scale**2  # the real part
    return noise_std(parameters) ** 2 + switched


def _matrix_variances(
    plan: MatrixPlan, products: Diagonals, rescaling: float, rotation: Array, *, early: bool
) -> Array:
    """[target ciphertexts, slots]: of what a matrix gives, after its rescaling and its fold."""
    summed = np.zeros_like(rotation)
    for count, step in plan.sums:
        summed = rolled_sum(summed, count, step) + (count - 1) * rotation
    found = np.zeros((plan.target.ciphertexts, len(rotation)))
    for (target, _, d), vector in products.items():
        giant, baby = plan.turns(d)
        operand = np.roll(summed, -d) + (np.roll(rotation, -giant) if baby else 0.0)
        found[target] += vector**2 * operand
    found += rescaling if early else 0.0
    for step in plan.fold_steps:
        found = found + np.roll(found, -step, axis=1) + (rotation if early else 0.0)
    return found if early else found + rescaling


class _Drawn:
    """Noise, drawn for every value. scale: by which all of it is greater than it is."""

    def __init__(self, parameters: Parameters, made: Made | None, *, early: bool, scale: float) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.rescaling = scale * noise_std(parameters)
        self.matrices: dict[str, torch.Tensor] = {}
        if made is None:
            return
        rotation = rotation_variances(parameters)
        for stage in made.schedule.stages:
            found = sum(
                _matrix_variances(
                    p.plan,
                    made.products[stage.stage, p.base],
                    noise_std(parameters) ** 2,
                    rotation,
                    early=early,
                )
                for p in stage.parts
            )
            rows = torch.from_numpy(np.asarray(found).reshape(-1)[stage.parts[0].plan.rows])
            self.matrices[stage.stage] = scale * rows.sqrt()

    def _more(self, x: torch.Tensor, std: float | torch.Tensor) -> torch.Tensor:
        return x + std * torch.randn(x.shape, generator=self.generator, dtype=torch.float64)

    def rescaled(self, x: torch.Tensor) -> torch.Tensor:
        return self._more(x, self.rescaling)

    def computed(self, x: torch.Tensor, stage: Stage) -> torch.Tensor:
        return self._more(x, self.matrices.get(stage.name, self.rescaling))


def predicted_error(
    stages: Stages, inputs: torch.Tensor, parameters: Parameters, made: Made | None, *, early: bool
) -> float:
    """Greatest error of the outputs with the noise of every rescaling and rotation added, over several draws.

    made: how one sample is spread over slots, or None. early: rescaling comes before a fold, which adds the noise of its
    blocks up.
    """
    # float64 could not tell less from none; the error grows in proportion
    small = min(1.0, noise_std(parameters) / LEAST_NOISE)
    noise = _Drawn(parameters, made, early=early, scale=1 / small)
    exact, _ = run_stages(stages, inputs)
    return small * max(float((run_stages(stages, inputs, noise)[0] - exact).abs().max()) for _ in range(4))
