"""SEAL's objects to bytes and back, by way of memory alone: the bindings know only paths, and key material must reach
no disk.

Loading checks everything that SEAL checks: metadata, parameters, and that each residue is below its prime. Before that, it
checks the envelope, which SEAL does not: that nothing follows the object, and what it may take once it is decompressed. A
megabyte of Galois keys that are all zeros would otherwise be 20 GB in memory.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from ...errors import WireError

Blob = bytes | bytearray | memoryview

ENVELOPE = struct.Struct("<HBBBBHQ")
"""Of every object: magic, size of this header, version (two bytes), compression, nothing, and the size of all."""
_MAGIC, _PLAIN, _ZSTD = 0xA15E, 0, 2
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 17
"""Most bytes that a block of Zstandard holds (RFC 8878, section 3.1.1.2)."""
SPLIT = 3
"""The compressor splits blocks as it sees fit: what is known of a size before decompressing is up to so many times it."""
MOST_KEYS_IN_ONE = 64
"""Places where a secret key is looked for within other bytes."""


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


def load(item: Any, context: Any, data: Blob, what: str, peer: str, *, most: int | None = None) -> Any:
    """Fill `item` from bytes of a peer. most: bytes that it has uncompressed, where SEAL does not bound them itself.

    Raises WireError, which names the peer and what it was to be.
    """
    view = check_envelope(data, what, peer, most=most)
    handle = os.memfd_create("seal", os.MFD_CLOEXEC)
    try:
        done = 0
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


def load_ciphertext(context: Any, data: Blob, level: int, what: str, peer: str) -> Any:
    """A ciphertext at that level and the parameters' scale. Raises WireError for any other, and for one without a random
    part: that is a plaintext in disguise, and the evaluator fails on it.
    """
    x = load(context.new(), context.context, data, what, peer)
    if (
        x.size() != 2
        or context.level(x) != level
        or x.scale != context.parameters.scale  # to the last bit: SEAL adds nothing of scales that differ
        or x.is_transparent()
    ):
        raise WireError(
            f"{peer}: {what} of another size, level or scale than the plan's, or not encrypted",
            public_detail=what,
        )
    return x


def check_envelope(data: Blob, what: str, peer: str, *, most: int | None = None) -> memoryview:
    """The bytes of an object. Raises WireError where `load` would, without a look at what is in them."""
    view = memoryview(data).cast("B")
    try:
        size = inflated(view)
    except (ValueError, struct.error) as error:
        raise WireError(f"{peer}: {what} could not be read: {error}", public_detail=what) from None
    if most is not None and size > SPLIT * most + _BLOCK:
        raise WireError(
            f"{peer}: {what} would take up to {size} bytes, where {most} were expected", public_detail=what
        )
    return view


def inflated(data: memoryview) -> int:
    """An upper bound of what an object takes once it is decompressed, from its envelope and the heads of its blocks alone.

    Raises ValueError and struct.error unless it ends exactly where the bytes do.
    """
    magic, head, _, _, mode, _, size = ENVELOPE.unpack_from(data)
    if magic != _MAGIC or head != ENVELOPE.size or mode not in (_PLAIN, _ZSTD):
        raise ValueError("no envelope of SEAL")
    if size != len(data):
        raise ValueError("it does not have the size that its envelope says")
    return len(data) if mode == _PLAIN else _zstd_bound(data[ENVELOPE.size :])


def _zstd_bound(data: memoryview) -> int:
    """Of one Zstandard frame (RFC 8878, section 3.1.1)."""
    if bytes(data[:4]) != _ZSTD_MAGIC:
        raise ValueError("it is not compressed as it says")
    (flags,) = struct.unpack_from("B", data, 4)
    alone = flags >> 5 & 1
    at = 5 + (1 - alone) + (0, 1, 2, 4)[flags & 3] + ((alone, 2, 4, 8)[flags >> 6])
    total, last = 0, 0
    while not last:
        low, high = struct.unpack_from("<HB", data, at)
        field = low | high << 16
        last, kind, size = field & 1, field >> 1 & 3, field >> 3
        if kind == 3 or size > _BLOCK:
            raise ValueError("a block of no kind")
        total += _BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
    if at + 4 * (flags >> 2 & 1) != len(data):
        raise ValueError("its compressed data end somewhere else")
    return total


def holds_secret_key(context: Any, data: Blob) -> bool:
    """Whether serialised bytes are, or contain, a secret key for this context: whoever sends one is told so, and it is not
    used.
    """
    raw = bytes(data)
    most = 2 * 8 * context.parameters.degree * (context.parameters.primes_at(context.parameters.levels) + 1)
    start = struct.pack("<HB", _MAGIC, ENVELOPE.size)
    at = -1
    for _ in range(MOST_KEYS_IN_ONE):
        at = raw.find(start, at + 1)
        if at < 0 or at + ENVELOPE.size > len(raw):
            return False
        size = ENVELOPE.unpack_from(raw, at)[-1]
        if size <= min(most, len(raw) - at):
            try:
                load(context.api.SecretKey(), context.context, raw[at : at + size], "a key", "peer")
            except WireError:
                continue
            return True
    return False
