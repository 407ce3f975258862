"""Made-up reports of benchmarks: one case of a known truth, with noise, and what tests change in it."""

from __future__ import annotations

import math
import random
from typing import Any

from secureinfer.bench.figures import overheads, timed
from secureinfer.bench.report import (
    Accuracy,
    Baseline,
    BenchReport,
    CaseKey,
    CaseResult,
    Energy,
    Fault,
    Interval,
    LoadResult,
    Meter,
    ModelFacts,
    Pool,
    Trial,
)

ENVIRONMENT = {"processor": "A processor", "cores": 2, "torch": "2.13.0", "secureinfer": "0.1.0"}
SESSION = {
    "program": {"planned": {"exact_bytes": True, "bytes": 5000}, "protocol": "fast"},
    "setup": {"bytes": 700, "latency_ms": 900.0, "count": 1, "parties": {}, "layers": []},
    "offline": {
        "bytes": 9000,
        "latency_ms": 30.0,
        "count": 9,
        "peak_memory_bytes": 400_000_000,
        "parties": {},
        "layers": [],
    },
    "online": {
        "bytes": 5000,
        "rounds": 12,
        "latency_ms": 300.0,
        "latency_ms_p50": 299.0,
        "count": 9,
        "cold_latency_ms": 900.0,
        "peak_memory_bytes": 800_000_000,
        "parties": {
            "data": {
                "bytes": 2000,
                "bytes_received": 3000,
                "rounds": 12,
                "cpu_seconds": 0.21,
                "waiting_ms": 80.0,
            },
            "model": {"bytes": 3000, "bytes_received": 2000, "rounds": 11, "peak_memory_bytes": 300_000_000},
        },
        "layers": [
            {"path": f"layer.{i}", "steps": 2, "latency_ms": 10.0 + i, "bytes": 100.0, "rounds": 1}
            for i in range(14)
        ],
    },
    "network": {"name": "loopback", "source": "measured"},
    "roles": {"data": "data_owner", "model": "model_owner"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{k: merged(base[k], v) if isinstance(v, dict) and k in base else v for k, v in changes.items()},
    }


def case(
    seed: int = 0,
    *,
    key: CaseKey | None = None,
    runs: int = 9,
    noise: float = 0.03,
    secure: float = 1.0,
    machine: float = 1.0,
    energy: float = 1.0,
    session: dict[str, Any] | None = None,
    **changes: Any,
) -> CaseResult:
    """One case. secure: how much slower the private runs are than they should be; machine: how much slower all is.

    Blocks of a run differ by up to a third in speed, for both sides; each run has `noise` (of its logarithm) of its own.
    """
    draw = random.Random(seed)
    blocks = [machine * draw.uniform(1, 1.33) for _ in range(runs)]

    def measured(ms: float) -> list[float]:
        return [ms * block * math.exp(draw.gauss(0, noise)) for block in blocks]

    baselines = [
        Baseline(
            engine=engine, dtype=dtype, status="ok", threads=2, latency=timed(measured(ms)),
            peak_memory_bytes=90_000_000, energy=Energy(joules=0.03, joules_per_sample=0.03, source="rapl"),
            accuracy=1.0,
        )
        for engine, dtype, ms in (("torch eager", "fp32", 3.0), ("onnxruntime", "int8", 1.5))
    ]  # fmt: skip
    baselines.append(
        Baseline(
            engine="torch.compile", dtype="fp32", status="unavailable", reason="no C++ compiler was found"
        )
    )
    online, offline = timed(measured(300 * secure), 900.0), timed(measured(30), 90.0)
    joules = 12 * machine * secure * energy
    fields: dict[str, Any] = {
        "key": key or CaseKey(model="mlp"),
        "status": "ok",
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 30.0,
        "settings": {"threads": None, "seconds": 5.0},
        "valid": True,
        "model": ModelFacts(
            title="A perceptron", weights="trained", input="30 features", samples=1, parameters=1000,
            float_bytes=4000, compressed_bytes=4000, program_bytes=9000, public_program_bytes=5000,
        ),
        "session": merged(SESSION, session or {}),
        "online": online,
        "offline": offline,
        "online_energy": Energy(joules=joules, joules_per_sample=joules, above_idle_joules=joules / 2, source="rapl"),
        "baselines": tuple(baselines),
        "overheads": overheads(online, offline, baselines, "mpc"),
        "accuracy": Accuracy(
            metric="top-1 of labels", samples=9, float=0.97, compressed=0.965, secure=0.963, max_absolute_error=2e-5
        ),
    }  # fmt: skip
    return CaseResult(**(fields | changes))


def failed(**changes: Any) -> CaseResult:
    return CaseResult(
        **{
            "key": CaseKey(model="mlp"),
            "status": "failed",
            "started": "2026-01-01T00:00:00+00:00",
            "seconds": 2.0,
            "fault": Fault(type="PeerError", message="dealer: it is gone\nwith | a second line"),
        }
        | changes
    )


def load(**changes: Any) -> LoadResult:
    fields: dict[str, Any] = {
        "key": CaseKey(model="mlp"),
        "scenario": "Server",
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 60.0,
        "valid": True,
        "queries": 1000,
        "qps": 20.0,
        "samples_per_second": 20.0,
        "latency_ms_p99": 45.0,
        "target_latency_ms": 50.0,
        "target_percentile": 99.0,
        "trials": (
            Trial(target_qps=20, valid=True, latency_ms_p99=45.0),
            Trial(target_qps=40, valid=False, why="p99 above the bound"),
        ),
        "pool": Pool(
            capacity=8, at_start=8, at_end=8, least=2, dealt=1000, used=1000, empty=3, offline_latency_ms=30.0
        ),
        "summary": "MLPerf Results Summary\nScenario : Server",
    }
    return LoadResult(**(fields | changes))


def report(*cases: CaseResult, **changes: Any) -> BenchReport:
    fields: dict[str, Any] = {
        "created": "2026-01-01T00:00:00+00:00",
        "environment": ENVIRONMENT,
        "meter": Meter(source="rapl", idle_watts=31.5, idle_seconds=3.0, unavailable=("nvml: no driver",)),
        "command": "python -m benchmarks run --quick",
        "cases": cases,
    }
    return BenchReport(**(fields | changes))


WIDE = Interval(low=50, high=200)
