"""The toy engine in the place of the CKKS backend: a catalog that says what it sends, and what makes it of a program.

Sessions between two parties are tested with it, without any encryption: a program of backend "ckks" whose plan states
bounds, as that of ciphertexts does.
"""

from __future__ import annotations

from typing import Any

from secureinfer.plan.spec import Cost, KernelSpec, Registry

SENT = 64 + 2 * (64 + 64)
"""Bytes of one inference of a 2 x 4 input: the frame that begins it, the input in float64, the answer."""
SET_UP = 2 * (64 + 16)


def registry(most: int = 1000) -> Registry:
    """most: bytes that the middle step is said to send at most."""
    costs = {
        "begin": Cost("b", 64, setup=frozenset({("keys", 2 * SET_UP)})),
        "linear": Cost("b1", most),
        "reveal": Cost(),
    }
    return Registry("ckks", [_row(op, cost) for op, cost in costs.items()])


def _row(op: str, cost: Cost) -> KernelSpec:
    return KernelSpec(op, f"toy.{op}", "ckks", lambda c: None, lambda c: cost, lambda c: 0.0, "nowhere")


def make_engine(role: str, program: Any, **given: Any) -> Any:
    from toy_engine import make

    if given.keys() != {"me", "compute_parties", "links", "clock", "session_id", "processes"}:
        raise ValueError(f"the backend without a dealer is given {sorted(given)}")
    del given["processes"]
    return make(role, program, dealer="", **given)
