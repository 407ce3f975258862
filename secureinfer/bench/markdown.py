"""A report of a benchmark as Markdown: the headline, each case in full, loads, the machine, the meter, every failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..measure.table import UNKNOWN, ms, size
from . import report as r
from .markdown_case import case_parts
from .pieces import (
    RATIOS,
    code,
    energy,
    facts,
    fenced,
    figure,
    flat,
    mapping,
    mean,
    ratio,
    settings,
    table,
    whole,
)
from .text import amount, number, share

READING = """\
Secure latency is the caller's, from the call to the returned tensors; plaintext ran on the same device in the same run, in
turns with it. Ratios are means over means of warm runs; in brackets stands the 95 % interval, from runs paired by block.
*total* counts the offline phase too. Bytes and rounds are of one inference, each byte counted once. Accuracy is that of
float / compressed / decrypted outputs, by the same metric on the same samples. "–" is unknown."""


def markdown(report: r.BenchReport) -> str:
    """The whole report for people. Ends with a newline."""
    return "\n\n".join(part for part in _parts(report) if part) + "\n"


def _parts(report: r.BenchReport) -> Iterator[str]:
    yield f"# {flat(report.title)}"
    yield _head(report)
    if report.cases:
        yield "## Secure beside plaintext"
        yield table(HEADLINE, map(_headline, report.cases), left=2)
        yield READING
    if report.loads:
        yield "## Loads, by MLPerf LoadGen"
        yield from _loads(report.loads)
    ran = [case for case in report.cases if case.status == "ok"]
    if ran:
        yield "## Case by case"
    for case in ran:
        yield from case_parts(case)
    yield "## Machine"
    yield facts(report.environment)
    yield "## Energy meter"
    yield _meter(report.meter)
    yield from _failures(report)


def _head(report: r.BenchReport) -> str:
    processor, cores, ours, torch = (
        flat(report.environment.get(key) or UNKNOWN) for key in ("processor", "cores", "secureinfer", "torch")
    )
    lines = [
        f"Made {flat(report.created)} on {processor}, {cores} core(s), secureinfer {ours}, torch {torch}."
    ]
    if report.command:
        lines.append(f"To make it again: {code(report.command)}")
    if not report.complete:
        lines.append("**The sweep was stopped: some of its cases have not run.**")
    return "  \n".join(lines)


# --- the headline ---

HEADLINE = (
    "case",
    "valid",
    "secure online, mean",
    "p50",
    "fp32 plaintext",
    "best plaintext",
    "online / fp32",
    "online / best",
    "total / fp32",
    "total / best",
    "bytes",
    "rounds",
    "energy a sample",
    "accuracy: float / compressed / secure",
)


def _headline(case: r.CaseResult) -> list[str]:
    if case.status == "failed":
        told = "no reason is told" if case.fault is None else f"{case.fault.type}; in full below"
        return [str(case.key), f"failed: {told}", *[UNKNOWN] * (len(HEADLINE) - 2)]
    fp32, best = case.overhead("online", "fp32"), case.overhead("online", "best")
    online = mapping(case.session, "online")
    return [
        str(case.key),
        "yes" if case.valid else f"no: {case.invalid_reason or 'no reason is told'}",
        mean(case.online),
        ms(None if case.online is None else case.online.latency_ms_p50),
        UNKNOWN if fp32 is None else f"{ms(fp32.denominator_ms)}, {fp32.denominator}",
        UNKNOWN if best is None else f"{ms(best.denominator_ms)}, {best.denominator}",
        *(ratio(case.overhead(*which)) for which in RATIOS),
        size(figure(online, "bytes")),
        number(figure(online, "rounds")),
        energy(case.online_energy),
        _accuracy(case.accuracy),
    ]


def _accuracy(found: r.Accuracy | None) -> str:
    if found is None:
        return UNKNOWN
    return " / ".join(share(v) for v in (found.float, found.compressed, found.secure))


# --- loads, machine, meter, failures ---


def _loads(loads: Sequence[r.LoadResult]) -> Iterator[str]:
    yield table(
        (
            "case",
            "scenario",
            "valid",
            "queries/s",
            "samples/s",
            "with all dealing counted",
            "mean",
            "p50",
            "p90",
            "p99",
            "bound",
            "queries",
            "prepared: start / end / least of capacity",
            "energy",
        ),
        map(_load, loads),
        left=3,
    )
    for load in loads:
        lines = [f"- tried {number(t.target_qps)} queries/s: {_trial(t)}" for t in load.trials]
        if load.pool is not None:
            lines.append(f"- {_pool(load.pool)}")
        if lines or load.summary:
            yield f"### {flat(load.key)}, {flat(load.scenario)}"
            yield f"LoadGen {flat(load.loadgen or UNKNOWN)}, with {code(settings(load.settings))}"
            yield "\n".join(lines)
            yield fenced(load.summary) if load.summary else ""


def _load(load: r.LoadResult) -> list[str]:
    pool = load.pool
    valid = "yes" if load.valid else f"no: {'; '.join(load.invalid_reasons) or 'no reason is told'}"
    if load.status == "failed":
        valid = "failed" if load.fault is None else f"failed: {load.fault.type}; in full below"
    return [
        str(load.key),
        load.scenario,
        valid,
        number(load.qps),
        number(load.samples_per_second),
        number(load.sustained_samples_per_second),
        *(ms(v) for v in (load.latency_ms, load.latency_ms_p50, load.latency_ms_p90, load.latency_ms_p99)),
        ms(load.target_latency_ms)
        + ("" if load.target_percentile is None else f" at p{load.target_percentile:g}"),
        number(load.queries),
        UNKNOWN if pool is None else f"{pool.at_start} / {pool.at_end} / {pool.least} of {pool.capacity}",
        whole(load.energy),
    ]


def _pool(pool: r.Pool) -> str:
    when = "beforehand" if pool.beforehand else "while it ran"
    return (
        f"prepared {when}, {number(pool.dealt)} dealt, {number(pool.used)} used, {number(pool.empty)} waited for one; "
        f"dealing one alone takes {ms(pool.offline_latency_ms)}"
    )


def _trial(trial: r.Trial) -> str:
    held = "held" if trial.valid else "not held" + (f", {flat(trial.why)}" if trial.why else "")
    return f"{held}; p99 {ms(trial.latency_ms_p99)}"


def _meter(meter: r.Meter) -> str:
    lines = [f"source: {flat(meter.source or 'none: energy is unknown')}"]
    if meter.model:
        lines.append(f"model: {flat(meter.model)}")
    if meter.source is not None:
        idle = UNKNOWN if meter.idle_watts is None else amount(meter.idle_watts, "W")
        over = "" if meter.idle_seconds is None else f", over {amount(meter.idle_seconds, 's')}"
        lines.append(
            f"the idle machine takes {idle}{over}; joules are with it, unless they are said to be above idle"
        )
    lines += [f"not read: {flat(reason)}" for reason in meter.unavailable]
    return "\n".join(f"- {line}" for line in lines)


def _failures(report: r.BenchReport) -> Iterator[str]:
    failed = [(str(c.key), c.fault) for c in report.cases if c.status == "failed"]
    failed += [
        (f"{load.key}, {load.scenario}", load.fault) for load in report.loads if load.status == "failed"
    ]
    if failed:
        yield "## Failures"
    for name, fault in failed:
        yield f"### {flat(name)}"
        yield "No reason is told." if fault is None else fenced(f"{fault.type}: {fault.message}")
