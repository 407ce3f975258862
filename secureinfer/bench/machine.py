"""What a benchmark ran on: measure.environment's figures, memory, devices, and the versions of what it compares with."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch

from ..measure.environment import environment

PEERS = ("transformers", "tenseal", "onnxruntime", "torchvision", "mlcommons-loadgen", "zeus")


def machine() -> dict[str, Any]:
    """JSON; None for what is unknown or not installed."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        **environment(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **{name: _version(name) for name in PEERS},
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
