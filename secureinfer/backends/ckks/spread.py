"""Matrices on ciphertexts that hold one value of many samples each: one number times one ciphertext an entry."""

from __future__ import annotations

from typing import Any

from .arithmetic import Arithmetic, Ciphertext, Vector
from .context import Context


class Rows:
    """Some rows of a matrix, at one level. factor: scale of the encoded numbers."""

    def __init__(self, context: Context, matrix: Vector, level: int, factor: float) -> None:
        self._context, self._matrix = context, matrix
        self._level, self._factor = level, factor

    def begin(self) -> list[Ciphertext | None]:
        return [None] * self._matrix.shape[0]

    def take(self, a: Arithmetic, totals: list[Ciphertext | None], column: int, x: Ciphertext) -> None:
        """Add the share of one input, as it comes: inputs need not stand in memory together."""
        x = a.lower(x, self._level)
        for row, weight in enumerate(self._matrix[:, column].tolist()):
            if abs(weight) * self._factor >= 1:  # else it would be encoded as zero
                totals[row] = a.add_to(totals[row], a.times_plain(x, self.number(weight)))

    def number(self, value: float) -> Any:
        """One number in every slot."""
        return self._context.encode(value, self._level, self._factor)
