"""A sweep of cases: each finished one in a file of its own, so that what is stopped goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..measure.energy import ESTIMATED, EnergyMeter
from ..plan.program import Program
from . import report as r
from .kept import Checks
from .loadgen_conf import Scenario, scenario_named
from .loads import LoadPlan, failed, loads_of
from .machine import machine
from .markdown import markdown
from .models import Built, compressed
from .outcome import fault_of
from .page import page
from .runner import Bench, Effort, compile_case, run_case

Say = Callable[[str], None]

IDLE_SECONDS = 3.0
TITLE = "secureinfer: what privacy costs"
SWEEP = "sweep.json"
REPORT = "report"


Result = r.CaseResult | r.LoadResult
Unit = tuple[r.CaseKey, Scenario | None]


def unit_of(result: Result) -> Unit:
    return result.key, result.scenario if isinstance(result, r.LoadResult) else None


@dataclass(frozen=True)
class Plan:
    """What a sweep runs: cases, or the loads of each. command: as a reader would type it again."""

    keys: tuple[r.CaseKey, ...]
    effort: Effort
    command: str | None = None
    title: str | None = None
    load: LoadPlan | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """(case, scenario), in order; the scenario is None where a case takes turns with plaintext."""
        scenarios = (None,) if self.load is None else self.load.scenarios
        return tuple((key, scenario) for key in self.keys for scenario in scenarios)

    @property
    def settings(self) -> dict[str, Any]:
        """What a kept result must have been measured with."""
        if self.load is None:
            return self.effort.to_dict()
        return {"load": self.load.to_dict(), "threads": self.effort.threads}

    def to_json(self) -> str:
        body = {
            "schema": r.SCHEMA,
            "keys": [key.model_dump() for key in self.keys],
            "effort": self.effort.to_dict(),
            "command": self.command,
            "title": self.title,
            "load": None if self.load is None else self.load.to_dict(),
        }
        return json.dumps(body, indent=1) + "\n"


def read_plan(folder: Path) -> Plan:
    """The plan of a sweep that was stopped. Raises UsageError where the folder holds none."""
    file = folder / SWEEP
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        if body.get("schema") != r.SCHEMA:
            raise ValueError(f"its schema is {body.get('schema')!r}, not {r.SCHEMA!r}")
        effort = dict(body["effort"])
        engines = effort.pop("engines")
        load = body["load"]
        if load is not None:
            load = LoadPlan(
                **{**load, "scenarios": tuple(scenario_named(text) for text in load["scenarios"])}
            )
        return Plan(
            tuple(r.CaseKey.model_validate(key) for key in body["keys"]),
            Effort(**effort, engines=None if engines is None else tuple(map(tuple, engines))),
            body["command"],
            body["title"],
            load,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UsageError(f"{folder} holds no sweep that could go on: {error}") from None


class Folder:
    """Where a sweep's results are kept: cases/NAME.json each, and the report as JSON, Markdown and HTML."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cases = path / "cases"
        try:
            self._cases.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write results to {path}: {error.strerror}") from None

    def file(self, unit: Unit) -> Path:
        name = "/".join(str(part) for part in unit if part is not None)
        slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", name)[:80]
        return self._cases / f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"

    def kept(
        self, unit: Unit, settings: dict[str, Any], checks: Checks, say: Say = lambda _: None
    ) -> Result | None:
        """An earlier result of the same, measured in the same way, with the same code and weights, on the same machine.

        None without one; say is told why one that is there does not count.
        """
        found = self._read(unit)
        if found is None:
            return None
        result, stamp, made_with = found
        if made_with != settings:
            why: str | None = "its settings were others"
        elif isinstance(result, r.CaseResult) and result.projected and ":" not in result.key.network:
            why = "it was projected, and perhaps its network can be made now"
        else:
            why = checks.differs(unit[0], result.environment, stamp)
        if why is None:
            return result
        say(f"{unit[0]}: to be measured again: {why}")
        return None

    def _read(self, unit: Unit) -> tuple[Result, dict[str, Any] | None, Any] | None:
        """(result, stamp, settings) of a file; one that is damaged, or another's, is as good as none."""
        kind: type[Result] = r.CaseResult if unit[1] is None else r.LoadResult
        try:
            body = json.loads(self.file(unit).read_text(encoding="utf-8"))
            found = kind.model_validate(body["result"])
            stamp = body.get("stamp")
            if stamp is not None and not {"salt", "weights", "code"} <= stamp.keys():
                return None
            return (found, stamp, body["settings"]) if unit_of(found) == unit else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def ran(self, result: Result) -> bool:
        """Whether there is a result of the same with figures: what fails today does not take its place on the disk."""
        found = self._read(unit_of(result))
        return found is not None and found[0].status == "ok"

    def keep(self, result: Result, settings: dict[str, Any], checks: Checks) -> None:
        body = {
            "settings": settings,
            "stamp": checks.stamp(result.key),
            "result": result.model_dump(mode="json"),
        }
        r.write(self.file(unit_of(result)), json.dumps(body, indent=1, allow_nan=False) + "\n")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Raises UsageError where another sweep runs in this folder: each would replace the other's files."""
        held = os.open(self.path, os.O_RDONLY)  # the kernel lets go of it, however this process ends
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise UsageError(
                f"another sweep runs in {self.path}; wait for it, or give another --out"
            ) from None
        try:
            yield
        finally:
            os.close(held)

    def begin(self, plan: Plan) -> None:
        r.write(self.path / SWEEP, plan.to_json())

    def publish(self, report: r.BenchReport) -> list[Path]:
        return publish(report, self.path / REPORT)


