"""The Graph: an immutable list of operator nodes over named edges, each with its shape, who may see it, and
its width.

Nodes are canonical operators of graph/ops.py (fewer than ATen's: `view`, `squeeze` and `flatten` are all
`reshape`). Scalars are edges too (public, zero-dimensional), so that a kernel sees only edges and attributes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MODEL_OWNER = "model_owner"
"""The owner of every weight edge. Data owners go by their own names; with one, that is `data_owner`."""

DATA_OWNER = "data_owner"


class Visibility(enum.Enum):
    """Who may see the values on an edge."""

    PUBLIC = "public"
    PRIVATE = "private"  # one owner holds it in plain
    SHARED = "shared"  # additive shares, nobody holds it
    MASKED_PUBLIC = "masked_public"  # everybody holds value + mask, the dealer's record holds the mask


@dataclass(frozen=True)
class Edge:
    """One tensor. scale: fraction bits (0 for integers and booleans). bound: greatest |value|, or None if
    unknown.

    The scales of an int8 weight are a float32 edge whose `scale` gives the greatest of them 10 or 11 bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "int64", "bool", "int8" (weights): what the plaintext model has here
    visibility: Visibility = Visibility.SHARED
    owner: str | None = None  # for PRIVATE
    ring_bits: int = 64
    scale: int = 0
    bound: float | None = None

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class Node:
    """One operator application. attrs are JSON values (ints, floats, strings, lists, None)."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    path: str = ""  # module path in the model, for messages and per-layer figures
    operator: str = ""  # the ATen overload that it came from, for messages


@dataclass(frozen=True)
class Graph:
    """The whole computation.

    inputs: edges that the caller gives, in the order of the flattened call; each PRIVATE to its owner.
    weights: PRIVATE edges of the model owner. constants: PUBLIC tensors fixed at compile time.
    outputs: edges in the order of the flattened output; output_spec rebuilds the model's own structure.
    reveal_to: names of the parties that get the outputs.
    """

    nodes: tuple[Node, ...]
    edges: Mapping[str, Edge]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: tuple[str, ...]
    input_spec: Any = None  # JSON: see graph/structure.py
    output_spec: Any = None
    reveal_to: tuple[str, ...] = (DATA_OWNER,)

    def edge(self, name: str) -> Edge:
        return self.edges[name]

    def rank_of(self, name: str) -> int:
        """Rank of a compute party: 0 is the model owner, data owners follow in the order of their first input."""
        if name == MODEL_OWNER:
            return 0
        owners = self.owners()
        return 1 + owners.index(name) if name in owners else 1

    def owners(self) -> tuple[str, ...]:
        """Data owners, in the order of their first input."""
        seen: dict[str, None] = {}
        for name in self.inputs:
            owner = self.edges[name].owner
            if owner is not None:
                seen.setdefault(owner)
        return tuple(seen)
