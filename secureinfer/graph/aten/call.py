"""The table ATen overload -> canonicaliser, and what every canonicaliser sees.

A canonicaliser gets the call and its arguments with tensors as Values, and returns one Value or a list of
them. Work on public values and weights alone never gets here: export.py runs it in torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..draft import Draft, Value, nominal

Result = Value | Sequence[Value]
Number = int | float | bool


class Unsupported(Exception):
    """This call has no canonical form; the text says why. It becomes one row of UnsupportedModelError."""


@dataclass(frozen=True)
class Call:
    """One ATen call: the draft that it goes to, and the shape and type of its (first) result."""

    draft: Draft
    shape: tuple[int, ...]
    dtype: torch.dtype


Canonicaliser = Callable[..., Result]
F = TypeVar("F", bound=Canonicaliser)
ATEN: dict[str, Canonicaliser] = {}
"""Overload, as "add.Tensor" -> canonicaliser."""


def aten(*names: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        for name in names:
            if name in ATEN:
                raise ValueError(f"ATen overload {name!r} has two canonicalisers")
            ATEN[name] = function
        return function

    return register


def dims_of(x: Value, dims: int | Sequence[int] | None) -> list[int]:
    """Non-negative dimensions; all of them for None or an empty list."""
    n = len(x.shape)
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(n))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [d % max(n, 1) for d in listed] if n else []


def operand(c: Call, x: Value | Number, dtype: torch.dtype) -> Value:
    """x as a value of this type: numbers become public scalars."""
    if isinstance(x, Value):
        return c.draft.cast(x, dtype)
    return c.draft.scalar(bool(x) if dtype == torch.bool else x, nominal(dtype))
