"""The weight that a layer computes with, whatever holds it: a parameter, torch's pruning, a parametrization, a hook."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .transform import evaluating


@dataclass(frozen=True)
class Effective:
    """tensor: what the layer computes with in evaluation mode. made_of: its names of parameters, buffers and attributes.

    hooks: keys of the forward pre-hooks that made it, which are not needed any more.
    """

    tensor: torch.Tensor
    made_of: tuple[str, ...]
    hooks: tuple[int, ...] = ()


class Unknown(Exception):
    """It is not known how this layer's weight is made; the text says what was seen."""


def effective(module: torch.nn.Module, name: str) -> Effective | None:
    """The tensor `name` of a layer, or None if it has none. Raises Unknown."""
    # In evaluation mode: a spectral norm would otherwise count this as a step of training.
    with torch.no_grad(), evaluating(module):
        if parametrize.is_parametrized(module, name):
            return Effective(getattr(module, name).detach(), ("parametrizations",))
        if name in module._parameters:
            parameter = module._parameters[name]
            return None if parameter is None else Effective(parameter.detach(), (name,))
        for key, hook in module._forward_pre_hooks.items():
            made_of = (name, f"{name}_orig", f"{name}_mask", f"{name}_g", f"{name}_u", f"{name}_v")
            if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == name:
                masked = module._parameters[f"{name}_orig"] * module._buffers[f"{name}_mask"]  # type: ignore[operator]
                return Effective(masked, made_of, (key,))
            if isinstance(hook, WeightNorm) and hook.name == name:
                return Effective(hook.compute_weight(module), made_of, (key,))
            if isinstance(hook, SpectralNorm) and hook.name == name:
                return Effective(hook.compute_weight(module, do_power_iteration=False), made_of, (key,))
    found = getattr(module, name, None)
    if found is None:
        return None
    raise Unknown(f"its {name} is made in a way that is not known ({type(found).__name__})")


def other_parametrizations(module: torch.nn.Module, names: tuple[str, ...]) -> list[str]:
    """Names that are parametrized beside these."""
    if not parametrize.is_parametrized(module):
        return []
    return sorted(set(module.parametrizations.keys()) - set(names))  # type: ignore[operator, union-attr]
