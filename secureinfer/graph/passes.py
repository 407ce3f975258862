"""The passes in order, until nothing changes: simplify, deduplicate, recover masks, fuse."""

from __future__ import annotations

from . import fuse, masks, simplify
from .draft import Draft

MAX_SWEEPS = 50
"""Each sweep shrinks the draft or moves a factor towards its layer, so a real model needs a handful."""


def canonicalise(draft: Draft) -> None:
    """Rewrite the draft in place. Values stay equal to the model's, up to float64 rounding, at every place
    that is kept."""
    for _ in range(MAX_SWEEPS):
        changed = draft.rewrite(*simplify.RULES)
        changed |= draft.rewrite(simplify.deduplicate())
        changed |= draft.rewrite(*masks.RULES)
        changed |= draft.rewrite(*fuse.RULES)
        if not changed:
            return
