"""A row for each engine, what published figures say, and both as Markdown and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

SCHEMA = "secureinfer.peers/1"
BOUND = 2e-2
"""Greatest error of a logit; beyond it an answer is wrong, as it is where it decides otherwise."""

Status = Literal["ok", "wrong", "failed", "unavailable"]


@dataclass(frozen=True)
class Row:
    """What one engine did; None is unknown. latency_ms: each turn after the first, which stands apart.

    bytes: all links, both directions, each message once. error: greatest, of all turns, against float64. inside, outside:
    what is in the clock and what is not. counts: where bytes and rounds come from.
    """

    engine: str
    label: str
    status: Status
    why: str | None = None
    latency_ms: tuple[float, ...] = ()
    first_ms: float | None = None
    offline_ms: tuple[float, ...] = ()
    setup_ms: float | None = None
    bytes: float | None = None
    rounds: int | None = None
    dealt_bytes: float | None = None
    setup_bytes: float | None = None
    error: float | None = None
    threads: int | None = None
    processes: int | None = None
    model_digest: str | None = None
    input_digest: str | None = None
    inside: str = ""
    outside: str = ""
    counts: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "measured"

    @property
    def latency_ms_p50(self) -> float | None:
        return statistics.median(self.latency_ms) if self.latency_ms else None

    @property
    def latency_ms_least(self) -> float | None:
        return min(self.latency_ms, default=None)

    @property
    def latency_ms_greatest(self) -> float | None:
        return max(self.latency_ms, default=None)

    @property
    def offline_ms_p50(self) -> float | None:
        return statistics.median(self.offline_ms) if self.offline_ms else None


@dataclass(frozen=True)
class Published:
    """Of a paper, on another machine and of a larger model: never in a ratio with a measured row."""

    label: str
    what: str
    hardware: str
    latency_ms: float
    bytes: float
    rounds: int | None
    dealt_bytes: float

    @property
    def kind(self) -> str:
        return "published"


_WHOLE = "BERT-base, 12 layers, 128 tokens"
PUBLISHED = (
    Published("FuseFSS", _WHOLE, "two RTX 5090", 920.0, 0.83e9, None, 12.7e9),
    Published("SIGMA", _WHOLE, "hardware not told here", 1070.0, 0.99e9, 1128, 16.8e9),
)


def judged(answers: Sequence[Tensor], expected: Tensor) -> tuple[float, str | None]:
    """The greatest error, and why the answers are wrong; None where they are not. NaN counts as infinite."""
    error, why = 0.0, None
    for answer in answers:
        if answer.shape != expected.shape:
            return math.inf, f"an answer of shape {tuple(answer.shape)} in place of {tuple(expected.shape)}"
        off = float((answer.double() - expected).abs().nan_to_num(nan=math.inf).max())
        error = max(error, off)
        if not torch.equal(answer.argmax(-1), expected.argmax(-1)):
            why = "it decides otherwise than float64"
    if error > BOUND:
        more = f"; {why}" if why else ""
        why = f"greatest error of a logit {error:.2g}, and {BOUND:g} is allowed{more}"
    return error, why


def ratio(row: Row, base: Row | None) -> float | None:
    """Median online latency over that of base; None where either has none."""
    if base is None or row.latency_ms_p50 is None or not base.latency_ms_p50:
        return None
    return row.latency_ms_p50 / base.latency_ms_p50


def _named(rows: Sequence[Row], engine: str) -> Row | None:
    return next((row for row in rows if row.engine == engine), None)


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def document(rows: Sequence[Row], about: Mapping[str, Any]) -> dict[str, Any]:
    plain, fast = _named(rows, "plaintext"), _named(rows, "fast")
    measured = []
    for row in rows:
        shown = {"kind": row.kind, **asdict(row)}
        for name in ("latency_ms_p50", "latency_ms_least", "latency_ms_greatest", "offline_ms_p50"):
            shown[name] = getattr(row, name)
        shown["online_over_plaintext"], shown["online_over_fast"] = ratio(row, plain), ratio(row, fast)
        measured.append(shown)
    published = [{"kind": row.kind, **asdict(row)} for row in PUBLISHED]
    found: dict[str, Any] = _finite(
        {"schema": SCHEMA, **about, "bound": BOUND, "rows": measured, "published": published}
    )
    return found


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f}"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e3:,.2f} s" if value >= 1000 else f"{value:,.3g} ms"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Markdown: what was measured, what stands in and out of the clock, and apart from both what was published."""
    head = ["engine", "online, median (least–greatest)", "/ plaintext", "/ fast", "MB", "rounds", "offline", "dealt MB",
            "setup", "threads × processes", "greatest error", "status"]  # fmt: skip
    plain, fast = _named(rows, "plaintext"), _named(rows, "fast")
    lines = [f"Measured, in turns: {about.get('what', '')}", "", _line(head), _line(["---"] * len(head))]
    for r in rows:
        spread = f" ({_ms(r.latency_ms_least)}–{_ms(r.latency_ms_greatest)})" if r.latency_ms else ""
        used = "" if r.threads is None or r.processes is None else f"{r.threads} × {r.processes}"
        lines.append(
            _line([
                r.label, _ms(r.latency_ms_p50) + spread, _shown(ratio(r, plain), "{:.3g}"), _shown(ratio(r, fast), "{:.3g}"),
                _megabytes(r.bytes), _shown(r.rounds, "{:,}"), _ms(r.offline_ms_p50),
                _megabytes(r.dealt_bytes), _ms(r.setup_ms), used, _shown(r.error, "{:.1e}"),
                r.status if r.why is None else f"**{r.status}**: {r.why}",
            ])
        )  # fmt: skip
    lines += ["", _line(["engine", "in the clock", "outside it", "bytes and rounds are"]), _line(["---"] * 4)]
    lines += [_line([r.label, r.inside, r.outside, r.counts]) for r in rows if r.inside]
    head = ["published, not measured here", "of", "on", "online", "MB", "rounds", "keys or dealt MB"]
    lines += ["", _line(head), _line(["---"] * len(head))]
    lines += [
        _line([
            f"{p.label} (published)", p.what, p.hardware, _ms(p.latency_ms), _megabytes(p.bytes),
            _shown(p.rounds, "{:,}"), _megabytes(p.dealt_bytes),
        ])
        for p in PUBLISHED
    ]  # fmt: skip
    return "\n".join(lines)
