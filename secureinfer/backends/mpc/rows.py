"""What the rows of the MPC catalogs are made of: what a row may ask of a step, its reasons to refuse one, and its figures.

Pure: no cryptography is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...graph.ir import MODEL_OWNER, Edge, Visibility
from ...plan.spec import Cost, KernelSpec, StepContext


def is_shared(edge: Edge) -> bool:
    return edge.visibility is Visibility.SHARED


def is_public(edge: Edge) -> bool:
    return edge.visibility is Visibility.PUBLIC


def is_weight(edge: Edge) -> bool:
    return edge.visibility is Visibility.PRIVATE and edge.owner == MODEL_OWNER


def is_data(edge: Edge) -> bool:
    return edge.visibility is Visibility.PRIVATE and edge.owner != MODEL_OWNER


def is_int8(edge: Edge) -> bool:
    """Whether it is a weight with scales beside it, which these kernels take as a float."""
    return edge.dtype == "int8" and is_weight(edge)


def precision_of(c: StepContext) -> int:
    return int(c.options["precision_bits"])


def unit_of(c: StepContext) -> float:
    return 2.0 ** -precision_of(c)


def numel(c: StepContext) -> int:
    return c.outputs[0].numel


def bound_of(edge: Edge) -> float:
    return edge.bound if edge.bound is not None else 2.0**10


Formula = Callable[[StepContext], Cost]
Bound = Callable[[StepContext], float]
Accept = Callable[[StepContext], str | None]


def anything(c: StepContext) -> str | None:
    return None


def secret(c: StepContext) -> str | None:
    return None if is_shared(c.outputs[0]) else "the result is not shared"


def fits(c: StepContext) -> str | None:
    """A product carries twice the fraction bits; with them its bound must stay below 2**62, or it would wrap in silence."""
    edge, f = c.outputs[0], precision_of(c)
    if edge.bound is not None and edge.scale and edge.bound * 2.0 ** (2 * f) > 2.0**62:
        fitting = int(62 - math.log2(edge.bound)) // 2
        return (
            f"values up to {edge.bound:.3g} (with head-room) do not fit into 64 bits beside {2 * f} fraction bits; "
            + (f"compile with precision_bits={fitting}" if fitting >= 8 else "scale the model's values down")
        )
    return None


def secret_product(c: StepContext) -> str | None:
    return secret(c) or fits(c)


def float_operand(c: StepContext) -> str | None:
    if not c.inputs[0].dtype.startswith("float"):
        return f"the operand is {c.inputs[0].dtype}; this kernel takes floats"
    return secret(c)


def no_error(c: StepContext) -> float:
    return 0.0


def reduces_something(c: StepContext) -> str | None:
    if numel(c) and c.inputs[0].numel == 0:
        return "a maximum over nothing"
    return secret(c)


def window_size(c: StepContext) -> int:
    size = c.node.attrs["kernel_size"]
    return int(size[0]) * int(size[1])


def image(c: StepContext) -> str | None:
    if len(c.inputs[0].shape) != 4:
        return f"the operand has {len(c.inputs[0].shape)} dimensions; this kernel takes [N, C, H, W]"
    return secret(c)


def one_or_two_dimensions(accepts: Accept) -> Accept:
    def check(c: StepContext) -> str | None:
        if len(c.inputs[0].shape) not in (3, 4):
            return (
                f"{len(c.inputs[0].shape) - 2} spatial dimensions; convolutions of one or two are supported"
            )
        return accepts(c)

    return check


def private_ids(c: StepContext) -> str | None:
    ids, table = c.inputs[:2]
    if not is_data(ids):
        return (
            "the ids do not belong to a data owner, so a one-hot vector cannot be made without opening them"
        )
    return None if is_weight(table) else "the table is not a weight of the model owner"


NORMALISED = "normalisation by comparisons, then a series from one opening"


class Rows(list[KernelSpec]):
    """The rows of one catalog, in order of preference."""

    def add(self, op: str, name: str, accepts: Accept, cost: Formula, error: Bound, source: str) -> None:
        self.append(KernelSpec(op, name, "mpc", accepts, cost, error, source))
