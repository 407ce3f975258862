"""CrypTen's Communicator over transport Links: the collectives that its primitives use, with exact counts and no pickle.

Every message has an address (phase, inference, step, ordinal in the step) that both ends compute for themselves, so that
parties which run different programs are found at the first frame. All collectives are one round: each party sends its
tensor to every other, and combines what it gets in rank order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from ...errors import SessionError, WireError
from ...transport.base import Address, Link

NUMPY_TYPES: dict[torch.dtype, Any] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}
MAX_OBJECT_BYTES = 1 << 20
_PAIRWISE = 1 << 31
"""Ordinals of messages between two parties start here, apart from those of collectives."""


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> bytes | memoryview:
    """The little-endian bytes of tensors, one after the other."""
    arrays = [t.detach().contiguous().cpu().numpy() for t in tensors]
    if len(arrays) == 1:
        return memoryview(arrays[0].reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    return b"".join(a.tobytes() for a in arrays)


def tensors_from(payload: memoryview, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors with the shapes and dtypes of `like`; the payload's length was checked by the Link."""
    out, offset = [], 0
    for t in like:
        count = math.prod(t.shape)
        size = count * t.dtype.itemsize
        raw = np.frombuffer(payload[offset : offset + size], dtype=NUMPY_TYPES[t.dtype], count=count)
        if not raw.flags.writeable:
            raw = raw.copy()
        out.append(torch.from_numpy(raw).reshape(tuple(t.shape)).to(t.device))
        offset += size
    return out


