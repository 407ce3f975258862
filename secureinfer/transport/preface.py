"""What the two ends of a data connection say before its first frame: who dials shows the session and its token, who
listens takes it or says why not.

Both messages have a fixed size, so that nobody reads what a stranger declares.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ..errors import WireError

MAGIC = b"SIDL"
VERSION = 1
TOKEN_BYTES = 32

_PREFACE = struct.Struct("<4sB3x16s32s")
_ANSWER = struct.Struct("<4sBBH248s")
PREFACE_BYTES = _PREFACE.size
ANSWER_BYTES = _ANSWER.size
_MAX_TEXT_BYTES = 248

ACCEPTED, REFUSED, TAKEN = range(3)
"""Taken: not an intruder, and yet no place, such as for a party that is connected already."""


@dataclass(frozen=True)
class Preface:
    """The session and the token that a dialler shows. The token is not in the repr."""

    session_id: bytes
    token: bytes = field(repr=False)


def pack_preface(preface: Preface) -> bytes:
    """Raises WireError where the session id or the token is too long; a short token is refused by the peer."""
    if len(preface.session_id) != 16 or len(preface.token) > TOKEN_BYTES:
        raise WireError(f"a session id has 16 bytes and a token {TOKEN_BYTES}")
    return _PREFACE.pack(MAGIC, VERSION, preface.session_id, preface.token)


def unpack_preface(data: bytes) -> Preface:
    """Raises WireError on anything but a preface of this version."""
    if len(data) != PREFACE_BYTES:
        raise WireError(f"a preface has {PREFACE_BYTES} bytes, got {len(data)}", public_detail="preface")
    magic, version, session_id, token = _PREFACE.unpack(data)
    if magic != MAGIC:
        raise WireError("the preface does not begin with the protocol's magic bytes", public_detail="preface")
    if version != VERSION or data[5:8] != bytes(3):
        raise WireError(
            f"the preface has version {version}, this side speaks {VERSION}",
            public_detail=f"version {VERSION} is spoken here",
        )
    return Preface(session_id, token)


def pack_answer(status: int, text: str = "") -> bytes:
    """text: public; cut to what fits."""
    raw = text.encode("ascii", "replace")[:_MAX_TEXT_BYTES]
    return _ANSWER.pack(MAGIC, VERSION, status, len(raw), raw)


def unpack_answer(data: bytes) -> tuple[int, str]:
    """Status and printable text. Raises WireError on anything else."""
    if len(data) != ANSWER_BYTES:
        raise WireError(f"an answer has {ANSWER_BYTES} bytes, got {len(data)}")
    magic, version, status, length, raw = _ANSWER.unpack(data)
    if magic != MAGIC or version != VERSION or status not in (ACCEPTED, REFUSED, TAKEN):
        raise WireError("the answer to the preface is none of this version")
    if length > _MAX_TEXT_BYTES or (status == ACCEPTED and length) or any(raw[length:]):
        raise WireError("the answer to the preface is malformed")
    text = "".join(c for c in raw[:length].decode("ascii", "replace") if c.isprintable())
    return status, text
