"""Whether a plan that came in a file may run: its kernels are rows of the catalog that take exactly these steps, and its
edges have the scales and rings that these kernels compute with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ProgramFileError
from ..graph.ir import Graph
from .planner import Plan
from .spec import Registry, Step, step_context


def check_plan(
    graph: Graph, plan: Plan, registry: Registry, parties: int, options: Mapping[str, Any]
) -> None:
    """Raise ProgramFileError unless every step's kernel belongs to its operator and accepts its operands.

    A file could otherwise run `reveal` in the middle of a model: what it opens is hidden by no mask.
    """
    for step in plan.steps:
        try:
            reason = _refusal(graph, step, registry, parties, options)
        except Exception as error:  # a formula that stumbles over odd attributes
            reason = f"the step does not fit it ({type(error).__name__})"
        if reason is not None:
            raise ProgramFileError(
                f"step {step.index} ({step.node.op}) of this program is planned with kernel {step.kernel!r}: {reason}; "
                "compile the model again",
                public_detail=f"kernel of step {step.index}",
            )
    try:
        reason = registry.check(graph, plan.steps, options) if registry.check is not None else None
    except Exception as error:  # whatever odd attributes make a check stumble
        reason = f"it does not fit ({type(error).__name__})"
    if reason is not None:
        raise ProgramFileError(
            f"this program is not what compiling gives: {reason}; compile the model again",
            public_detail="scales and rings",
        )


def _refusal(
    graph: Graph, step: Step, registry: Registry, parties: int, options: Mapping[str, Any]
) -> str | None:
    spec = registry.specs.get(step.kernel)
    if spec is None:
        return f"the {registry.backend} backend has none of that name"
    if spec.op != step.node.op:
        return f"that one computes {spec.op}"
    if spec.parties is not None and spec.parties != parties:
        return f"it takes {spec.parties} parties, not {parties}"
    return spec.accepts(step_context(graph, step.node, parties, options))
