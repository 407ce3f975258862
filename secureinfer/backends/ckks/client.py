"""The data owner's side: the secret key, which never leaves this process, encryption, and decryption (rule K2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...errors import SessionError
from .context import Context
from .sealed import dump, load_ciphertext


class Client:
    """A fresh key for each session. Nothing here writes, logs or sends the secret key, and nothing returns it."""

    def __init__(self, context: Context, steps: Sequence[int]) -> None:
        self.context = context
        self._steps = list(steps)
        self._generator = context.api.KeyGenerator(context.context)
        secret = self._generator.secret_key()
        self._encryptor = context.api.Encryptor(context.context, secret)
        self._decryptor = context.api.Decryptor(context.context, secret)

    def evaluation_keys(self, *, public: bool) -> list[bytearray]:
        """Serialised and seeded: relinearisation, Galois keys of the steps in use (empty without any), public key if
        wanted."""
        generator = self._generator
        if generator is None:
            raise SessionError("this engine is closed")
        elements = [self.context.element(s) for s in self._steps]
        galois = dump(generator.create_galois_keys(elements)) if elements else bytearray()
        keys = [dump(generator.create_relin_keys()), galois]
        if public:
            key = self.context.api.PublicKey()  # TenSEAL has no binding of the seeded one
            generator.create_public_key(key)
            keys.append(dump(key))
        return keys

    def encrypt(self, slots: npt.NDArray[np.float64]) -> bytearray:
        """[slots] values to a serialised ciphertext at the top level, its random half as a seed."""
        if self._encryptor is None:
            raise SessionError("this engine is closed")
        p = self.context.parameters
        plain = self.context.encode(slots, p.levels, p.scale)
        return dump(self._encryptor.encrypt_symmetric(plain))

    def decrypt(self, data: memoryview, peer: str) -> npt.NDArray[np.float64]:
        """[slots] values. Raises WireError, before anything is decrypted, for what is no result of this context."""
        if self._decryptor is None:
            raise SessionError("this engine is closed")
        x = load_ciphertext(self.context, data, 0, "a result", peer)
        plain = self.context.api.Plaintext()
        self._decryptor.decrypt(x, plain)
        return np.array(self.context.encoder.decode_double(plain))

    def close(self) -> None:
        """Forget the secret key."""
        self._generator = self._encryptor = self._decryptor = None
