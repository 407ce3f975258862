"""What a kernel declares before it runs: a KernelSpec with closed formulas for its cost, and the registry of specs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph.ir import Edge, Graph, Node


def advance(clocks: Sequence[int], messages: str) -> list[int]:
    """The parties' Lamport clocks after a sequence of message patterns.

    messages: one character a pattern. x: every party sends to every other. b: rank 1 sends to every other party.
    A digit: every other party sends to that rank.
    A clock for each party is needed, because messages overlap: after a one-way message the sender goes on at once, so that
    a one-way message followed by an exchange costs less than the sum.
    """
    clocks = list(clocks)
    for letter in messages:
        sent = [c + 1 for c in clocks]
        if letter == "x":
            clocks = [max([c, *sent[:i], *sent[i + 1 :]]) for i, c in enumerate(clocks)]
        elif letter.isdecimal() and int(letter) < len(clocks):
            to = int(letter)
            clocks[to] = max([clocks[to], *sent[:to], *sent[to + 1 :]])
        elif letter == "b":
            clocks = [c if i == 1 else max(c, sent[1]) for i, c in enumerate(clocks)]
        else:
            raise ValueError(f"unknown message pattern {letter!r}")
    return clocks


def longest_chain(messages: str, parties: int) -> int:
    """Steps on the longest chain of dependent messages, from equal clocks; see advance."""
    return max(advance([0] * parties, messages), default=0)


@dataclass(frozen=True)
class Cost:
    """Costs of one step of one inference, all links and parties together.

    messages: the patterns of its online messages in order, see advance. bytes: online frames, headers and payload.
    dealt_bytes: frames of the offline phase. setup: what is sent once a session, as (what, bytes) pairs, so that two steps
    that use one weight count it once. parties: how many compute.
    Addition is sequential composition.
    """

    messages: str = ""
    bytes: int = 0
    dealt_bytes: int = 0
    setup: frozenset[tuple[str, int]] = frozenset()
    parties: int = 2

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.dealt_bytes + other.dealt_bytes,
            self.setup | other.setup,
            max(self.parties, other.parties),
        )

    @property
    def rounds(self) -> int:
        """Steps on the longest chain of dependent messages, from equal clocks."""
        return longest_chain(self.messages, self.parties)

    @property
    def setup_bytes(self) -> int:
        """Bytes of frames that are sent once a session."""
        return sum(size for _, size in self.setup)


@dataclass(frozen=True)
class StepContext:
    """What a formula may look at: the node, its edges, and how many parties compute."""

    node: Node
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    parties: int
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # public settings of the program: precision_bits, ...


@dataclass(frozen=True)
class KernelSpec:
    """One row of a backend's catalog.

    accepts returns None if the kernel can run this step, else the reason why not.
    error_bound: greatest |secure - float64| for a step whose inputs are exact, from the step's edges and attributes.
    source: the paper, section or page that the protocol comes from.
    """

    op: str
    name: str
    backend: str
    accepts: Callable[[StepContext], str | None]
    cost: Callable[[StepContext], Cost]
    error_bound: Callable[[StepContext], float]
    source: str
    parties: int | None = None  # None: any number


DETAILS = ("level", "ciphertexts", "rotations", "products", "estimate_ms")
"""Attributes of a CKKS node that a plan shows: level before it, ciphertexts that it reads, and what it takes on one core."""

Lower = Callable[[Graph, Mapping[str, Any]], Graph]


class Registry:
    """The specs of one backend, in order of preference."""

    def __init__(
        self,
        backend: str,
        specs: Iterable[KernelSpec],
        lower: Lower | None = None,
        check: Check | None = None,
        can_be_exact: Callable[[Graph], bool] | None = None,
    ) -> None:
        """lower: makes the graph one that these kernels run best, before a plan is made. None: as it is.

        check: why a graph and a plan that came in a file cannot be what compiling gave, or None. can_be_exact: whether no
        step of a graph rounds at random once its products are cut exactly.
        """
        self.backend = backend
        self.lower = lower
        self.check = check
        self.can_be_exact = can_be_exact
        self.specs: dict[str, KernelSpec] = {}
        for spec in specs:
            if spec.name in self.specs:
                raise ValueError(f"kernel {spec.name!r} has two rows in the {backend} catalog")
            self.specs[spec.name] = spec

    def for_op(self, op: str) -> list[KernelSpec]:
        return [s for s in self.specs.values() if s.op == op]


@dataclass(frozen=True)
class Step:
    """One planned node: which kernel runs it and what that costs."""

    index: int
    node: Node
    kernel: str
    cost: Cost

    @property
    def details(self) -> dict[str, int | float]:
        """What a backend without rounds of its own says of the step, by name: see DETAILS."""
        attrs = self.node.attrs
        return {n: attrs[n] for n in DETAILS if type(attrs.get(n)) in (int, float)}

    @property
    def fit(self) -> dict[str, Any] | None:
        """Of a polynomial in an activation's place: what it stands for, on which range, how far off it is there at most, and
        how many values of the calibration lay outside.
        """
        attrs = self.node.attrs
        if self.node.op != "polynomial" or not attrs.get("range"):
            return None
        return {n: attrs.get(n) for n in ("kind", "range", "error", "outside")}


Check = Callable[[Graph, Iterable[Step], Mapping[str, Any]], str | None]


def step_context(graph: Graph, node: Node, parties: int, options: Mapping[str, Any]) -> StepContext:
    return StepContext(
        node,
        tuple(graph.edge(e) for e in node.inputs),
        tuple(graph.edge(e) for e in node.outputs),
        parties,
        options,
    )
