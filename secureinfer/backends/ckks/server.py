"""The model owner's side: matrices, polynomials and poolings on ciphertexts, with weights that are encoded once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .context import Context
from .layouts import NOTHING, Layout
from .matrices import MatrixPlan, diagonals

Ciphertext = Any
Vector = npt.NDArray[np.float64]


class Keys:
    """The data owner's evaluation keys: they compute on ciphertexts and open nothing. public: for circuit privacy alone."""

    def __init__(self, relinearisation: Any, galois: Any, public: Any = None) -> None:
        self.relinearisation = relinearisation
        self.galois = galois
        self.public = public


class Arithmetic:
    """Operations on ciphertexts that keep track of levels and scales. All return new ciphertexts."""

    def __init__(self, context: Context, keys: Keys) -> None:
        self.context = context
        self._evaluator = context.evaluator
        self._keys = keys

    def rotate(self, x: Ciphertext, step: int) -> Ciphertext:
        out = self.context.new()
        self._evaluator.apply_galois(x, self.context.element(step), self._keys.galois, out)
        return out

    def times_plain(self, x: Ciphertext, plain: Any) -> Ciphertext:
        out = self.context.new()
        self._evaluator.multiply_plain(x, plain, out)
        return out

    def times(self, x: Ciphertext, y: Ciphertext) -> Ciphertext:
        """Relinearised and rescaled."""
        out = self.context.new()
        if x is y:
            self._evaluator.square(x, out)
        else:
            self._evaluator.multiply(x, y, out)
        self._evaluator.relinearize_inplace(out, self._keys.relinearisation)
        return self.rescale(out)

    def rescale(self, x: Ciphertext) -> Ciphertext:
        for _ in range(self.context.parameters.split):
            self._evaluator.rescale_to_next_inplace(x)
        return x

    def add_to(self, total: Ciphertext | None, x: Ciphertext) -> Ciphertext:
        """total + x, in place of total."""
        if total is None:
            return x
        self._evaluator.add_inplace(total, x)
        return total

    def add(self, x: Ciphertext, y: Ciphertext) -> Ciphertext:
        out = self.context.new()
        self._evaluator.add(x, y, out)
        return out

    def add_plain(self, x: Ciphertext, values: Vector) -> Ciphertext:
        """values: [slots]; at the ciphertext's own level and scale."""
        level = self.context.level(x)
        if level is None:
            raise ValueError("a ciphertext of no level")
        self._evaluator.add_plain_inplace(x, self.context.encode(values, level, x.scale))
        return x

    def lower(self, x: Ciphertext, level: int) -> Ciphertext:
        """x at a level that is not above its own."""
        if self.context.level(x) == level:
            return x
        out = self.context.new()
        self._evaluator.mod_switch_to(x, self.context.parms[level], out)
        return out


# --- matrices over slots ---


