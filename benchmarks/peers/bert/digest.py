"""One name for the same arrays in every engine's process. Of numpy alone: a peer's environment has no more."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def digest(arrays: Mapping[str, Any]) -> str:
    """SHA-256, as hex, over names, shapes, types and little-endian bytes, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        head = f"{len(name)}:{name}:{array.dtype.name}:{','.join(map(str, np.shape(arrays[name])))};"
        found.update(head.encode())
        found.update(array.tobytes())
    return found.hexdigest()
