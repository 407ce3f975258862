"""A polynomial as a layer: one operator that torch.export keeps whole, so that compiling sees what it stands in for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..graph.polynomials import Fit, derivative, evaluate


@torch.library.custom_op(
    "secureinfer::polynomial",
    mutates_args=(),
    schema="(Tensor x, float[] coefficients, float radius, str kind, float error) -> Tensor",
)
def polynomial(
    x: torch.Tensor, coefficients: Sequence[float], radius: float, kind: str, error: float
) -> torch.Tensor:
    """sum of coefficients[i] · (x / radius)**i, in the type of x; kind and error say what it stands in for, and how well."""
    return evaluate(coefficients, radius, x)


@polynomial.register_fake
def _(x: torch.Tensor, coefficients: Sequence[float], radius: float, kind: str, error: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, coefficients, radius, _, _ = inputs
    ctx.save_for_backward(x)
    ctx.slope, ctx.radius = derivative(coefficients, radius), radius


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    (x,) = ctx.saved_tensors
    return gradient * evaluate(ctx.slope, ctx.radius, x), None, None, None, None


polynomial.register_autograd(_backward, setup_context=_keep)


class PolynomialActivation(torch.nn.Module):
    """A fitted polynomial in place of an activation. It has no parameters and no buffers: the state is the model's own.

    Outside of [-fit.radius, fit.radius] it is no activation any more, and grows fast.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        f = self.fit
        result: torch.Tensor = polynomial(input, list(f.coefficients), f.radius, f.kind, f.error)
        return result

    def extra_repr(self) -> str:
        f = self.fit
        return f"{f.kind}, degree={f.degree}, range=±{f.radius:.3g}, error={f.error:.2g}"


def operand_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What an activation was called with."""
    x: torch.Tensor = args[0] if args else kwargs["input"]
    return x
