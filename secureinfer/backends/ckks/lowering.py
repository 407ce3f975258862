"""A model's graph → the graph that CKKS runs: parameters and layouts are found, not asked for.

Degrees of polynomials that stand for activations are tried from the greatest, and for each the CKKS degrees from the
smallest. The first chain is taken that holds, within 128 bits of security, the levels and the values of the hardest inputs
that are found, and whose noise stays below the error on those of them that leave no activation's range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import SettingsError, UnsupportedModelError, UnsupportedNode
from ...graph.ir import Graph
from ...graph.ranges import power_of_two, quarter_octave
from .affine import to_stages
from .catalog import key_bytes
from .found import Found, Source
from .headroom import head_bits
from .limits import MOST_CIPHERTEXTS, MOST_KEY_BYTES, MOST_MATRICES, MOST_ROTATIONS, MOST_SLOTS, MOST_SPREAD
from .noise import ENCODING, PRIVACY, PRIVACY_MARGIN, Box, hard_inputs, in_range, predicted_error
from .params import LEAST_SCALE, MOST_BITS, MOST_PRIME, Parameters, check, fitted
from .schedule import Made, Schedule, batch_estimate_ms, estimate_ms, levels_of, make_schedule
from .stages import INPUTS, Stages, run_stages
from .writing import write

ERROR = 1e-3
"""What the greatest error against the approximated model is planned for."""
FIT_ERROR = 1e-2
DEGREES = (7, 3, 2)
"""Greatest degrees of activations that are tried, until the levels fit."""
LEAST_DEFAULT_SCALE = 26
GREATEST_SCALE = {1: 40, 2: 80}
LEAST_VALUE = 2.0**-10


def lower(
    source: Source, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Graph, weights, constants and options of the program. settings: an expert's, see api.compile.

    Raises UnsupportedModelError with what CKKS cannot compute, or, where the model is too deep or too wide, with what
    would fit.
    """
    names = source.graph.inputs
    flat = {n: source.samples[n].reshape(len(source.samples[n]), -1).double() for n in names}
    bounds = {n: power_of_two(max(float(flat[n].abs().max()), LEAST_VALUE)) for n in names}
    signed = {n: bool((flat[n] < 0).any()) for n in names}
    high = torch.cat([torch.full((flat[n].shape[1],), bounds[n], dtype=torch.float64) for n in names])
    low = torch.cat(
        [torch.full((flat[n].shape[1],), -bounds[n] * signed[n], dtype=torch.float64) for n in names]
    )
    privacy = bool(options.get("circuit_privacy", 0))
    found = _Search(source, torch.cat([flat[n] for n in names], 1), (low, high), privacy, settings).run()
    graph, weights, constants = write(source, found, bounds, signed)
    return graph, weights, constants, {**options, **_options(source, found)}


def _options(source: Source, found: Found) -> dict[str, Any]:
    """The public settings that both parties and the plan's formulas need."""
    batch = source.batch if source.independent else 1
    if found.schedule is not None:
        layout, returned = "slots", batch * found.schedule.outputs.ciphertexts
        keys = len(found.schedule.steps())
    else:
        groups = math.ceil(batch / found.parameters.slots)
        layout, returned, keys = "batch", groups * found.stages.stages[-1].rows, 0
    return {
        **found.parameters.to_options(), "layout": layout, "returned": returned, "galois_keys": keys,
        "noise": found.predicted_error, "late_rescaling": found.late,
    }  # fmt: skip


def _rounded(error: float) -> float:
    """Up, to a quarter of an octave: the program's public part states it, and with all its digits it would let anybody test
    guesses of the weights."""
    return quarter_octave(error) if 0 < error < math.inf else error


