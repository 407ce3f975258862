"""`secureinfer demo --backend ckks`: private diagnosis, and digits, on encrypted data, beside plaintext.

A model owner trains on one half of scikit-learn's data; a data owner asks about the other half, through two programs:
one sample at a time (its values spread over slots), and all at once (a slot a sample). All that is printed is measured in
this run, on decrypted answers. Both owners are processes of their own; this process plays the user who sets them up,
and is the only place where both sides' secrets meet, to be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from . import api
from .classifiers import TASKS, Classifier, Data, Task, check_installed, train
from .compression.report import ActivationReport
from .measure.baseline import time_plaintext, together, unrest
from .measure.gather import LEAST_WARM_MS, LEAST_WARM_RUNS
from .measure.latency import time_calls
from .measure.report import Report
from .measure.table import machine, ms, size, times
from .plan.program import Program
from .terminal import Terminal

LEAST_SINGLES = 10
"""Samples that go alone: enough to see that their latency does not vary."""


@dataclass(frozen=True)
class Learnt:
    """A task, its two halves, and what was learnt from one of them."""

    task: Task
    data: Data
    classifier: Classifier


@dataclass(frozen=True)
class Measured:
    """One session. samples: of an inference. accuracy stands in the report too."""

    samples: int
    noun: str
    report: Report
    accuracy: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The two sessions of what was learnt: one sample at a time, and all at once."""

    learnt: Learnt
    single: Measured
    batch: Measured

    @property
    def sessions(self) -> tuple[Measured, Measured]:
        return self.single, self.batch

    def to_dict(self) -> dict[str, Any]:
        learnt = self.learnt
        return {
            "name": learnt.task.name,
            "network": learnt.task.network,
            "trained_on": len(learnt.data.x),
            "held_out": len(learnt.data.held_x),
            "compression": learnt.classifier.report.to_dict(),
            "accuracy": self.batch.accuracy,
            "sessions": [{"samples": m.samples, "report": m.report.to_dict()} for m in self.sessions],
        }


def run(
    terminal: Terminal, *, runs: int | None = None, network: str | None = None, tasks: Sequence[Task] = TASKS
) -> None:
    """Train, compile and measure each task. runs: inferences of each session, the first of which is cold; None for as
    many as a latency takes that may be quoted."""
    check_installed("sklearn", "tenseal")
    results = []
    for task in tasks:
        data = task.load()
        with terminal.working(f"{task.name}: training, as float and with polynomials"):
            learnt = Learnt(task, data, train(task, data))
        single, batch = (_measured(terminal, learnt, n, runs, network) for n in (1, len(data.held_x)))
        results.append(Result(learnt, single, batch))
    lines = [
        *map(_ranges, results),
        machine(results[0].batch.report),
        *(d for r in results for d in _doubts(r)),
    ]
    terminal.answer(
        {"tasks": [r.to_dict() for r in results]}, _accuracies(results), _costs(results), "\n".join(lines)
    )


def _measured(
    terminal: Terminal, learnt: Learnt, samples: int, runs: int | None, network: str | None
) -> Measured:
    """One program for so many samples of an inference, its session, and plaintext before and after it."""
    task, data, model = learnt.task, learnt.data, learnt.classifier.float_model
    noun = f"{samples} {task.sample}{'' if samples == 1 else 's'}"
    what = f"{task.name}, {noun} at a time"
    with _threads(1), terminal.working(f"{what}: compiling"):
        program = _compiled(learnt, samples)
    options, totals = program.options, program.plan.totals
    terminal.note(
        f"plan: ring degree {options['degree']}, {options['levels']} levels; at most {size(totals.setup_bytes)} of keys, "
        f"once, and {size(totals.bytes)} an inference"
    )
    x = data.held_x[:samples]
    threads = _quickest_threads(lambda: model(x))
    with _threads(threads), torch.inference_mode(), terminal.working(f"{what}: plaintext"):
        before = time_plaintext(lambda: model(x))
    with terminal.working(f"{what}: starting both owners (mutual TLS)"):
        session = api.local_session(program, network=network)
    asked: list[torch.Tensor] = []
    answers: list[torch.Tensor] = []
    times_ms: list[float] = []
    with session, terminal.working(f"{what}: private inferences"):
        while not _enough(times_ms, samples, runs):
            indices = (samples * len(times_ms) + torch.arange(samples)) % len(data.held_x)
            start = time.perf_counter()
            answers.append(session.infer(data.held_x[indices]))
            times_ms.append(1000 * (time.perf_counter() - start))
            asked.append(indices)
        report = session.report()
    with _threads(threads), torch.inference_mode(), terminal.working(f"{what}: plaintext again"):
        after = time_plaintext(lambda: model(x))
    accuracy = _compared(learnt, torch.cat(asked), torch.cat(answers))
    baseline = together(before, after, engine="torch eager, with SiLU", dtype="float32", threads=threads)
    report = report.with_plaintext(baseline, accuracy=accuracy, faults=unrest(before, after, threads))
    return Measured(samples, noun, report, accuracy)


