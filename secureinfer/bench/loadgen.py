"""Loads by MLPerf LoadGen over private sessions: SingleStream, MultiStream, Offline, and the rate that a Server holds.

LoadGen's samples are inferences of the program's batch. Nothing is left out: material is dealt before the load, and its
time is stated and counted in what is sustained, or it is dealt beside the load from a bounded pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import has_dealer
from ..errors import SecureInferError, UsageError
from ..session.local import LocalParties, Place
from . import report as r
from .loadgen_conf import read_conf, scenario_named
from .loadgen_fields import Request
from .loadgen_load import Load, Say
from .loadgen_process import loadgen_version
from .loadgen_server import server

if TYPE_CHECKING:
    from ..measure.energy import EnergyMeter
    from ..plan.program import Program
    from ..session.client import Session

STEP_SECONDS = 900.0
MATERIAL_BYTES = 2 << 30
MEMORY_SHARE = 8
"""Each owner's material takes at most this part of the memory that is free: both are on this machine."""


def run_load(
    program: Program,
    held_out: Sequence[Sequence[Any]],
    key: r.CaseKey,
    scenario: str,
    *,
    settings_file: str | Path | None = None,
    target_p99_ms: float | None = None,
    min_duration_s: float | None = None,
    min_queries: int | None = None,
    pool: int | None = None,
    threads: int | None = None,
    places: Mapping[str, Place] | None = None,
    timeout: float = STEP_SECONDS,
    torch_compile: bool = False,
    meter: EnergyMeter | None = None,
    progress: Say | None = None,
) -> r.LoadResult:
    """Open a session of real parties on this machine, and let LoadGen load it.

    held_out: inputs of the program, taken at LoadGen's choice. scenario: "server", "single-stream", "multi-stream",
    "offline". settings_file: in LoadGen's format, or default, quick, official; what the arguments after it say goes
    before it. target_p99_ms: the server's bound. pool: inferences whose material is kept while dealing goes on beside the
    load; None: all is dealt beforehand where that is little. meter: entered by the caller. A fault of the session or of
    LoadGen stands in the result.
    Raises UsageError for settings that cannot be read, an unknown scenario, or a missing LoadGen.
    """
    named = scenario_named(scenario)
    conf = read_conf(settings_file, key.model, named)
    request = Request(key, named, conf, target_p99_ms, min_duration_s, min_queries, pool)
    _check(request, held_out)
    say = progress or (lambda _: None)

    def opened() -> Session:
        say(f"{key}: starting the parties")
        owner = {
            "limits": {"prepared_inferences": 1 << 20, "material_bytes": _material_bytes()},
            "torch_compile": torch_compile,
        }
        parties = LocalParties(
            program,
            timeout=timeout,
            threads=threads,
            overrides={"data_owner": owner, "model_owner": owner},
            places=places,
        )
        return parties.session()

    return recorded(request, opened, held_out, dealt=has_dealer(program.backend), meter=meter, say=say)


def recorded(
    request: Request,
    opened: Callable[[], contextlib.AbstractContextManager[Any]],
    held_out: Sequence[Sequence[Any]],
    *,
    dealt: bool,
    meter: EnergyMeter | None = None,
    say: Say = lambda _: None,
) -> r.LoadResult:
    """The load's result; a fault is recorded in it. An interrupt passes, and leaves nothing behind.

    opened: gives a session, which this ends.
    """
    begin = time.perf_counter()
    head: dict[str, Any] = {
        "key": request.key,
        "scenario": request.scenario,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "loadgen": loadgen_version(),
        "settings": {"file": request.conf.name, **request.overrides()},
    }
    try:
        with opened() as session:
            load = Load(request, session, held_out, dealt=dealt, meter=meter, say=say)
            found = server(load) if request.scenario == "Server" else load.single()
    except Exception as error:
        text = str(error) if isinstance(error, SecureInferError) else f"unexpected: {error}"
        fault = r.Fault(type=type(error).__name__, message=text or type(error).__name__)
        return r.LoadResult(**head, status="failed", fault=fault, seconds=time.perf_counter() - begin)
    return r.LoadResult(**{**head, **found}, seconds=time.perf_counter() - begin)


def _check(request: Request, held_out: Sequence[Sequence[Any]]) -> None:
    loadgen_version()
    bound = request.target_p99_ms
    if not held_out:
        raise UsageError("a load needs held-out inputs; none were given")
    if request.pool is not None and request.pool < 1:
        raise UsageError(f"the pool's capacity is {request.pool}; it must be 1 at least")
    if bound is not None and request.scenario != "Server":
        raise UsageError(f"target_p99_ms is a bound of the server scenario; {request.scenario} has none")
    if bound is not None and not 0 < bound < 1e9:
        raise UsageError(f"target_p99_ms is {bound}; it must be above 0")


def _material_bytes() -> int:
    """Of each owner, so that both together leave this machine its memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return min(MATERIAL_BYTES, 1024 * int(line.split()[1]) // MEMORY_SHARE)
    return MATERIAL_BYTES // MEMORY_SHARE
