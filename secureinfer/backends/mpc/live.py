"""Any CrypTen program between parties: correlations are asked for as it runs, and dealt at once.

A planned program knows its correlations beforehand (engine.py). A program written against CrypTen does not: here each party
sends the dealer a description of the correlation that it needs next, the dealer checks that all ask for the same one, and
sends rank 0 the correction. `crypten_party` is the party's side, `serve` the dealer's.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import CorrelationError, WireError
from ...transport.base import Address, Link
from . import ring, runtime
from .correlations import And, BitPair, Correlation, Product, Square, Truncation, Wraps
from .dealer import Dealer, draw
from .party import Parts, Party, Request
from .seeds import agree

MAX_REQUEST_BYTES = 1 << 16
MAX_CORRECTION_BYTES = 1 << 32
_KINDS: dict[str, type[Correlation]] = {
    "product": Product,
    "square": Square,
    "and": And,
    "wraps": Wraps,
    "bits": BitPair,
    "truncation": Truncation,
}
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.int64, torch.int32, torch.int16, torch.uint8)}


def pack(kind: Correlation) -> bytes:
    """A correlation as JSON. Raises CorrelationError for a kind that only planned programs use."""
    name = next((n for n, c in _KINDS.items() if type(kind) is c), None)
    if name is None:
        raise CorrelationError(f"{type(kind).__name__} can only be dealt for a planned program")
    fields = {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in vars(kind).items()
    }
    return json.dumps({"kind": name, **fields}, sort_keys=True).encode()


def unpack(payload: bytes | memoryview) -> Correlation:
    """The correlation behind a peer's request. Raises WireError if it is malformed, inconsistent or too large."""
    if len(payload) > MAX_REQUEST_BYTES:
        raise WireError(f"a request of {len(payload)} bytes is longer than {MAX_REQUEST_BYTES}")
    try:
        raw = json.loads(bytes(payload))
        cls = _KINDS[raw.pop("kind")]
        fields: dict[str, Any] = {}
        for key, value in raw.items():
            if key in ("left", "right", "result", "shape"):
                fields[key] = _shape(value)
            elif key == "dtype":
                fields[key] = _DTYPES[value]
            elif key == "options":
                fields[key] = tuple((str(k), tuple(v) if isinstance(v, list) else v) for k, v in value)
            elif key in ("op", "bits"):
                fields[key] = value
            else:
                raise KeyError(key)
        kind = cls(**fields)
        _check(kind)
        return kind
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        RecursionError,
        IndexError,
    ) as e:
        raise WireError("a peer asked for a correlation that cannot be") from e


def _shape(value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > 16
        or not all(type(n) is int and 0 <= n < 1 << 40 for n in value)
    ):
        raise ValueError("not a shape")
    return tuple(value)


def _check_options(kind: Product) -> None:
    """Strides, paddings and the like that a convolution can have, and channels that its groups divide."""
    options = dict(kind.options)
    for key, value in options.items():
        least = 0 if key in ("padding", "output_padding") else 1
        numbers = value if isinstance(value, tuple) else (value,)
        if key not in ("stride", "padding", "output_padding", "dilation", "groups") or not all(
            type(n) is int and least <= n < 1 << 20 for n in numbers
        ):
            raise ValueError("not an option")
    if kind.op in ("conv1d", "conv2d"):
        groups = options.get("groups", 1)
        if kind.left[1] != kind.right[1] * groups or kind.right[0] % groups:
            raise ValueError("channels that the groups do not divide")


def _check(kind: Correlation) -> None:
    """The shape of a product is what its operands give, and nothing is larger than a dealer should make."""
    if isinstance(kind, Product):
        if kind.op not in ("mul", "matmul", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"):
            raise ValueError("unknown product")
        _check_options(kind)
        operands = [torch.empty(s, dtype=torch.int64, device="meta") for s in (kind.left, kind.right)]
        if tuple(ring.apply(kind.op, operands[0], operands[1], dict(kind.options)).shape) != kind.result:
            raise ValueError("the result has another shape")
    if isinstance(kind, And) and tuple(torch.broadcast_shapes(kind.left, kind.right)) != kind.result:  # type: ignore[no-untyped-call]
        raise ValueError("the result has another shape")
    if isinstance(kind, Truncation) and not (type(kind.bits) is int and 1 <= kind.bits <= 61):
        raise ValueError("truncation out of range")
    if sum(math.prod(p.shape) * p.dtype.itemsize for p in kind.parts()) > MAX_CORRECTION_BYTES:
        raise ValueError("too large")


@contextlib.contextmanager
def crypten_party(
    rank: int,
    names: Sequence[str],
    links: Mapping[str, Link],
    *,
    dealer: str,
    session_id: bytes,
    program_digest: str = "",
) -> Iterator[Party]:
    """Be `rank` of a CrypTen program inside this block: crypten.cryptensor, .get_plain_text and the like then work.

    names: compute parties in rank order. links: to every other party and to the dealer, by name. program_digest: a
    name of the program that all parties agree on; parties that give different ones get unrelated seeds.
    """
    party = Party(rank, tuple(names), links)
    seed = agree(party, links[dealer], session_id, program_digest)
    party.at("online", 0, 0)
    asked = 0

    def ask(kind: Correlation, record: int) -> Parts:
        nonlocal asked
        address = Address("online", 0, 0, asked)
        asked += 1
        links[dealer].send(address, pack(kind))
        parts = draw(kind, seed, rank, (0, 0, record))
        if rank == 0:
            parts.update(kind.read_correction(links[dealer].receive(address, kind.correction_bytes())))
        return parts

    party.ask = ask
    try:
        with runtime.activate(party):
            yield party
        links[dealer].send(Address("online", 0, 0, asked), b"")  # the end, if nothing went wrong
    finally:
        seed.erase()
        for pair in party.pair_seeds.values():
            pair.erase()


def serve(
    names: Sequence[str], links: Mapping[str, Link], *, session_id: bytes, program_digest: str = ""
) -> int:
    """Deal for one CrypTen program until all parties end it. Returns the number of correlations dealt.

    Raises CorrelationError if the parties ask for different correlations: they do not run one program.
    """
    dealer = Dealer(names, (), {}, session_id=session_id, manifest_digest=program_digest)
    dealer.agree(links)
    dealt = 0
    try:
        while True:
            address = Address("online", 0, 0, dealt)
            asked = [bytes(links[name].receive(address, limit=MAX_REQUEST_BYTES)) for name in names]
            if any(a != asked[0] for a in asked):
                raise CorrelationError(
                    f"the parties asked for different correlations at number {dealt}; they do not run one program"
                )
            if not asked[0]:
                return dealt
            kind = unpack(asked[0])
            correction = dealer.correction(0, Request(0, dealt, kind))
            links[names[0]].send(address, kind.write_correction(correction))
            dealt += 1
    finally:
        dealer.erase()
