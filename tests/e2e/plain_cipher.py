"""A cipher that leaves everything as it was: the planted fault of material on disk."""

from __future__ import annotations

from typing import Any


class Plain:
    """In place of `Cipher`."""

    def __init__(self, *args: Any) -> None:
        self.tag = bytes(16)

    def encryptor(self) -> Plain:
        return self

    def authenticate_additional_data(self, data: bytes) -> None: ...

    def update_into(self, data: Any, buffer: Any) -> int:
        buffer[: len(data)] = data
        return len(data)

    def finalize(self) -> bytes:
        return b""