class _Done:
    """The request of an asynchronous call that has already ended."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self._action = action

    def is_completed(self) -> bool:
        return self._action is None

    def wait(self) -> None:
        if self._action is not None:
            action, self._action = self._action, None
            action()


class LinkCommunicator:
    """CrypTen's communicator interface for one rank.

    links: by peer name. names: compute parties in rank order. address: gives each collective its Address, place: the step
    that messages between two parties belong to.
    on_open: called with what a reduction gave, for audits. tracing: nothing is sent, only shapes come back.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        links: Mapping[str, Link],
        address: Callable[[], Address],
        place: Callable[[], Address],
        *,
        on_open: Callable[[Sequence[torch.Tensor]], None] | None = None,
        tracing: bool = False,
    ) -> None:
        self.rank = rank
        self.tracing = tracing
        self._on_open = on_open
        self.names = tuple(names)
        self._links = links
        self._address = address
        self._place = place
        self._pairwise: dict[tuple[str, int], int] = {}
        self._name = self.names[rank]

    # -- what CrypTen asks of itself

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return len(self.names)

    def get_ttp_rank(self) -> int:
        raise SessionError("the dealer of a session has no rank; CrypTen's TTP provider is not used")

    def set_name(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name

    def get_distributed_backend(self) -> str:
        return "grpc"

    def peers(self) -> list[int]:
        return [r for r in range(len(self.names)) if r != self.rank]

    def _link(self, rank: int) -> Link:
        if not 0 <= rank < len(self.names) or rank == self.rank:
            raise SessionError(
                f"rank {rank} is not a peer of rank {self.rank} among {len(self.names)} parties"
            )
        return self._links[self.names[rank]]

    # -- messages

    def _send(self, tensors: Sequence[torch.Tensor], dst: int, address: Address) -> None:
        self._link(dst).send(address, tensor_bytes(tensors))

    def _receive(self, like: Sequence[torch.Tensor], src: int, address: Address) -> list[torch.Tensor]:
        size = sum(math.prod(t.shape) * t.dtype.itemsize for t in like)
        return tensors_from(self._link(src).receive(address, size), like)

    def exchange(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Send `tensors` to every peer as one frame and get theirs: a list for each rank, in rank order."""
        if self.tracing:
            return [list(tensors) for _ in self.names]
        address = self._address()
        for peer in self.peers():
            self._send(tensors, peer, address)
        return [
            list(tensors) if rank == self.rank else self._receive(tensors, rank, address)
            for rank in range(len(self.names))
        ]

    def to_one(self, tensors: Sequence[torch.Tensor], dst: int) -> list[list[torch.Tensor]] | None:
        """Send `tensors` to rank dst alone, which gets a list for each rank; the others get None."""
        if self.tracing:
            return [list(tensors) for _ in self.names]
        address = self._address()
        if self.rank != dst:
            self._send(tensors, dst, address)
            return None
        return [
            list(tensors) if rank == dst else self._receive(tensors, rank, address)
            for rank in range(len(self.names))
        ]

    def exchange_bytes(self, payload: bytes | memoryview) -> list[memoryview]:
        """Send a payload to every peer as one frame, and get theirs, of the same size, in rank order."""
        address = self._address()
        for peer in self.peers():
            self._link(peer).send(address, payload)
        return [self._link(peer).receive(address, len(payload)) for peer in self.peers()]

    def bytes_to_one(self, payload: bytes | memoryview, dst: int, size: int) -> list[memoryview] | None:
        """Send a payload of `size` bytes to rank dst alone, which gets every peer's in rank order; the others get None."""
        address = self._address()
        if self.rank != dst:
            self._link(dst).send(address, payload)
            return None
        return [self._link(peer).receive(address, size) for peer in self.peers()]

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._send([tensor], dst, self._pair_address("to", dst))

    def recv(self, tensor: torch.Tensor, src: int | None = None) -> torch.Tensor:
        source = self._source(src)
        return self._receive([tensor], source, self._pair_address("from", source))[0]

    def _pair_address(self, direction: str, peer: int) -> Address:
        """For messages between two parties, which the others do not see: numbered in each direction of each pair."""
        count = self._pairwise.get((direction, peer), 0)
        self._pairwise[direction, peer] = count + 1
        here = self._place()
        return Address(here.phase, here.inference, here.step, _PAIRWISE + count)

    def isend(self, tensor: torch.Tensor, dst: int) -> _Done:
        self.send(tensor, dst)
        return _Done()

    def irecv(self, tensor: torch.Tensor, src: int | None = None) -> _Done:
        source = self._source(src)
        address = self._pair_address("from", source)

        def fill() -> None:
            tensor.copy_(self._receive([tensor], source, address)[0])

        return _Done(fill)

    def _source(self, src: int | None) -> int:
        if src is not None:
            return src
        if len(self.names) == 2:
            return 1 - self.rank
        raise SessionError("recv needs the rank to receive from when there are more than two parties")

    def scatter(
        self,
        scatter_list: Sequence[torch.Tensor],
        src: int,
        size: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        address = self._address()
        if self.rank == src:
            for peer in self.peers():
                self._send([scatter_list[peer]], peer, address)
            return scatter_list[self.rank]
        like = torch.empty(
            tuple(size) if size is not None else tuple(scatter_list[self.rank].shape), dtype=torch.int64
        )
        return self._receive([like], src, address)[0]

    def gather(self, tensor: torch.Tensor, dst: int) -> list[Any]:
        got = self.to_one([tensor], dst)
        return [None] if got is None else [row[0] for row in got]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [row[0] for row in self.exchange([tensor])]

    def reduce(self, input: Any, dst: int, op: Any = ReduceOp.SUM, batched: bool = False) -> Any:
        got = self.to_one(list(input) if batched else [input], dst)
        if got is None:
            return None
        reduced = self._reduced(got, op)
        return reduced if batched else reduced[0]

    def _reduced(self, rows: Sequence[Sequence[torch.Tensor]], op: Any) -> list[torch.Tensor]:
        reduced = reduce_rows(rows, op)
        if self._on_open is not None and not self.tracing:
            self._on_open(reduced)
        return reduced

    def all_reduce(self, input: Any, op: Any = ReduceOp.SUM, batched: bool = False) -> Any:
        reduced = self._reduced(self.exchange(list(input) if batched else [input]), op)
        return reduced if batched else reduced[0]

    def broadcast(self, input: Any, src: int, group: Any = None, batched: bool = False) -> Any:
        tensors = list(input) if batched else [input]
        address = self._address()
        if self.rank == src:
            for peer in self.peers():
                self._send(tensors, peer, address)
            return input
        got = self._receive(tensors, src, address)
        for old, new in zip(tensors, got, strict=True):
            old.copy_(new)
        return got if batched else got[0]

    def barrier(self) -> None:
        self.exchange([torch.zeros(0, dtype=torch.uint8)])

    # -- objects: JSON, never pickle

    def send_obj(self, obj: Any, dst: int, group: Any = None) -> None:
        self._link(dst).send(self._pair_address("to", dst), _dump(obj))

    def recv_obj(self, src: int, group: Any = None) -> Any:
        return _load(self._link(src).receive(self._pair_address("from", src), limit=MAX_OBJECT_BYTES))

    def broadcast_obj(self, obj: Any, src: int, group: Any = None) -> Any:
        address = self._address()
        if self.rank == src:
            for peer in self.peers():
                self._link(peer).send(address, _dump(obj))
            return obj
        return _load(self._link(src).receive(address, limit=MAX_OBJECT_BYTES))

    # -- CrypTen's own statistics are kept by the links

    def reset_communication_stats(self) -> None:
        """Nothing to do: counters of a Link only grow."""

    def get_communication_stats(self) -> dict[str, int]:
        totals = [self._link(peer).total() for peer in self.peers()]
        return {
            "rounds": sum(t.frames_sent for t in totals),
            "bytes": sum(t.bytes_sent for t in totals),
        }

    def print_communication_stats(self) -> None:
        import logging

        logging.getLogger("secureinfer").info("communication: %s", self.get_communication_stats())


def reduce_rows(rows: Sequence[Sequence[torch.Tensor]], op: Any = ReduceOp.SUM) -> list[torch.Tensor]:
    """Combine the tensors of all ranks, position by position: SUM or BXOR."""
    if op not in (ReduceOp.SUM, ReduceOp.BXOR):
        raise SessionError(f"reduce operation {op} is not one that additive or XOR shares need")
    out = []
    for column in zip(*rows, strict=True):
        total = column[0].clone()
        for t in column[1:]:
            total = total ^ t if op == ReduceOp.BXOR else total + t
        out.append(total)
    return out


def _dump(obj: Any) -> bytes:
    def encode(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, (tuple, list)):
            return {type(value).__name__: [encode(v) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
        raise SessionError(
            f"an object of type {type(value).__name__} cannot be sent; send tensors or JSON values"
        )

    return json.dumps(encode(obj)).encode()


def _load(payload: memoryview) -> Any:
    if len(payload) > MAX_OBJECT_BYTES:
        raise WireError(f"an object of {len(payload)} bytes is larger than {MAX_OBJECT_BYTES}")

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, body),) = value.items()
        if kind == "size":
            return torch.Size(body)
        if kind == "dict":
            return {decode(k): decode(v) for k, v in body}
        items = [decode(v) for v in body]
        return tuple(items) if kind == "tuple" else items

    try:
        return decode(json.loads(bytes(payload)))
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise WireError("a peer sent an object that is not the expected JSON") from e
