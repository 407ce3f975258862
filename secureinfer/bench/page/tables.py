"""Tables of all cases, failures in full, and what the words mean."""

from __future__ import annotations

import json
from typing import Any, Final

from ..report import BenchReport, CaseResult, Fault
from . import words as w
from .figure import case_name, folded, lines, standing
from .html import Markup, Part, join, table, tag


def cases(report: BenchReport) -> Markup:
    """What it costs, one row a case; what else was measured is folded below."""
    head = [
        "case", "online", "plaintext fp32", "quickest plaintext", "online over fp32", "online over quickest",
        "total over fp32", "offline", "setup", "bytes online", "rounds", "accuracy: float / compressed / secure",
    ]  # fmt: skip
    rows = [_cost(i, case) for i, case in enumerate(report.cases, 1)]
    more = [
        "case", "model", "weights", "input", "parameters", "float size", "compressed size", "p50", "p90", "p99", "first run",
        "runs", "samples/s", "tokens/s", "samples/s, offline included", "bytes offline", "peak memory of all parties",
        "peak GPU memory", "joules online", "joules offline", "metric", "samples scored", "max abs. error, secure",
    ]  # fmt: skip
    others = [_more(i, case) for i, case in enumerate(report.cases, 1) if case.status == "ok"]
    return join(
        [
            table(head, rows, name="All cases", text_columns=(0,)),
            folded(
                False,
                "Percentiles, throughput, memory, energy and models of all cases",
                table(more, others, name="More figures of all cases", text_columns=(0, 1, 2, 3, 20)),
            ),
            tag("p", f"{w.UNKNOWN} is unknown; nothing unknown is written as 0.", class_="muted small"),
        ]
    )


def _cost(number: int, case: CaseResult) -> list[Part]:
    name = case_name(case.key, number, standing(case))
    if case.status == "failed":
        return [name, *[""] * 11]
    fp32, best, total = (
        case.overhead(*which) for which in (("online", "fp32"), ("online", "best"), ("total", "fp32"))
    )
    offline = w.ms(w.offline_ms(case)) if w.dealt(case) else "none"
    quickest = (
        w.UNKNOWN
        if best is None
        else join([w.ms(best.denominator_ms), tag("div", best.denominator, class_="muted")])
    )
    return [
        name, w.ms(w.online_ms(case)), w.ms(fp32.denominator_ms if fp32 else None), quickest,
        _ratio(fp32), _ratio(best), _ratio(total), offline, w.ms(w.setup_ms(case)),
        w.size(w.figure(case.session, "online", "bytes")), w.number(w.figure(case.session, "online", "rounds")),
        _accuracy(case),
    ]  # fmt: skip


def _ratio(found: Any) -> Part:
    if found is None:
        return w.UNKNOWN
    return join(
        [
            tag("span", w.times(found.ratio), class_="strong"),
            tag("div", w.interval(found.interval), class_="muted nowrap"),
        ]
    )


def _accuracy(case: CaseResult) -> str:
    found = case.accuracy
    if found is None:
        return w.UNKNOWN
    return " / ".join(f"{100 * v:.1f}" for v in (found.float, found.compressed, found.secure)) + " %"


def _more(number: int, case: CaseResult) -> list[Part]:
    model, online, speed, accuracy = case.model, case.online, case.throughput, case.accuracy
    about: list[Part] = [w.UNKNOWN] * 6
    if model is not None:
        about = [model.title, model.weights, model.input, w.number(model.parameters), w.size(model.float_bytes),
                 w.size(model.compressed_bytes)]  # fmt: skip
    latencies = [getattr(online, f"latency_ms_{p}", None) for p in ("p50", "p90", "p99")]
    error = None if accuracy is None else accuracy.max_absolute_error
    return [
        case_name(case.key, number), *about, *map(w.ms, latencies), w.ms(online.cold_latency_ms if online else None),
        w.number(online.count if online else None), w.rate(speed.samples_per_second), w.rate(speed.tokens_per_second),
        w.rate(speed.total_samples_per_second), w.size(w.figure(case.session, "offline", "bytes")),
        w.size(w.figure(case.session, "online", "peak_memory_bytes")),
        w.size(w.figure(case.session, "online", "peak_gpu_memory_bytes")), w.energy(case.online_energy),
        w.energy(case.offline_energy) if w.dealt(case) else "none", accuracy.metric if accuracy else w.UNKNOWN,
        w.number(accuracy.samples if accuracy else None), w.UNKNOWN if error is None else f"{error:.1e}",
    ]  # fmt: skip


