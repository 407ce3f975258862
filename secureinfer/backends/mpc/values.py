"""What flows along an edge while a program runs: a share, a plain tensor at its owner, or nothing at the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...graph.ir import Edge, Visibility


@dataclass(frozen=True)
class Share:
    """This party's additive share of a fixed-point tensor: int64, value = sum of shares / 2**scale."""

    tensor: torch.Tensor = field(repr=False)
    scale: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class Operand:
    """One input of a step.

    share: set if the edge is SHARED. plain: set if the edge is PUBLIC, or PRIVATE and this party owns it.
    owner_rank: for PRIVATE edges.
    """

    edge: Edge
    share: Share | None = None
    plain: torch.Tensor | None = field(default=None, repr=False)
    owner_rank: int | None = None

    @property
    def is_public(self) -> bool:
        return self.edge.visibility is Visibility.PUBLIC

    @property
    def is_private(self) -> bool:
        return self.edge.visibility is Visibility.PRIVATE
