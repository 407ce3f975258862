"""What every data port does, whatever carries its bytes: whom it takes, which links have come, and its words where no port
is free.
"""

from __future__ import annotations

import hmac
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from ..errors import AuthenticationError, PeerError, SessionError
from .framing import FramedLink
from .tls import Identity

AnyLink = TypeVar("AnyLink", bound=FramedLink)


class DataPort(ABC, Generic[AnyLink]):
    """The links of one session's expected peers. A subclass listens, and puts them in `_links` under `_arrived`."""

    port: int

    def __init__(self, session_id: bytes, expected: Mapping[Identity, bytes]) -> None:
        self._session_id = session_id
        self._expected = dict(expected)
        self._links: dict[str, AnyLink] = {}
        self._arrived = threading.Condition()

    def accept(self, peer: str, timeout: float) -> AnyLink:
        """The link of a peer that dialled, waiting for it.

        Raises PeerError naming it after `timeout` seconds, and at once the reason for which another link
        ended.
        """
        stop = time.monotonic() + timeout
        with self._arrived:
            while peer not in self._links:
                ended = next((f for link in self._links.values() if (f := link.failure)), None)
                if ended is not None:
                    raise ended
                left = stop - time.monotonic()
                if left <= 0:
                    raise PeerError(peer, f"did not connect within {timeout:g} s")
                self._arrived.wait(min(left, 0.5))
            return self._links[peer]

    @abstractmethod
    def close(self) -> None:
        """Close all links and the port."""

    def _check(self, identity: Identity, session_id: object, token: object) -> None:
        """Raises AuthenticationError unless an expected party shows this session's id and its own token."""
        expected = self._expected.get(identity)
        if expected is None:
            raise AuthenticationError(
                f"{identity} has no part in this session", public_detail="not a party of it"
            )
        same_session = _equal(session_id, self._session_id)
        if not (_equal(token, expected) and same_session):
            raise AuthenticationError(
                f"{identity} came with another session's token", public_detail="session token"
            )


def _equal(shown: object, expected: bytes) -> bool:
    return isinstance(shown, bytes) and hmac.compare_digest(shown, expected)


def no_free_port(bind: str, ports: range | tuple[int, ...]) -> SessionError:
    shown = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    return SessionError(
        f"no free port among {shown} on {bind}; end what listens there or change the settings",
        public_detail="no free port",
    )