def _compiled(learnt: Learnt, samples: int) -> Program:
    """The model owner's program: made of its own half alone."""
    return api.compile(
        learnt.classifier.polynomial,
        (learnt.data.x[:samples],),
        backend="ckks",
        calibration=[learnt.data.x],
        ckks={"layout": "slots" if samples == 1 else "batch"},
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Torch computes with so many; what there were come back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quickest_threads(call: Callable[[], object]) -> int:
    """One, or all that torch takes: in layers this small they may only wait for each other, and plaintext gets its best."""

    def latency_ms(count: int) -> float:
        with _threads(count), torch.inference_mode():
            return statistics.median(time_calls(call, least_seconds=0.1))

    return min({1, torch.get_num_threads()}, key=latency_ms)


def _enough(times_ms: Sequence[float], samples: int, runs: int | None) -> bool:
    """runs: how many were asked for; None for a latency that may be quoted."""
    if runs is not None:
        return len(times_ms) >= runs
    warm = times_ms[1:]
    least = LEAST_SINGLES if samples == 1 else LEAST_WARM_RUNS
    return len(warm) >= least and sum(warm) > 1.1 * LEAST_WARM_MS


def _compared(learnt: Learnt, asked: torch.Tensor, answers: torch.Tensor) -> dict[str, Any]:
    """Decrypted answers beside those of both models in plaintext, for the same samples. asked: their indices."""
    with torch.inference_mode():
        x, y = learnt.data.held_x[asked], learnt.data.held_y[asked]
        plain, exact = learnt.classifier.float_model(x), learnt.classifier.polynomial(x)
    samples = set(asked.tolist())
    different = set(asked[answers.argmax(1) != exact.argmax(1)].tolist())

    def right(outputs: torch.Tensor) -> float:
        return float((outputs.argmax(1) == y).double().mean())

    return {
        "compared": "decrypted answers with those in plaintext, of the float model and with polynomials",
        "samples": len(samples),
        "answers": len(answers),
        "float": right(plain),
        "polynomial": right(exact),
        "secure": right(answers),
        "same_decisions": len(samples) - len(different),
        "max_absolute_error": float((answers - exact).abs().max()),
        "max_absolute_output": float(exact.abs().max()),
    }


# What is shown.


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _accuracies(results: Sequence[Result]) -> Table:
    table = _table("Accuracy on the half that was not trained on", [r.learnt.task.name for r in results])
    found = [r.batch.accuracy for r in results]
    both = [[m.accuracy["max_absolute_error"] for m in r.sessions] for r in results]
    table.add_row("samples", *(f"{a['samples']}" for a in found))
    table.add_row("float model", *(_percent(a["float"]) for a in found))
    table.add_row("with polynomials", *(_percent(a["polynomial"]) for a in found))
    table.add_row("secure, decrypted", *(_percent(a["secure"]) for a in found))
    table.add_row("decided as with polynomials", *(f"{a['same_decisions']} of {a['samples']}" for a in found))
    table.add_row("greatest error, secure", *(f"{max(errors):.1e}" for errors in both))
    table.add_row("greatest output", *(f"{a['max_absolute_output']:.1f}" for a in found))
    return table


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _costs(results: Sequence[Result]) -> Table:
    sessions = [m for r in results for m in r.sessions]
    table = _table("Cost of an inference", [m.noun for m in sessions])
    setups = [m.report.setup.figures for m in sessions]
    online = [m.report.online for m in sessions]
    means = [phase.figures.latency.latency_ms for phase in online]
    sent = [phase.figures.bytes for phase in online]

    def each(values: Sequence[float | None]) -> list[float | None]:
        return [None if v is None else v / m.samples for v, m in zip(values, sessions, strict=True)]

    table.add_row("setup, once", *(ms(f.latency.latency_ms) for f in setups))
    table.add_row("keys, once", *(size(f.bytes) for f in setups))
    table.add_row("online, the first", *(ms(phase.cold_latency_ms) for phase in online))
    table.add_row("online, then", *map(ms, means))
    table.add_row("  a sample", *map(ms, each(means)))
    table.add_row("bytes", *map(size, sent))
    table.add_row("  a sample", *map(size, each(sent)))
    plain = [m.report.plaintext for m in sessions]
    table.add_row("plaintext", *(ms(None if p is None else p.latency.latency_ms) for p in plain))
    table.add_row("online / plaintext", *(times(m.report.overhead()["online"]["ratio"]) for m in sessions))
    return table


def _ranges(result: Result) -> str:
    """What stands in for the activations."""
    rows = [
        row
        for transform in result.learnt.classifier.report.transforms
        for row in transform.changed
        if isinstance(row, ActivationReport)
    ]
    fits = " and ".join(f"degree {row.degree} on ±{row.radius:.3g}" for row in rows)
    outside, values = sum(row.check_outside or 0 for row in rows), sum(row.check_values or 0 for row in rows)
    task = result.learnt.task
    return f"{task.name}: {task.network}; {fits} in place of SiLU; {outside} of {values:,} held-out values lie outside"


def _doubts(result: Result) -> list[str]:
    return [
        f"not to be quoted: {result.learnt.task.name}, {m.noun}: {m.report.invalid_reason}"
        for m in result.sessions
        if m.report.invalid_reason is not None
    ]
