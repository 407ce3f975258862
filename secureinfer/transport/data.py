"""The kinds of data link, by the name that a listening party announces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import WireError
from .base import Clock
from .data_port import DataPort
from .framing import FramedLink
from .grpc_link import dial
from .grpc_listener import Listener
from .limits import Limits
from .tls import Credentials, Identity
from .tls_dial import dial_tls
from .tls_listener import TlsListener

DataListener = DataPort[Any]
"""A worker's data port, of either kind."""


class _Listen(Protocol):
    def __call__(
        self,
        credentials: Credentials,
        bind: str,
        ports: range | tuple[int, ...],
        session_id: bytes,
        expected: Mapping[Identity, bytes],
        clock: Clock,
        limits: Limits,
    ) -> DataListener: ...


class _Dial(Protocol):
    def __call__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        peer: Identity,
        session_id: bytes,
        token: bytes,
        clock: Clock,
        limits: Limits,
        *,
        timeout: float,
    ) -> FramedLink: ...


LISTENERS: dict[str, _Listen] = {"tls": TlsListener, "grpc": Listener}
DIALLERS: dict[str, _Dial] = {"tls": dial_tls, "grpc": dial}


def dialler(kind: str, peer: str) -> _Dial:
    """How a peer that announced `kind` is dialled. Raises WireError for a kind that this version does not know."""
    found = DIALLERS.get(kind)
    if found is None:
        shown = "".join(c for c in kind[:32] if c.isprintable())
        raise WireError(f"{peer}: its data link {shown!r} is none of {', '.join(DIALLERS)}")
    return found
