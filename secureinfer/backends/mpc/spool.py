"""Spool: dealt material on disk until its inference begins, encrypted under keys that only this process's memory has.

Each inference has a file without a name and a key of its own (AES-256-GCM, the key from the operating system), so that a
crash, or `burn`, leaves nothing that can be read (rule R3). Each record has a nonce of its own, its ordinal, and is bound to
session, inference, step, record and kind. Tags stay in memory with the key: the file is ciphertext and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher, algorithms, modes

from ...errors import CorrelationError, SessionError, SettingsError
from .communicator import NUMPY_TYPES
from .correlations import Correlation
from .party import Parts
from .randomness import fields

Material = dict[tuple[int, int], tuple[Correlation, Parts]]
"""One inference's: (step, record) -> what it is, and this party's shares."""

KEY_BYTES = 32
PIECE_BYTES = 1 << 20
_SPARE = 15
"""Bytes of room that the cipher's interface asks for past the end."""


@dataclass
class _Record:
    step: int
    record: int
    kind: Correlation
    tag: bytes


@dataclass
class _Sealed:
    """One inference's file and key, and what lies in it, in order."""

    file: BinaryIO
    key: bytearray
    records: list[_Record] = field(default_factory=list)

    def burn(self) -> None:
        self.key[:] = bytes(len(self.key))
        self.records.clear()
        with contextlib.suppress(OSError):  # what a full disk did not take
            self.file.close()


class Spool:
    """The material of one session at one party. One thread may write an inference while another takes one."""

    def __init__(self, folder: Path, session_id: bytes) -> None:
        """Raises SettingsError for a folder in which no file can be made."""
        self._folder = folder
        self._session_id = session_id
        self._sealed: dict[int, _Sealed] = {}
        self._open().close()

    def _open(self) -> BinaryIO:
        try:
            return tempfile.TemporaryFile(dir=self._folder)
        except OSError as error:
            raise SettingsError(
                f"material_folder: no file can be made in {self._folder} ({error.strerror})"
            ) from None

    def __contains__(self, inference: int) -> bool:
        return inference in self._sealed

    def begin(self, inference: int) -> Writer:
        return Writer(self, inference, _Sealed(self._open(), bytearray(os.urandom(KEY_BYTES))))

    def add(self, inference: int, sealed: _Sealed) -> None:
        self._sealed[inference] = sealed

    def take(self, inference: int) -> Material:
        """Read all of one inference's material, and burn the file and its key.

        Raises CorrelationError where it is not there or is not, bit for bit, what was written for this place.
        """
        sealed = self._sealed.pop(inference, None)
        if sealed is None:
            raise CorrelationError(f"inference {inference} has no material on disk, or it was taken before")
        try:
            sealed.file.seek(0)
            return {
                (r.step, r.record): (r.kind, self._read(sealed, inference, i, r))
                for i, r in enumerate(sealed.records)
            }
        except OSError as error:
            raise SessionError(f"material cannot be read from {self._folder} ({error.strerror})") from None
        finally:
            sealed.burn()

    def _read(self, sealed: _Sealed, inference: int, ordinal: int, row: _Record) -> Parts:
        cipher = Cipher(algorithms.AES(sealed.key), modes.GCM(_nonce(ordinal), row.tag))
        decryptor: AEADDecryptionContext = cipher.decryptor()
        decryptor.authenticate_additional_data(self.place(inference, row.step, row.record, row.kind))
        parts = {}
        try:
            for part in row.kind.parts():
                shape, dtype = part.shape, part.dtype
                empty = torch.empty(shape, dtype=dtype, device="meta")
                size = empty.numel() * dtype.itemsize
                memory = np.empty(size + _SPARE, np.uint8)
                # Read to where it is decrypted, piece by piece, while it is in the processor's cache.
                for start in range(0, size, PIECE_BYTES):
                    piece = memoryview(sealed.file.read(min(PIECE_BYTES, size - start)))
                    decryptor.update_into(piece, memory.data[start : start + len(piece) + _SPARE])
                raw: Any = memory[:size].view(NUMPY_TYPES[dtype])
                parts[part.name] = torch.from_numpy(raw).reshape(shape)
            decryptor.finalize()
        except InvalidTag:
            raise CorrelationError(
                f"the material of inference {inference}, step {row.step}, record {row.record} is not what was written "
                f"to {self._folder}: it was changed there; its index is burnt"
            ) from None
        return parts

    def place(self, inference: int, step: int, record: int, kind: Correlation) -> bytes:
        """What a record is bound to."""
        return fields(
            self._session_id,
            inference.to_bytes(8, "little"),
            step.to_bytes(4, "little"),
            record.to_bytes(4, "little"),
            repr(kind).encode(),
        )

    def burn_below(self, inference: int) -> None:
        """Drop what was written for indices before this one: they only go up."""
        for index in [i for i in list(self._sealed) if i < inference]:
            self._sealed.pop(index).burn()

    def close(self) -> None:
        for index in list(self._sealed):
            self._sealed.pop(index).burn()

    @property
    def folder(self) -> Path:
        return self._folder


class Writer:
    """Writes the records of one inference, in order."""

    def __init__(self, spool: Spool, inference: int, sealed: _Sealed) -> None:
        self._spool = spool
        self._inference = inference
        self._sealed = sealed
        self._buffer = bytearray(PIECE_BYTES + _SPARE)

    def write(self, step: int, record: int, kind: Correlation, parts: Mapping[str, torch.Tensor]) -> None:
        sealed = self._sealed
        cipher = Cipher(algorithms.AES(sealed.key), modes.GCM(_nonce(len(sealed.records))))
        encryptor = cipher.encryptor()
        encryptor.authenticate_additional_data(self._spool.place(self._inference, step, record, kind))
        with self._disk():
            for part in kind.parts():
                array = parts[part.name].contiguous().numpy().reshape(-1).view(np.uint8)
                for start in range(0, array.size, PIECE_BYTES):
                    count = encryptor.update_into(array[start : start + PIECE_BYTES].data, self._buffer)
                    sealed.file.write(memoryview(self._buffer)[:count])
            encryptor.finalize()
        sealed.records.append(_Record(step, record, kind, encryptor.tag))

    def finish(self) -> None:
        """All of it was written: it can be taken."""
        with self._disk():
            self._sealed.file.flush()
        self._spool.add(self._inference, self._sealed)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SessionError(
                f"material cannot be written to {self._spool.folder} ({error.strerror}); make room there, or lower "
                "limits.material_bytes"
            ) from None

    def abandon(self) -> None:
        self._sealed.burn()


def _nonce(ordinal: int) -> bytes:
    """Under a key that serves one inference."""
    return ordinal.to_bytes(12, "little")
