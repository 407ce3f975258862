"""SEAL's objects to bytes and back, by way of memory alone: the bindings know only paths, and key material must reach
no disk.

Loading checks everything that SEAL checks: metadata, parameters, and that each residue is below its prime.
"""

from __future__ import annotations

import os
from typing import Any

from ...errors import WireError


def dump(item: Any) -> bytearray:
    """The serialised bytes of a key, a ciphertext, or a seeded one of either."""
    handle = os.memfd_create("seal", os.MFD_CLOEXEC)
    try:
        item.save(f"/proc/self/fd/{handle}")
        size = os.lseek(handle, 0, os.SEEK_END)
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            done += os.preadv(handle, [view[done:]], done)
        return data
    finally:
        os.close(handle)


def load(item: Any, context: Any, data: bytes | bytearray | memoryview, what: str, peer: str) -> Any:
    """Fill `item` from bytes of a peer. Raises WireError, which names the peer and what it was to be."""
    handle = os.memfd_create("seal", os.MFD_CLOEXEC)
    try:
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            done += os.pwrite(handle, view[done:], done)
        item.load(context, f"/proc/self/fd/{handle}")
    except OSError:
        raise
    except Exception as error:  # SEAL raises several kinds for damaged bytes
        raise WireError(
            f"{peer}: {what} could not be read: {type(error).__name__}", public_detail=what
        ) from None
    finally:
        os.close(handle)
    return item


def is_secret_key(context: Any, data: bytes | bytearray | memoryview) -> bool:
    """Whether serialised bytes hold a secret key: whoever sends one is told so, and it is not used."""
    key: Any = context.api.SecretKey()
    try:
        load(key, context.context, data, "a key", "peer")
    except WireError:
        return False
    return True
