"""One load on an open session: warm-up, the pool that the scenario needs, and runs of LoadGen."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .loadgen_fields import Attempt, Request, fields, part_of
from .loadgen_process import LoadGen
from .pool import DealtPool, Infers

if TYPE_CHECKING:
    from ..measure.energy import EnergyMeter, Spent

Say = Callable[[str], None]

CAPACITY = 32
"""Of a pool that is dealt for beside the load."""
BEFOREHAND_SECONDS = 60.0
"""A load whose material takes longer to deal is dealt for while it runs."""
WARM_RUNS, LEAST_WARM_RUNS, WARM_SECONDS = 20, 5, 10.0
SPARE = 1.25
"""How much more is issued, or dealt beforehand, than the load is expected to use, where it ends by the clock."""
SLACK = 1.1
"""LoadGen's own, of the offline scenario's samples."""
SETTLE_SHARE = 0.02
"""Of a run's time: a pool that is full again within it has kept up."""


@dataclass(frozen=True)
class Warm:
    """Inferences one at a time before the load, the first left out. offline_ms: None where nothing is dealt."""

    online_ms: tuple[float, ...]
    offline_ms: float | None

    @property
    def quick_ms(self) -> float:
        """The lower quartile: what a quiet machine takes, so that a load is planned long enough."""
        return statistics.quantiles(self.online_ms, n=4)[0] if len(self.online_ms) > 1 else self.online_ms[0]

    @property
    def most_rate(self) -> float:
        """Inferences a second that neither phase exceeds."""
        return 1000 / max(self.quick_ms, self.offline_ms or 0.0)


def warm_up(session: Infers, held_out: Sequence[Sequence[Any]], *, dealt: bool) -> Warm:
    """Both phases, one inference at a time, until there are enough to plan with."""
    online: list[float] = []
    offline: list[float] = []
    begin = time.perf_counter()
    for run in range(WARM_RUNS + 1):
        start = time.perf_counter()
        if dealt:
            session.prepare(1)
        middle = time.perf_counter()
        session.infer(*held_out[run % len(held_out)])
        end = time.perf_counter()
        if run:  # the first is cold
            offline.append(1000 * (middle - start))
            online.append(1000 * (end - middle))
        if run >= LEAST_WARM_RUNS and end - begin > WARM_SECONDS:
            break
    return Warm(tuple(online), statistics.median(offline) if dealt else None)


class Load:
    """dealt: the program has a dealer. Everything runs in the caller's thread."""

    def __init__(
        self,
        request: Request,
        session: Infers,
        held_out: Sequence[Sequence[Any]],
        *,
        dealt: bool,
        meter: EnergyMeter | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self.request = request
        self.session = session
        self.held_out = held_out
        self.dealt = dealt
        self.meter = meter
        self._say = say
        self.say("warming up")
        self.warm = warm_up(session, held_out, dealt=dealt)
        with self._loadgen() as loadgen:  # for its settings alone; a run has a process of its own
            self.stated = {**loadgen.settings, **request.overrides()}
            """What the file and the request say."""

    def say(self, text: str) -> None:
        self._say(f"{self.request.key}, {self.request.scenario}: {text}")

    def _loadgen(self) -> LoadGen:
        request = self.request
        return LoadGen(request.conf, request.key.model, request.scenario, inputs=len(self.held_out))

    def single(self) -> dict[str, Any]:
        """Fields of a LoadResult, of a scenario that is one run: the streams and offline."""
        overrides, need = self._plan()
        pool = self.pool(need)
        self.say(f"about {need} inferences")
        attempt = self.attempt(overrides, pool)
        reasons = list(attempt.ran.verdict.reasons)
        if attempt.pool is not None and attempt.pool.beforehand and attempt.pool.empty:
            reasons.append(
                f"{attempt.fault}; give the pool a capacity, so that dealing goes on beside the load"
            )
        return fields(self.request, attempt, reasons)

    def _plan(self) -> tuple[dict[str, Any], int]:
        """Settings that LoadGen needs to generate queries enough, and the most inferences that they are expected to make."""
        found, stated, conf = self.request.overrides(), self.stated, self.request.conf.stated
        seconds, queries = stated["min_duration_ms"] / 1000, int(stated["min_query_count"])
        if self.request.scenario == "Offline":
            if "target_qps" not in conf:
                found["offline_expected_qps"] = SPARE * self.warm.most_rate
            rate = found.get("offline_expected_qps", stated["offline_expected_qps"])
            return found, max(queries, math.ceil(SLACK * seconds * rate), 1)
        samples, prefix = 1, "single"
        if self.request.scenario == "MultiStream":
            samples, prefix = int(stated["multi_stream_samples_per_query"]), "multi"
        least_ms = min(self.warm.online_ms) * samples
        if "target_latency" not in conf:
            # Queries are generated for twice the duration at this latency; a run that uses them up ends too early.
            found[f"{prefix}_stream_expected_latency_ns"] = max(1, round(7.5e5 * least_ms))
        return found, max(queries, math.ceil(SPARE * 1000 * seconds / least_ms) + 2) * samples

    def pool(self, need: int | None) -> DealtPool | None:
        """Dealt beforehand for `need` inferences where that is little; else bounded, and dealt for beside the load."""
        if not self.dealt:
            return None
        room = max(1, (self.session.room or 1) - 1)  # that of one is in use
        if self.request.pool is not None:
            return DealtPool(self.session, min(self.request.pool, room), refill=True)
        if need is not None and need <= room:
            if need * (self.warm.offline_ms or 0.0) <= 1000 * BEFOREHAND_SECONDS:
                return DealtPool(self.session, need, refill=False)
        return DealtPool(self.session, min(CAPACITY, room), refill=True)

    def attempt(self, overrides: Mapping[str, Any], pool: DealtPool | None) -> Attempt:
        """One run of LoadGen, from a full pool."""
        dealing, filled = None, 0
        if pool is not None:
            self.say(f"dealing for {pool.capacity} inferences")
            before = pool.dealt_before
            _, dealing = self._metered(pool.fill)
            filled = pool.dealt_before - before
            pool.begin()

        def run() -> Any:
            with self._loadgen() as loadgen:
                if pool is None:
                    return loadgen.run(overrides, lambda index: self.session.infer(*self.held_out[index]))
                ran = loadgen.run(
                    overrides, lambda index: pool.infer(self.held_out[index]), after=pool.replenish
                )
                pool.settle(SETTLE_SHARE * ran.seconds + 2 * (self.warm.offline_ms or 0.0) / 1000)
                return ran

        ran, spent = self._metered(run)
        if pool is None:
            return Attempt(ran, spent)
        taken = max(0, pool.at_start - pool.at_end)
        if not taken or dealing is None:
            return Attempt(ran, spent, pool.figures(), pool.fault())
        if not filled:  # it was dealt beside an earlier run, and what that took is not known
            return Attempt(ran, None, pool.figures(), pool.fault())
        return Attempt(ran, spent, pool.figures(), pool.fault(), part_of(dealing, taken / filled))

    def _metered(self, work: Callable[[], Any]) -> tuple[Any, Spent | None]:
        if self.meter is None:
            return work(), None
        before = self.meter.read()
        found = work()
        return found, self.meter.between(before, self.meter.read())
