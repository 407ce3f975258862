"""Loads of a sweep: MLPerf LoadGen's scenarios on the program of each case."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..backends import has_dealer
from ..errors import SessionError, UsageError
from ..measure.energy import EnergyMeter
from ..plan.program import Program
from ..session.local import Place
from . import report as r
from .loadgen import run_load
from .loadgen_conf import Scenario, read_conf, scenario_named
from .namespaces import unavailable
from .outcome import fault_of
from .places import places

Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadPlan:
    """Which scenarios run on each case, and with which settings: of a file, then of what is given here.

    settings_file: in LoadGen's format, or default, quick, official. least_seconds: duration below which a run is invalid.
    """

    scenarios: tuple[Scenario, ...]
    target_p99_ms: float | None = None
    settings_file: str | None = None
    least_seconds: float | None = None
    pool: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"scenarios": list(self.scenarios)}


def load_plan(
    scenarios: list[str], target_p99_ms: float | None, settings_file: str | None, least_seconds: float | None
) -> LoadPlan:
    """Raises UsageError for what could not run, before anything does."""
    named = tuple(dict.fromkeys(scenario_named(text) for text in scenarios))
    if target_p99_ms is not None and "Server" not in named:
        raise UsageError("--target-p99-ms is the bound of --scenario server; the other scenarios have none")
    for scenario in named:
        read_conf(settings_file, "", scenario)
    return LoadPlan(named, target_p99_ms, settings_file, least_seconds)


def loads_of(
    key: r.CaseKey,
    program: Callable[[], Program],
    held_out: tuple[tuple[Any, ...], ...],
    plan: LoadPlan,
    scenarios: tuple[Scenario, ...],
    *,
    threads: int | None,
    meter: EnergyMeter,
    say: Say,
) -> Iterator[r.LoadResult]:
    """One result a scenario; what is wrong with one stands in it. program: compiles it."""
    started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    try:
        made = program()
    except (Exception, SystemExit) as error:  # a user's code may call sys.exit
        seconds = time.perf_counter() - begin
        for scenario in scenarios:
            yield failed(key, scenario, error, started, seconds)
        return
    for scenario in scenarios:
        started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        try:
            with _places(key, made) as where:
                yield run_load(
                    made,
                    held_out,
                    key,
                    scenario,
                    settings_file=plan.settings_file,
                    target_p99_ms=plan.target_p99_ms if scenario == "Server" else None,
                    min_duration_s=plan.least_seconds,
                    pool=plan.pool,
                    threads=threads,
                    places=where,
                    meter=meter,
                    progress=say,
                )
        except Exception as error:
            yield failed(key, scenario, error, started, time.perf_counter() - begin)


def failed(
    key: r.CaseKey, scenario: Scenario, error: BaseException, started: str, seconds: float
) -> r.LoadResult:
    return r.LoadResult(
        key=key, scenario=scenario, status="failed", fault=fault_of(error), started=started, seconds=seconds
    )


@contextlib.contextmanager
def _places(key: r.CaseKey, program: Program) -> Iterator[Mapping[str, Place] | None]:
    """A load takes time as it passes: it cannot be projected."""
    if key.network == "loopback":
        yield None
        return
    why = "a load cannot be projected" if ":" in key.network else unavailable()
    if why is not None:
        raise SessionError(f"no load over {key.network}: {why}")
    roles = ("data_owner", "model_owner", *(["dealer"] if has_dealer(program.backend) else []))
    with places(key.network, roles) as found:
        yield found
