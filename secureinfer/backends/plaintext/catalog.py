"""The catalog of the plaintext backend: one row an operator, exact and free."""

from __future__ import annotations

from ...graph.ops import OPS
from ...plan.spec import Cost, KernelSpec, Registry

CATALOG = Registry(
    "plaintext",
    [
        KernelSpec(
            op=name,
            name=f"plaintext.{name}",
            backend="plaintext",
            accepts=lambda context: None,
            cost=lambda context: Cost(),
            error_bound=lambda context: 0.0,
            source="the PyTorch operator itself",
        )
        for name in ("begin", *OPS, "reveal")
    ],
)