def publish(report: r.BenchReport, stem: Path) -> list[Path]:
    """Write stem.json, stem.md and stem.html."""
    texts = {".json": report.to_json(), ".md": markdown(report), ".html": page(report)}
    files = []
    for ending, text in texts.items():
        files.append(stem.with_name(stem.name + ending))
        r.write(files[-1], text)
    return files


class Watcher:
    """Told how a sweep gets on; a command shows it. Each does nothing here."""

    def say(self, text: str) -> None: ...

    def began(self, unit: Unit, number: int, count: int) -> None: ...

    def ended(self, result: Result, *, kept: bool) -> None: ...


def sweep(
    plan: Plan,
    folder: Folder | None,
    watcher: Watcher,
    *,
    meter: EnergyMeter,
    retry_failed: bool = False,
    checks: Checks | None = None,
) -> r.BenchReport:
    """Run what is not there yet, in the plan's order with what has one model and batch together. meter: entered.

    What is kept says itself on what it ran. checks: what it is held to, for tests.
    KeyboardInterrupt ends it with a report of what there is (`complete` is false).
    """
    with contextlib.nullcontext() if folder is None else folder.alone():
        return _sweep(plan, folder, watcher, meter, retry_failed, checks or Checks())


def _sweep(
    plan: Plan,
    folder: Folder | None,
    watcher: Watcher,
    meter: EnergyMeter,
    retry_failed: bool,
    checks: Checks,
) -> r.BenchReport:
    done: dict[Unit, Result] = {}
    if folder is not None:
        folder.begin(plan)
        for unit in plan.units:
            found = folder.kept(unit, plan.settings, checks, watcher.say)
            if found is not None and not (retry_failed and found.status == "failed"):
                done[unit] = found
    complete = True
    try:
        for result, kept in _results(plan, done, watcher, meter, checks):
            done[unit_of(result)] = result
            if folder is not None and not kept and not (result.status == "failed" and folder.ran(result)):
                folder.keep(result, plan.settings, checks)
            watcher.ended(result, kept=kept)
    except KeyboardInterrupt:
        complete = False
    results = [done[unit] for unit in plan.units if unit in done]
    newest = max(results, key=lambda result: result.started, default=None)
    report = r.BenchReport(
        title=plan.title or TITLE,
        command=plan.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=(newest and newest.environment) or machine(),
        meter=(newest and newest.meter) or _meter(meter),
        complete=complete,
        cases=tuple(found for found in results if isinstance(found, r.CaseResult)),
        loads=tuple(found for found in results if isinstance(found, r.LoadResult)),
    )
    if folder is not None:
        folder.publish(report)
    return report


