"""One case: private inferences and every plaintext engine in turns, under one meter, every fault kept."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import api
from ..backends import has_dealer
from ..errors import UsageError
from ..measure.energy import EnergyMeter, Spent
from ..measure.gather import LEAST_WARM_MS, LEAST_WARM_RUNS
from ..session.local import local_session
from . import report as r
from .flat import flat
from .models import Built, compile_options, compressed, save_state, subject
from .namespaces import unavailable
from .outcome import Outcome, fault_of
from .places import EMULATED, LOOPBACK, places
from .plaintext import PlaintextProcess
from .plaintext import engines as plaintext_engines
from .quiet import CHOICE, PLAINTEXT, SECURE, Quiet

if TYPE_CHECKING:
    from ..plan.program import Program
    from ..session.client import Session

Say = Callable[[str], None]

STEP_SECONDS = 900.0
LOAD_SECONDS = 600.0
BLOCK_MS, MOST_IN_BLOCK = 50.0, 10
"""Private inferences of a block: as many as take so long, but not more than that."""


@dataclass(frozen=True)
class Effort:
    """How much is run. least_runs, most_runs: warm private inferences of a case; between them, until `seconds` have passed.
    There is a second of them in any case, which a quick model may need more than most_runs for.

    block_seconds: the least time of one plaintext engine in each block. engines: (engine, dtype), None for all there are.
    threads: of each party, None for half of the cores.
    """

    least_runs: int = 5
    most_runs: int = 400
    seconds: float = 30.0
    block_seconds: float = 0.02
    engines: tuple[tuple[str, str], ...] | None = None
    threads: int | None = None
    torch_compile: bool = False
    device: str = "cpu"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "engines": None if self.engines is None else [list(pair) for pair in self.engines]
        }


QUICK_EFFORT = Effort(
    least_runs=3,
    seconds=2.0,
    engines=(
        ("torch eager", "fp32"),
        ("torch eager", "int8"),
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
        ("torch.compile", "fp32"),
    ),
)
"""Compiling takes half a minute a type: one of them will do here."""


class Bench:
    """What cases of one model and batch share: the model, and plaintext engines in processes of their own.

    faults: what disturbed the choice of their threads, and so every case of theirs.
    """

    def __init__(
        self,
        model: str,
        batch: int,
        effort: Effort,
        say: Say,
        *,
        engines: bool = True,
        meter: EnergyMeter | None = None,
    ) -> None:
        self.model, self.batch, self.effort = model, batch, effort
        self.subject = subject(model)
        say(f"{self.subject.title}: building")
        self.built: Built = self.subject.build(batch)
        with torch.inference_mode():
            self.expected = [flat(self.built.module(*inputs)) for inputs in self.built.held_out]
        # A load has no plaintext beside it.
        self._wanted = (
            (plaintext_engines(effort.device) if effort.engines is None else effort.engines)
            if engines
            else ()
        )
        self._folder = tempfile.TemporaryDirectory(prefix="secureinfer-bench-")
        state = Path(self._folder.name) / "state.safetensors"
        save_state(self.built.module, state)
        self._all: list[PlaintextProcess] = []
        self.processes: list[PlaintextProcess] = []
        self.unavailable: list[r.Baseline] = []
        self.faults: list[str] = []
        self._outputs: dict[tuple[str, int], torch.Tensor] = {}
        try:
            self._start(state, say, None if meter is None else Quiet(meter))
        except BaseException:
            self.close()
            raise

    def _start(self, state: Path, say: Say, quiet: Quiet | None) -> None:
        """Loaded a few at a time, as many as there are cores; then one after another, since each chooses its threads."""
        several = os.cpu_count() or 1
        for first in range(0, len(self._wanted), several):
            some = self._wanted[first : first + several]
            say(f"{self.subject.title}: loading {' and '.join(' '.join(pair) for pair in some)}")
            started = [
                PlaintextProcess(
                    self.model, self.batch, engine, dtype, state=state, device=self.effort.device
                )
                for engine, dtype in some
            ]
            self._all += started
            for process in started:
                process.loaded(LOAD_SECONDS)
        say(f"{self.subject.title}: plaintext engines choose their threads")
        for process in self._all:
            begin = None if quiet is None else quiet.mark()
            if process.ready(LOAD_SECONDS):
                self.processes.append(process)
            else:
                self.unavailable.append(process.baseline())
            if quiet is not None and begin is not None:
                quiet.add(CHOICE, begin, quiet.mark())
        # They are loaded. A sweep that is killed leaves its folder, which should hold no weights.
        state.unlink()
        if quiet is not None:
            self.faults = quiet.faults()

    def outputs(self, process: PlaintextProcess, index: int) -> torch.Tensor | None:
        """Of one engine for held_out[index]; None where it gives none."""
        at = process.name, index
        if at not in self._outputs and (found := process.outputs(index)):
            self._outputs[at] = flat(found)
        return self._outputs.get(at)

    def close(self) -> None:
        for process in self._all:
            process.close()
        self._folder.cleanup()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Turns:
    """What the loop measured: a value of each private inference, and as many of every engine, which belong to the same
    blocks. asked: the held_out index of each inference, the cold one first; outputs likewise.
    """

    online_ms: list[float] = field(default_factory=list)
    offline_ms: list[float] = field(default_factory=list)
    plaintext_ms: dict[str, list[float]] = field(default_factory=dict)
    online_spent: list[Spent] = field(default_factory=list)
    offline_spent: list[Spent] = field(default_factory=list)
    plaintext_spent: dict[str, list[tuple[Spent, int]]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    setup_spent: Spent | None = None
    cold_online_ms: float | None = None
    cold_offline_ms: float | None = None


def run_case(key: r.CaseKey, bench: Bench, meter: EnergyMeter, effort: Effort, say: Say) -> r.CaseResult:
    """Never raises for what is wrong with a case: its fault stands in the result. An interrupt passes."""
    started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    head: dict[str, Any] = {"key": key, "started": started, "settings": effort.to_dict()}
    try:
        found = _measure(key, bench, meter, effort, say)
    except (Exception, SystemExit) as error:  # a user's forward may call sys.exit
        return r.CaseResult(
            **head, status="failed", fault=fault_of(error), seconds=time.perf_counter() - begin
        )
    return r.CaseResult(**head, status="ok", seconds=time.perf_counter() - begin, **found)


def _measure(key: r.CaseKey, bench: Bench, meter: EnergyMeter, effort: Effort, say: Say) -> dict[str, Any]:
    say(f"{key}: compressing and compiling")
    module, changes = compressed(key.compression, bench.built)
    program = compile_case(key, module, bench.built)
    say(f"{key}: starting the parties")
    outset = meter.read()
    quiet = Quiet(meter)
    with opened(key, program, effort) as (session, why_projected):
        setup = meter.between(outset, meter.read())
        turns = _take_turns(key, session, bench, meter, quiet, effort, say)
        secure = session.report()
    turns.setup_spent = setup
    faults = [*bench.faults, *quiet.faults()]
    return Outcome(key, bench, program, module, changes, turns, why_projected, secure, faults).fields()


def compile_case(key: r.CaseKey, module: torch.nn.Module, built: Built) -> Program:
    return api.compile(module, built.examples, **compile_options(key.backend, built))


@contextlib.contextmanager
def opened(key: r.CaseKey, program: Program, effort: Effort) -> Iterator[tuple[Session, str | None]]:
    """A session over the case's network, and None; or one over loopback, and why its figures are to be projected."""
    network, _, how = key.network.partition(":")
    if network not in (LOOPBACK, *EMULATED) or how not in ("", "projected") or (how and network == LOOPBACK):
        raise UsageError(
            f"there is no network {key.network!r}; choose {', '.join((LOOPBACK, *EMULATED))}, "
            + ", ".join(f"{name}:projected" for name in EMULATED)
        )
    options: dict[str, Any] = {
        "timeout": STEP_SECONDS,
        "threads": effort.threads,
        "torch_compile": effort.torch_compile,
    }
    why = None
    if how:
        why = "asked for"
    elif network != LOOPBACK:
        why = unavailable()
    if network == LOOPBACK or why is not None:
        with api.local_session(program, **options) as session:
            yield session, why
        return
    roles = ("data_owner", "model_owner", *(["dealer"] if has_dealer(program.backend) else []))
    with places(network, roles) as found, local_session(program, places=found, **options) as session:
        yield session, None


