"""From a run of LoadGen to the fields of a report's LoadResult."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import report as r
from .figures import energy_of
from .loadgen_conf import Conf, Scenario
from .loadgen_process import Ran

if TYPE_CHECKING:
    from ..measure.energy import Spent

_PERCENTILES = {
    "SingleStream": "single_stream_target_latency_percentile",
    "MultiStream": "multi_stream_target_latency_percentile",
    "Server": "server_target_latency_percentile",
}


@dataclass(frozen=True)
class Request:
    """What is asked of a load; None: as the settings file says. pool: capacity; None: all beforehand if that is little."""

    key: r.CaseKey
    scenario: Scenario
    conf: Conf
    target_p99_ms: float | None = None
    min_duration_s: float | None = None
    min_queries: int | None = None
    pool: int | None = None

    def overrides(self) -> dict[str, Any]:
        """LoadGen's settings in place of the file's."""
        found: dict[str, Any] = {}
        if self.min_duration_s is not None:
            found["min_duration_ms"] = round(1000 * self.min_duration_s)
        if self.min_queries is not None:
            found["min_query_count"] = self.min_queries
        if self.scenario == "Server" and self.target_p99_ms is not None:
            found["server_target_latency_ns"] = round(1e6 * self.target_p99_ms)
            found["server_target_latency_percentile"] = 0.99
        return found


@dataclass(frozen=True)
class Attempt:
    """One run of LoadGen. fault: of the pool. dealing: energy of what was dealt before it, as far as it was used."""

    ran: Ran
    spent: Spent | None = None
    pool: r.Pool | None = None
    fault: str | None = None
    dealing: Spent | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not valid, in the server scenario."""
        return self.ran.verdict.reasons + (() if self.fault is None else (self.fault,))

    def why(self, bound_ms: float) -> str | None:
        """In short, of a rate."""
        verdict = self.ran.verdict
        parts = [] if self.fault is None else [self.fault]
        if not verdict.keeps_bound:
            share = "99" if self.ran.queries >= 100 else "90"
            late = verdict.latency_ms.get(share)
            if late is not None and late > bound_ms:
                parts.append(f"the {share}th percentile was {late:.4g} ms, over the bound of {bound_ms:g} ms")
        if not parts:
            parts = [reason.removeprefix("LoadGen: ") for reason in verdict.reasons]
        return "; ".join(parts) or None


def fields(request: Request, attempt: Attempt, reasons: Sequence[str]) -> dict[str, Any]:
    """reasons: why the result is not valid; none: it is, as far as LoadGen says so."""
    scenario, batch, ran = request.scenario, request.key.batch, attempt.ran
    verdict, rate = ran.verdict, ran.verdict.rate
    per_query = ran.inferences // ran.queries if ran.queries else None
    if scenario == "MultiStream" and ran.seconds > 0:
        rate = ran.queries / ran.seconds  # LoadGen states none
    inferences = 1 if scenario != "MultiStream" else per_query or 1
    # Of the offline scenario they say when each sample was taken from the one query, and nothing of latency.
    latency = {} if scenario == "Offline" else verdict.latency_ms
    return {
        "valid": verdict.valid and not reasons,
        "invalid_reasons": tuple(reasons),
        "settings": {"file": request.conf.name, **ran.settings},
        "queries": ran.queries,
        "samples_per_query": per_query,
        "qps": rate,
        "samples_per_second": None if rate is None else rate * inferences * batch,
        "sustained_samples_per_second": sustained(ran, attempt.pool, batch),
        "latency_ms": latency.get("mean"),
        "latency_ms_p50": latency.get("50"),
        "latency_ms_p90": latency.get("90") if ran.queries >= 10 else None,
        "latency_ms_p99": latency.get("99") if ran.queries >= 100 else None,
        "target_latency_ms": ran.settings["server_target_latency_ns"] / 1e6 if scenario == "Server" else None,
        "target_percentile": 100 * ran.settings[_PERCENTILES[scenario]] if scenario in _PERCENTILES else None,
        "pool": attempt.pool,
        "energy": _energy(attempt, batch),
        "summary": verdict.summary,
    }


def sustained(ran: Ran, pool: r.Pool | None, batch: int) -> float | None:
    """Samples a second with all dealing counted."""
    if ran.seconds <= 0:
        return None
    if pool is None:
        return ran.inferences * batch / ran.seconds
    if pool.beforehand:
        if pool.offline_latency_ms is None:
            return None
        dealing = (pool.used - pool.dealt) * pool.offline_latency_ms / 1000
        return ran.inferences * batch / (ran.seconds + dealing)
    lost = max(0, pool.at_start - pool.at_end)
    return max(0, ran.inferences - lost) * batch / ran.seconds


def trial(rate: float, attempt: Attempt, bound_ms: float) -> r.Trial:
    valid = attempt.ran.verdict.valid and attempt.fault is None
    return r.Trial(
        target_qps=rate,
        valid=valid,
        latency_ms_p99=attempt.ran.verdict.latency_ms.get("99") if attempt.ran.queries >= 100 else None,
        why=None if valid else attempt.why(bound_ms),
    )


def _energy(attempt: Attempt, batch: int) -> r.Energy:
    """Of one inference with its dealing, whenever that was."""
    if attempt.spent is None or not attempt.ran.inferences:
        return r.Energy()
    parts = [(attempt.spent, attempt.ran.inferences)]
    if attempt.dealing is not None:
        parts.append((attempt.dealing, 0))
    return energy_of(parts, batch)


def part_of(spent: Spent, share: float) -> Spent:
    def of(joules: float | None) -> float | None:
        return None if joules is None else joules * share

    return dataclasses.replace(spent, joules=of(spent.joules), above_idle_joules=of(spent.above_idle_joules))