class Matrix:
    """A matrix whose diagonals are encoded at one level.

    scale: of the result; the factor's own scale makes up for what the operand's differs by, so that all results of a
    stage have exactly this one. late: folds come before the rescaling, whose noise they then do not add up.
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
    ) -> None:
        self._late = late
        self.plan = plan
        self.level = level
        self._encoded: dict[int, dict[int, list[tuple[int, int, Any]]]] = {}
        factor = scale * context.primes[level] / operand
        slots, n = plan.source.slots, plan.babies
        least = np.zeros(slots)
        least[0] = 2 / factor
        found = diagonals(plan, matrix)
        for target in range(plan.target.ciphertexts):
            if not any(key[0] == target for key in found):  # nothing at all: SEAL refuses a product with zero
                found[target, 0, plan.offsets[0][0] if plan.offsets[0] else 0] = least
        for (target, i, d), vector in sorted(found.items(), key=lambda item: item[0]):
            giant = d // n * n
            shifted = np.roll(vector, giant)
            if np.abs(shifted).max() * factor < 1:  # would be encoded as zero
                shifted = np.where(shifted == 0, least, shifted)
            plain = context.encode(shifted, level, factor)
            self._encoded.setdefault(target, {}).setdefault(giant, []).append((i, d - giant, plain))
        self._bias = None if bias is None else _over(plan.target, bias)

    @property
    def work(self) -> list[tuple[int, int]]:
        """(target, giant) pairs, which are independent of each other."""
        return [(t, g) for t, giants in self._encoded.items() for g in giants]

    def apply(self, a: Arithmetic, given: Sequence[Ciphertext]) -> list[Ciphertext]:
        at = [a.lower(x, self.level) for x in given]
        for count, step in self.plan.sums:
            at = [_summed(a, x, count, step) for x in at]
        wanted = {
            (i, b) for giants in self._encoded.values() for terms in giants.values() for i, b, _ in terms
        }
        rotated = {(i, b): a.rotate(at[i], b) if b else at[i] for i, b in sorted(wanted)}
        out = []
        for target in range(self.plan.target.ciphertexts):
            total = None
            for giant, terms in self._encoded[target].items():
                inner = None
                for i, b, plain in terms:
                    inner = a.add_to(inner, a.times_plain(rotated[i, b], plain))
                total = a.add_to(total, a.rotate(inner, giant) if giant else inner)
            if not self._late:
                total = a.rescale(total)
            for step in self.plan.fold_steps:
                total = a.add_to(total, a.rotate(total, step))
            if self._late:
                total = a.rescale(total)
            if self._bias is not None:
                total = a.add_plain(total, self._bias[target])
            out.append(total)
        return out


def _summed(a: Arithmetic, x: Ciphertext, count: int, step: int) -> Ciphertext:
    total = None
    for i in range(1, count):
        total = a.add_to(total, a.rotate(x, i * step))
    return x if total is None else a.add_to(total, x)


def _over(layout: Layout, values: Vector) -> Vector:
    """Values at every slot that holds them: [ciphertexts, slots]."""
    return np.where(layout.where == NOTHING, 0.0, values[np.maximum(layout.where, 0)])


# --- a sample a slot ---


class SpreadMatrix:
    """A matrix on ciphertexts that hold one value of many samples each: one plaintext number times one ciphertext an
    entry."""

    def __init__(
        self, context: Context, matrix: Vector, bias: Vector | None, level: int, scale: float, operand: float
    ) -> None:
        self.level = level
        self._context = context
        self._factor = scale * context.primes[level] / operand
        self._matrix, self._bias = matrix, bias
        self._scale = scale

    def begin(self) -> list[Ciphertext | None]:
        return [None] * self._matrix.shape[0]

    def take(self, a: Arithmetic, totals: list[Ciphertext | None], column: int, x: Ciphertext) -> None:
        """Add the share of one input, as it comes: inputs need not stand in memory together."""
        x = a.lower(x, self.level)
        for row, weight in enumerate(self._matrix[:, column].tolist()):
            if abs(weight) * self._factor < 1:  # it would be encoded as zero
                continue
            totals[row] = a.add_to(totals[row], a.times_plain(x, self._number(weight)))

    def end(self, a: Arithmetic, totals: list[Ciphertext | None], any_input: Ciphertext) -> list[Ciphertext]:
        out = []
        for row, total in enumerate(totals):
            if total is None:
                total = a.times_plain(a.lower(any_input, self.level), self._number(2 / self._factor))
            total = a.rescale(total)
            if self._bias is not None:
                total = a.add_plain(total, np.full(self._context.parameters.slots, self._bias[row]))
            out.append(total)
        return out

    def apply(self, a: Arithmetic, given: Sequence[Ciphertext]) -> list[Ciphertext]:
        totals = self.begin()
        for column, x in enumerate(given):
            self.take(a, totals, column, x)
        return self.end(a, totals, given[0])

    def _number(self, value: float) -> Any:
        plain = self._context.api.Plaintext()
        self._context.encoder.encode(float(value), self._context.parms[self.level], self._factor, plain)
        return plain


# --- polynomials ---


class Polynomial:
    """sum c_i x^i of each slot, in ceil(log2(degree + 1)) levels; a square alone in one.

    p(x) = high(x) · x^(2^k) + low(x), over and over (Paterson and Stockmeyer, SIAM J. Comput. 1973): products of ciphertexts
    meet at equal depths, and every constant factor takes the scale that makes its summand's exact.
    """

    def __init__(self, coefficients: Sequence[float], depth: int) -> None:
        self._c = list(coefficients)
        self._depth = depth

    def apply(self, a: Arithmetic, given: Sequence[Ciphertext]) -> list[Ciphertext]:
        return [self._one(a, x) for x in given]

    def result_scale(self, context: Context, level: int, operand: float) -> float:
        """Scale of the result for an operand of that level and scale."""
        if self._c == [0.0, 0.0, 1.0]:
            return operand * operand / context.primes[level]
        return operand

    def _one(self, a: Arithmetic, x: Ciphertext) -> Ciphertext:
        if self._c == [0.0, 0.0, 1.0]:
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
            if slope == 0.0:
                return None
            x = a.lower(powers[0], level + 1)
            factor = scale * context.primes[level + 1] / x.scale
            value = slope if abs(slope) * factor >= 1 else 2 / factor
            out = a.rescale(a.times_plain(x, _everywhere(context, value, level + 1, factor)))
            out.scale = scale
        else:
            low = self._evaluate(a, powers, c[:half], depth - 1, level, scale)
            high_c = c[half : 2 * half]
            out = low
            if any(high_c):
                power = a.lower(powers[depth - 1], level + 1)
                wanted = scale * context.primes[level + 1] / power.scale
                high = self._evaluate(a, powers, high_c, depth - 1, level + 1, wanted)
                if high is None:  # a constant times the power
                    factor = scale * context.primes[level + 1] / power.scale
                    product = a.rescale(
                        a.times_plain(power, _everywhere(context, high_c[0], level + 1, factor))
                    )
                else:
                    if high_c[0]:
                        high = _plus(a, high, high_c[0])
                    product = a.times(high, power)
                product.scale = scale
                out = product if low is None else a.add_to(low, product)
        if out is not None and depth == self._depth and c[0]:
            out = _plus(a, out, c[0])
        return out


def _everywhere(context: Context, value: float, level: int, scale: float) -> Any:
    plain = context.api.Plaintext()
    context.encoder.encode(float(value), context.parms[level], scale, plain)
    return plain


def _plus(a: Arithmetic, x: Ciphertext, value: float) -> Ciphertext:
    return a.add_plain(x, np.full(a.context.parameters.slots, value))


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
