"""Layers that torch itself quantised dynamically, taken in with their int8 weights and scales."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CompileError
from .int8 import fill, shell_of
from .transform import copied

_DYNAMIC_LINEAR = ("torch.ao.nn.quantized.dynamic.modules.linear", "Linear")


def adopt(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, or, if torch's quantize_dynamic has been there, a copy with int8 layers that export can read.

    The weights are the same numbers. Activations are not rounded to eight bits, as that layer does while it runs.
    Raises CompileError, which names them, for layers that torch quantised in other ways.
    """
    found = [
        (p, m) for p, m in model.named_modules() if _home(m)[0].startswith("torch.ao.nn.") and _packed(m)
    ]
    if not found:
        return model
    memo: dict[int, Any] = {}
    refused = []
    for path, module in found:
        layer = _linear(module) if _home(module) == _DYNAMIC_LINEAR else None
        if layer is None:
            refused.append(f"{path or '(the model)'} ({type(module).__name__})")
        else:
            memo[id(module)] = layer.train(module.training)
    if refused:
        raise CompileError(
            f"{', '.join(refused)}: quantised by torch in a way that is not supported; of torch's own quantised layers only "
            "a dynamically quantised Linear with symmetric int8 weights is taken in. Give the float model instead, "
            "and use si.compress(model, [si.Quantize()])"
        )
    return copied(model, memo)


def _home(module: torch.nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _packed(module: torch.nn.Module) -> bool:
    """Whether it is one of torch's quantised layers: those that train with fake rounding hold floats."""
    return "quantized" in type(module).__module__ and not type(module).__name__.endswith("PackedParams")


def _linear(module: Any) -> torch.nn.Module | None:
    """An int8 layer with the numbers of a dynamically quantised Linear; a float one for its float16 form."""
    weight, bias = module.weight(), module.bias()
    layer = torch.nn.Linear(module.in_features, module.out_features, bias is not None, device="meta")
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.detach().float().clone(), requires_grad=False)
    if not weight.is_quantized:
        layer.weight = torch.nn.Parameter(weight.detach().float(), requires_grad=False)
        return layer
    channels = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
    zeros = weight.q_per_channel_zero_points() if channels else torch.tensor(weight.q_zero_point())
    if weight.dtype != torch.qint8 or bool(zeros.any()) or (channels and weight.q_per_channel_axis() != 0):
        return None
    scale = weight.q_per_channel_scales() if channels else torch.tensor(weight.q_scale())
    shell = shell_of(torch.nn.Linear)
    state = {**vars(layer), "_parameters": {"bias": layer.bias}}
    fill(shell, state, weight.int_repr(), scale.float().expand(module.out_features).contiguous(), 0)
    return shell
