"""The model owner's side: matrices, polynomials and what hides them, with weights that are encoded once."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graph.polynomials import SQUARE
from .arithmetic import Arithmetic, Ciphertext, Vector
from .context import Context
from .layouts import NOTHING, Layout
from .matrices import MatrixPlan, diagonals, product_ms
from .pool import Blob, Pool, RemoteRows, RemoteTerms
from .sealed import dump
from .spread import Rows
from .terms import HAND_OVER_PRIMES_MS, Term, Terms, share

# --- matrices over slots ---


class Matrix:
    """A matrix whose diagonals are encoded at one level, in this process and, where that pays, in those of a pool.

    scale: of the result; the factor's own scale makes up for what the operand's differs by, so that all results of a stage
    have exactly this one. late: folds come before the rescaling, whose noise they then do not add up.
    """

    def __init__(
        self,
        context: Context,
        plan: MatrixPlan,
        matrix: Vector,
        bias: Vector | None,
        level: int,
        scale: float,
        operand: float,
        *,
        late: bool = False,
        pool: Pool | None = None,
        serial: str = "",
    ) -> None:
        self._late = late
        self.plan = plan
        self.level = level
        factor = scale * context.primes[level] / operand
        p = context.parameters
        terms = _terms(plan, matrix, factor)
        shares = [terms]
        if pool is not None and pool.processes > 1:
            shares = share(terms, pool.processes, p.degree, p.primes_at(level), len(plan.sum_steps))
        self._here = Terms(context, level, factor, plan.sums, shares[0])
        self._away = [
            RemoteTerms(pool.helper(i), serial, level, factor, plan.sums, part)
            for i, part in enumerate(shares[1:])
            if pool is not None
        ]
        self._bias = None if bias is None else _over(plan.target, bias)

    def apply(
        self, a: Arithmetic, given: Sequence[Ciphertext], raw: Mapping[int, Blob] | None = None
    ) -> list[Ciphertext]:
        """raw: the operands as they were serialised, if they came so."""
        if self._away:
            wanted = sorted({i for away in self._away for i in away.sources})
            blobs = raw if raw is not None else {i: dump(a.lower(given[i], self.level)) for i in wanted}
            for away in self._away:
                away.begin(blobs)
        totals = self._here.apply(a, dict(enumerate(given)))
        for away in self._away:
            for target, part in away.end(a.context).items():
                totals[target] = a.add_to(totals.get(target), part)
        return [self._finish(a, totals[target], target) for target in range(self.plan.target.ciphertexts)]

    def _finish(self, a: Arithmetic, total: Ciphertext, target: int) -> Ciphertext:
        if not self._late:
            total = a.rescale(total)
        for step in self.plan.fold_steps:
            total = a.add_to(total, a.rotate(total, step))
        if self._late:
            total = a.rescale(total)
        return total if self._bias is None else a.add_plain(total, self._bias[target])


def _terms(plan: MatrixPlan, matrix: Vector, factor: float) -> list[Term]:
    """The diagonals that are not zero, each as it is encoded: rotated back by its giant step."""
    found = diagonals(plan, matrix)
    for target in range(plan.target.ciphertexts):
        if not any(key[0] == target for key in found):  # nothing at all
            source = next(i for i, offsets in enumerate(plan.offsets) if offsets)
            found[target, source, plan.offsets[source][0]] = np.zeros(plan.source.slots)
    out = []
    for (target, i, d), vector in sorted(found.items(), key=lambda item: item[0]):
        giant, baby = plan.turns(d)
        out.append(Term(target, giant, i, baby, _encodable(np.roll(vector, giant), factor)))
    return out


def _encodable(vector: Vector, factor: float) -> Vector:
    """The vector, or if it may be encoded as zero the nearest that is not: SEAL refuses a product with zero.

    The squares of the N coefficients add up to the mean square of the slots (Parseval): all of them round to zero only where
    that is below N / 4. One unit more in the constant coefficient is far below the noise.
    """
    if np.mean(vector**2) * factor**2 > len(vector) / 2:
        return vector
    return vector + math.copysign(1 / factor, float(vector.mean()))


def _over(layout: Layout, values: Vector) -> Vector:
    """Values at every slot that holds them: [ciphertexts, slots]."""
    return np.where(layout.where == NOTHING, 0.0, values[np.maximum(layout.where, 0)])


# --- a sample a slot ---


class SpreadMatrix:
    """A matrix on ciphertexts that hold one value of many samples each; its rows are shared out where that pays."""

    def __init__(
        self,
        context: Context,
        matrix: Vector,
        bias: Vector | None,
        level: int,
        scale: float,
        operand: float,
        *,
        pool: Pool | None = None,
        serial: str = "",
        first: bool = False,
    ) -> None:
        """first: its operands come serialised, and need not be so for other processes."""
        self._context, self._level, self._bias = context, level, bias
        self._factor = scale * context.primes[level] / operand
        cuts = self._cuts(matrix, pool.processes if pool is not None else 1, first)
        parts = np.split(matrix, cuts)
        self._here = Rows(context, parts[0], level, self._factor)
        self._away = [
            RemoteRows(pool.helper(i), serial, level, self._factor, part)
            for i, part in enumerate(parts[1:])
            if pool is not None
        ]

    def _cuts(self, matrix: Vector, processes: int, first: bool) -> list[int]:
        rows, columns = matrix.shape
        degree, primes = self._context.parameters.degree, self._context.parameters.primes_at(self._level)
        saved = np.count_nonzero(matrix) * product_ms(degree, primes) * (1 - 1 / processes)
        moved = rows / processes + (0 if first else columns)
        if processes < 2 or rows < processes or saved < moved * HAND_OVER_PRIMES_MS * primes * degree / 8192:
            return []
        return [rows * i // processes for i in range(1, processes)]

    @property
    def shared(self) -> bool:
        """Whether other processes have rows of it."""
        return bool(self._away)

    def apply(self, a: Arithmetic, given: Iterator[tuple[Ciphertext, Blob | None]]) -> list[Ciphertext]:
        """given: the operands one after the other, with their serialised form if they came in it."""
        totals, last = self._here.begin(), None
        for column, (x, raw) in enumerate(given):
            if self._away:
                data = raw if raw is not None else dump(a.lower(x, self._level))
                for away in self._away:
                    away.take(column, data)
            self._here.take(a, totals, column, x)
            last = x
        for away in self._away:
            totals += away.end(a.context)
        return [self._finish(a, row, total, last) for row, total in enumerate(totals)]

    def _finish(self, a: Arithmetic, row: int, total: Ciphertext | None, any_input: Ciphertext) -> Ciphertext:
        if total is None:
            total = a.times_plain(a.lower(any_input, self._level), self._here.number(2 / self._factor))
        total = a.rescale(total)
        if self._bias is not None:
            total = a.add_plain(total, float(self._bias[row]))
        return total


# --- polynomials ---


class Polynomial:
    """sum c_i x^i of each slot, in ceil(log2(degree + 1)) levels; a square alone in one.

    p(x) = high(x) · x^(2^k) + low(x), over and over (Paterson and Stockmeyer, SIAM J. Comput. 1973): products of ciphertexts
    meet at equal depths, and every constant factor takes the scale that makes its summand's exact.
    """

    def __init__(self, coefficients: Sequence[float], depth: int) -> None:
        self._c = list(coefficients)
        self._is_square = tuple(coefficients) == SQUARE
        self._depth = depth

    def apply(self, a: Arithmetic, given: Sequence[Ciphertext]) -> list[Ciphertext]:
        return [self._one(a, x) for x in given]

    def result_scale(self, context: Context, level: int, operand: float) -> float:
        """Scale of the result for an operand of that level and scale."""
        if self._is_square:
            return operand * operand / context.primes[level]
        return operand

    def _one(self, a: Arithmetic, x: Ciphertext) -> Ciphertext:
        if self._is_square:
            return a.times(x, x)
        level, scale = a.context.level(x), x.scale
        if level is None:
            raise ValueError("a ciphertext of no level")
        powers = [x]
        for _ in range(self._depth - 1):
            powers.append(a.times(powers[-1], powers[-1]))
        result = self._evaluate(a, powers, self._c, self._depth, level - self._depth, scale)
        if result is None:
            raise ValueError("a polynomial without a variable part")
        return result

    def _evaluate(
        self, a: Arithmetic, powers: list[Ciphertext], c: list[float], depth: int, level: int, scale: float
    ) -> Ciphertext | None:
        """The polynomial of degree below 2^depth, at that level and scale; None if it has no variable part."""
        context = a.context
        half = 1 << (depth - 1)
        if depth == 1:
            slope = c[1] if len(c) > 1 else 0.0
            out = _multiple(a, powers[0], slope, level, scale) if slope else None
        else:
            low = self._evaluate(a, powers, c[:half], depth - 1, level, scale)
            high_c = c[half : 2 * half]
            out = low
            if any(high_c):
                power = a.lower(powers[depth - 1], level + 1)
                wanted = scale * context.primes[level + 1] / power.scale
                high = self._evaluate(a, powers, high_c, depth - 1, level + 1, wanted)
                if high is None:  # a constant times the power
                    product = _multiple(a, power, high_c[0], level, scale)
                else:
                    if high_c[0]:
                        high = a.add_plain(high, high_c[0])
                    product = a.times(high, power)
                    product.scale = scale
                out = product if low is None else a.add_to(low, product)
        if out is not None and depth == self._depth and c[0]:
            out = a.add_plain(out, c[0])
        return out


def _multiple(a: Arithmetic, x: Ciphertext, value: float, level: int, scale: float) -> Ciphertext:
    """value · x, rescaled to that level and scale. SEAL refuses a product with zero: the least number is one unit."""
    context = a.context
    x = a.lower(x, level + 1)
    factor = scale * context.primes[level + 1] / x.scale
    given = value if abs(value) * factor >= 1 else math.copysign(1 / factor, value)
    out = a.rescale(a.times_plain(x, context.encode(given, level + 1, factor)))
    out.scale = scale
    return out


# --- circuit privacy ---


@dataclass(frozen=True)
class Privacy:
    """What hides a result's randomness and left-overs from the data owner (rule K3).

    noise: greatest value that is added to what is read; slots: to every slot and imaginary part that is not read.
    """

    noise: float
    slots: float

    def hide(
        self,
        a: Arithmetic,
        encryptor: Any,
        results: Sequence[Ciphertext],
        kept: Sequence[npt.NDArray[np.bool_]],
    ) -> None:
        context = a.context
        for x, keep in zip(results, kept, strict=True):
            level = context.level(x)
            if level is None:
                raise ValueError("a ciphertext of no level")
            zero = context.new()
            encryptor.encrypt_zero(context.parms[level], zero)
            zero.scale = x.scale
            context.evaluator.add_inplace(x, zero)
            size = np.where(keep, self.noise, self.slots)
            real = _uniform(len(keep)) * size
            imaginary = _uniform(len(keep)) * self.slots
            context.evaluator.add_plain_inplace(x, context.encode(real + 1j * imaginary, level, x.scale))


def _uniform(n: int) -> Vector:
    """n values, uniform in -1..1, from the operating system's generator."""
    words = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
