"""One case of a benchmark's report as Markdown: phases, parties, layers, plaintext, compression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..measure.stats import PHASES
from ..measure.table import UNKNOWN, ms, size
from . import report as r
from .pieces import (
    RATIOS,
    code,
    energy,
    facts,
    figure,
    flat,
    mapping,
    mean,
    ratio,
    sequence,
    settings,
    table,
    whole,
)
from .text import number, share

LAYERS = 10
"""Of each case, those that took longest; the JSON has all."""
_LABEL = {"setup": "setup, once a session", "offline": "offline, each", "online": "online, each"}


def case_parts(case: r.CaseResult) -> Iterator[str]:
    yield f"### {flat(case.key)}"
    yield _about(case)
    yield "#### Phases"
    yield _phases(case)
    if parties := list(_parties(case)):
        yield "#### Parties"
        yield table(PARTIES, parties, left=2)
    layers = [layer for layer in sequence(case.session, "online", "layers") if isinstance(layer, dict)]
    if layers:
        yield f"#### Layers, online: the {min(LAYERS, len(layers))} that took longest of {len(layers)}"
        yield table(("layer", "time", "of it waiting", "bytes", "rounds"), _layers(layers))
    if case.baselines:
        yield "#### Plaintext"
        yield table(PLAINTEXT, map(_baseline, case.baselines), left=2, right=10)
    if case.model is not None and case.model.compression:
        yield "#### What compression changed"
        yield _compression(case.model.compression)


def _about(case: r.CaseResult) -> str:
    lines = []
    if not case.valid:
        lines.append(f"**Not to be quoted: {flat(case.invalid_reason or 'no reason is told')}.**")
    if (m := case.model) is not None:
        tokens = "" if m.tokens is None else f", {number(m.tokens)} tokens"
        lines.append(
            f"{flat(f'{m.title}:')} {number(m.parameters)} parameters, {flat(m.weights)} weights; {flat(m.input)}, "
            f"{number(m.samples)} sample(s){tokens} an inference."
        )
        lines.append(
            f"Weights {size(m.float_bytes)}, compressed {size(m.compressed_bytes)}; "
            f"program {size(m.program_bytes)}, its public part {size(m.public_program_bytes)}."
        )
    network = mapping(case.session, "network")
    if network:
        lines.append(
            f"Network: {flat(network.get('name') or UNKNOWN)}, {flat(network.get('source') or UNKNOWN)}."
        )
    if (a := case.accuracy) is not None:
        lines.append(
            f"Accuracy, {flat(a.metric)}, {number(a.samples)} samples: float {share(a.float)}, compressed "
            f"{share(a.compressed)}, secure {share(a.secure)}; greatest error of secure outputs "
            f"{number(a.max_absolute_error)}, of compression {number(a.compression_error)}."
        )
    t = case.throughput
    lines.append(
        f"Throughput, one inference after another: {_rate(t.samples_per_second, t.tokens_per_second)}; "
        f"with the offline phase {_rate(t.total_samples_per_second, t.total_tokens_per_second)}."
    )
    lines += [
        f"{phase} over {against}: {flat(o.numerator)} {ms(o.numerator_ms)} / {flat(o.denominator)} "
        f"{ms(o.denominator_ms)} = {ratio(o)}."
        for phase, against in RATIOS
        if (o := case.overhead(phase, against)) is not None
    ]
    lines.append(
        f"Took {case.seconds:.0f} s, started {flat(case.started)}, with {code(settings(case.settings))}."
    )
    return "\n".join(f"- {line}" for line in lines)


def _rate(samples: float | None, tokens: float | None) -> str:
    found = f"{number(samples)} samples/s"
    return found if tokens is None else f"{found}, {number(tokens)} tokens/s"


def _phases(case: r.CaseResult) -> str:
    rows = []
    for phase in PHASES:
        figures = mapping(case.session, phase)
        timing, spent = {
            "setup": (None, r.Energy()),
            "offline": (case.offline, case.offline_energy),
            "online": (case.online, case.online_energy),
        }[phase]
        if phase == "offline" and timing is None:
            continue
        if timing is None:
            times_of = [ms(figure(figures, f"latency_ms{p}")) for p in ("", "_p50", "_p90", "_p99")]
            runs, cold = number(figure(figures, "count")), ms(figure(figures, "cold_latency_ms"))
        else:
            times_of = [mean(timing), *(ms(getattr(timing, f"latency_ms_p{p}")) for p in (50, 90, 99))]
            runs, cold = number(timing.count), ms(timing.cold_latency_ms)
        rows.append(
            [
                _LABEL[phase],
                runs,
                *times_of,
                cold,
                size(figure(figures, "bytes")),
                number(figure(figures, "rounds")),
                size(figure(figures, "peak_memory_bytes")),
                size(figure(figures, "peak_gpu_memory_bytes")),
                whole(spent),
            ]
        )
    return table(
        (
            "phase",
            "runs",
            "mean",
            "p50",
            "p90",
            "p99",
            "first run",
            "bytes",
            "rounds",
            "peak memory",
            "peak GPU memory",
            "energy",
        ),
        rows,
    )


def _compression(found: dict[str, Any]) -> str:
    """One line a transform, and what it left alone, by reason: a report of each layer is in the JSON."""
    lines = []
    for transform in (t for t in sequence(found, "transforms") if isinstance(t, dict)):
        layers = [row for row in sequence(transform, "layers") if isinstance(row, dict)]
        changed = sum(bool(row.get("changed")) for row in layers)
        before, after = (size(figure(transform, key)) for key in ("bytes_before", "bytes_after"))
        lines.append(
            f"{flat(transform.get('name') or UNKNOWN)} with {code(settings(mapping(transform, 'settings')))}: "
            f"{changed} of {len(layers)} changed, {before} to {after}"
        )
        kept: dict[str, list[str]] = {}
        for row in layers:
            if not row.get("changed"):
                kept.setdefault(flat(row.get("reason") or "no reason is told"), []).append(
                    flat(row.get("path"))
                )
        for reason, paths in kept.items():
            more = "" if len(paths) <= 3 else ", …"
            lines.append(f"not changed, {len(paths)} ({', '.join(paths[:3])}{more}): {reason}")
    return "\n".join(f"- {line}" for line in lines) or facts(found)


PARTIES = (
    "party",
    "phase",
    "sent",
    "received",
    "rounds",
    "time",
    "of it waiting",
    "CPU time",
    "peak memory",
    "GPU memory",
)


def _parties(case: r.CaseResult) -> Iterator[list[str]]:
    roles = mapping(case.session, "roles")
    for phase in PHASES:
        for name, figures in mapping(case.session, phase, "parties").items():
            if not isinstance(figures, dict) or figure(figures, "bytes") is None:
                continue
            role = roles.get(name)
            seconds = figure(figures, "cpu_seconds")
            yield [
                f"{name} ({role})" if role and role != name else name,
                phase,
                size(figure(figures, "bytes")),
                size(figure(figures, "bytes_received")),
                number(figure(figures, "rounds")),
                ms(figure(figures, "latency_ms")),
                ms(figure(figures, "waiting_ms")),
                ms(None if seconds is None else 1000 * seconds),
                size(figure(figures, "peak_memory_bytes")),
                size(figure(figures, "peak_gpu_memory_bytes")),
            ]


def _layers(layers: Sequence[dict[str, Any]]) -> list[list[str]]:
    longest = sorted(layers, key=lambda layer: -(figure(layer, "latency_ms") or 0.0))[:LAYERS]
    return [
        [
            str(layer.get("path") or "(top level)"),
            ms(figure(layer, "latency_ms")),
            ms(figure(layer, "waiting_ms")),
            size(figure(layer, "bytes")),
            number(figure(layer, "rounds")),
        ]
        for layer in longest
    ]


PLAINTEXT = (
    "engine",
    "status",
    "mean",
    "p50",
    "samples/s",
    "tokens/s",
    "threads",
    "peak memory",
    "model",
    "energy a sample",
    "accuracy",
    "greatest error",
    "quantised; reason",
)


def _baseline(found: r.Baseline) -> list[str]:
    device = "" if found.device == "cpu" else f", {found.device}"
    return [
        found.name + device,
        found.status,
        mean(found.latency),
        ms(None if found.latency is None else found.latency.latency_ms_p50),
        number(found.samples_per_second),
        number(found.tokens_per_second),
        number(found.threads),
        size(found.peak_memory_bytes)
        + ("" if found.peak_gpu_memory_bytes is None else f", GPU {size(found.peak_gpu_memory_bytes)}"),
        size(found.model_bytes),
        energy(found.energy),
        share(found.accuracy),
        number(found.max_absolute_error),
        "; ".join(text for text in (found.quantized, found.reason) if text),
    ]
