"""Waiting and buffering of links, whatever carries them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_QUEUED_BYTES = 1 << 30
FLUSH_SECONDS = 2.0
"""For a link that closes to send what is queued."""


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes.

    deadline: for one send or receive. keepalive: silence of a connection before it is tested, and again before
    the peer counts as dead; a peer that computes is not silent. queued_bytes: waiting to be sent, before `send`
    waits.
    """

    deadline: float = 120.0
    keepalive: float = 20.0
    queued_bytes: int = MAX_QUEUED_BYTES
