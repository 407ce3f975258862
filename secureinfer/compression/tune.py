"""Weights tuned to the polynomials that stand in for activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CompileError, SettingsError
from ..graph.export import as_call
from .activations import PolynomialActivation, operand_of
from .transform import evaluating

_EDGE, _PENALTY = 0.9, 1.0
"""Tuning keeps values within this part of their range: beyond the range a polynomial grows as its highest power."""


@dataclass(frozen=True)
class FineTune:
    """Tune the weights to the polynomials, with Adam, in evaluation mode: no dropout, and batch norms keep their statistics.

    batches: (inputs, target) pairs, inputs as in calibration; a list or a DataLoader, gone through once an epoch.
    loss: of (output of the model, target), a scalar tensor. What leaves the activations' ranges is added to it.

    Raises SettingsError at once for numbers that cannot work; CompileError, when it runs, where the loss is not finite.
    """

    batches: Iterable[Any]
    loss: Callable[[Any, Any], torch.Tensor]
    epochs: int = 1
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if type(self.epochs) is not int or self.epochs < 1:
            raise SettingsError(f"epochs={self.epochs!r} is not a number of epochs")
        if not (isinstance(self.learning_rate, int | float) and 0 < self.learning_rate < math.inf):
            raise SettingsError(f"learning_rate={self.learning_rate!r} is not a positive number")
        if not callable(self.loss):
            raise SettingsError(
                "loss is a function of (output, target), such as torch.nn.functional.cross_entropy"
            )
        if not isinstance(self.batches, Iterable):
            raise SettingsError("batches is a list or a DataLoader of (inputs, target) pairs")
        if self.epochs > 1 and isinstance(self.batches, Iterator):
            raise SettingsError(
                f"batches can be gone through once, and epochs is {self.epochs}; give a list or a DataLoader"
            )

    def run(self, model: torch.nn.Module, activations: Iterable[PolynomialActivation]) -> None:
        """Tune the model in place."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise SettingsError(
                "the model has no parameters that may change (requires_grad), so there is nothing to tune"
            )
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate)
        left: list[torch.Tensor] = []
        steps = 0
        with ExitStack() as stack:
            stack.enter_context(evaluating(model))
            stack.enter_context(torch.enable_grad())
            for activation in activations:
                hook = activation.register_forward_pre_hook(_leaving(left), with_kwargs=True)
                stack.callback(hook.remove)
            for _ in range(self.epochs):
                for batch in self.batches:
                    inputs, target = _pair(batch)
                    args, kwargs = as_call(inputs)
                    left.clear()
                    total = self.loss(model(*args, **kwargs), target) + _PENALTY * sum(left)
                    if not bool(torch.isfinite(total).all()):
                        raise CompileError(
                            f"the loss is not finite in step {steps} of tuning; lower learning_rate={self.learning_rate}, "
                            "or give calibration that covers the batches"
                        )
                    optimizer.zero_grad()
                    total.backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimizer.step()
                    steps += 1
        optimizer.zero_grad()
        if not steps:
            raise SettingsError("batches of fine_tune is empty")


def _leaving(left: list[torch.Tensor]) -> Callable[..., None]:
    """A hook that gathers by how much values leave the inner part of an activation's range, squared, a sample."""

    def look(module: PolynomialActivation, args: Any, kwargs: Any) -> None:
        x = operand_of(args, kwargs)
        beyond = (x.abs() / module.fit.radius - _EDGE).relu()
        left.append(beyond.square().sum() / (x.shape[0] if x.dim() else 1))

    return look


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise SettingsError("batches of fine_tune are (inputs, target) pairs")
    return batch[0], batch[1]
