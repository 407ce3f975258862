"""What a benchmark asks of a model: how it is built for a batch, which inputs it is timed on, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..compression.approximate import Approximate
from ..errors import UsageError

Score = Callable[[Sequence[Tensor], Sequence[int], Sequence[Tensor]], float]
"""(outputs of some runs, the held_out index of each run, the float model's outputs of the same) -> 0 to 1."""

Batches = tuple[tuple[Tensor, ...], ...]

AGREEMENT = "top-1 agreement with the float model"
CLOSE_PART = 0.01
CLOSE = "outputs within 1 % of the float model's greatest"
"""Of models whose outputs are no classes."""


@dataclass(frozen=True)
class Built:
    """A model in evaluation mode, float32, without gradients, and inputs for one batch size.

    examples: public inputs of the batch's shape, for compiling and for baselines that trace. calibration: more of them.
    held_out: batches that neither training nor calibration has seen; timed runs go through them in turn. tokens: of one
    inference, all samples; None where samples have none. metric: what score counts. approximate: how activations become
    polynomials, where a compression asks for that.
    """

    module: nn.Module
    examples: tuple[Tensor, ...]
    calibration: Batches
    held_out: Batches
    tokens: int | None
    metric: str
    score: Score
    approximate: Approximate = field(default_factory=Approximate)

    @property
    def batch(self) -> int:
        """Samples of one inference."""
        return int(self.examples[0].shape[0])


@dataclass(frozen=True)
class Subject:
    """A model that can be measured. weights: pretrained, trained (here, in seconds) or random.

    input: of one sample, in words. batches: sizes that a sweep takes where it names none. make: (batch, state) -> Built.
    """

    name: str
    title: str
    weights: str
    input: str
    make: Callable[[int, Path | None], Built] = field(repr=False)
    batches: tuple[int, ...] = (1,)

    def build(self, batch: int, state: Path | None = None) -> Built:
        """The model and inputs for batches of that many samples; the same inputs in every process.

        state: file that `save_state` wrote of this subject's float module; nothing is trained then.
        Raises UsageError for a batch that cannot be, or where a package is missing.
        """
        if batch < 1:
            raise UsageError(f"a batch is 1 sample or more, got {batch}")
        return self.make(batch, state)


def save_state(module: nn.Module, path: Path) -> None:
    """Write a float module's parameters and buffers, those that share memory once, as safetensors."""
    from safetensors.torch import save_model

    save_model(module, str(path))


def finished(module: nn.Module, state: Path | None) -> nn.Module:
    """Ready to be measured, with the weights of a file where one is given. Raises UsageError where they do not fit."""
    if state is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_model

        try:
            load_model(module, str(state))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UsageError(f"{state} is not the state of this model: {error}") from None
    return module.float().eval().requires_grad_(False)


def settled(head: nn.Module, outputs: Tensor) -> None:
    """Change the last linear layer so that each of its outputs has mean 0 and deviation 1 over these, (samples, classes).

    A random network decides for one class nearly always, by a wide margin; agreement with it would say nothing.
    """
    weight, bias = head.get_parameter("weight"), head.get_parameter("bias")
    mean, std = outputs.mean(0), outputs.std(0).clamp(min=1e-6)
    with torch.no_grad():
        weight.div_(std[:, None])
        bias.sub_(mean).div_(std)


@contextmanager
def repeatable(threads: int | None = None) -> Iterator[None]:
    """Torch's seed 0, and so many threads (in small layers more would wait for each other); both come back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(before)


def turns(count: int, batch: int, *tensors: Tensor) -> Batches:
    """`count` batches of rows in turn, beginning again where the rows end. tensors: of one length."""
    rows = torch.arange(count * batch).remainder(len(tensors[0])).reshape(count, batch)
    return tuple(tuple(t[i] for t in tensors) for i in rows)


def turns_to_use(samples: int, batch: int, most: int = 256) -> int:
    """How many batches hold each sample about once: few enough for all of them to be run in plaintext too."""
    return max(2, min(most, -(-samples // batch)))


# Scores.


def decisions(output: Tensor) -> Tensor:
    """The greatest class of each row; -1, which is no class, where a row is not finite."""
    rows = output.detach().float().cpu().flatten(1)
    return torch.where(rows.isfinite().all(1), rows.argmax(1), torch.full((len(rows),), -1))


def top1(labels: Sequence[Tensor]) -> Score:
    """The part that is decided as labelled. labels: of each held-out batch."""

    def score(outputs: Sequence[Tensor], indices: Sequence[int], floats: Sequence[Tensor]) -> float:
        return _mean([decisions(o) == labels[i] for o, i in zip(outputs, indices, strict=True)])

    return score


def balanced(labels: Sequence[Tensor]) -> Score:
    """Mean over the classes of the part of each that is found: a rare class counts as much as a common one.

    It does not depend on how often each class occurs in the held-out batches.
    """

    def score(outputs: Sequence[Tensor], indices: Sequence[int], floats: Sequence[Tensor]) -> float:
        found = torch.cat([decisions(o) for o in outputs])
        right = torch.cat([labels[i] for i in indices])
        if len(found) != len(right):
            raise UsageError(f"{len(found)} answers to {len(right)} samples; give outputs of whole batches")
        classes = sorted(set(right.tolist()))
        return sum(_mean([found[right == c] == c]) for c in classes) / len(classes)

    return score


def agreement(outputs: Sequence[Tensor], indices: Sequence[int], floats: Sequence[Tensor]) -> float:
    """The part that is decided as the float model decides."""
    return _mean([decisions(a) == decisions(b) for a, b in zip(outputs, floats, strict=True)])


def close(outputs: Sequence[Tensor], indices: Sequence[int], floats: Sequence[Tensor]) -> float:
    """The part of all output values that lies within CLOSE_PART of the float model's greatest."""
    greatest = max(float(f.detach().abs().max()) for f in floats)
    return _mean(
        [
            ((a.detach().float() - b.detach().float()).abs() <= CLOSE_PART * greatest).flatten()
            for a, b in zip(outputs, floats, strict=True)
        ]
    )


def _mean(right: Sequence[Tensor]) -> float:
    return float(torch.cat([r.flatten() for r in right]).double().mean())
