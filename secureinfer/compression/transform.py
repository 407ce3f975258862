"""A transform takes a model and gives a new one with a report; `run` applies several in order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import CompileError, SettingsError
from .report import CompressionReport, TransformReport


@runtime_checkable
class Transform(Protocol):
    """A frozen dataclass of settings that is also the transform."""

    def apply(
        self, model: torch.nn.Module, calibration: Sequence[Any] | None
    ) -> tuple[torch.nn.Module, TransformReport]:
        """A new model, the given one unchanged, and what became of each layer.

        calibration: example inputs, for a transform that looks at activations.
        """
        ...


def run(
    model: torch.nn.Module, transforms: Iterable[Transform], calibration: Sequence[Any] | None
) -> tuple[torch.nn.Module, CompressionReport]:
    """The transforms one after the other. Raises SettingsError for what is no transform."""
    if isinstance(transforms, type | Transform):
        raise SettingsError("transforms is a list, such as [si.Quantize()]")
    listed = list(transforms)
    for t in listed:
        if isinstance(t, type) or not isinstance(t, Transform):
            raise SettingsError(f"{t!r} is no transform; there are si.Quantize() and si.Approximate()")
    reports = []
    result = model if listed else copied(model, {})
    for t in listed:
        result, report = t.apply(result, calibration)
        reports.append(report)
    return result, CompressionReport(tuple(reports))


def copied(model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A deep copy, in which what the memo knows by its identity is replaced. Raises CompileError where it fails."""
    remember_computed(model, memo)
    try:
        result: torch.nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # attributes may be anything
        raise CompileError(f"the model cannot be copied: {type(error).__name__}: {error}") from error
    return result


def remember_computed(model: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Computed tensors in attributes, such as torch's pruning leaves, become values: deepcopy itself refuses them."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """All its modules in evaluation mode; their modes come back."""
    modules = [(m, m.training) for m in model.modules()]
    for m, _ in modules:
        m.training = False
    try:
        yield
    finally:
        for m, training in modules:
            m.training = training


def module_places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[str]]]:
    """Every module with all its paths, in the order of the first."""
    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), (module, []))[1].append(path)
    return list(found.values())


def model_bytes(model: torch.nn.Module, *, recurse: bool = True) -> int:
    """Bytes of parameters and buffers, tensors that share memory once. recurse: of what is below it too."""
    seen = {}
    for tensor in [*model.parameters(recurse), *model.buffers(recurse)]:
        if torch.nn.parameter.is_lazy(tensor):
            continue
        seen[tensor.data_ptr() or id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(seen.values())
