"""The parts of a Report: what ran, what the caller timed, and the figures of a phase, a party and a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .latency import LatencySummary
from .stats import Phase


@dataclass(frozen=True)
class PlannedStep:
    """One row of the plan, as far as a report needs it."""

    index: int
    path: str
    op: str
    kernel: str
    rounds: int
    bytes: int
    dealt_bytes: int


@dataclass(frozen=True)
class ProgramInfo:
    """What ran. unsafe: names of the unsafe_* switches that are on. steps: the plan, in order.

    rounds: planned for an inference; less than the sum over steps, since messages of two steps overlap.
    setup_bytes: planned for a session; no sum over steps either, since steps share what is sent once.
    dealer: whether there is one; without it nothing is dealt, and there is no offline phase. exact_bytes: whether planned
    bytes are what is sent, to the byte; else they are what it is at most.
    """

    manifest_digest: str
    weights_digest: str | None
    backend: str
    protocol: str
    unsafe: tuple[str, ...] = ()
    steps: tuple[PlannedStep, ...] = ()
    rounds: int | None = None
    setup_bytes: int | None = None
    dealer: bool = True
    exact_bytes: bool = True

    @property
    def planned(self) -> dict[str, int | None]:
        return {
            "rounds": self.rounds,
            "bytes": sum(s.bytes for s in self.steps),
            "dealt_bytes": sum(s.dealt_bytes for s in self.steps),
            "setup_bytes": self.setup_bytes,
        }


@dataclass(frozen=True)
class CallerTimings:
    """What the caller's clock says, milliseconds.

    setup_ms: opening the session. offline, online: inference -> from the call to its return, encoding and
    inter-process work included. Where a run is missing here, the slowest worker's figure stands in.
    """

    setup_ms: float | None = None
    offline: Mapping[int, float] = field(default_factory=dict)
    online: Mapping[int, float] = field(default_factory=dict)

    def of(self, phase: Phase) -> Mapping[int, float]:
        if phase == "setup":
            return {} if self.setup_ms is None else {0: self.setup_ms}
        return self.offline if phase == "offline" else self.online


@dataclass(frozen=True)
class Plaintext:
    """The same model and inputs without protection, on the same machine in the same run."""

    engine: str
    dtype: str
    threads: int | None
    latency: LatencySummary
    processes: int = 1

    def to_dict(self) -> dict[str, Any]:
        head = {
            "engine": self.engine,
            "dtype": self.dtype,
            "processes": self.processes,
            "threads": self.threads,
        }
        return head | dataclasses.asdict(self.latency)


@dataclass(frozen=True)
class Figures:
    """One phase of one party, or of all that took part. Per inference (setup: session); None is unknown.

    bytes counts each frame once, at its sender, so that the parties' figures add up to the phase's. waiting_ms: of warm
    runs, how long a party was blocked on its peers and the network; the phase's is that of the party which took longest.
    bytes_one_way: of each step the greater direction, since peers send at once there, and of all steps one after the other:
    what the phase's longest path carries. peak_gpu_memory_bytes: None where no GPU was used.
    """

    latency: LatencySummary
    waiting_ms: float | None = None
    bytes: float | None = None
    bytes_one_way: float | None = None
    bytes_received: float | None = None
    socket_bytes: float | None = None
    rounds: float | None = None
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    energy_joules: float | None = None
    energy_source: str | None = None

    def to_dict(self) -> dict[str, Any]:
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "latency"}
        return dataclasses.asdict(self.latency) | rest


@dataclass(frozen=True)
class Layer:
    """The steps of one module path in one inference. rounds are the plan's: frames count whole runs.

    latency_ms, waiting_ms: of each step's slowest party; the rest of its latency it computed. waiting_ms is None where the
    parties do not go through the steps together (CKKS: one computes, the other waits for the answer). bytes_one_way: as in
    Figures.
    """

    path: str
    steps: int
    latency_ms: float | None
    waiting_ms: float | None
    bytes: float | None
    bytes_one_way: float | None
    rounds: int


@dataclass(frozen=True)
class PhaseReport:
    """figures: warm runs (all runs for bytes and rounds). cold_latency_ms: the first run of the session."""

    figures: Figures
    cold_latency_ms: float | None = None
    parties: Mapping[str, Figures] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return self.figures.to_dict() | {
            "cold_latency_ms": self.cold_latency_ms,
            "parties": {name: figures.to_dict() for name, figures in self.parties.items()},
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }
