"""Operations on ciphertexts that keep track of levels and scales, under a data owner's evaluation keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .context import Context

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

    def add_plain(self, x: Ciphertext, values: Vector | float) -> Ciphertext:
        """values: [slots], or one for all; at the ciphertext's own level and scale."""
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