class _Search:
    def __init__(
        self, source: Source, samples: torch.Tensor, box: Box, privacy: bool, settings: Mapping[str, Any]
    ) -> None:
        self.source, self.samples, self.box = source, samples, box
        self.private = privacy
        self.split = 2 if privacy else 1
        self.flooding = 2.0 ** (PRIVACY + PRIVACY_MARGIN) if privacy else 1.0
        self.settings = settings
        self.target = float(settings.get("error", ERROR))

    def run(self) -> Found:
        """The first chain and layout that do. Raises UnsupportedModelError that tells of every degree why it does not."""
        reasons: dict[int, str] = {}  # by degree, of the lowest activations that were tried
        where = ("model", "levels", "")
        for stages in self._stages():
            hard = hard_inputs(stages, self.samples, self.box)
            for degree in [int(self.settings["degree"])] if "degree" in self.settings else MOST_BITS:
                try:
                    found = self._at(stages, hard, degree)
                except UnsupportedModelError as error:
                    node = error.nodes[0]
                    where, found = (node.node, node.operator, node.path), node.reason
                if isinstance(found, Found):
                    return found
                reasons[degree] = found
        told = "; ".join(f"degree {degree}: {reason}" for degree, reason in reasons.items())
        raise UnsupportedModelError([UnsupportedNode(*where, told)])

    def _stages(self) -> Iterator[Stages]:
        """With activations of ever lower degree."""
        asked = self.settings.get("greatest_degree")
        seen = set()
        for greatest in DEGREES if asked is None else (int(asked),):
            fit_error = float(self.settings.get("fit_error", FIT_ERROR))
            stages = to_stages(
                self.source.graph,
                self.source.tensors,
                self.samples,
                error=fit_error,
                greatest_degree=greatest,
            )
            levels, _ = levels_of(stages)
            if levels not in seen:
                seen.add(levels)
                yield stages

    def _at(self, stages: Stages, hard: torch.Tensor, degree: int) -> Found | str:
        """Parameters and layout of a degree, or why there are none."""
        levels, _ = levels_of(stages)
        outputs, _ = run_stages(stages, hard)
        greatest = max(float(outputs.abs().max()), LEAST_VALUE)
        head = max(3, 2 + math.ceil(math.log2(greatest))) if math.isfinite(greatest) else 60
        parameters = self._parameters(degree, levels, head)
        if parameters is None:
            return self._too_deep(degree, levels, head, f"results up to {greatest:.3g}")
        schedule = self._schedule(stages, parameters)
        made = None if schedule is None else Made.of(stages, schedule)
        if made is not None:
            needed = head_bits(stages, made, hard, parameters.scale_bits)
            if needed > head:
                head = math.ceil(needed) if needed < MOST_PRIME else MOST_PRIME
                parameters = self._parameters(degree, levels, head)
            if parameters is None:
                sums = f"sums of parts of results, of {needed:.0f} bits where their parts cancel out,"
                return self._too_deep(degree, levels, head, sums)
        if (reason := self._too_much(stages, parameters, schedule)) is not None:
            return reason
        if not self.private:  # whose noise hides that of every input
            hard = torch.cat([self.samples[:64], hard[in_range(stages, hard)]])
        early = predicted_error(stages, hard, parameters, made, early=True)
        late = early * self.flooding > self.target
        error = predicted_error(stages, hard, parameters, made, early=False) if late else early
        told = _rounded(error)
        if not (told if self.private else error) * self.flooding <= self.target:
            return (
                f"its noise would make an error of {error * self.flooding:.1e}, above {self.target:g} (scale of "
                f"{parameters.scale_bits} bits); a smaller range of inputs, or of activations, makes less"
            )
        if self.private:  # as much of the error as there is, to hide what float64 does not
            hidden = min(ENCODING * max(1.0, greatest), self.target / 2.0 ** (PRIVACY + 1))
            told = max(told, _rounded(hidden / 2.0**PRIVACY_MARGIN))
        return Found(stages, parameters, schedule, told, late)

    def _too_deep(self, degree: int, levels: int, head: int, values: str) -> str:
        each = LEAST_DEFAULT_SCALE * self.split
        fit = (MOST_BITS[degree] - (2 * (each + head))) // each
        return (
            f"{levels} levels, {values} and 128 bits of security need a longer modulus than the {MOST_BITS[degree]} bits "
            f"that it allows; about {max(0, fit)} levels fit. Take fewer layers, activations of a lower degree "
            "(si.Approximate, or squares), or backend='mpc'"
        )

    def _too_much(self, stages: Stages, parameters: Parameters, schedule: Schedule | None) -> str | None:
        """Why no party would run it: see limits.py."""
        if sum(len(s.parts) for s in stages.stages) > MOST_MATRICES:
            return f"it has more than {MOST_MATRICES} matrices"
        if schedule is None:
            wide = max(stages.sizes[INPUTS], stages.stages[-1].rows)
            return (
                f"{wide} values with a ciphertext each; {MOST_SPREAD} are possible"
                if wide > MOST_SPREAD
                else None
            )
        keys = len(schedule.steps())
        size = key_bytes(parameters, keys, public=True)
        if keys > MOST_ROTATIONS or size > MOST_KEY_BYTES:
            return (
                f"it takes {keys} rotations, and {size / 1e9:.3g} GB of keys for them; {MOST_ROTATIONS} and "
                f"{MOST_KEY_BYTES / 1e9:.3g} GB are possible. Take fewer or narrower layers"
            )
        targets = [p.plan.target.ciphertexts for s in schedule.stages for p in s.parts]
        if (
            max(schedule.inputs.ciphertexts, *targets) > MOST_CIPHERTEXTS
            or sum(targets) * parameters.slots > MOST_SLOTS
        ):
            return f"its values take more ciphertexts than are possible ({MOST_CIPHERTEXTS} a layer)"
        return None

    def _parameters(self, degree: int, levels: int, head: int) -> Parameters | None:
        """An expert's, or the greatest scale that fits: it costs no time."""
        names = {f.name for f in dataclasses.fields(Parameters)} - {"degree", "levels"}
        given = {n: int(self.settings[n]) for n in names if n in self.settings}
        if given or "levels" in self.settings:
            missing = {"degree", "first_bits", "scale_bits", "special_bits"} - self.settings.keys()
            if missing:
                raise SettingsError(f"CKKS parameters by hand also need {', '.join(sorted(missing))}")
            given = {"split": self.split, **given}
            chosen = check(
                Parameters(degree=degree, levels=int(self.settings.get("levels", levels)), **given)
            )
            if chosen.levels != levels:
                raise SettingsError(f"this model takes {levels} levels, and levels is {chosen.levels}")
            if chosen.first_bits - chosen.scale_bits < head:
                raise SettingsError(
                    f"CKKS first_bits must exceed scale_bits by {head}: results reach 2^{head - 2}, and would come out wrong"
                )
            return chosen
        least = max(LEAST_DEFAULT_SCALE, LEAST_SCALE) * self.split
        for scale in range(GREATEST_SCALE[self.split], least - 1, -1):
            found = fitted(degree, levels=levels, scale_bits=scale, head_bits=head, split=self.split)
            if found is not None:
                return found
        return None

    def _schedule(self, stages: Stages, parameters: Parameters) -> Schedule | None:
        """A sample over the slots, or None where a slot a sample is estimated faster, or asked for."""
        source, wanted = self.source, self.settings.get("layout")
        spread = stages.sizes[INPUTS] <= MOST_SPREAD and (source.independent and source.batch > 1)
        if wanted == "batch":
            if not source.independent:
                raise SettingsError(
                    "CKKS layout 'batch' has a slot for each sample; this model does not treat the samples of a batch apart"
                )
            return None
        try:
            schedule = make_schedule(stages, parameters.degree, self.split, private=self.private)
        except UnsupportedModelError:
            if not spread or wanted == "slots":
                raise
            return None
        together = batch_estimate_ms(stages, parameters.degree, self.split) * math.ceil(
            source.batch / parameters.slots
        )
        apart = source.batch * estimate_ms(schedule, parameters.degree, self.split)
        return None if spread and wanted is None and together < apart else schedule
