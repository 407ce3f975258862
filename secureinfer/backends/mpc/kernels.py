"""Binding kernels to their catalog rows: `@kernel("name")` on a function of a StepCall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...errors import SessionError
from ...graph.int8 import dequantized, is_quantized
from ...graph.ir import Edge, Node
from . import ring
from .correlations import SessionWeight
from .fast.catalog import CATALOG
from .party import Party
from .ranges import bound_bits
from .values import Operand, Share

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class StepCall:
    """One step of one inference at one party.

    weights: the model owner's private tensors, at the model owner only.
    """

    party: Party
    node: Node
    operands: tuple[Operand, ...]
    outputs: tuple[Edge, ...]
    options: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    cache: dict[tuple[str, bool], SessionWeight]

    def encoded(self, weight: Operand) -> SessionWeight:
        """A weight as ring elements, made once a session."""
        node = self.node if is_quantized(self.node) else None
        bits = None
        if weight.edge.bound is not None and node is None:
            bits = min(64, weight.edge.scale + bound_bits(weight.edge) + 2)
        return self._once(
            weight, False, lambda: encode_weight(weight.edge, self.weights, node, self.scale), bits
        )

    def int8(self, weight: Operand) -> SessionWeight:
        """The int8 values of a quantised weight, without their scales, made once a session."""
        return self._once(weight, True, lambda: self.weights[weight.edge.name], 8)

    def _once(
        self, weight: Operand, int8: bool, make: Callable[[], torch.Tensor], bits: int | None
    ) -> SessionWeight:
        name = weight.edge.name
        if (name, int8) not in self.cache:
            if weight.plain is None:
                raise SessionError(f"weight {name!r} is not here")
            self.cache[name, int8] = SessionWeight(make(), bits)
        return self.cache[name, int8]

    @property
    def scale(self) -> int:
        """Fraction bits of floats in this program."""
        return int(self.options["precision_bits"])

    def planned(self, plan: Plan | str) -> Plan:
        """A kernel's plan of this step. Raises SessionError where it is the reason why there is none."""
        if isinstance(plan, str):
            raise SessionError(f"{self.node.name}: {plan}")
        return plan

    def attr(self, name: str) -> Any:
        return self.node.attrs[name]

    def share_scale(self, index: int) -> int:
        """Fraction bits of `share(index)`, without making it."""
        operand = self.operands[index]
        return operand.share.scale if operand.share is not None else operand.edge.scale

    def share(self, index: int) -> Share:
        """Operand `index` as a share at its edge's scale; plain values are shared without communication.

        A private value is hidden by a fresh sharing of zero, so that what its owner holds is uniform (R4).
        """
        operand = self.operands[index]
        if operand.share is not None:
            return operand.share
        return share_plain(self.party, operand, operand.edge.scale)


def encode_weight(
    edge: Edge, weights: Mapping[str, torch.Tensor], quantized: Node | None, bits: int
) -> torch.Tensor:
    """A weight as ring elements, at the scale of its edge; an int8 one dequantised, at `bits` fraction bits.

    quantized: the node whose int8 weight it is, which knows its scales.
    """
    weight, what = weights[edge.name], f"weight {edge.name}"
    if quantized is None:
        return ring.encode(weight, edge.scale, what)
    scale = weights[quantized.inputs[-1]].double()
    return ring.encode(dequantized(quantized.op, weight, scale), bits, what)


def factors(weights: Mapping[str, torch.Tensor], node: Node, scale: Edge) -> torch.Tensor:
    """The scales of a quantised node's channels as integers, at the fraction bits of their edge: int64 [channels]."""
    return torch.round(weights[scale.name].double() * 2.0**scale.scale).long()


def factored_weight(weights: Mapping[str, torch.Tensor], node: Node, scale: Edge) -> torch.Tensor:
    """An int8 weight times the integer factors of its channels: what the fast kernels compute with."""
    whole = dequantized(node.op, weights[node.inputs[1]].double(), factors(weights, node, scale).double())
    return whole.long()  # below 2**18: exact in float64


def share_plain(party: Party, operand: Operand, scale: int) -> Share:
    """Share a PUBLIC or PRIVATE operand at `scale`: no communication."""
    shape = operand.edge.shape
    if operand.is_public:
        if operand.plain is None:
            raise SessionError(f"public edge {operand.edge.name!r} has no value")
        encoded = ring.encode(operand.plain, scale, operand.edge.name)
        return Share(encoded if party.first else torch.zeros_like(encoded), scale)
    zero = party.zero_share(shape)
    if operand.owner_rank == party.rank:
        if operand.plain is None:
            raise SessionError(f"private edge {operand.edge.name!r} has no value at its owner")
        zero = zero + ring.encode(operand.plain, scale, operand.edge.name)
    return Share(zero, scale)


Kernel = Callable[[StepCall], Sequence[Share | torch.Tensor | None]]
_BOUND: dict[str, Kernel] = {}


def kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Bind a function to the catalog row `name`. Raises ValueError if there is no such row, or if it is bound already."""
    if name not in CATALOG.specs:
        raise ValueError(f"kernel {name!r} has no row in the mpc catalog")
    if name in _BOUND:
        raise ValueError(f"kernel {name!r} is bound twice")

    def bind(function: Kernel) -> Kernel:
        _BOUND[name] = function
        return function

    return bind


def lookup(name: str) -> Kernel:
    """The function of a catalog row."""
    if name not in _BOUND:
        raise SessionError(f"no code is bound to kernel {name!r} of the mpc catalog")
    return _BOUND[name]


def bound() -> frozenset[str]:
    """Names of all rows that have code."""
    return frozenset(_BOUND)