def _take_turns(
    key: r.CaseKey,
    session: Session,
    bench: Bench,
    meter: EnergyMeter,
    quiet: Quiet,
    effort: Effort,
    say: Say,
) -> Turns:
    """The first inference is cold: its latency stands apart. Then blocks: some inferences, and a turn of every engine."""
    turns = Turns()
    turns.cold_offline_ms, turns.cold_online_ms = _one(session, bench, turns, meter)[0]
    say(f"{key}: first inference {turns.cold_online_ms:.0f} ms; plaintext takes turns with it now")
    begin, count = time.perf_counter(), 1
    while not _enough(turns, effort, time.perf_counter() - begin):
        begun = quiet.mark()
        for _ in range(count):
            (offline_ms, online_ms), (offline_spent, online_spent) = _one(session, bench, turns, meter)
            turns.offline_ms.append(offline_ms)
            turns.online_ms.append(online_ms)
            turns.offline_spent.append(offline_spent)
            turns.online_spent.append(online_spent)
        turns.blocks.append(count)
        quiet.add(SECURE, begun, quiet.mark())
        for process in bench.processes:
            last = quiet.mark()
            # The first call of a turn finds caches that the others filled. Plaintext in earnest is warm: it is not counted.
            times_ms = process.time(turns.asked[-1], least_runs=count + 1, least_seconds=effort.block_seconds)
            if len(times_ms) <= count:
                continue  # it died; its baseline says so
            turns.plaintext_ms.setdefault(process.name, []).extend(in_groups(times_ms[1:], count))
            ended = quiet.mark()
            quiet.add(PLAINTEXT, last, ended)
            spent = meter.between(last.reading, ended.reading)
            turns.plaintext_spent.setdefault(process.name, []).append((spent, len(times_ms)))
        count = max(1, min(MOST_IN_BLOCK, round(BLOCK_MS / statistics.median(turns.online_ms))))
    return turns


