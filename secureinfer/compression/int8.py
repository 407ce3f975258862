"""Layers whose weight is int8 with a scale for each output channel: torch's own layers, with `weight` computed from both."""

from __future__ import annotations

import math
from typing import Any

import torch

LARGEST = 127
"""Symmetric: -128 is not used, so that a channel's sign can change."""

SCALE_BITS = 11
"""Scales of a layer are whole multiples, of so many bits, of one power of two. Secure kernels multiply by that integer,
so that nothing is rounded twice and the layer's secure and plain results are those of the same weights."""


class Int8Weight(torch.nn.Module):
    """Mixed into a layer's class: buffers `weight_int8` and `weight_scale`, in place of the parameter `weight`.

    weight_int8 has the shape of the weight; weight_scale one float a channel, along `channel_dim`. `weight` is float, so
    that whatever reads it goes on working, and forward is the layer's own.
    """

    weight_int8: torch.Tensor
    weight_scale: torch.Tensor
    channel_dim: int

    @property
    def weight(self) -> torch.Tensor:
        return dequantized(self.weight_int8, self.weight_scale, self.channel_dim)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return shell_of, (type(self).__mro__[2],), dict(vars(self))


_CLASSES: dict[type, type[torch.nn.Module]] = {}


def int8_class(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of layer `base` on an int8 weight; it is a `base` itself."""
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Int8{base.__name__}", (Int8Weight, base), {"__module__": __name__})
    return _CLASSES[base]


def shell_of(base: type[torch.nn.Module]) -> torch.nn.Module:
    """A layer of kind `base` on an int8 weight, without any state; see fill."""
    cls = int8_class(base)
    return cls.__new__(cls)


def fill(
    shell: torch.nn.Module,
    state: dict[str, Any],
    values: torch.Tensor,
    scale: torch.Tensor,
    channel_dim: int,
) -> None:
    """Make an instance that has no state yet a whole layer. state: of the float layer, without its weight."""
    shell.__dict__.update(state)
    shell.__dict__["channel_dim"] = channel_dim
    shell.register_buffer("weight_int8", values)
    shell.register_buffer("weight_scale", scale)


def dequantized(values: torch.Tensor, scale: torch.Tensor, channel_dim: int) -> torch.Tensor:
    """The weight that int8 values and scales along `channel_dim` stand for, in the type of the scales."""
    return values.to(scale.dtype) * _along(scale, values.dim(), channel_dim)


def _along(scale: torch.Tensor, dims: int, channel_dim: int) -> torch.Tensor:
    shape = [1] * dims
    shape[channel_dim] = -1
    return scale.reshape(shape)


def quantized(weight: torch.Tensor, channel_dim: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """int8 values and scales of a finite float weight; None where its scales have no place between 2**-52 and 2**11.

    A channel of zeros has the smallest scale. The relative error of a weight is below scale / 2.
    """
    dims = [d for d in range(weight.dim()) if d != channel_dim % weight.dim()]
    exact = weight.double()
    wanted = exact.abs().amax(dims) / LARGEST
    scale = _on_a_grid(wanted, weight.dtype)
    if scale is None:
        return None
    values = (
        torch.round(exact / _along(scale, weight.dim(), channel_dim)).clamp(-LARGEST, LARGEST).to(torch.int8)
    )
    return values, scale.to(weight.dtype)


def _on_a_grid(wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The least multiples of one power of two that are not below the wanted scales, and not 0."""
    greatest = float(wanted.max())
    if greatest == 0.0:
        return torch.ones_like(wanted)
    if not 2.0**-52 <= greatest < 2.0**11 - 1:
        return None
    info = torch.finfo(dtype)
    bits = min(SCALE_BITS, 1 - int(math.log2(info.eps)))
    step = 2.0 ** (math.frexp(greatest)[1] - bits)
    if math.ceil(greatest / step) == 1 << bits:
        step *= 2
    step = max(step, info.smallest_normal * info.eps)
    return torch.ceil(wanted / step).clamp(min=1) * step