def failures(report: BenchReport) -> Markup:
    """Every error word for word."""
    found: list[tuple[str, Fault | None]] = [
        (f"{i}. {case.key}", case.fault) for i, case in enumerate(report.cases, 1) if case.status == "failed"
    ]
    found += [
        (f"load: {load.key}, {load.scenario}", load.fault) for load in report.loads if load.status == "failed"
    ]
    if not found:
        return tag("p", "Nothing failed.")
    return join(_failure(name, fault) for name, fault in found)


def _failure(name: str, fault: Fault | None) -> Markup:
    kind, message = ("an unknown error", "") if fault is None else (fault.type, fault.message)
    return tag(
        "div",
        tag("div", name, class_="strong"),
        tag("div", kind, class_="bad"),
        lines(message),
        class_="fault",
    )


DEFINITIONS: Final = {
    "overhead, ratio": "Latency of private inference divided by latency of the same model and inputs in plaintext, on the "
    "same device in the same run, in turns. Online: from the caller's infer() to its answer. Total: the offline phase "
    "included.",
    "over fp32, over quickest": "The denominator is torch eager in float32, or the quickest of all engines and "
    "types that ran; each ratio names its own.",
    "setup, offline, online": "Setup: once a session, until parties may begin. Offline: once an inference, before its "
    "input is known. Online: from the input to the answer.",
    "interval": "Where the figure lies with 95 % confidence, from runs paired block by block; none where there were "
    "too few.",
    "to be quoted": "A run that is too short, or whose counters disagree, is shown with the reason and is in no headline.",
    "bytes": "Frame headers and payload of all links, both directions, each counted once.",
    "rounds": "Steps on the longest chain of messages that wait for each other; a one-way message is 1.",
    "waiting": "Time in which a party's thread was blocked in receiving from its peers or in sending to them.",
    "networks": "loopback: all parties on this machine. LAN: 1 GB/s, 0.5 ms. WAN: 100 Mbit/s, 40 ms; both emulated, each "
    "party in a namespace of its own. Projected: computed from a loopback run's bytes and rounds.",
    "accuracy": "Three times on the same samples: of the float model, of the compressed one in plaintext, and of decrypted "
    "outputs of the timed inferences.",
    "energy": "Of one inference of the whole batch, all parties' processes by one meter. Estimated: CPU time times a stated "
    "power, which is no measurement. Unknown is said, never 0.",
    "memory": "The sum of the parties' peak resident memory, processes of torch and all included.",
}


def definitions() -> Markup:
    return tag(
        "dl", *(part for term, words in DEFINITIONS.items() for part in (tag("dt", term), tag("dd", words)))
    )


def environment(report: BenchReport) -> Markup:
    entries = [(str(k).replace("_", " "), _plainly(str(k), v)) for k, v in report.environment.items()]
    shown = (part for k, v in entries for part in (tag("dt", k), tag("dd", v)))
    command = lines(report.command) if report.command else tag("p", "The report does not name its command.")
    return join([tag("h3", "Command"), command, tag("h3", "Environment", class_="apart"), tag("dl", *shown)])


def _plainly(name: str, value: Any) -> str:
    if value is None:
        return "none, or unknown"
    if name.endswith("_bytes") and w.figure({"value": value}, "value") is not None:
        return w.size(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