def _one(
    session: Session, bench: Bench, turns: Turns, meter: EnergyMeter
) -> tuple[tuple[float, float], tuple[Spent, Spent]]:
    """Material for one inference and the inference: milliseconds and what was spent, (offline, online)."""
    index = len(turns.asked) % len(bench.built.held_out)
    before, start = meter.read(), time.perf_counter()
    session.prepare(1)
    offline_ms = 1000 * (time.perf_counter() - start)
    between, start = meter.read(), time.perf_counter()
    output = session.infer(*bench.built.held_out[index])
    online_ms = 1000 * (time.perf_counter() - start)
    after = meter.read()
    turns.asked.append(index)
    turns.outputs.append(flat(output))
    return (offline_ms, online_ms), (meter.between(before, between), meter.between(between, after))


def in_groups(times_ms: list[float], count: int) -> list[float]:
    """The median of each of `count` groups of calls that followed one another: as many values as private runs."""
    edges = [round(i * len(times_ms) / count) for i in range(count + 1)]
    return [statistics.median(times_ms[a:b]) for a, b in itertools.pairwise(edges)]


def _enough(turns: Turns, effort: Effort, seconds: float) -> bool:
    """A quick model takes more runs than most_runs until there is a second of them: with less it could not be quoted."""
    warm = len(turns.online_ms)
    if warm < max(effort.least_runs, LEAST_WARM_RUNS) or sum(turns.online_ms) < 1.1 * LEAST_WARM_MS:
        return False
    return seconds >= effort.seconds or warm >= effort.most_runs
