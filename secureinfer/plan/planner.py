"""Graph + catalog → Plan: for each node the first kernel that accepts it, or every rejection at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModelError, UnsupportedNode
from ..graph.ir import Graph, Node
from .spec import DETAILS, Cost, KernelSpec, Registry, Step, StepContext, advance, step_context

BEGIN = Node("begin", "begin", (), ())
"""Step 0 of every plan: the parties burn the index."""


def reveal_node(graph: Graph) -> Node:
    """The last step of every plan: the outputs go to the ranks that may have them, and to nobody else.

    ranks: who gets them. owners: for each output, the rank that holds it in plain, or None.
    """
    edges = [graph.edge(name) for name in graph.outputs]
    attrs = {
        "ranks": sorted(graph.rank_of(name) for name in graph.reveal_to),
        "owners": [None if e.owner is None else graph.rank_of(e.owner) for e in edges],
    }
    return Node("reveal", "reveal", graph.outputs, (), attrs)


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they run; printing it gives one row a step."""

    steps: tuple[Step, ...]

    @property
    def totals(self) -> Cost:
        """Cost of one inference (setup: of one session)."""
        total = Cost()
        for step in self.steps:
            total = total + step.cost
        return total

    def step_rounds(self) -> list[int]:
        """By how much each step lengthens the chain of dependent messages: they add up to totals.rounds.

        A step's own cost.rounds may be greater, since its first messages can overlap those of the step before.
        """
        clocks, longest, out = [0] * self.totals.parties, 0, []
        for step in self.steps:
            clocks = advance(clocks, step.cost.messages)
            out.append(max(clocks) - longest)
            longest = max(clocks)
        return out

    def __str__(self) -> str:
        """One row a step; where a backend says more of its steps than their messages, that too."""
        shown = [n for n in DETAILS if any(n in step.details for step in self.steps)]
        costs = ("rounds", "bytes") if shown else ("rounds", "bytes", "dealt bytes")
        head = ("step", "path", "operator", "kernel", *(n.replace("_", " ") for n in shown), *costs)
        rounds = self.step_rounds()
        rows = [head, *(self._row(s, rounds[s.index], shown) for s in self.steps)]
        sums = [_figure(sum(s.details.get(n, 0) for s in self.steps)) if n in SUMMED else "" for n in shown]
        rows.append(("", "total", "", "", *sums, *_costs(self.totals, self.totals.rounds, shown)))
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        aligned = [
            [
                t.ljust(w) if i in (1, 2, 3) else t.rjust(w)
                for i, (t, w) in enumerate(zip(r, widths, strict=True))
            ]
            for r in rows
        ]
        lines = ["  ".join(cells) for cells in aligned]
        rule = "-" * max(map(len, lines))
        fits = [_fit_line(step) for step in self.steps if step.fit is not None]
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *fits])

    @staticmethod
    def _row(step: Step, rounds: int, shown: Sequence[str]) -> tuple[str, ...]:
        details = [_figure(step.details[n]) if n in step.details else "" for n in shown]
        head = (str(step.index), step.node.path, step.node.op, step.kernel)
        return (*head, *details, *_costs(step.cost, rounds, shown))


def _fit_line(step: Step) -> str:
    fit = step.fit or {}
    outside = f"{fit['outside']:,} values" if fit["outside"] else "no value"
    where = f"fitted on ±{fit['range']:.4g} with an error of at most {fit['error']:.1e}"
    return f"step {step.index}: {fit['kind']}, {where}; {outside} of the calibration outside"


SUMMED = ("rotations", "products", "estimate_ms")


def _figure(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _costs(cost: Cost, rounds: int, shown: Sequence[str]) -> tuple[str, ...]:
    """Bytes of a backend with details of its own are bounds, and it deals nothing."""
    if shown:
        return (f"{rounds:,}", f"<= {cost.bytes:,}" if cost.bytes else "0")
    return (f"{rounds:,}", f"{cost.bytes:,}", f"{cost.dealt_bytes:,}")


def make_plan(graph: Graph, registry: Registry, parties: int, options: Mapping[str, Any]) -> Plan:
    """A kernel for every node, between a "begin" and a "reveal" step.

    parties: how many compute (the dealer does not). options: public settings that formulas may look at.
    Raises UnsupportedModelError with every node that no kernel of the catalog accepts.
    """
    steps: list[Step] = []
    problems: list[UnsupportedNode] = []
    for node in (BEGIN, *graph.nodes, reveal_node(graph)):
        context = step_context(graph, node, parties, options)
        spec, reason = _choose(registry, context)
        if spec is None:
            problems.append(UnsupportedNode(node.name, node.operator or node.op, node.path, reason))
        else:
            steps.append(Step(len(steps), node, spec.name, spec.cost(context)))
    if problems:
        raise UnsupportedModelError(problems)
    return Plan(tuple(steps))


def _choose(registry: Registry, context: StepContext) -> tuple[KernelSpec | None, str]:
    """The first kernel that accepts the step, or why none does."""
    node = context.node
    if "reason" in node.attrs:  # export found no canonical operator
        return None, str(node.attrs["reason"])
    reasons = []
    for spec in registry.for_op(node.op):
        if spec.parties is not None and spec.parties != context.parties:
            reasons.append(f"{spec.name} takes {spec.parties} parties, not {context.parties}")
            continue
        refusal = spec.accepts(context)
        if refusal is None:
            return spec, ""
        reasons.append(f"{spec.name}: {refusal}")
    return None, "; ".join(reasons) or f"the {registry.backend} backend has no kernel for {node.op}"
