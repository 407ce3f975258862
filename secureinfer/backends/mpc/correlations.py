"""The kinds of correlated randomness: what each party draws from its seed, and what the dealer corrects.

A Correlation is a public description (kind and shapes). It lists Parts. A *free* part is drawn by every party from its
own seed. A *bound* part must combine to a function of the free ones: every rank but 0 draws its share, and the dealer
sends rank 0 the correction that makes the sum (or XOR) come out. Nothing that a seed can expand is sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import products, ring, series
from .communicator import tensor_bytes, tensors_from
from .costs import weight_label
from .packing import pack, packed_bytes, unpack

Shares = Sequence[torch.Tensor]

ALIGNMENT = 64
"""Bytes: of tensors that compiled code reads as they are."""


@dataclass(frozen=True)
class MaskedWeight:
    """A weight edge in a ring of `bits` bits: what has one mask for a session.

    factored: an int8 weight times the integer factors of its channels, and not its value at the program's scale.
    """

    name: str
    bits: int = 64
    factored: bool = False

    @property
    def label(self) -> str:
        return weight_label(self.name, self.bits, factored=self.factored)


@dataclass(frozen=True)
class Part:
    """One tensor of a correlation. xor: shares combine by XOR, else by addition. without: a rank that holds zero.

    bits: how many of each element count, where that is less than its type has; a correction has no more on the wire.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64
    xor: bool = False
    bound: bool = False
    without: int | None = None
    bits: int | None = None

    @property
    def nbytes(self) -> int:
        return packed_bytes(math.prod(self.shape), self.bits or 8 * self.dtype.itemsize)


class Correlation(ABC):
    """Public description of one record of dealt randomness."""

    @abstractmethod
    def parts(self) -> tuple[Part, ...]: ...

    @abstractmethod
    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        """The values of the bound parts, from all parties' shares of the free ones.

        weights: the session-wide masks of weights (FixedProduct only).
        """

    def correction_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts() if p.bound)

    def write_correction(self, values: Mapping[str, torch.Tensor]) -> bytes:
        """The bound parts as one payload, from the values of rank 0's shares."""
        return b"".join(
            pack(values[p.name], p.bits) if p.bits else tensor_bytes([values[p.name]])
            for p in self.parts()
            if p.bound
        )

    def read_correction(self, payload: memoryview) -> dict[str, torch.Tensor]:
        """Rank 0's shares of the bound parts. The payload has correction_bytes, which its Link has checked."""
        out, offset = {}, 0
        for p in self.parts():
            if not p.bound:
                continue
            piece = payload[offset : offset + p.nbytes]
            offset += p.nbytes
            if p.bits:
                value = unpack(piece, p.shape, p.bits, p.dtype)
            else:
                value = tensors_from(piece, [torch.empty(p.shape, dtype=p.dtype)])[0]
            # A part of a payload may begin anywhere; compiled code would copy it at each use, online.
            out[p.name] = value.clone() if value.data_ptr() % ALIGNMENT else value
        return out


def frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """An operation's options as a correlation holds them."""
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in options.items()))


def combine(shares: Shares, xor: bool) -> torch.Tensor:
    """The value behind one tensor a party."""
    total = shares[0]
    for share in shares[1:]:
        total = total ^ share if xor else total + share
    return total


@dataclass(frozen=True)
class Product(Correlation):
    """Beaver triple c = op(a, b): CrypTen's `additive`. op: mul, matmul, conv1d, conv2d, conv_transpose1d or 2d.

    bits: the ring, Z_2^bits.
    """

    op: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    bits: int = 64

    def parts(self) -> tuple[Part, ...]:
        bits = self.bits if self.bits < 64 else None
        return (Part("a", self.left), Part("b", self.right), Part("c", self.result, bound=True, bits=bits))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        a, b = combine(free["a"], False), combine(free["b"], False)
        return {"c": ring.apply(self.op, a, b, dict(self.options), self.bits)}


@dataclass(frozen=True)
class Square(Correlation):
    """r and r squared: CrypTen's `square`."""

    shape: tuple[int, ...]

    def parts(self) -> tuple[Part, ...]:
        return (Part("r", self.shape), Part("r2", self.shape, bound=True))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False)
        return {"r2": r * r}


@dataclass(frozen=True)
class And(Correlation):
    """XOR-shared triple c = a & b: CrypTen's `binary`."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype = torch.int64

    def parts(self) -> tuple[Part, ...]:
        return (
            Part("a", self.left, self.dtype, xor=True),
            Part("b", self.right, self.dtype, xor=True),
            Part("c", self.result, self.dtype, xor=True, bound=True),
        )

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        return {"c": combine(free["a"], True) & combine(free["b"], True)}


@dataclass(frozen=True)
class Wraps(Correlation):
    """r and the number of times that its shares wrap around the ring: CrypTen's `wraps`."""

    shape: tuple[int, ...]

    def parts(self) -> tuple[Part, ...]:
        return (Part("r", self.shape), Part("theta", self.shape, bound=True))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        return {"theta": ring.count_wraps(free["r"])}


