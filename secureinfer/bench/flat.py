"""A model's answer as one tensor, whatever its structure, so that answers of all engines can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def flat(output: Any) -> torch.Tensor:
    """The only tensor of an answer as it is; several, in one row each sample where they share a first dimension."""
    leaves = [leaf.detach().float().cpu() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if len(leaves) == 1:
        return leaves[0]
    if all(leaf.dim() and leaf.shape[0] == leaves[0].shape[0] for leaf in leaves):
        return torch.cat([leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1) for leaf in leaves], dim=1)
    return torch.cat([leaf.flatten() for leaf in leaves])
