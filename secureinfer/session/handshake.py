"""Handshake: what the parties of a session must have in common, and how a difference is told to both
sides.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from ..backends import has_dealer
from ..errors import HandshakeError, SettingsError, WireError
from ..transport.base import NAME_PATTERN
from ..v1 import control_pb2
from .manifest import ProgramHead

PROTOCOL_VERSION = 1
MAX_DATA_OWNERS = 64
_TEXT = re.compile(r"[ -~]{0,64}")
_NAME = re.compile(NAME_PATTERN)

_SHOWN = {
    "protocol_version": "protocol version",
    "manifest_digest": "program (manifest digest)",
    "backend": "backend",
    "protocol": "protocol",
    "model_owner": "model owner",
    "data_owners": "data owners",
    "dealer": "dealer",
    "unsafe": "unsafe switches",
}


@dataclass(frozen=True)
class Hello:
    """What each party states. Compared whole; nothing in it is private. dealer: empty where the program has none."""

    session_id: bytes
    manifest_digest: str
    backend: str
    protocol: str
    model_owner: str
    data_owners: tuple[str, ...]
    dealer: str
    unsafe: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION

    @property
    def compute_parties(self) -> tuple[str, ...]:
        """Names in rank order."""
        return (self.model_owner, *self.data_owners)

    def to_message(self) -> control_pb2.Hello:
        return control_pb2.Hello(**dataclasses.asdict(self))

    def to_json(self) -> dict[str, Any]:
        """For a worker, over its pipe."""
        return {**dataclasses.asdict(self), "session_id": self.session_id.hex()}


def hello_from_json(body: dict[str, Any]) -> Hello:
    """What `Hello.to_json` wrote."""
    return Hello(
        **{
            **body,
            "session_id": bytes.fromhex(body["session_id"]),
            "data_owners": tuple(body["data_owners"]),
            "unsafe": tuple(body["unsafe"]),
        }
    )


def from_message(message: control_pb2.Hello) -> Hello:
    """Raises WireError where a field is not what this protocol allows."""
    hello = Hello(
        session_id=message.session_id,
        manifest_digest=message.manifest_digest,
        backend=message.backend,
        protocol=message.protocol,
        model_owner=message.model_owner,
        data_owners=tuple(message.data_owners[: MAX_DATA_OWNERS + 1]),
        dealer=message.dealer,
        unsafe=tuple(message.unsafe[:16]),
        protocol_version=message.protocol_version,
    )
    texts = (hello.manifest_digest, hello.backend, hello.protocol, *hello.unsafe)
    names = (*hello.compute_parties, *((hello.dealer,) if hello.dealer else ()))
    if (
        len(hello.session_id) != 16
        or not 1 <= len(hello.data_owners) <= MAX_DATA_OWNERS
        or len(set(names)) != len(names)
        or any(_TEXT.fullmatch(text) is None for text in texts)
        or any(_NAME.fullmatch(name) is None for name in names)
    ):
        raise WireError("the peer's handshake is malformed", public_detail="malformed handshake")
    return hello


def expect_same(mine: Hello, theirs: Hello, peer: str) -> None:
    """Raise HandshakeError that names every difference between two parties' views of one session."""
    differences = []
    for field, shown in _SHOWN.items():
        a, b = getattr(mine, field), getattr(theirs, field)
        if a != b:
            differences.append(f"{shown}: {_show(a)} here, {_show(b)} at {peer}")
    if differences:
        # Names, versions and digests of public things only, so that the peer may read the same text.
        text = "; ".join(differences)
        raise HandshakeError(f"{peer} does not agree with this party: {text}", public_detail=text)


def make_hello(
    head: ProgramHead,
    *,
    session_id: bytes,
    model_owner: str,
    data_owners: tuple[str, ...],
    dealer: str,
    unsafe: tuple[str, ...],
) -> Hello:
    """This party's view. dealer: the name in its settings, if any; a program without a dealer takes no notice of it.

    Raises SettingsError where the program needs other parties than there are.
    """
    if len(head.owners) > len(data_owners):
        raise SettingsError(
            f"the program takes inputs of {len(head.owners)} data owners ({', '.join(head.owners)}); a session has one"
        )
    if has_dealer(head.backend) and not dealer:
        raise SettingsError(
            "peers.dealer: this program needs a dealer's name and address",
            public_detail="the program needs a dealer, and peers.dealer is not set",
        )
    return Hello(
        session_id,
        head.digest,
        head.backend,
        head.protocol,
        model_owner,
        data_owners,
        dealer if has_dealer(head.backend) else "",
        tuple(sorted({*unsafe, *head.unsafe})),
    )


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    text = str(value)
    return text[:12] if len(text) == 64 else text or "none"
