"""Party: what one compute party of one session holds while kernels run: rank, links, seeds, material and its place.

Kernels are written once against a Party. In *trace* mode tensors are shapes only (torch's meta device), nothing is sent,
and each correlation asked for is recorded: that list is what the dealer deals and the parties expand. In *run* mode the
same calls take the material and talk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import CorrelationError
from ...transport.base import Address, Link
from .communicator import LinkCommunicator
from .correlations import Correlation
from .packing import pack, packed_bytes, unpack
from .randomness import Seed, Stream, fresh_nonce

SESSION = -1
"""The inference index of session-wide values: masks of weights."""

Parts = dict[str, torch.Tensor]

Place = tuple[int, int, int]
"""Of a record of dealt randomness: inference, step, ordinal in the step."""


@dataclass(frozen=True)
class Request:
    """One correlation that the program asks for: its place (plan step, ordinal in the step) and its kind."""

    step: int
    record: int
    kind: Correlation


@dataclass(frozen=True)
class Opening:
    """What all parties saw at one opening; for audits in tests.

    mask: (inference, step, record) of the correlation that hid it; None where the opening is of the declared output.
    words: the opened tensors.
    """

    inference: int
    step: int
    what: str
    mask: Place | None
    words: tuple[torch.Tensor, ...]


def _payload(words: Sequence[tuple[torch.Tensor, int]]) -> bytes | memoryview:
    pieces = [pack(x, bits) for x, bits in words]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True)
class Word:
    """Shares of k-bit words that one record masks. items: (shares, k). xor: they combine by XOR, else by addition."""

    what: str
    items: Sequence[tuple[torch.Tensor, int]]
    xor: bool
    mask: Place | None


@dataclass
class Party:
    """State of one rank.

    rank: 0 is the model owner. names: compute parties in rank order. pair_seeds: by peer rank, for sharings of zero.
    cores: threads for what this party computes while all others wait for it; None: as many as it has at all times.
    audit: called with every Opening; None outside tests. ask: gets a correlation at once, for programs without a plan.
    """

    rank: int
    names: tuple[str, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    tracing: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pair_seeds: dict[tuple[int, int], Seed] = field(default_factory=dict)
    audit: Callable[[Opening], None] | None = None
    cores: int | None = None
    ask: Callable[[Correlation, int], Parts] | None = None

    def __post_init__(self) -> None:
        self.requests: list[Request] = []
        self.material: dict[int, dict[tuple[int, int], tuple[Correlation, Parts]]] = {}
        self.phase, self.inference, self.step = "setup", 0, 0
        self._message = self._record = self._zero = 0
        self._named: dict[str, int] = {}
        self._mask: Place | None = None
        self._what = ""
        self.communicator = LinkCommunicator(
            self.rank,
            self.names,
            self.links,
            self._next_address,
            self._here,
            on_open=None if self.audit is None else self._opened,
            tracing=self.tracing,
        )

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def first(self) -> bool:
        """Whether this party adds public constants to its share."""
        return self.rank == 0

    def at(self, phase: str, inference: int, step: int) -> None:
        """Go to a step: ordinals of messages, correlations and zero sharings start again."""
        self.phase, self.inference, self.step = phase, inference, step
        self._message = self._record = self._zero = 0
        self._named = {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Compute with all cores: the other parties wait for what this one sends next."""
        threads = torch.get_num_threads()
        if self.cores is None or self.cores <= threads:
            yield
            return
        torch.set_num_threads(self.cores)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _here(self) -> Address:
        return Address(self.phase, max(self.inference, 0), self.step, 0)

    def _next_address(self) -> Address:
        address = Address(self.phase, max(self.inference, 0), self.step, self._message)
        self._message += 1
        return address

    # -- correlated randomness

    def take(self, kind: Correlation) -> Parts:
        """This party's shares of one record of dealt randomness, which is gone afterwards.

        Raises CorrelationError if it was not dealt, was taken before, or is of another kind.
        """
        place = (self.step, self._record)
        self._record += 1
        if self.tracing:
            self.requests.append(Request(*place, kind))
            return {p.name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in kind.parts()}
        self._mask = (self.inference, *place)
        if self.ask is not None:
            return self.ask(kind, place[1])
        found = self.material.get(self.inference, {}).pop(place, None)
        if found is None:
            raise CorrelationError(
                f"no material for inference {self.inference}, step {place[0]}, record {place[1]}: "
                "it was never dealt or was already used; prepare a new inference"
            )
        dealt, parts = found
        if dealt != kind:
            raise CorrelationError(
                f"the material of inference {self.inference}, step {place[0]}, record {place[1]} "
                "was dealt for another kind or shape; the parties do not run one program"
            )
        return parts

    # -- openings

    def open(self, tensors: Sequence[torch.Tensor], what: str, xor: bool = False) -> list[torch.Tensor]:
        """Open shares to all parties as one frame each way: one round. The shares must be masked by the caller."""
        self._what = what
        op = torch.distributed.ReduceOp.BXOR if xor else torch.distributed.ReduceOp.SUM
        opened: list[torch.Tensor] = self.communicator.all_reduce(list(tensors), op=op, batched=True)
        self._what = ""
        return opened

    def open_to(self, tensors: Sequence[torch.Tensor], rank: int, what: str) -> list[torch.Tensor] | None:
        """Open shares to one rank: one message from each other party, one round. None at the others."""
        self._what = what
        opened: list[torch.Tensor] | None = self.communicator.reduce(list(tensors), rank, batched=True)
        self._what = ""
        return opened

    def open_words(
        self, words: Sequence[tuple[torch.Tensor, int]], what: str, xor: bool = False
    ) -> list[torch.Tensor]:
        """Open shares of k-bit words to all parties, as one frame each way: one round.

        words: (shares, k). Only the low k bits are sent and count. The shares must be masked by the caller.
        """
        return self.open_together([Word(what, [(x, bits)], xor, self._mask) for x, bits in words])

    def open_together(self, words: Sequence[Word]) -> list[torch.Tensor]:
        """Open words of several protocols to all parties as one frame each way: one round. One tensor for each item."""
        listed = [item for word in words for item in word.items]
        if self.tracing:
            return [torch.empty_like(x) for x, _ in listed]
        rows = self.communicator.exchange_bytes(_payload(listed))
        opened, offset = [], 0
        for word in words:
            size = sum(packed_bytes(x.numel(), bits) for x, bits in word.items)
            part = self._combined([row[offset : offset + size] for row in rows], word.items, word.xor)
            offset += size
            opened += part
            self._audited(part, word.what, word.mask)
        return opened

    def word(
        self, what: str, *items: tuple[torch.Tensor, int], xor: bool = False, mask: Place | None = None
    ) -> Word:
        """What to open under the mask of one record: the one taken last, or `mask`. items: (shares, k)."""
        return Word(what, list(items), xor, mask or self._mask)

    @property
    def mask(self) -> Place | None:
        """The place of the record that was taken last."""
        return self._mask

    def open_words_to(
        self, words: Sequence[tuple[torch.Tensor, int]], rank: int, what: str
    ) -> list[torch.Tensor] | None:
        """Open shares of k-bit words to one rank: one message from each other party, one round. None at the others.

        words: (shares, k), as for open_words.
        """
        if self.tracing:
            return [torch.empty_like(x) for x, _ in words]
        payload = b"" if self.rank == rank else _payload(words)
        rows = self.communicator.bytes_to_one(
            payload, rank, sum(packed_bytes(x.numel(), b) for x, b in words)
        )
        if rows is None:
            return None
        opened = self._combined(rows, words, xor=False)
        self._audited(opened, what, self._mask)
        return opened

    @staticmethod
    def _combined(
        rows: Sequence[memoryview], words: Sequence[tuple[torch.Tensor, int]], xor: bool
    ) -> list[torch.Tensor]:
        """This party's words and those that every other sent, added modulo 2**k or XORed."""
        opened = []
        offset = 0
        for x, bits in words:
            size = packed_bytes(x.numel(), bits)
            total = x
            # Whole words may be the payload's own memory, which is not ours to write to; others were made for us.
            ours = 8 * x.itemsize != bits
            for row in rows:
                other = unpack(row[offset : offset + size], x.shape, bits, x.dtype)
                if xor:
                    total = other.bitwise_xor_(total) if ours else other ^ total
                else:
                    total = other.add_(total) if ours else other + total
            offset += size
            opened.append(total & ((1 << bits) - 1) if bits < 64 and not xor else total)
        return opened

    def _audited(self, words: Sequence[torch.Tensor], what: str, mask: Place | None) -> None:
        if self.audit is not None:
            mask = None if what == "output" else mask
            self.audit(Opening(self.inference, self.step, what, mask, tuple(w.clone() for w in words)))

    def _opened(self, words: Sequence[torch.Tensor]) -> None:
        self._audited(words, self._what or "beaver", self._mask)

    # -- sharings of zero

    def zero_stream(self, first: int, second: int, label: str) -> Stream:
        """The next stream that ranks first and second have in common."""
        return self.pair_seeds[first, second].stream(self.inference, self.step, self._zero, label)

    def zero_share(self, shape: Sequence[int], xor: bool = False) -> torch.Tensor:
        """This party's share of zero, uniform, without communication: every neighbouring pair of ranks has a seed."""
        if self.tracing:
            return torch.empty(tuple(shape), dtype=torch.int64, device="meta")
        here, after, before = self.rank, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        mine = self.zero_stream(before, here, "zero").tensor(shape, device=self.device)
        others = self.zero_stream(here, after, "zero").tensor(shape, device=self.device)
        self._zero += 1
        return mine ^ others if xor else mine - others

    def named_ring(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Uniform ring elements for CrypTen's named generators: `prev` and `next` are shared with a neighbour."""
        if self.tracing:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        here, after, before = self.rank, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if name in ("prev", "next"):
            pair = (before, here) if name == "prev" else (here, after)
            count = self._named.get(name, 0)
            self._named[name] = count + 1
            stream = self.pair_seeds[pair].stream(self.inference, self.step, count, "crypten")
            return stream.tensor(shape, device=self.device)
        if name == "local":
            return Stream(fresh_nonce()).tensor(shape, device=self.device)
        raise CorrelationError("CrypTen's global generator would be known to every party; it is not offered")

    # -- the end of an inference

    def burn(self, inference: int) -> None:
        """Drop whatever is left of one inference: its index is never used again."""
        self.material.pop(inference, None)
        for seed in self.pair_seeds.values():
            seed.forget(inference)
