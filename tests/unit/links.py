"""Two ends of a data link of either kind, over TLS on the loopback, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from secureinfer.transport.base import Address, Clock
from secureinfer.transport.data import DIALLERS, LISTENERS
from secureinfer.transport.framing import FramedLink
from secureinfer.transport.limits import Limits
from secureinfer.transport.tls import Credentials, Identity

SESSION = b"s" * 16
TOKEN = b"t" * 32
OWNER, MODEL, DEALER = (Identity(role, role) for role in ("data_owner", "model_owner", "dealer"))
AT = Address("online", 3, 2, 1)

Certificates = dict[Identity, Credentials]
Pair = tuple[FramedLink, FramedLink]


@contextmanager
def between(
    kind: str,
    certs: dict[Identity, Credentials],
    *,
    deadline: float = 20.0,
    queued: int = 1 << 30,
    keepalive: float = 20.0,
) -> Iterator[Pair]:
    limits = Limits(deadline, keepalive, queued)
    listener = LISTENERS[kind](certs[MODEL], "127.0.0.1", (0,), SESSION, {OWNER: TOKEN}, Clock(), limits)
    try:
        here = DIALLERS[kind](
            "127.0.0.1", listener.port, certs[OWNER], MODEL, SESSION, TOKEN, Clock(), limits, timeout=10
        )
        try:
            yield here, listener.accept("data_owner", 10)
        finally:
            closing = threading.Thread(target=here.close)
            closing.start()
            listener.close()
            closing.join()
    finally:
        listener.close()
