"""What LoadGen says of a run, from its own summary and detail logs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import SessionError

_LATENCY = re.compile(r"^(Mean|[\d.]+ percentile) latency \(ns\) *: *(\d+)$", re.MULTILINE)
_RATES = (
    re.compile(r"^QPS w/ loadgen overhead *: *([\d.e+-]+)$", re.MULTILINE),
    re.compile(r"^Completed samples per second *: *([\d.e+-]+)$", re.MULTILINE),
    re.compile(r"^Samples per second: *([\d.e+-]+)$", re.MULTILINE),
)
_SCHEDULED = re.compile(r"^Scheduled samples per second *: *([\d.e+-]+)$", re.MULTILINE)
_UNMET = re.compile(r"^ +(.+ satisfied) *: *NO$", re.MULTILINE)
_EARLY = "Early stopping satisfied"
_BOUND = "Performance constraints satisfied"


@dataclass(frozen=True)
class Verdict:
    """One run, by LoadGen. rate: completed, of its own line; None where there is none. scheduled_rate: of the server.

    latency_ms: of queries, under "mean" and percentiles ("50", "99.9"). unmet: what it says is not satisfied, word for word.
    """

    valid: bool
    unmet: tuple[str, ...]
    reasons: tuple[str, ...]
    rate: float | None
    scheduled_rate: float | None
    latency_ms: dict[str, float]
    summary: str

    @property
    def keeps_bound(self) -> bool:
        """The latency's bound, whatever else is wrong with the run. True where there is none."""
        return _BOUND not in self.unmet

    @property
    def proves_percentile(self) -> bool:
        """Whether it had queries enough to show its percentile (LoadGen's early stopping)."""
        return _EARLY not in self.unmet


def read_logs(folder: Path) -> Verdict:
    """Raises SessionError where the logs are not those of a run that ended."""
    try:
        summary = (folder / "mlperf_log_summary.txt").read_text(encoding="utf-8")
        detail = (folder / "mlperf_log_detail.txt").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SessionError(f"LoadGen left no logs that can be read: {error}") from None
    return parse(summary, detail)


def parse(summary: str, detail: str) -> Verdict:
    found = re.search(r"^Result is : (VALID|INVALID)$", summary, re.MULTILINE)
    if found is None:
        raise SessionError("LoadGen's summary has no result; the run did not end as it should")
    valid = found.group(1) == "VALID"
    unmet = tuple(_UNMET.findall(summary))
    rate = next((float(m.group(1)) for pattern in _RATES if (m := pattern.search(summary))), None)
    scheduled = _SCHEDULED.search(summary)
    latency = {
        name.split()[0].lower().removesuffix("0").removesuffix(".0"): int(ns) / 1e6
        for name, ns in _LATENCY.findall(summary)
    }
    reasons = () if valid else _reasons(summary, detail, unmet)
    return Verdict(
        valid, unmet, reasons, rate, float(scheduled.group(1)) if scheduled else None, latency, summary
    )


def _reasons(summary: str, detail: str, unmet: tuple[str, ...]) -> tuple[str, ...]:
    """What is not satisfied, LoadGen's recommendations, what early stopping found, and errors of the detail log."""
    reasons = [f"{what}: NO" for what in unmet]
    advice = _bullets(_section(summary, "Recommendations:"))
    if _EARLY in unmet:
        advice += _bullets(_section(summary, "Early Stopping Result:"))
    return tuple(f"LoadGen: {text}" for text in [*reasons, *advice, *_errors(detail)])


def _section(text: str, begin: str) -> str:
    return re.split(r"Early Stopping Result:|=====", text.partition(begin)[2], maxsplit=1)[0]


def _bullets(text: str) -> list[str]:
    """Lines that go on from the bullet before them are one with it."""
    return [" ".join(part.split()) for part in re.split(r"^ \* ", text, flags=re.MULTILINE)[1:]]


def _errors(detail: str) -> list[str]:
    found = []
    for line in detail.splitlines():
        if line.startswith(":::MLLOG ") and '"is_error": true' in line:
            try:
                found.append(str(json.loads(line.removeprefix(":::MLLOG "))["value"]))
            except (ValueError, KeyError, TypeError):
                continue
    return found