def _results(
    plan: Plan, done: dict[Unit, Result], watcher: Watcher, meter: EnergyMeter, checks: Checks
) -> Iterator[tuple[Result, bool]]:
    kept = [unit for unit in plan.units if unit in done]
    yield from ((done[unit], True) for unit in kept)
    left = [unit for unit in plan.units if unit not in done]
    if left and meter.describe()["source"] not in (None, ESTIMATED):
        watcher.say("measuring what the idle machine takes")
        meter.measure_idle(IDLE_SECONDS)
    numbers = {unit: i + 1 for i, unit in enumerate(plan.units)}
    for (model, batch), group in itertools.groupby(_together(left), key=_shared):
        units = list(group)
        began = functools.partial(_began, watcher, numbers)
        began(units[0])
        started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            bench = Bench(model, batch, plan.effort, watcher.say, engines=plan.load is None, meter=meter)
        except (Exception, SystemExit) as error:  # a user's code may call sys.exit
            checks.built(units[0][0], None)
            for key, scenario in units:
                yield _stamped(_unbuilt(key, scenario, plan, started, error), meter), False
            continue
        checks.built(units[0][0], bench.built.module)
        with bench:
            for result in _of_bench(plan, bench, units, watcher, meter, began):
                yield _stamped(result, meter), False


def _stamped(result: Result, meter: EnergyMeter) -> Result:
    return result.model_copy(update={"environment": machine(), "meter": _meter(meter)})


def _meter(meter: EnergyMeter) -> r.Meter:
    return r.Meter.model_validate(meter.describe())


def _of_bench(
    plan: Plan,
    bench: Bench,
    units: list[Unit],
    watcher: Watcher,
    meter: EnergyMeter,
    began: Callable[[Unit], None],
) -> Iterator[Result]:
    for key, same in itertools.groupby(units, key=lambda unit: unit[0]):
        scenarios = tuple(scenario for _, scenario in same if scenario is not None)
        if plan.load is None:
            began((key, None))
            yield run_case(key, bench, meter, plan.effort, watcher.say)
            continue
        began((key, scenarios[0]))
        built = bench.built

        def program(key: r.CaseKey = key, built: Built = built) -> Program:
            return compile_case(key, compressed(key.compression, built)[0], built)

        yield from loads_of(
            key, program, built.held_out, plan.load, scenarios,
            threads=plan.effort.threads, meter=meter, say=watcher.say,
        )  # fmt: skip


def _began(watcher: Watcher, numbers: dict[Unit, int], unit: Unit) -> None:
    watcher.began(unit, numbers[unit], len(numbers))


def _shared(unit: Unit) -> tuple[str, int]:
    return unit[0].model, unit[0].batch


def _together(units: Sequence[Unit]) -> list[Unit]:
    """What has one model and batch side by side, in the order of the first of each."""
    groups: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        groups.setdefault(_shared(unit), []).append(unit)
    return [unit for group in groups.values() for unit in group]


def _unbuilt(
    key: r.CaseKey, scenario: Scenario | None, plan: Plan, started: str, error: BaseException
) -> Result:
    if scenario is not None:
        return failed(key, scenario, error, started, 0.0)
    fault, settings = fault_of(error), plan.effort.to_dict()
    return r.CaseResult(
        key=key, status="failed", fault=fault, started=started, seconds=0.0, settings=settings
    )
