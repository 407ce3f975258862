"""Room: how much dealt material that waits for its inference a party keeps, as it announces it when it is ready."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import Limits
from ..errors import WireError

_LAYOUT = struct.Struct("<QQQ")
ROOM_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Room:
    """prepared_inferences, material_bytes: the party's limits. inference_bytes: of one inference's material there."""

    prepared_inferences: int
    material_bytes: int
    inference_bytes: int

    @property
    def inferences(self) -> int:
        """How many may wait; one at least, since nothing runs without its material."""
        by_size = (
            self.material_bytes // self.inference_bytes if self.inference_bytes else self.prepared_inferences
        )
        return max(1, min(self.prepared_inferences, by_size))

    def __str__(self) -> str:
        """Which limit it is that holds."""
        if self.inferences == self.prepared_inferences:
            return f"limits.prepared_inferences = {self.prepared_inferences}"
        return f"limits.material_bytes = {self.material_bytes}, {self.inference_bytes} an inference"

    def pack(self) -> bytes:
        return _LAYOUT.pack(self.prepared_inferences, self.material_bytes, self.inference_bytes)


def room_of(limits: Limits, inference_bytes: int) -> Room:
    return Room(limits.prepared_inferences, limits.material_bytes, inference_bytes)


def unpack_room(payload: memoryview, peer: str) -> Room:
    """What a peer announced. Raises WireError for anything that no settings can say."""
    if len(payload) != ROOM_BYTES:
        raise WireError(f"{peer}: {len(payload)} bytes announce its limits, {ROOM_BYTES} were expected")
    room = Room(*_LAYOUT.unpack(payload))
    if (
        not 1 <= room.prepared_inferences <= 1 << 20
        or max(room.material_bytes, room.inference_bytes) > 1 << 50
    ):
        raise WireError(f"{peer}: it announces limits that no party can have")
    return room


def least(rooms: Mapping[str, Room]) -> tuple[str, Room]:
    """The party that takes the fewest, and its room."""
    return min(rooms.items(), key=lambda row: row[1].inferences)
