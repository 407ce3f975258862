"""Tensors on a worker's pipe: heads in the JSON, raw bytes beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import WireError

DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

MAX_DIMENSIONS = 64
"""As torch has them."""


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[list[list[Any]], list[memoryview]]:
    """Heads [name, dtype, shape] and bytes of each tensor."""
    heads, blobs = [], []
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        heads.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        array: Any = flat.view(torch.uint8).numpy()
        blobs.append(memoryview(array) if flat.numel() else memoryview(b""))
    return heads, blobs


def unpack(heads: Any, blobs: list[bytearray]) -> dict[str, torch.Tensor]:
    """Raises WireError where heads and bytes do not fit."""
    tensors = {}
    if not isinstance(heads, list) or len(heads) != len(blobs):
        raise WireError("tensors without their heads")
    for head, blob in zip(heads, blobs, strict=True):
        name, dtype, shape = _head(head)
        if math.prod(shape) * dtype.itemsize != len(blob):
            raise WireError(f"tensor {name!r} does not have the bytes that its head says")
        flat = torch.frombuffer(blob, dtype=dtype) if blob else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape)
    return tensors


def _head(head: Any) -> tuple[str, torch.dtype, list[int]]:
    if not isinstance(head, list) or len(head) != 3:
        raise WireError("a tensor's head that is not a name, a type and a shape")
    name, dtype, shape = head
    if (
        not isinstance(name, str)
        or not isinstance(dtype, str)
        or dtype not in DTYPES
        or not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
    ):
        raise WireError("a tensor's head that is not a name, a type and a shape")
    return name, DTYPES[dtype], shape
