"""Frames between the two parties: a header that binds a ciphertext to its context and place, then SEAL's bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...errors import WireError

HEADER = struct.Struct("!4s16sQIIB7x")
"""Magic, context id, inference, ordinal, count, kind."""
MAGIC = b"CKS1"
INPUT, OUTPUT = 1, 2

KEYS = struct.Struct("!4s16s")
KEYS_MAGIC = b"CKK1"


@dataclass(frozen=True)
class Place:
    """Which ciphertext of which inference of which context: what the receiver expects is exact."""

    context: bytes
    inference: int
    kind: int
    ordinal: int
    count: int

    def pack(self, data: bytes | bytearray | memoryview) -> bytearray:
        head = HEADER.pack(MAGIC, self.context, self.inference, self.ordinal, self.count, self.kind)
        return bytearray(head) + data

    def unpack(self, frame: memoryview, peer: str) -> memoryview:
        """SEAL's bytes of a frame. Raises WireError for one of another context, inference, kind, place or count."""
        if len(frame) <= HEADER.size:
            raise WireError(f"{peer}: an empty or truncated ciphertext", public_detail="ciphertext")
        magic, context, inference, ordinal, count, kind = HEADER.unpack(frame[: HEADER.size])
        if magic != MAGIC:
            raise WireError(f"{peer}: a frame that holds no ciphertext", public_detail="ciphertext")
        if context != self.context:
            raise WireError(
                f"{peer}: a ciphertext of another context", public_detail="context of a ciphertext"
            )
        came = (inference, kind, ordinal, count)
        expected = (self.inference, self.kind, self.ordinal, self.count)
        if came != expected:
            raise WireError(
                f"{peer}: a ciphertext (inference, kind, ordinal, count) {came} where {expected} was expected",
                public_detail="place of a ciphertext",
            )
        return frame[HEADER.size :]
