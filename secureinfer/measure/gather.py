"""From what each worker counted to the figures of a phase, and the faults that make them unfit to quote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

from .figures import Figures, Layer, PhaseReport, PlannedStep, ProgramInfo
from .latency import summarise
from .stats import PHASES, Phase, RunStats, WorkerStats
from .traffic import bytes_of, link_differences, run_bytes, run_rounds

N = TypeVar("N", int, float)

LEAST_WARM_RUNS = 2
LEAST_WARM_MS = 1000.0
"""A ratio from fewer or shorter warm runs than this is noise, and the report says so (`valid` is false)."""


def _mean(values: Sequence[float]) -> float | None:
    """The mean; a whole number stays one, so that exact counts of bytes read as such."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return values[0] if all(v == values[0] for v in values) else mean


def _total(values: Sequence[N | None]) -> N | None:
    """The sum, or None if any part of it is unknown."""
    known = [v for v in values if v is not None]
    return reduce(add, known) if known and len(known) == len(values) else None


def _worst(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def phase_report(
    phase: Phase,
    program: ProgramInfo,
    workers: Sequence[WorkerStats],
    caller_ms: Mapping[int, float],
    socket_bytes: int | None,
) -> PhaseReport:
    traffic, rounds = run_bytes(workers, phase), run_rounds(workers, phase)
    runs = sorted(traffic.keys() | caller_ms.keys())
    latencies = {i: ms for i in runs if (ms := caller_ms.get(i, _slowest(workers, phase, i))) is not None}
    # A session's first run pays for pages, caches and lazy imports. Setup happens once: it is no cold run.
    cold = runs[0] if runs and phase != "setup" else None
    parties = {w.party: _party(w, phase, cold) for w in workers}
    took_part = [f for f in parties.values() if f.bytes is not None]
    slowest = max(took_part, key=lambda f: f.latency.latency_ms or 0.0, default=None)
    on_gpus = [n for f in took_part if (n := f.peak_gpu_memory_bytes) is not None]
    figures = Figures(
        latency=summarise([ms for i, ms in latencies.items() if i != cold]),
        waiting_ms=None if slowest is None else slowest.waiting_ms,
        bytes=_mean(list(traffic.values())),
        bytes_one_way=_one_way(workers, phase, _steps_of(workers, phase)),
        bytes_received=_mean([sum(bytes_of(r)[1] for r in same) for same in _by_run(workers, phase)]),
        socket_bytes=socket_bytes / len(runs) if socket_bytes is not None and runs else None,
        rounds=_mean(list(rounds.values())),
        cpu_seconds=_total([f.cpu_seconds for f in took_part]),
        peak_memory_bytes=_total([f.peak_memory_bytes for f in took_part]),
        peak_gpu_memory_bytes=sum(on_gpus) if on_gpus else None,
    )
    return PhaseReport(
        figures,
        cold_latency_ms=latencies.get(cold) if cold is not None else None,
        parties=parties,
        layers=_layers(program, workers, cold) if phase == "online" else (),
    )


def _by_run(workers: Sequence[WorkerStats], phase: Phase) -> list[list[RunStats]]:
    found: dict[int, list[RunStats]] = {}
    for worker in workers:
        for run in worker.runs(phase):
            found.setdefault(run.inference, []).append(run)
    return list(found.values())


def _slowest(workers: Sequence[WorkerStats], phase: Phase, inference: int) -> float | None:
    found = [
        run.latency_ms
        for worker in workers
        for run in worker.runs(phase)
        if run.inference == inference and run.latency_ms is not None
    ]
    return max(found) if found else None


def _party(worker: WorkerStats, phase: Phase, cold: int | None) -> Figures:
    runs = worker.runs(phase)
    peak = _worst([run.peak_memory_bytes for run in runs])
    if peak is None and phase == _last_phase(worker):
        peak = worker.peak_memory_bytes  # read when the report was asked for: it covers up to the last phase
    return Figures(
        latency=summarise([r.latency_ms for r in runs if r.latency_ms is not None and r.inference != cold]),
        waiting_ms=_mean([r.waiting_ms for r in runs if r.waiting_ms is not None and r.inference != cold]),
        bytes=_mean([bytes_of(r)[0] for r in runs]),
        bytes_received=_mean([bytes_of(r)[1] for r in runs]),
        rounds=_mean([r.rounds for r in runs if r.rounds is not None]),
        cpu_seconds=_mean([r.cpu_seconds for r in runs if r.cpu_seconds is not None]),
        peak_memory_bytes=peak,
        peak_gpu_memory_bytes=_worst([run.peak_gpu_memory_bytes for run in runs]),
    )


def _last_phase(worker: WorkerStats) -> Phase | None:
    ran = [phase for phase in PHASES if worker.runs(phase)]
    return ran[-1] if ran else None


def _layers(program: ProgramInfo, workers: Sequence[WorkerStats], cold: int | None) -> tuple[Layer, ...]:
    """Steps grouped by module path, in plan order. A step takes as long as its slowest party."""
    groups: dict[str, list[PlannedStep]] = {}
    for step in program.steps:
        groups.setdefault(step.path, []).append(step)
    layers = []
    for path, steps in groups.items():
        indices = [s.index for s in steps]
        times = [t for i in indices if (t := _step_times(workers, i, cold)) is not None]
        waits = [waiting for _, waiting in times if waiting is not None] if program.dealer else []
        sent = [b for i in indices if (b := _step_bytes(workers, i)) is not None]
        layers.append(
            Layer(
                path=path,
                steps=len(steps),
                latency_ms=sum(ms for ms, _ in times) if times else None,
                waiting_ms=sum(waits) if waits else None,
                bytes=sum(sent) if sent else None,
                bytes_one_way=_one_way(workers, "online", indices),
                rounds=sum(s.rounds for s in steps),
            )
        )
    return tuple(layers)


def _step_times(
    workers: Sequence[WorkerStats], step: int, cold: int | None
) -> tuple[float, float | None] | None:
    """Latency and waiting of a step at its slowest party, milliseconds."""
    means = []
    for worker in workers:
        runs = [r for r in worker.runs("online") if step in r.steps]
        warm = [r.steps[step] for r in runs if r.inference != cold] or [r.steps[step] for r in runs]
        mean = _mean([s.latency_ms for s in warm if s.latency_ms is not None])
        if mean is not None:
            means.append((mean, _mean([s.waiting_ms for s in warm if s.waiting_ms is not None])))
    return max(means, key=lambda times: times[0]) if means else None


def _step_bytes(workers: Sequence[WorkerStats], step: int) -> float | None:
    parts = [
        mean
        for worker in workers
        if (mean := _mean([r.steps[step].bytes_sent for r in worker.runs("online") if step in r.steps]))
        is not None
    ]
    return sum(parts) if parts else None


def _steps_of(workers: Sequence[WorkerStats], phase: Phase) -> list[int]:
    return sorted({step for worker in workers for run in worker.runs(phase) for step in run.steps})


def _one_way(workers: Sequence[WorkerStats], phase: Phase, steps: Sequence[int]) -> float | None:
    """Bytes on the longest path: the greatest direction of each step at any party, steps one after the other."""
    ways = [
        mean
        for step in steps
        if (mean := max((m for w in workers if (m := _direction(w, phase, step)) is not None), default=None))
        is not None
    ]
    return sum(ways) if ways else None


def _direction(worker: WorkerStats, phase: Phase, step: int) -> float | None:
    each = [run.steps[step] for run in worker.runs(phase) if step in run.steps]
    return _mean([max(s.bytes_sent, s.bytes_received) for s in each])


def faults(program: ProgramInfo, workers: Sequence[WorkerStats], online: PhaseReport) -> list[str]:
    """Why these figures must not be quoted, if anything."""
    found = []
    if differences := link_differences(workers):
        found.append(f"the two ends of a link counted differently ({differences[0]})")
    if program.steps:
        planned, exact = program.planned, program.exact_bytes
        sent = {phase: run_bytes(workers, phase) for phase in PHASES}
        found += _off_plan("setup", "bytes", sent["setup"], planned["setup_bytes"], exact)
        found += _off_plan("offline", "bytes", sent["offline"], planned["dealt_bytes"], exact)
        found += _off_plan("online", "bytes", sent["online"], planned["bytes"], exact)
        found += _off_plan("online", "rounds", run_rounds(workers, "online"), planned["rounds"], True)
    warm = online.figures.latency
    if warm.count < LEAST_WARM_RUNS or warm.count * (warm.latency_ms or 0.0) < LEAST_WARM_MS:
        found.append(
            f"too short for a latency: {warm.count} warm inference(s); "
            f"it takes {LEAST_WARM_RUNS} and {LEAST_WARM_MS / 1000:g} s"
        )
    return found


def _off_plan(
    phase: Phase, what: str, measured: Mapping[int, int], planned: int | None, exact: bool
) -> list[str]:
    """The first run that took something else than was planned; more, where the plan states a bound."""
    if planned is None:
        return []
    wrong = sorted((i, v) for i, v in measured.items() if (v != planned if exact else v > planned))
    says = f"the plan says {planned}" if exact else f"the plan says at most {planned}"
    return [f"{phase} {i} took {value} {what} where {says}" for i, value in wrong[:1]]
