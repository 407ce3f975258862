"""What became slower or fatter from one report to another, beyond what noise explains.

Times are compared as secure over plaintext of the same block, so that a machine that was slower for both sides tells
nothing. What is counted (bytes, rounds) has no noise: one byte more is more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UsageError
from ..measure.intervals import LEAST_VALUES, Interval, change_interval
from . import report as r
from .comparison import Comparison, Row, Verdict
from .figures import FP32, per_block
from .places import LOOPBACK

LIKE = ("threads", "torch_compile", "device")
"""Settings that make a case another one for time, memory and energy; how often it runs does not."""
NO_MATTER = ("secureinfer", "load_average")
"""Of an environment: the version is what is compared, and the load passes."""
COMPRESSED_BYTES = 0.01
"""Ciphertexts are compressed, so that their bytes differ a little from run to run."""


def compare(before: r.BenchReport, after: r.BenchReport, tolerance: float = 0.05) -> Comparison:
    """Cases and loads of two reports, matched by key. tolerance: what may become more, as a part; 0.05 is 5 %.

    Worse: online or offline time over plaintext's, its whole interval beyond the tolerance; online, dealt or setup bytes,
    or rounds, by any amount; memory, model sizes and energy beyond the tolerance; a case that fails and did not before.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise UsageError(f"a tolerance is a part that may be more, such as 0.05, not {tolerance}")
    differs = _differs(before.environment, after.environment)
    rows: list[Row] = []
    old, new = {c.key: c for c in before.cases}, {c.key: c for c in after.cases}
    for key in [*old, *(k for k in new if k not in old)]:
        a, b = old.get(key), new.get(key)
        same = not _differs(_environment(a, before), _environment(b, after))
        rows += _Cases(str(key), a, b, tolerance, same, after.complete).rows()
    old_loads = {(load.key, load.scenario): load for load in before.loads}
    new_loads = {(load.key, load.scenario): load for load in after.loads}
    for which in [*old_loads, *(w for w in new_loads if w not in old_loads)]:
        rows += _loads(f"{which[0]} {which[1]}", old_loads.get(which), new_loads.get(which))
    return Comparison(tuple(rows), tolerance, differs)


def _environment(case: r.CaseResult | None, report: r.BenchReport) -> dict[str, Any]:
    return report.environment if case is None or case.environment is None else case.environment


def _differs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = (before.keys() | after.keys()) - set(NO_MATTER)
    return {
        key: (before.get(key), after.get(key)) for key in sorted(keys) if before.get(key) != after.get(key)
    }


def _about(case: str, verdict: Verdict, note: str) -> Row:
    return Row(case, "case", "", None, None, None, None, verdict, note)


def _presence(
    case: str,
    old: r.CaseResult | r.LoadResult | None,
    new: r.CaseResult | r.LoadResult | None,
    complete: bool,
) -> Row | None:
    """What there is to say of a case that cannot be compared, if it cannot."""
    if old is None:
        failed = new is not None and new.status == "failed"
        return _about(case, "shown", "it is new" + (f", and failed: {_why(new)}" if failed else ""))
    if new is None:
        stopped = "" if complete else "; the sweep was stopped"
        return _about(case, "shown", f"missing: it is in the first report only{stopped}")
    if new.status == "failed":
        if old.status == "failed":
            return _about(case, "shown", f"it failed before and fails now: {_why(new)}")
        return _about(case, "worse", f"it fails now: {_why(new)}")
    if old.status == "failed":
        return _about(case, "better", "it failed before, and runs now")
    return None


def _why(result: r.CaseResult | r.LoadResult | None) -> str:
    fault = None if result is None else result.fault
    return "no reason is told" if fault is None else f"{fault.type}: {' '.join(fault.message.split())[:200]}"


