"""The dealer: expands every party's seed, and sends rank 0 the corrections that bind the shares together.

It holds the seeds that it agreed with each compute party and the public program. It never sees an input, a weight, a share
of a value or anything that compute parties open; it learns the shape of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...errors import CorrelationError
from ...transport.base import Address, Link
from .correlations import Correlation, MaskedWeight, SessionWeight, combine
from .party import SESSION, Request
from .randomness import NONCE_BYTES, Seed, agree_seed, fresh_nonce
from .seeds import dealer_role


def check_distinct(seeds: Sequence[Seed]) -> None:
    """Raises CorrelationError if two parties share a seed with the dealer: one could expand the other's masks (R2)."""
    for i, seed in enumerate(seeds):
        if any(seed.same_as(other) for other in seeds[:i]):
            raise CorrelationError("two parties have one seed with the dealer; the session is refused")


def draw(kind: Correlation, seed: Seed, rank: int, place: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """What rank expands from its seed for one record: all parts, but at rank 0 only the free ones."""
    parts = {}
    for part in kind.parts():
        if part.bound and rank == 0:
            continue
        if part.without == rank:
            parts[part.name] = torch.zeros(part.shape, dtype=part.dtype)
        else:
            parts[part.name] = seed.stream(*place, part.name).tensor(part.shape, part.dtype)
    return parts


def mask_of_weight(seed: Seed, weight: MaskedWeight, shape: Sequence[int]) -> torch.Tensor:
    """The session-wide mask B of one weight in one ring, from its owner's seed: uniform over the whole ring."""
    return seed.stream(SESSION, 0, 0, weight.label).tensor(shape)


class Dealer:
    """One session's dealer.

    requests: what one inference asks for, in order, from tracing the program. weights: shapes of those that have a
    session-wide mask, all owned by rank 0.
    """

    def __init__(
        self,
        names: Sequence[str],
        requests: Sequence[Request],
        weights: Mapping[MaskedWeight, tuple[int, ...]],
        *,
        session_id: bytes,
        manifest_digest: str,
    ) -> None:
        self.names = tuple(names)
        self.requests = tuple(requests)
        self._weights = dict(weights)
        self._session_id = session_id
        self._manifest_digest = manifest_digest
        self.seeds: list[Seed] = []
        self._masks: dict[MaskedWeight, SessionWeight] = {}
        self._next = 0

    def agree(self, links: Mapping[str, Link]) -> None:
        """Exchange nonces with every party: one frame each way. Then draw the masks of the weights."""
        address = Address("setup", 0, 0, 0)
        mine = {name: fresh_nonce() for name in self.names}
        for name in self.names:
            links[name].send(address, mine[name])
        self.seeds = [
            agree_seed(
                bytes(links[name].receive(address, NONCE_BYTES)),
                mine[name],
                session=self._session_id,
                manifest_digest=self._manifest_digest,
                role=dealer_role(rank),
            )
            for rank, name in enumerate(self.names)
        ]
        check_distinct(self.seeds)
        self._masks = {
            weight: SessionWeight(mask_of_weight(self.seeds[0], weight, shape))
            for weight, shape in self._weights.items()
        }

    @torch.inference_mode()
    def deal(self, inference: int, link: Link) -> None:
        """Send rank 0 the corrections of one inference, a frame a record. Each index once, in rising order (R3)."""
        if inference < self._next:
            raise CorrelationError(
                f"inference {inference} was already dealt or skipped; the next index that can be dealt is {self._next}"
            )
        self._next = inference + 1
        for request in self.requests:
            correction = self.correction(inference, request)
            link.send(
                Address("offline", inference, request.step, request.record + 1),
                request.kind.write_correction(correction),
            )
        for seed in self.seeds:
            seed.forget(inference)

    def correction(self, inference: int, request: Request) -> dict[str, torch.Tensor]:
        """Rank 0's shares of the bound parts of one record."""
        place = (inference, request.step, request.record)
        drawn = [draw(request.kind, seed, rank, place) for rank, seed in enumerate(self.seeds)]
        parts = request.kind.parts()
        free = {p.name: [d[p.name] for d in drawn] for p in parts if not p.bound}
        values = request.kind.bind(free, self._masks)
        out = {}
        for part in parts:
            if not part.bound:
                continue
            value = values[part.name]
            others = [d[part.name] for d in drawn[1:]]
            if others:
                rest = combine(others, part.xor)
                value = value ^ rest if part.xor else value - rest
            out[part.name] = value.to(part.dtype).contiguous()
        return out

    def erase(self) -> None:
        for seed in self.seeds:
            seed.erase()
        self._masks.clear()
