"""CKKS parameters: degree, modulus chain and scale, within the 128-bit limits of the 2024 guidelines (rule K1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import SettingsError

MOST_BITS = {8192: 214, 16384: 430, 32768: 868}
"""Polynomial degree -> greatest log2(Q·P) with 128 bits of security, special prime included: ia.cr/2024/463, ternary
secret. SEAL's own check allows 218, 438 and 881."""

LEAST_SCALE, MOST_SCALE = 24, 50
LEAST_PRIME = {8192: 21, 16384: 23, 32768: 26}
"""Degree -> bits from which on there are more primes that are 1 modulo 2N than a chain within MOST_BITS has."""
MOST_PRIME = 60
SPECIAL_MARGIN = 6
"""Bits by which the special prime exceeds the others where there is room: the noise of a rotation is divided by it."""


@dataclass(frozen=True)
class Parameters:
    """What both parties make their contexts from; public.

    degree: of the polynomials, N. first_bits: of the prime that a result is decrypted modulo. scale_bits: log2 of the
    scale of every ciphertext, and bits of the primes that rescaling divides by. levels: how many of those. special_bits: of
    the key-switching prime. split: how many primes stand for each of the others, so that a scale may exceed 60 bits.
    """

    degree: int
    first_bits: int
    scale_bits: int
    levels: int
    special_bits: int
    split: int = 1

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def scale(self) -> float:
        return 2.0**self.scale_bits

    @property
    def moduli(self) -> tuple[int, ...]:
        """Bits of the primes of the chain, in SEAL's order: the first are the last that are left, the special one
        comes last."""
        level = _parts(self.scale_bits, self.split)
        return (*_parts(self.first_bits, self.split), *level * self.levels, self.special_bits)

    @property
    def total_bits(self) -> int:
        return self.first_bits + self.levels * self.scale_bits + self.special_bits

    def primes_at(self, level: int) -> int:
        """Primes of a ciphertext's modulus at a level; a rotation switches keys over one more."""
        return (level + 1) * self.split

    def to_options(self) -> dict[str, int]:
        return asdict(self)


def _parts(bits: int, count: int) -> tuple[int, ...]:
    """As equal as can be, the longest first."""
    return tuple(bits // count + (i < bits % count) for i in range(count))


def check(parameters: Parameters) -> Parameters:
    """The same parameters. Raises SettingsError below 128 bits of security, or where no such chain exists (rule K1)."""
    p = parameters
    for name, value in asdict(p).items():
        if type(value) is not int:
            raise SettingsError(f"CKKS {name} is {value!r}; it is an integer")
    if p.degree not in MOST_BITS:
        raise SettingsError(
            f"CKKS degree {p.degree} is none of {', '.join(map(str, MOST_BITS))}; smaller ones hold no useful chain at "
            "128 bits of security"
        )
    if p.split not in (1, 2) or not LEAST_SCALE <= p.scale_bits <= MOST_SCALE * p.split or p.levels < 1:
        raise SettingsError(
            f"CKKS scale_bits is {LEAST_SCALE} to {MOST_SCALE} (twice that with split 2) and levels at least 1, got "
            f"{p.scale_bits}, split {p.split}, and {p.levels}"
        )
    if p.total_bits > MOST_BITS[p.degree]:  # before the chain is written out: levels may be any number
        raise SettingsError(
            f"a modulus of {p.total_bits} bits at degree {p.degree} has less than 128 bits of security; at most "
            f"{MOST_BITS[p.degree]} bits have it (2024 guidelines). Take fewer levels, a smaller scale or a greater degree"
        )
    least = LEAST_PRIME[p.degree]
    for bits in p.moduli:
        if not least <= bits <= MOST_PRIME:
            raise SettingsError(
                f"a CKKS prime of {bits} bits: at degree {p.degree} they have {least} to {MOST_PRIME} bits, and below there "
                "are too few"
            )
    if p.first_bits <= p.scale_bits or p.special_bits < max(p.moduli[:-1]):
        raise SettingsError("CKKS first_bits must exceed scale_bits, and special_bits be the greatest")
    return p


def from_options(options: Mapping[str, Any]) -> Parameters:
    """The parameters in a program's options, checked. Raises SettingsError."""
    names = tuple(Parameters.__dataclass_fields__)
    missing = [n for n in names if n not in options]
    if missing:
        raise SettingsError(f"a CKKS program without {', '.join(missing)}")
    return check(Parameters(**{n: options[n] for n in names}))


def fitted(degree: int, *, levels: int, scale_bits: int, head_bits: int, split: int = 1) -> Parameters | None:
    """The chain of that degree and scale, or None where the budget does not hold it.

    head_bits: between the scale and the first modulus, for the greatest result and its sign. What is left of the budget
    makes the special prime greater, up to SPECIAL_MARGIN.
    """
    first = scale_bits + head_bits
    left = MOST_BITS[degree] - first - levels * scale_bits
    greatest = max(_parts(first, split) + _parts(scale_bits, split))
    special = min(left, greatest + SPECIAL_MARGIN, MOST_PRIME)
    in_range = LEAST_SCALE <= scale_bits <= MOST_SCALE * split and scale_bits // split >= LEAST_PRIME[degree]
    if not in_range or greatest > MOST_PRIME or special < greatest:
        return None
    return Parameters(degree, first, scale_bits, levels, special, split)
