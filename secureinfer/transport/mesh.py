"""A full mesh of links between the parties of a program that is no planned session, such as one written for CrypTen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import SettingsError
from .base import Clock
from .limits import Limits
from .tls import Credentials, Identity
from .tls_dial import dial_tls
from .tls_link import TlsLink
from .tls_listener import TlsListener


@dataclass(frozen=True)
class Member:
    """One party. Every member but the last listens: those that come later in the list dial it."""

    identity: Identity
    host: str
    port: int


@contextmanager
def mesh(
    me: str,
    members: Sequence[Member],
    credentials: Credentials,
    *,
    session_id: bytes,
    tokens: Mapping[str, bytes],
    limits: Limits,
    timeout: float,
) -> Iterator[dict[str, TlsLink]]:
    """Links from `me` to every other member, by name, over mutual TLS; closed at the end of the block.

    members: the same list, in the same order, at all parties. tokens: by the name of the member that listens, what the
    others show it. timeout: seconds until all are connected.
    Raises PeerError naming who is not there, AuthenticationError for a wrong certificate or token.
    """
    names = [m.identity.name for m in members]
    if me not in names or len(set(names)) != len(names):
        raise SettingsError(f"{me!r} must stand once among the members {names}")
    place, clock = names.index(me), Clock()
    before, after = members[:place], members[place + 1 :]
    listener = None
    links: dict[str, TlsLink] = {}
    try:
        if after:
            expected = {m.identity: tokens[me] for m in after}
            here = members[place]
            listener = TlsListener(credentials, here.host, (here.port,), session_id, expected, clock, limits)
        for m in before:
            name = m.identity.name
            links[name] = dial_tls(
                m.host,
                m.port,
                credentials,
                m.identity,
                session_id,
                tokens[name],
                clock,
                limits,
                timeout=timeout,
            )
        for m in after:
            if listener is not None:
                links[m.identity.name] = listener.accept(m.identity.name, timeout)
        yield links
    finally:
        for link in links.values():
            link.close()
        if listener is not None:
            listener.close()
