"""Peak memory of this process, as the operating system counts it, and on GPUs, as torch does."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Highest resident size of this program since it started, bytes.

    On Linux VmHWM is read, since ru_maxrss survives exec: a small worker would report the size of the process
    that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


def peak_gpu_memory_bytes() -> int | None:
    """Highest sum of what torch held of its GPUs since this process started, bytes, memory that it keeps for reuse included.
    None where this process has not used CUDA; asking does not begin to.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(sum(torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count())))
