"""Engine: one party's side of one session, whatever the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch


class Engine(ABC):
    """One party (a compute party or the dealer) of one session.

    Calls come in this order: setup once; then prepare and run, each index at most once, prepare before run; close once.
    One thread may prepare while another runs an index that was prepared before. A backend without a dealer has nothing to
    prepare: there, run comes alone, with indices that go up by one.
    """

    @abstractmethod
    def setup(self) -> None:
        """Exchange seeds and session masks with the peers (phase "setup")."""

    @abstractmethod
    def prepare(self, index: int) -> None:
        """Make the correlated randomness of inference `index` (phase "offline"). Takes no input."""

    @abstractmethod
    def run(self, index: int, inputs: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """Run inference `index` (phase "online").

        inputs: edge name -> plaintext tensor, for the edges that this party owns; None if it owns none.
        Returns edge name -> plaintext output where this party is one of graph.reveal_to, else None.
        Raises CorrelationError if the index was not prepared, where that is needed, or was already used.
        """

    def material_bytes(self) -> int:
        """Of one inference's material at this party, from its dealing until it is used. The same for every inference."""
        return 0

    @abstractmethod
    def step_times(self) -> dict[int, float]:
        """Plan step -> seconds in the last run."""

    @abstractmethod
    def close(self) -> None:
        """Erase seeds and material. May be called twice."""
