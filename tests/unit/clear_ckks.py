"""SEAL's evaluator in the clear: slots are numbers that anyone reads, levels and scales are held to SEAL's rules.

What the model owner computes on ciphertexts runs on it unchanged, without noise and with few slots, so that layouts, levels
and scales can be tested on many shapes. It counts what it does.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from secureinfer.backends.ckks.arithmetic import Arithmetic, Keys
from secureinfer.backends.ckks.params import Parameters

Vector = npt.NDArray[np.float64]


class SealError(RuntimeError):
    """What SEAL raises."""


@dataclass
class Item:
    """A ciphertext (size 2 or 3) or a plaintext (size 0). level: primes left, less one."""

    values: Any = None
    level: int = -1
    scale: float = 1.0
    parts: int = 2

    def size(self) -> int:
        return self.parts

    def set(self, other: Item) -> None:
        self.values, self.level = other.values.copy(), other.level
        self.scale, self.parts = other.scale, other.parts


@functools.cache
def _embedding(slots: int) -> Vector:
    """[slots, 2 * slots], real parts: slot j is a polynomial at the root to the power of 3^j."""
    roots = np.array([pow(3, j, 4 * slots) for j in range(slots)])
    return np.cos(np.pi / (2 * slots) * roots[:, None] * np.arange(2 * slots)[None, :])


def coefficients(values: Vector) -> Vector:
    """[2 * slots], of the real polynomial that has these values in its slots."""
    found: Vector = values @ _embedding(len(values)) / len(values)
    return found


def beyond(values: Vector, limit: float) -> bool:
    """Whether a coefficient is greater. None is greater than the slots' mean; one is than any part of their mean square."""
    if np.abs(values).mean() <= limit:
        return False
    if (values**2).mean() > 2 * len(values) * limit**2:
        return True
    return bool(np.abs(coefficients(values)).max() > limit)


class ClearContext:
    """In place of context.Context. first_bits bounds what the last modulus holds, as it does in SEAL."""

    def __init__(self, slots: int, levels: int, *, scale_bits: int = 40, first_bits: int = 60) -> None:
        self.parameters = Parameters(2 * slots, first_bits, scale_bits, levels, 60)
        # As far from the scale as real primes are, and each at another distance.
        self.primes = {0: 2.0**first_bits} | {
            i: self.parameters.scale * (1 + (-1) ** i * i * 2.0**-18) for i in range(1, levels + 1)
        }
        self.parms = {level: level for level in range(levels + 1)}
        self.evaluator = Evaluator(self)
        self.encoder = self
        self.api = self
        self.Plaintext = self.new

    def new(self) -> Item:
        return Item()

    def level(self, item: Item) -> int:
        return item.level

    def element(self, step: int) -> int:
        return step % self.parameters.slots

    def encode(self, values: Any, level: int, scale: float, plain: Item | None = None) -> Item:
        """The context's and the encoder's. Nothing is rounded, unless all of it is to zero."""
        full = np.broadcast_to(np.asarray(values, dtype=np.float64), (self.parameters.slots,))
        item = plain if plain is not None else Item()
        if not beyond(full, 0.5 / scale):
            full = np.zeros_like(full)
        item.values, item.level, item.scale, item.parts = full.copy(), level, scale, 0
        return item

    def encrypted(self, values: Vector, level: int | None = None) -> Item:
        top = self.parameters.levels if level is None else level
        return self.evaluator.held(Item(values.copy(), top, self.parameters.scale))

    def modulus_bits(self, level: int) -> float:
        return sum(math.log2(self.primes[i]) for i in range(level + 1))


class Evaluator:
    def __init__(self, context: ClearContext) -> None:
        self.context = context
        self.calls: collections.Counter[str] = collections.Counter()

    def held(self, x: Item) -> Item:
        """Raises if the modulus cannot hold the scale, or a coefficient."""
        bits = self.context.modulus_bits(x.level)
        if math.log2(x.scale) >= bits:
            raise SealError("scale out of bounds")
        if beyond(x.values, 2.0 ** (bits - 1 - math.log2(x.scale))):
            raise OverflowError("a value beyond the modulus: it would come out wrong")
        return x

    @staticmethod
    def _alike(x: Item, y: Item, scales: bool) -> None:
        if x.level != y.level:
            raise SealError("encrypted1 and encrypted2 parameter mismatch")
        if scales and abs(x.scale / y.scale - 1) > 1e-9:
            raise SealError("scale mismatch")

    def _product(self, x: Item, y: Item, parts: int, name: str, out: Item) -> None:
        self.calls[name] += 1
        self._alike(x, y, scales=False)
        if x.parts > 2 or (parts == 2 and not np.any(y.values)):
            raise SealError("result ciphertext is transparent")
        out.set(Item(x.values * y.values, x.level, x.scale * y.scale, parts))
        self.held(out)

    def multiply_plain(self, x: Item, plain: Item, out: Item) -> None:
        self._product(x, plain, 2, "multiply_plain", out)

    def multiply(self, x: Item, y: Item, out: Item) -> None:
        self._product(x, y, 3, "multiply", out)

    def square(self, x: Item, out: Item) -> None:
        self._product(x, x, 3, "multiply", out)

    def relinearize_inplace(self, x: Item, keys: Any) -> None:
        self.calls["relinearize"] += 1
        x.parts = 2

    def apply_galois(self, x: Item, element: int, keys: frozenset[int], out: Item) -> None:
        self.calls["rotate"] += 1
        if element not in keys or x.parts != 2:
            raise SealError(f"Galois key not present: {element}")
        out.set(x)
        out.values = np.roll(x.values, -element)

    def rescale_to_next_inplace(self, x: Item) -> None:
        self.calls["rescale"] += 1
        if x.level < 1:
            raise SealError("end of modulus switching chain reached")
        x.scale /= self.context.primes[x.level]
        x.level -= 1
        self.held(x)

    def mod_switch_to(self, x: Item, parms: int, out: Item) -> None:
        if parms > x.level:
            raise SealError("cannot switch to higher level modulus")
        out.set(x)
        out.level = parms
        self.held(out)

    def add_inplace(self, x: Item, y: Item) -> None:
        self.add(x, y, x)

    def add(self, x: Item, y: Item, out: Item) -> None:
        self._alike(x, y, scales=True)
        if x.parts != y.parts:
            raise SealError("sizes differ")
        out.set(Item(x.values + y.values, x.level, x.scale, x.parts))
        self.held(out)

    def add_plain_inplace(self, x: Item, plain: Item) -> None:
        self._alike(x, plain, scales=True)
        x.values = x.values + plain.values


def arithmetic(context: Any, steps: Iterable[int]) -> Arithmetic:
    """The real one, on the clear evaluator. steps: for which there are Galois keys."""
    return Arithmetic(context, Keys(None, frozenset(steps)))


def values(items: Sequence[Item]) -> Vector:
    """[ciphertexts, slots]."""
    return np.stack([x.values for x in items])