@dataclass(frozen=True)
class _Cases:
    """One case in both reports."""

    name: str
    old: r.CaseResult | None
    new: r.CaseResult | None
    tolerance: float
    same_environment: bool
    complete: bool

    def rows(self) -> list[Row]:
        told = _presence(self.name, self.old, self.new, self.complete)
        if told is not None or self.old is None or self.new is None:
            return [] if told is None else [told]
        old, new = self.old, self.new
        if not (old.valid and new.valid):
            side = "now" if old.valid else "before" if new.valid else "before and now"
            reason = (old if new.valid else new).invalid_reason
            return [_about(self.name, "shown", f"not judged: it is not valid {side}: {reason}")]
        if old.model is not None and new.model is not None and _what(old.model) != _what(new.model):
            return [
                _about(self.name, "shown", f"not judged: {_what(old.model)} before, {_what(new.model)} now")
            ]
        unlike = [k for k in LIKE if old.settings.get(k) != new.settings.get(k)]
        if unlike:
            says = ", ".join(f"{k} {old.settings.get(k)} before, {new.settings.get(k)} now" for k in unlike)
            return [
                _about(self.name, "shown", f"only bytes and rounds are judged: {says}"),
                *self._counted(old, new),
            ]
        if other := _unlike(old, new):
            # Bytes, rounds, memory and sizes are those of the loopback run, and no computation.
            return [
                _about(self.name, "shown", f"times and energy are not judged: {other}"),
                *(replace(row, verdict="shown", note=other) for row in self._times(old, new)),
                *self._counted(old, new),
                *self._sizes(old, new),
            ]
        times = self._times(old, new)
        if old.projected:
            both = "times are computed from a loopback run in both reports, and compared as such"
            times.insert(0, _about(self.name, "shown", both))
        noise = max(
            (math.log(t.interval.high / t.ratio) for t in times if t.interval and t.ratio), default=None
        )
        speed = next((t.ratio for t in times if t.figure.startswith("plaintext")), None)
        return [
            *times,
            *self._counted(old, new),
            *self._sizes(old, new),
            *self._energy(old, new, noise, speed),
        ]

    @property
    def _waits(self) -> bool:
        """Whether a network's delay is part of the private latency."""
        return self.new is not None and self.new.key.network != LOOPBACK

    def _row(
        self,
        figure: str,
        unit: str,
        before: float | None,
        after: float | None,
        verdict: Verdict,
        note: str | None,
    ) -> Row:
        ratio = after / before if before and after is not None else None
        return Row(self.name, figure, unit, before, after, ratio, None, verdict, note)

    # --- times ---

    def _times(self, old: r.CaseResult, new: r.CaseResult) -> list[Row]:
        plain = _common(old, new)
        rows = []
        for phase in ("online", "offline"):
            a, b = getattr(old, phase), getattr(new, phase)
            if a is None or b is None:
                continue
            if plain is not None:
                rows.append(self._paired(f"{phase} / {plain[0]}", a, b, *plain[1:]))
            rows.append(self._absolute(f"{phase} latency", a, b, judged=plain is None))
        if plain is not None:
            rows.append(self._absolute(f"plaintext, {plain[0]}", *plain[1:], judged=False))
        return rows

    def _paired(self, figure: str, a: r.Timed, b: r.Timed, plain_a: r.Timed, plain_b: r.Timed) -> Row:
        before, after = _ratio(a, plain_a), _ratio(b, plain_b)
        change, interval = _changed(_pairs(a, plain_a), _pairs(b, plain_b))
        if interval is None:
            change = after / before if before and after else None
            interval = _of_means(change, (a, b, plain_a, plain_b))
        verdict = self._judged(change, interval)
        if verdict[0] in ("worse", "better") and self._waits:
            # A network's delay is the same on any machine: a quicker one speeds up plaintext alone, and the ratio grows.
            absolute = self._judged(*_change(a, b))
            if absolute[0] != verdict[0]:
                verdict = (
                    "unclear",
                    "the latency itself did not change so: a network's delay follows no machine",
                )
        return Row(self.name, figure, "x", before, after, change, interval, *verdict)

    def _absolute(self, figure: str, a: r.Timed, b: r.Timed, *, judged: bool) -> Row:
        before, after = a.latency_ms, b.latency_ms
        change, interval = _change(a, b)
        verdict: tuple[Verdict, str | None] = self._judged(change, interval)
        if not self.same_environment:
            verdict = "shown", "the environments differ"
        elif not judged:
            verdict = "shown", "the machine's speed is in it"
        return Row(self.name, figure, "ms", before, after, change, interval, *verdict)

    def _judged(self, change: float | None, interval: Interval | None) -> tuple[Verdict, str | None]:
        if change is None or interval is None:
            return "shown", f"not judged: an interval takes {LEAST_VALUES} runs"
        most = 1 + self.tolerance
        if interval.low > most:
            return "worse", None
        if interval.high < 1 / most:
            return "better", None
        return ("unclear", "noise may explain it") if change > most else ("same", None)

    # --- what is counted ---

    def _counted(self, old: r.CaseResult, new: r.CaseResult) -> Iterator[Row]:
        exact = all(_at(c.session, "program", "planned", "exact_bytes") is not False for c in (old, new))
        for figure, unit, path in (
            ("online bytes", "bytes", ("online", "bytes")),
            ("online rounds", "rounds", ("online", "rounds")),
            ("dealt bytes", "bytes", ("offline", "bytes")),
            ("setup bytes", "bytes", ("setup", "bytes")),
        ):
            before, after = _number(old.session, *path), _number(new.session, *path)
            if before is None and after is None:
                continue
            slack = 0.0 if exact or unit == "rounds" else COMPRESSED_BYTES
            yield self._row(figure, unit, before, after, *_grown(before, after, slack))

    def _sizes(self, old: r.CaseResult, new: r.CaseResult) -> Iterator[Row]:
        for phase in ("online", "offline"):
            for figure, key in (
                ("peak memory", "peak_memory_bytes"),
                ("peak GPU memory", "peak_gpu_memory_bytes"),
            ):
                sizes = _number(old.session, phase, key), _number(new.session, phase, key)
                yield from self._size(f"{phase} {figure}", *sizes)
        if old.model is not None and new.model is not None:
            yield from self._size("model", old.model.compressed_bytes, new.model.compressed_bytes)
            yield from self._size("program", old.model.program_bytes, new.model.program_bytes)
            yield from self._size(
                "public program", old.model.public_program_bytes, new.model.public_program_bytes
            )

    def _size(self, figure: str, before: float | None, after: float | None) -> Iterator[Row]:
        if before is not None or after is not None:
            yield self._row(figure, "bytes", before, after, *_grown(before, after, self.tolerance))

    def _energy(
        self, old: r.CaseResult, new: r.CaseResult, noise: float | None, speed: float | None
    ) -> Iterator[Row]:
        """Joules have no repeated readings: their noise is taken to be that of the times, and what a slower machine took
        longer for is taken off."""
        for figure, a, b in (
            ("online energy", old.online_energy, new.online_energy),
            ("offline energy", old.offline_energy, new.offline_energy),
        ):
            before, after = a.joules_per_sample, b.joules_per_sample
            if before is None and after is None:
                continue
            if a.source != b.source and None not in (before, after):
                note = f"not judged: {a.source} before, {b.source} now"
                yield self._row(figure, "J", before, after, "shown", note)
            elif not self.same_environment:
                yield self._row(figure, "J", before, after, "shown", "the environments differ")
            elif noise is None:
                yield self._row(
                    figure, "J", before, after, "shown", "not judged: too few runs to know its noise"
                )
            else:
                slack = (1 + self.tolerance) * math.exp(noise) * max(1.0, speed or 1.0) - 1
                yield self._row(figure, "J", before, after, *_grown(before, after, slack))


