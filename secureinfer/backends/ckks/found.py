"""What is compiled for CKKS, and what the search for parameters and layouts gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...graph.ir import Graph
from .params import Parameters
from .schedule import Schedule
from .stages import Stages


@dataclass(frozen=True)
class Source:
    """What is compiled: the graph of one sample, its tensors, samples as rows, and how many samples one inference has."""

    graph: Graph
    tensors: Mapping[str, torch.Tensor]
    samples: Mapping[str, torch.Tensor]
    batch: int
    independent: bool


@dataclass(frozen=True, eq=False)
class Found:
    """schedule: None where each sample has a slot, and each value a ciphertext. late: folds come before rescaling, for less
    noise; rotations are faster after it."""

    stages: Stages
    parameters: Parameters
    schedule: Schedule | None
    predicted_error: float
    late: bool
