"""Energy counters of the machine: RAPL's of processors and memory, NVML's of GPUs; joules since they were opened.

A counter that cannot be opened says why. One that can no longer be read is lost for good: what it would have counted
meanwhile is unknown, and so is every sum from then on.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

BENCH = "pip install 'secureinfer[bench]'"
RAPL_FOLDERS = (Path("/sys/class/powercap/intel-rapl"), Path("/zeus_sys/class/powercap/intel-rapl"))
"""The kernel's, and where zeus's documentation has a container mount it."""
MOST_WATTS = 1000.0
"""That one package or its memory takes; it bounds how soon a counter can wrap (65 kJ, a usual range: 65 s)."""
LEAST_POLL_SECONDS = 0.02


class Counter(Protocol):
    """What energy is read from. name: nvml, rapl. lost: why it can no longer be read, None while it can."""

    name: str
    lost: str | None
    poll_seconds: float | None
    """How often it must be read so as not to miss a wrap; None where it does not wrap."""

    def joules(self) -> float | None:
        """Since it was opened; None once it is lost. Not safe to call from two threads at once: the meter locks."""


@dataclass(frozen=True)
class Absent:
    """A counter that this machine does not have, or does not let this process read."""

    name: str
    why: str


@dataclass
class _Zone:
    """One counter of RAPL. It counts microjoules up to `range_uj`, and then from 0 again."""

    name: str
    file: Path
    range_uj: float
    last_uj: float
    total_uj: float = 0.0

    def advance(self) -> None:
        now_uj = float(self.file.read_text())
        if not 0 <= now_uj <= self.range_uj:
            raise ValueError(f"{now_uj:g} microjoules lies outside 0 to {self.range_uj:g}")
        self.total_uj += now_uj - self.last_uj + (self.range_uj if now_uj < self.last_uj else 0.0)
        self.last_uj = now_uj


class Rapl:
    """Joules of all packages and their memory.

    A package's own zones (core, uncore) are parts of it, and psys holds the packages: neither is added.
    """

    name = "rapl"
    lost: str | None = None

    def __init__(self, zones: Sequence[_Zone], clock: Callable[[], float] = time.monotonic) -> None:
        self._zones, self._clock, self._at = zones, clock, clock()
        self._wrap_seconds = min(zone.range_uj for zone in zones) / 1e6 / MOST_WATTS
        self.poll_seconds: float | None = max(LEAST_POLL_SECONDS, min(1.0, self._wrap_seconds / 4))

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(zone.name for zone in self._zones)

    def joules(self) -> float | None:
        if self.lost is not None:
            return None
        now = self._clock()
        if now - self._at >= self._wrap_seconds:
            self.lost = (
                f"RAPL was not read for {now - self._at:.1f} s, in which it may have wrapped more than once"
            )
            return None
        self._at = now
        for zone in self._zones:
            try:
                zone.advance()
            except (OSError, ValueError) as error:
                self.lost = f"RAPL's {zone.name} could not be read any more: {_text(error)}"
                return None
        return sum(zone.total_uj for zone in self._zones) / 1e6


def open_rapl(
    folders: Sequence[Path] = RAPL_FOLDERS, clock: Callable[[], float] = time.monotonic
) -> Rapl | Absent:
    """RAPL's counters, found by zeus. Wraps are counted here: zeus starts a multiprocessing process for each counter,
    which breaks scripts without a `__main__` guard."""
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None:
        return Absent("rapl", f"this system has no {folders[0]}: no RAPL, or a virtual machine without it")
    try:
        zeus = importlib.import_module("zeus.device.cpu.rapl")
    except ImportError as error:
        return Absent("rapl", f"zeus cannot be imported ({error}): {BENCH}")
    numbers = sorted(
        int(end) for d in folder.glob("intel-rapl:*") if (end := d.name.partition(":")[2]).isdigit()
    )
    zones = []
    for number in numbers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a sub-zone without a counter is no part of what is read
                package = zeus.RAPLCPU(number, str(folder))
            if not package.rapl_file.name.startswith("package"):
                continue
            zones += [_zone(f) for f in (package.rapl_file, package.dram) if f is not None]
        except Exception as error:  # zeus has a class of its own for most of what can be wrong here
            return Absent("rapl", f"RAPL in {folder} cannot be read: {_text(error)}")
    if not zones:
        return Absent("rapl", f"{folder} holds no package")
    return Rapl(zones, clock)


def _zone(file: Any) -> _Zone:
    range_uj = float(file.max_energy_range_uj)
    if range_uj <= 0:
        raise ValueError(f"{file.name} has the range {range_uj:g}")
    return _Zone(
        f"{Path(file.path).name} {file.name}", Path(file.energy_uj_path), range_uj, float(file.last_energy)
    )


class Nvml:
    """Joules of all visible GPUs, whole boards. The driver counts millijoules in 64 bits, which do not wrap."""

    name = "nvml"
    lost: str | None = None
    poll_seconds: float | None = None

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._first = self._last = [nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in handles]

    @property
    def devices(self) -> int:
        return len(self._handles)

    def joules(self) -> float | None:
        if self.lost is not None:
            return None
        try:
            now = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in self._handles]
        except Exception as error:  # pynvml makes a class for each code at run time
            self.lost = f"NVML could not be read any more: {_text(error)}"
            return None
        if any(n < b for n, b in zip(now, self._last, strict=True)):
            self.lost = "NVML's counter went back: the driver was loaded anew"
            return None
        self._last = now
        return float(sum(now) - sum(self._first)) / 1000


def open_nvml(environment: Mapping[str, str] = os.environ) -> Nvml | Absent:
    """Counters of the GPUs that CUDA_VISIBLE_DEVICES leaves visible; all of them without it.

    Numbers there are taken in the order of the bus, which is CUDA's own where all GPUs of a machine are alike.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return Absent("nvml", f"nvidia-ml-py cannot be imported ({error}): {BENCH}")
    try:
        nvml.nvmlInit()
    except Exception as error:
        return Absent("nvml", f"NVML does not start: {_text(error)}")
    try:
        handles = _visible(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        if not handles:
            return Absent("nvml", "no GPU is visible")
        return Nvml(nvml, handles)
    except Exception as error:
        return Absent("nvml", f"NVML counts no energy of these GPUs: {_text(error)}")


def _visible(nvml: Any, named: str | None) -> list[Any]:
    every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if named is None:
        return every
    uuids: list[str] | None = None
    found: list[Any] = []
    for name in filter(None, (part.strip() for part in named.split(","))):
        if name.startswith("MIG-"):
            raise ValueError(f"{name} is a slice of a GPU, and has no counter of its own")
        if name.startswith("GPU-"):
            uuids = uuids or [_string(nvml.nvmlDeviceGetUUID(handle)) for handle in every]
            index = next((i for i, uuid in enumerate(uuids) if uuid.startswith(name)), -1)
        else:
            index = int(name) if name.isdecimal() else -1
        if not 0 <= index < len(every):
            break  # as CUDA does: what stands behind a name that it does not know is not visible either
        if every[index] not in found:
            found.append(every[index])
    return found


def _string(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _text(error: Exception) -> str:
    """One line; an error without text is known by its class."""
    return " ".join(str(error).split()) or type(error).__name__
