"""The diagonals of a matrix that one process holds, encoded, and how a matrix is shared out among processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arithmetic import Arithmetic, Ciphertext, Vector
from .context import Context
from .matrices import product_ms, rotation_ms

HAND_OVER_PRIMES_MS = 1.0
"""Estimated time, a prime, for a ciphertext to go to another process and its result to come back: SEAL compresses both."""


@dataclass(frozen=True, eq=False)
class Term:
    """One diagonal: of `source`, rotated by `baby`, times `vector`; then, summed, rotated by `giant`, into `target`."""

    target: int
    giant: int
    source: int
    baby: int
    vector: Vector

    @property
    def key(self) -> list[int]:
        return [self.target, self.giant, self.source, self.baby]


class Terms:
    """A share of a matrix at one level, encoded once. factor: scale of the encoded numbers."""

    def __init__(
        self,
        context: Context,
        level: int,
        factor: float,
        sums: Sequence[tuple[int, int]],
        terms: Iterable[Term],
    ) -> None:
        self._level = level
        self._sums = tuple(sums)
        self._encoded: dict[int, dict[int, list[tuple[int, int, Any]]]] = {}
        for t in terms:
            plain = context.encode(t.vector, level, factor)
            self._encoded.setdefault(t.target, {}).setdefault(t.giant, []).append((t.source, t.baby, plain))
        self.sources = sorted(
            {i for giants in self._encoded.values() for g in giants.values() for i, _, _ in g}
        )

    def apply(self, a: Arithmetic, given: Mapping[int, Ciphertext]) -> dict[int, Ciphertext]:
        """Source -> ciphertext to target -> sum of products, not rescaled."""
        at = {i: self._summed(a, a.lower(given[i], self._level)) for i in self.sources}
        rotated: dict[tuple[int, int], Ciphertext] = {}
        out: dict[int, Ciphertext] = {}
        for target, giants in self._encoded.items():
            total = None
            for giant, terms in giants.items():
                inner = None
                for i, baby, plain in terms:
                    if (i, baby) not in rotated:
                        rotated[i, baby] = a.rotate(at[i], baby) if baby else at[i]
                    inner = a.add_to(inner, a.times_plain(rotated[i, baby], plain))
                total = a.add_to(total, a.rotate(inner, giant) if giant else inner)
            out[target] = total
        return out

    def _summed(self, a: Arithmetic, x: Ciphertext) -> Ciphertext:
        for count, step in self._sums:
            total = None
            for i in range(1, count):
                total = a.add_to(total, a.rotate(x, i * step))
            x = x if total is None else a.add_to(total, x)
        return x


def share(terms: Sequence[Term], processes: int, degree: int, primes: int, sums: int = 0) -> list[list[Term]]:
    """As many shares as pay, the first for this process: split by what is rotated before, or after, or by target.

    sums: rotations of each source that every share must do for itself.
    """
    turn = rotation_ms(degree, primes)

    def cost(part: Sequence[Term]) -> float:
        before = {(t.source, t.baby) for t in part if t.baby}
        after = {(t.target, t.giant) for t in part if t.giant}
        sources = {t.source for t in part}
        return turn * (len(before) + len(after) + sums * len(sources)) + len(part) * product_ms(
            degree, primes
        )

    def away(part: Sequence[Term]) -> float:
        moved = {t.source for t in part} | {-1 - t.target for t in part}
        return cost(part) + HAND_OVER_PRIMES_MS * (degree / 8192) * primes * len(moved)

    best, least = [list(terms)], cost(terms)
    ways = (
        lambda t: (t.target, t.giant),
        lambda t: (t.source, t.baby),
        lambda t: (t.source,),
        lambda t: (t.target,),
    )
    for n in range(2, processes + 1):
        for way in ways:
            groups: dict[Any, list[Term]] = {}
            for t in terms:
                groups.setdefault(way(t), []).append(t)
            if len(groups) < n:
                continue
            parts: list[list[Term]] = [[] for _ in range(n)]
            for key in sorted(groups, key=lambda k: (-len(groups[k]), k)):
                lightest = min(range(n), key=lambda i: (cost(parts[i]) if not i else away(parts[i]), i))
                parts[lightest] += groups[key]
            slowest = max(cost(parts[0]), *(away(p) for p in parts[1:]))
            if slowest < 0.9 * least and all(parts):
                best, least = parts, slowest
    return best
