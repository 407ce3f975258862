"""SEAL's context from checked parameters, and what both parties do with ciphertexts alike."""

from __future__ import annotations

import hashlib
from typing import Any

from ...errors import SettingsError
from .params import Parameters, check


def seal() -> Any:
    """TenSEAL's bindings of SEAL. Raises SettingsError that says what to install where they are absent."""
    try:
        import tenseal.sealapi as api
    except ImportError:
        raise SettingsError(
            "backend='ckks' needs TenSEAL, which is not installed; `pip install 'secureinfer[he]'` installs it, and "
            "backend='mpc' works without",
            public_detail="TenSEAL is not installed there; `pip install 'secureinfer[he]'` installs it",
        ) from None
    return api


class Context:
    """One party's SEAL context. parms: level -> SEAL's id of the modulus at that level. primes: what a rescaling from there
    divides by.

    Raises SettingsError below 128 bits of security, by our own table and again by SEAL's (rule K1).
    """

    def __init__(self, parameters: Parameters) -> None:
        api = seal()
        self.parameters = check(parameters)
        given = api.EncryptionParameters(api.SCHEME_TYPE.CKKS)
        given.set_poly_modulus_degree(parameters.degree)
        given.set_coeff_modulus(api.CoeffModulus.Create(parameters.degree, list(parameters.moduli)))
        self.context = api.SEALContext(given, True, api.SEC_LEVEL_TYPE.TC128)
        if not self.context.parameters_set():
            raise SettingsError(
                f"SEAL refuses these CKKS parameters: {self.context.parameters_error_message()}"
            )
        self.api = api
        self.encoder = api.CKKSEncoder(self.context)
        self.evaluator = api.Evaluator(self.context)
        self.parms: dict[int, Any] = {}
        self.primes: dict[int, int] = {}
        data, left = self.context.first_context_data(), parameters.primes_at(parameters.levels)
        while data is not None and left > 0:
            level, part = divmod(left - 1, parameters.split)
            prime = data.parms().coeff_modulus()[-1].value()
            self.primes[level] = self.primes.get(level, 1) * prime
            if part == parameters.split - 1:
                self.parms[level] = data.parms_id()
            data, left = data.next_context_data(), left - 1
        self._level = {tuple(p): level for level, p in self.parms.items()}

    def level(self, item: Any) -> int | None:
        """Of a ciphertext or plaintext; None if it is of no level of this chain."""
        return self._level.get(tuple(item.parms_id()))

    def new(self) -> Any:
        return self.api.Ciphertext(self.context)

    def encode(self, values: Any, level: int, scale: float) -> Any:
        """values: [slots] floats or complex numbers, or one float for all slots. Returns a plaintext."""
        plain = self.api.Plaintext()
        given = values if isinstance(values, float) else values.tolist()
        self.encoder.encode(given, self.parms[level], scale, plain)
        return plain

    def element(self, step: int) -> int:
        """The Galois element of a rotation to the left (rule K4)."""
        degree = self.parameters.degree
        return int(pow(3, step % (degree // 2), 2 * degree))


def context_id(session_id: bytes, manifest_digest: str, keys: list[bytes | bytearray | memoryview]) -> bytes:
    """16 bytes that every ciphertext of a session carries: of its program and of the keys that it is to be computed with."""
    h = hashlib.blake2b(digest_size=16, person=b"secureinfer ckks")
    for part in (session_id, bytes.fromhex(manifest_digest), *keys):
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return h.digest()
