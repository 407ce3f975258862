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
        name, dtype_name, shape = head
        dtype = DTYPES.get(dtype_name)
        if dtype is None or math.prod(shape) * dtype.itemsize != len(blob):
            raise WireError(f"tensor {name!r} does not have the bytes that its head says")
        flat = torch.frombuffer(blob, dtype=dtype) if blob else torch.empty(0, dtype=dtype)
        tensors[str(name)] = flat.reshape(shape)
    return tensors