@dataclass(frozen=True)
class BitPair(Correlation):
    """A random bit, XOR-shared in the lowest bit of `dtype` and shared additively: CrypTen's `B2A`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8

    def parts(self) -> tuple[Part, ...]:
        return (Part("binary", self.shape, self.dtype, xor=True), Part("arithmetic", self.shape, bound=True))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        return {"arithmetic": (combine(free["binary"], True) & 1).long()}


@dataclass(frozen=True)
class Truncation(Correlation):
    """r, floor(r / 2**bits) and the top bit of r (modulo 2**32, or 2**64 if more than 32 bits are cut)."""

    shape: tuple[int, ...]
    bits: int

    def parts(self) -> tuple[Part, ...]:
        top = torch.int32 if self.bits <= 32 else torch.int64
        return (
            Part("r", self.shape),
            Part("quotient", self.shape, bound=True),
            Part("top", self.shape, top, bound=True),
        )

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False)
        top = ring.logical_shift(r, 63)
        return {
            "quotient": ring.logical_shift(r, self.bits),
            "top": top.to(torch.int32 if self.bits <= 32 else torch.int64),
        }


@dataclass(frozen=True)
class Masked(Correlation):
    """r with everything that one opening of x + r may need: all from one record (R1).

    compare: XOR-shares of the bits of r, in bit-reversed order (see protocols.py). terms: shares of cos(k w r) and
    sin(k w r), k = 1..terms, w = 2 pi / 2**period_bits, TRIG_BITS fraction bits.
    """

    shape: tuple[int, ...]
    compare: bool = False
    terms: int = 0
    period_bits: int = 0

    def parts(self) -> tuple[Part, ...]:
        parts = [Part("r", self.shape)]
        if self.compare:
            parts.append(Part("bits", self.shape, xor=True, bound=True))
        if self.terms:
            parts.append(Part("trig", (2 * self.terms, *self.shape), bound=True))
        return tuple(parts)

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        r = combine(free["r"], False)
        out = {}
        if self.compare:
            out["bits"] = ring.reverse_bits(r)
        if self.terms:
            cos, sin = series.rotation(r, self.period_bits)
            rows = [row for pair in series.multiples(cos, sin, self.terms) for row in pair]
            out["trig"] = torch.stack(rows) if rows else r.new_zeros((0, *self.shape))
        return out


TREE_LEVELS: tuple[tuple[torch.dtype, int], ...] = (
    (torch.int32, 2),
    (torch.int16, 2),
    (torch.uint8, 2),
    (torch.uint8, 2),
    (torch.uint8, 2),
    (torch.uint8, 1),
)
"""Word and number of products at each level of the borrow tree: 32, 16, 8, 4, 2 and 1 bits of each operand."""


@dataclass(frozen=True)
class BorrowTree(Correlation):
    """AND triples for the six levels of one tree: at level l, c = a & b; a has `shape`, b and c [products, *shape]."""

    shape: tuple[int, ...]

    def parts(self) -> tuple[Part, ...]:
        parts = []
        for level, (dtype, count) in enumerate(TREE_LEVELS):
            parts.append(Part(f"a{level}", self.shape, dtype, xor=True))
            parts.append(Part(f"b{level}", (count, *self.shape), dtype, xor=True))
            parts.append(Part(f"c{level}", (count, *self.shape), dtype, xor=True, bound=True))
        return tuple(parts)

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        return {
            f"c{level}": combine(free[f"a{level}"], True) & combine(free[f"b{level}"], True)
            for level in range(len(TREE_LEVELS))
        }


@dataclass(frozen=True)
class FixedProduct(Correlation):
    """For op(x, W) with W known to rank `owner` and its mask B fixed for the session: A, and c = op(A, B).

    The owner's share of A is zero: it learns x - A, so A must be the others' alone. B comes from the owner's seed and
    stays with owner and dealer.
    """

    op: str
    left: tuple[int, ...]
    result: tuple[int, ...]
    weight: str
    owner: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    bits: int = 64
    factored: bool = False

    @property
    def mask(self) -> MaskedWeight:
        """Which session-wide mask hides the weight: one for each ring that it is used in (R1)."""
        return MaskedWeight(self.weight, self.bits, self.factored)

    def parts(self) -> tuple[Part, ...]:
        bits = self.bits if self.bits < 64 else None
        return (Part("A", self.left, without=self.owner), Part("c", self.result, bound=True, bits=bits))

    def bind(
        self, free: Mapping[str, Shares], weights: Mapping[MaskedWeight, SessionWeight]
    ) -> dict[str, torch.Tensor]:
        return {"c": self.apply(combine(free["A"], False), weights[self.mask])}

    def apply(self, a: torch.Tensor, w: SessionWeight) -> torch.Tensor:
        """op(a, w) modulo 2**bits."""
        return w.apply(self.op, a, dict(self.options), self.bits)


class SessionWeight:
    """A right operand that serves a whole session: its limbs are made once for each operation that it is used in.

    tensor: int64, or int8. bits: of its values with their sign, if fewer than 64.
    """

    def __init__(self, tensor: torch.Tensor, bits: int | None = None) -> None:
        self.tensor = tensor
        self._bits = bits
        self._forms: dict[tuple[str, int], products.Factor] = {}

    def apply(
        self, op: str, a: torch.Tensor, options: Mapping[str, Any], ring_bits: int = 64
    ) -> torch.Tensor:
        """op(a, tensor) modulo 2**ring_bits; see ring.apply."""
        w = self.tensor
        if op == "linear":
            return products.linear(a, self._form(op, 1), ring_bits)
        if op == "matmul" and w.dim() == 2:
            return products.matmul(a, self._form(op, 1), ring_bits)
        if op in ("conv1d", "conv2d"):
            groups = int(options.get("groups", 1))
            return getattr(products, op)(a, self._form(op, groups), **options, ring_bits=ring_bits)  # type: ignore[no-any-return]
        return ring.apply(op, a, w.long(), options)

    def _form(self, op: str, groups: int) -> products.Factor:
        key = (op, groups)
        if key not in self._forms:
            w, bits = self.tensor, self._bits
            if op == "linear":
                self._forms[key] = products.prepare_linear(w, bits)
            elif op == "matmul":
                self._forms[key] = products.prepare(w, bits)
            else:
                self._forms[key] = products.prepare_conv(w, groups, bits)
        return self._forms[key]
