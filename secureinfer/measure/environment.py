"""What a run stood on: processor, cores, versions."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """What this ran on: processor, cores this process may use, versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": cores,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("secureinfer", "torch", "crypten", "grpcio")},
    }


def network_between(hosts: Sequence[str], stated: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What lies between the parties: as the settings state it, else loopback, or None where peers are elsewhere.

    stated: name and source, measured or emulated.
    """
    if stated is not None:
        return {"name": stated["name"], "source": stated["source"]}
    return {"name": "loopback" if hosts and all(map(_is_loopback, hosts)) else None, "source": "measured"}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _processor() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
