"""The server scenario: the highest rate of Poisson arrivals at which a session keeps its bound, and its pool."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import report as r
from .loadgen_fields import Attempt, fields, trial
from .loadgen_load import Load
from .pool import DealtPool
from .rates import LOWEST_SHARE, RESOLUTION, best, first_guess, search

PROBE_QUERIES = 100
"""Of a short run, which tells a rate that is far too high from one that deserves a long one."""
HOPELESS_QUERIES = 30
"""Of a run that only shows what is known before it."""
PROBE_WORTH = 3
"""A long run that is not so many times longer needs none before it."""
KEPT_UP = 0.9
"""Of the rate that was scheduled, the least to be completed: below it the queue grew, and the run was too short to show
it in a bound that is long."""
OUTSTANDING = 8
"""Bounds' worth of queries that may wait before LoadGen gives a rate up."""
ZERO: dict[str, Any] = {"qps": 0.0, "samples_per_second": 0.0, "sustained_samples_per_second": 0.0}


def server(load: Load) -> dict[str, Any]:
    """Fields of a LoadResult: those of the run at the highest rate that held; a rate of 0 and why, where none did."""
    bound_ms = load.stated["server_target_latency_ns"] / 1e6
    percentile = float(load.stated["server_target_latency_percentile"])
    pool, least_ms = load.pool(None), min(load.warm.online_ms)
    if least_ms > bound_ms:
        return _hopeless(load, pool, least_ms, bound_ms)
    rates = _Rates(load, pool, bound_ms, percentile)
    tried = search(rates.attempt, *_begin(load, bound_ms, percentile))
    chosen = best(tried) or min(tried, key=lambda t: t.rate)
    reasons = list(chosen.what.reasons)
    if not chosen.held:
        reasons.insert(
            0,
            f"no rate of {chosen.rate:.4g} queries/s or more holds {bound_ms:g} ms at the {100 * percentile:g}th "
            f"percentile: {chosen.what.why(bound_ms)}",
        )
    found = fields(load.request, chosen.what, reasons)
    found["settings"]["search_resolution"] = RESOLUTION
    trials = tuple(trial(t.rate, t.what, bound_ms) for t in tried)
    return found | ({} if chosen.held else ZERO) | {"trials": trials}


def _begin(load: Load, bound_ms: float, percentile: float) -> tuple[float, float]:
    """The rate to try first, and the lowest to try."""
    most = load.warm.most_rate
    start = first_guess(load.warm.online_ms, bound_ms, percentile, most)
    lowest = most * LOWEST_SHARE
    if start <= lowest:
        # Service times alone, not waiting, break the bound now and then: one rate, at which few wait, to see.
        start = lowest = most / 8
    if "target_qps" in load.request.conf.stated:
        start = float(load.stated["server_target_qps"])
        lowest = min(lowest, start)
    return start, lowest


class _Rates:
    """Tries a rate: a short run first where the long one is much longer, so that a hopeless rate costs little."""

    def __init__(self, load: Load, pool: DealtPool | None, bound_ms: float, percentile: float) -> None:
        self._load = load
        self._pool = pool
        self._bound_ms = bound_ms
        self._enough = math.ceil(math.log(0.01) / math.log(percentile))
        """Queries that show the percentile when none is late, as LoadGen counts."""

    def attempt(self, rate: float) -> tuple[bool, Attempt]:
        load, say = self._load, self._load.say
        expected = max(load.stated["min_query_count"], rate * load.stated["min_duration_ms"] / 1000)
        settings = _at(load, rate, self._bound_ms)
        if expected >= PROBE_WORTH * PROBE_QUERIES:
            say(f"trying {rate:.4g} queries/s, shortly")
            probe = self._run({**settings, **_short(PROBE_QUERIES)})
            if self._is_hopeless(probe):
                say(f"{rate:.4g} queries/s: {probe.why(self._bound_ms)}")
                return False, probe
        say(f"trying {rate:.4g} queries/s, for about {expected / rate:.0f} s")
        found = self._run(settings)
        held = self._held(found)
        say(f"{rate:.4g} queries/s: {'held' if held else found.why(self._bound_ms)}")
        return held, found

    def _run(self, settings: dict[str, Any]) -> Attempt:
        found = self._load.attempt(settings, self._pool)
        completed, scheduled = found.ran.verdict.rate, found.ran.verdict.scheduled_rate
        if found.fault is None and completed and scheduled and completed < KEPT_UP * scheduled:
            grew = f"the queue grew: {completed:.4g} queries/s were completed where {scheduled:.4g} came"
            return dataclasses.replace(found, fault=grew)
        return found

    def _is_hopeless(self, probe: Attempt) -> bool:
        """More than 5 % late, where 1 % may be, is no accident among so many; nor is an end before them."""
        verdict = probe.ran.verdict
        late = verdict.latency_ms.get("95", math.inf) > self._bound_ms and not verdict.keeps_bound
        return late or probe.ran.queries < PROBE_QUERIES

    def _held(self, found: Attempt) -> bool:
        """A run that is too short for LoadGen is so at every rate: it is invalid in the end, but the search goes on."""
        verdict = found.ran.verdict
        met = not set(verdict.unmet) - {"Early stopping satisfied"}
        return met and found.fault is None and (verdict.proves_percentile or found.ran.queries < self._enough)


def _at(load: Load, rate: float, bound_ms: float) -> dict[str, Any]:
    found = {**load.request.overrides(), "server_target_qps": rate}
    if not load.stated["server_max_async_queries"]:
        found["server_max_async_queries"] = math.ceil(OUTSTANDING * bound_ms / load.warm.quick_ms) + 16
    return found


def _short(queries: int) -> dict[str, Any]:
    return {"min_duration_ms": 0, "min_query_count": queries}


def _hopeless(load: Load, pool: DealtPool | None, least_ms: float, bound_ms: float) -> dict[str, Any]:
    """The answer is 0; a short run shows it in LoadGen's own figures."""
    rate = load.warm.most_rate / 2
    attempt = load.attempt({**_at(load, rate, bound_ms), **_short(HOPELESS_QUERIES)}, pool)
    reason = (
        f"no rate holds {bound_ms:g} ms: the least latency alone, of {len(load.warm.online_ms)} inferences one at a time, "
        f"is {least_ms:.4g} ms"
    )
    trials = (r.Trial(target_qps=rate, valid=False, why=reason),)
    return fields(load.request, attempt, [reason, *attempt.reasons]) | ZERO | {"trials": trials}
