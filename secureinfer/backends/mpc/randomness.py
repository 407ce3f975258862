"""Cryptographic randomness for shares and masks: a seed for each pair of parties, a keyed AES-CTR stream for each value.

R2: seed = HKDF(nonce ‖ nonce; session, manifest digest, role). Each stream has a key of its own, keyed BLAKE2b over the
length-prefixed (session, inference, step, value, label), and its counter starts at 0. No stream is read twice: a seed
remembers the keys that it gave out, and refuses one that it gave before.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import CorrelationError

NONCE_BYTES = 32
SEED_BYTES = 32

_DTYPES: dict[torch.dtype, type] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.uint8: np.uint8,
}
_ZEROS = bytes(1 << 20)


def fresh_nonce() -> bytes:
    """32 bytes from the operating system."""
    return os.urandom(NONCE_BYTES)


def agree_seed(first: bytes, second: bytes, *, session: bytes, manifest_digest: str, role: str) -> Seed:
    """A seed from two nonces that were exchanged over an authenticated, encrypted channel."""
    info = fields(b"secureinfer seed v1", manifest_digest.encode(), role.encode())
    key = HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=session, info=info).derive(first + second)
    return Seed(key, session)


def fields(*parts: bytes) -> bytes:
    """Injective: every part is preceded by its length."""
    return b"".join(len(p).to_bytes(4, "little") + p for p in parts)


class Stream:
    """The key stream of AES-256-CTR under one key, from counter 0."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def read(self, size: int) -> bytearray:
        """The next `size` bytes."""
        out = bytearray(size + 15)  # update_into asks for a block of room past the end
        view = memoryview(out)
        done = 0
        while done < size:
            chunk = min(len(_ZEROS), size - done)
            self._encryptor.update_into(memoryview(_ZEROS)[:chunk], view[done : done + chunk + 15])
            done += chunk
        return out

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Uniform integers over the whole range of dtype (int64, int32, int16 or uint8)."""
        count = math.prod(shape)
        raw: np.ndarray[Any, Any] = np.frombuffer(
            self.read(count * dtype.itemsize), dtype=_DTYPES[dtype], count=count
        )
        return torch.from_numpy(raw).reshape(tuple(shape)).to(device)


class Seed:
    """A secret shared by two parties of one session. Gives each (inference, step, value, label) its own stream, once."""

    def __init__(self, key: bytes, session: bytes) -> None:
        self._key = bytearray(key)
        self._session = session
        self._given: dict[int, set[bytes]] = {}

    def stream(self, inference: int, step: int, value: int, label: str) -> Stream:
        """Raises CorrelationError if this stream was given before, or if the seed was erased."""
        if not self._key:
            raise CorrelationError("the session is closed and its seeds are erased; open a new session")
        place = fields(
            self._session,
            inference.to_bytes(8, "little", signed=True),
            step.to_bytes(4, "little"),
            value.to_bytes(4, "little"),
            label.encode(),
        )
        key = hashlib.blake2b(place, key=bytes(self._key), digest_size=32).digest()
        given = self._given.setdefault(inference, set())
        if key in given:
            raise CorrelationError(
                f"the stream of inference {inference}, step {step}, value {value} ({label}) was already used; "
                "a mask belongs to one value"
            )
        given.add(key)
        return Stream(key)

    def forget(self, inference: int) -> None:
        """Drop the record of one inference, once its index is burnt and can never be asked for again."""
        self._given.pop(inference, None)

    def same_as(self, other: Seed) -> bool:
        """Whether two seeds are equal: the dealer refuses a session in which they are."""
        return self._key == other._key

    def erase(self) -> None:
        """Overwrite the seed."""
        for i in range(len(self._key)):
            self._key[i] = 0
        self._key = bytearray()
        self._given.clear()

    def __repr__(self) -> str:
        return "Seed(hidden)"
