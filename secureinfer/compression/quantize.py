"""Weights as int8 with one scale an output channel, in every layer that has them."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..errors import CompileError, SettingsError
from .int8 import Int8Weight, dequantized, fill, quantized, shell_of
from .report import LayerReport, TransformReport
from .transform import copied, model_bytes, module_places, remember_computed
from .weights import Effective, Unknown, effective, other_parametrizations

_CHANNEL_DIMS: tuple[tuple[type[torch.nn.Module], int], ...] = (
    (torch.nn.Linear, 0),
    (torch.nn.Conv1d, 0),
    (torch.nn.Conv2d, 0),
    (torch.nn.Embedding, 1),
)


@dataclass(frozen=True)
class Quantize:
    """Quantise weights: symmetric, round to nearest, W ≈ int8 · scale. Biases, norms and activations stay floats.

    weights: "int8". granularity: "channel": one scale for each output of nn.Linear, nn.Conv1d, nn.Conv2d and
    transformers' Conv1D, for each column of nn.Embedding. A table has no scale a row, since which row is looked up is secret
    and so would its scale be; a column's is applied to the result, like any layer's. (MiniLM's word table errs by 1.1 % so,
    by 4.3 % with one scale in all.)
    skip: module paths (with all below them) or patterns such as "*.lm_head" that stay as they are.

    Raises SettingsError for a choice that does not exist, at once; CompileError, when it runs, for weights that are not
    finite or not there yet.
    """

    weights: str = "int8"
    granularity: str = "channel"
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.weights != "int8":
            raise SettingsError(f"weights={self.weights!r} does not exist; there is weights='int8'")
        if self.granularity != "channel":
            raise SettingsError(
                f"granularity={self.granularity!r} does not exist; there is granularity='channel'"
            )
        if isinstance(self.skip, str) or not all(isinstance(s, str) and s for s in self.skip):
            raise SettingsError(f"skip={self.skip!r} is not a list of module paths, such as ['lm_head']")
        object.__setattr__(self, "skip", tuple(self.skip))

    def apply(
        self, model: torch.nn.Module, calibration: Sequence[Any] | None = None
    ) -> tuple[torch.nn.Module, TransformReport]:
        """The model with int8 layers, and what became of each. calibration is not used: only weights change."""
        places = module_places(model)
        self._check_skips(places)
        done = _Conversion(model)
        rows = [row for module, paths in places if (row := self._row(done, module, paths)) is not None]
        settings = {"weights": self.weights, "granularity": self.granularity, "skip": self.skip}
        result = done.model()
        report = TransformReport("Quantize", settings, tuple(rows), model_bytes(model), model_bytes(result))
        return result, report

    def _row(self, done: _Conversion, module: torch.nn.Module, paths: Sequence[str]) -> LayerReport | None:
        if any(done.inside(path) for path in paths):
            return None
        name, layer = type(module).__name__, _channel_dim(module) is not None
        before = model_bytes(module, recurse=layer)
        reason = _refusal(module)
        if self._skipped(paths) and (reason is not None or layer):
            reason = "skipped, as asked"
        if reason is None and not layer:
            return None
        if reason is not None:
            return LayerReport(paths[0], name, False, reason, before, before)
        try:
            error, after, remark = done.convert(module, paths)
        except Unknown as unknown:
            return LayerReport(paths[0], name, False, str(unknown), before, before)
        return LayerReport(paths[0], name, True, remark, before, after, error)

    def _skipped(self, paths: Sequence[str]) -> bool:
        return any(_matches(path, pattern) for path in paths for pattern in self.skip)

    def _check_skips(self, places: Sequence[tuple[torch.nn.Module, list[str]]]) -> None:
        paths = [p for _, listed in places for p in listed]
        lost = [s for s in self.skip if not any(_matches(p, s) for p in paths)]
        if lost:
            raise SettingsError(f"skip names {', '.join(lost)}, which the model does not have")


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or path.startswith(f"{pattern}.") or fnmatch.fnmatchcase(path, pattern)


def _lazy(module: torch.nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(torch.nn.parameter.is_lazy(t) for t in tensors if t is not None)


def _channel_dim(module: torch.nn.Module) -> int | None:
    """The dimension of the weight that has a scale for each index; None for a layer that has no int8 form."""
    for cls, dim in _CHANNEL_DIMS:
        if isinstance(module, cls):
            return dim
    # GPT-2's layer: a linear layer whose weight is stored the other way round.
    names = [(c.__module__, c.__name__) for c in type(module).__mro__]
    return 1 if ("transformers.pytorch_utils", "Conv1D") in names else None


def _refusal(module: torch.nn.Module) -> str | None:
    """Why this module stays as it is; None if it is converted, or has nothing to convert."""
    name = type(module).__name__
    if isinstance(module, Int8Weight):
        return "int8 already"
    if type(module).__module__.startswith("torch.ao.nn.quantized"):
        return "quantised by torch already; si.compile takes a dynamically quantised Linear as it is"
    if _channel_dim(module) is None:
        own = list(module.parameters(recurse=False))
        if not own:
            return None
        if _lazy(module):
            return "it has no weights yet"
        if all(p.dim() < 2 for p in own):
            return "its parameters are no matrices; they stay floats"
        return f"{name} has no int8 form; Linear, Conv1d, Conv2d, Embedding and transformers' Conv1D have"
    if isinstance(module, torch.nn.Embedding) and module.max_norm is not None:
        return "max_norm changes its rows while it runs"
    if others := other_parametrizations(module, ("weight", "bias")):
        return f"its {', '.join(others)} is parametrized"
    return None


@dataclass(frozen=True)
class _Layer:
    """A layer that was converted. shell: what takes its place, which is filled at the end."""

    module: torch.nn.Module
    shell: torch.nn.Module
    weight: Effective
    bias: Effective | None
    values: torch.Tensor
    scale: torch.Tensor
    channel_dim: int


class _Conversion:
    """Int8 layers for the modules of one model, and the copy of the model that has them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._source = model
        self._memo: dict[int, Any] = {}
        remember_computed(model, self._memo)
        self._paths: list[str] = []
        self._layers: list[_Layer] = []
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._tied = {id(p): list(paths) for p, paths in _shared_parameters(model)}

    def inside(self, path: str) -> bool:
        """Whether this place is inside a layer that was converted, which holds its parametrizations there."""
        return any(path.startswith(f"{p}.") if p else path != "" for p in self._paths)

    def convert(self, module: torch.nn.Module, paths: Sequence[str]) -> tuple[float, int, str]:
        """Relative error, bytes after, remark. Raises Unknown where its weight cannot be int8."""
        place = paths[0] or "(the model)"
        if _lazy(module):
            raise CompileError(f"layer {place} has no weights yet; run the model once on an example input")
        weight, bias = effective(module, "weight"), effective(module, "bias")
        if weight is None:
            raise Unknown("it has no weight")
        tensor = weight.tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            raise Unknown(
                f"its weight is a {type(tensor).__name__} of {tensor.dtype}, not a plain float tensor"
            )
        if tensor.is_meta:
            raise CompileError(f"the weight of layer {place} is on the meta device; load the weights first")
        if not tensor.numel():
            raise Unknown("its weight has no element")
        if not bool(torch.isfinite(tensor).all()):
            raise CompileError(f"the weight of layer {place} holds values that are not finite")
        dim = _channel_dim(module) or 0
        parameter = module._parameters.get("weight")
        key = (id(parameter if parameter is not None else tensor), dim)
        made = self._made.get(key) or quantized(tensor, dim)
        if made is None:
            raise Unknown("its weights are too large or too small for scales in fixed point")
        self._made[key] = made
        shell = shell_of(parametrize.type_before_parametrizations(module))
        self._memo[id(module)] = shell
        self._layers.append(_Layer(module, shell, weight, bias, *made, dim))
        self._paths.extend(paths)
        values, scale = made
        exact = tensor.double()
        difference = dequantized(values, scale.double(), dim) - exact
        size = float(exact.norm())
        error = float(difference.norm()) / size if size else 0.0
        after = sum(t.numel() * t.element_size() for t in (values, scale))
        after += bias.tensor.numel() * bias.tensor.element_size() if bias is not None else 0
        return error, after, self._remark(parameter, paths)

    def _remark(self, parameter: torch.Tensor | None, paths: Sequence[str]) -> str:
        remarks = [f"also at {', '.join(paths[1:])}"] if len(paths) > 1 else []
        others = [p for p in self._tied.get(id(parameter), []) if p.rpartition(".")[0] not in paths]
        if others:
            remarks.append(
                f"was one tensor with {', '.join(others)}, which only layers of one kind still share"
            )
        return "; ".join(remarks)

    def model(self) -> torch.nn.Module:
        """The copy. Float weights that were converted are not copied first."""
        for layer in self._layers:
            state = copy.deepcopy(_state_without(layer.module, layer.weight, layer.bias), self._memo)
            fill(layer.shell, state, layer.values, layer.scale, layer.channel_dim)
        return copied(self._source, self._memo)


def _state_without(module: torch.nn.Module, weight: Effective, bias: Effective | None) -> dict[str, Any]:
    """The layer's state without its weight and what made it, with its bias as a parameter."""
    parts = [weight] if bias is None else [weight, bias]
    gone = {name for part in parts for name in part.made_of}
    hooks = {key for part in parts for key in part.hooks}
    state = {k: v for k, v in vars(module).items() if k not in gone}
    for table in ("_parameters", "_buffers", "_modules"):
        state[table] = {k: v for k, v in state[table].items() if k not in gone}
    for table in [k for k in state if k.startswith("_forward_pre_hooks")]:
        kept = {k: v for k, v in state[table].items() if k not in hooks}
        state[table] = type(state[table])(kept)
    if bias is not None:
        original = module._parameters.get("bias")
        state["_parameters"]["bias"] = (
            torch.nn.Parameter(bias.tensor.clone(), requires_grad=False) if original is None else original
        )
    return state


def _shared_parameters(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, list[str]]]:
    """Parameters that several modules hold, with all their names."""
    found: dict[int, tuple[torch.nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    yield from ((p, names) for p, names in found.values() if len(names) > 1)
