"""Layouts: which value of a vector stands in which slot of which ciphertext."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
NOTHING = -1


@dataclass(frozen=True, eq=False)
class Layout:
    """where: [ciphertexts, slots], the index of the value in each slot, or NOTHING where the slot holds no value that counts
    (zero, or a left-over of a sum). size: values. grid: (channels, height, width) of the values, and block: slots from one
    channel to the next, where they are laid out as images; else None.
    """

    where: Indices
    size: int
    grid: tuple[int, int, int] | None = None
    block: int = 0

    @property
    def ciphertexts(self) -> int:
        return int(self.where.shape[0])

    @property
    def slots(self) -> int:
        return int(self.where.shape[1])

    def places(self) -> Indices:
        """Of each value, ciphertext * slots + slot of its first copy; NOTHING if it has none."""
        flat = self.where.reshape(-1)
        found = np.full(self.size, NOTHING, dtype=np.int64)
        held = np.flatnonzero(flat != NOTHING)[::-1]
        found[flat[held]] = held
        return found

    def pack(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """values: [size]. Returns [ciphertexts, slots], zero where nothing stands."""
        return np.where(self.where == NOTHING, 0.0, values[np.maximum(self.where, 0)])

    def unpack(self, slots: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[ciphertexts, slots] to [size]."""
        return slots.reshape(-1)[self.places()]