def _loads(case: str, old: r.LoadResult | None, new: r.LoadResult | None) -> Iterator[Row]:
    """A load is one run, without a plaintext of its own beside it: what it reached is shown."""
    told = _presence(case, old, new, True)
    if told is not None or old is None or new is None:
        if told is not None:
            yield told
        return
    for side, load in (("before", old), ("now", new)):
        if not load.valid:
            yield _about(case, "shown", f"it is not valid {side}: {'; '.join(load.invalid_reasons)}")
    for figure, unit, before, after in (
        ("rate", "queries/s", old.qps, new.qps),
        ("p99", "ms", old.latency_ms_p99, new.latency_ms_p99),
    ):
        if before is not None or after is not None:
            ratio = after / before if before and after is not None else None
            yield Row(case, figure, unit, before, after, ratio, None, "shown", "one run: not judged")


def _common(old: r.CaseResult, new: r.CaseResult) -> tuple[str, r.Timed, r.Timed] | None:
    """The same plaintext in both, its name and latencies; torch eager fp32 before all others."""
    ran = {(b.engine, b.dtype, b.device): b.latency for b in new.baselines if b.status == "ok"}
    for a in sorted(old.baselines, key=lambda b: (b.engine, b.dtype) != FP32):
        after = ran.get((a.engine, a.dtype, a.device))
        if a.status == "ok" and a.latency is not None and after is not None:
            return a.name, a.latency, after
    return None


def _unlike(old: r.CaseResult, new: r.CaseResult) -> str | None:
    """Why the private times of two cases are not of one kind; a reason for projecting is none."""
    if (old.projected is None) == (new.projected is None):
        return None
    a, b = ("computed" if case.projected is not None else "measured" for case in (old, new))
    return f"{a} before, {b} now"


def _change(before: r.Timed, after: r.Timed) -> tuple[float | None, Interval | None]:
    """Of latencies themselves."""
    change, interval = _changed(per_block(before), per_block(after))
    if interval is None:
        change = after.latency_ms / before.latency_ms if before.latency_ms and after.latency_ms else None
        interval = _of_means(change, (before, after))
    return change, interval


def _changed(before: Sequence[float], after: Sequence[float]) -> tuple[float | None, Interval | None]:
    if min(len(before), len(after)) < LEAST_VALUES or min(*before, *after) <= 0:
        return None, None
    return change_interval(before, after)


def _ratio(above: r.Timed, below: r.Timed) -> float | None:
    if above.latency_ms is None or not below.latency_ms:
        return None
    return above.latency_ms / below.latency_ms


def _pairs(above: r.Timed, below: r.Timed) -> list[float]:
    """Secure over plaintext of each block; none where they were not measured block by block."""
    a, b = per_block(above), per_block(below)
    if len(a) != len(b):
        return []
    return [x / y for x, y in zip(a, b, strict=True) if x > 0 and y > 0]


def _of_means(change: float | None, parts: tuple[r.Timed, ...]) -> Interval | None:
    """The interval of a quotient of means from the interval of each, their half-widths added in squares."""
    halves = [
        math.log(part.latency_ms_interval.high / part.latency_ms)
        for part in parts
        if part.latency_ms and part.latency_ms_interval is not None
    ]
    if change is None or len(halves) != len(parts):
        return None
    factor = math.exp(min(math.hypot(*halves), 50.0))
    return Interval(change / factor, change * factor)


def _grown(before: float | None, after: float | None, slack: float) -> tuple[Verdict, str | None]:
    if before is None or after is None:
        return "shown", f"not judged: unknown {'before' if before is None else 'now'}"
    if after > before * (1 + slack):
        return "worse", None
    return ("better", None) if after * (1 + slack) < before else ("same", None)


def _what(model: r.ModelFacts) -> str:
    return f"{model.title}, {model.input}, {model.weights} weights"


def _at(found: Any, *path: str) -> Any:
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _number(session: dict[str, Any] | None, *path: str) -> float | None:
    found = _at(session, *path)
    return found if isinstance(found, int | float) and math.isfinite(found) else None
