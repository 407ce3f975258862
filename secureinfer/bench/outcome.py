"""From what the loop of a case measured to its result in the report."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SecureInferError
from ..measure.figures import Plaintext
from ..measure.latency import summarise
from ..measure.report import Report
from . import report as r
from .figures import FP32, energy_of, overheads, timed
from .flat import flat
from .plaintext import PlaintextProcess, max_absolute_error
from .projection import projected_report

if TYPE_CHECKING:
    from ..compression.report import CompressionReport
    from ..plan.program import Program
    from .runner import Bench, Turns


log = logging.getLogger("secureinfer.bench")

LEAST_QUOTED = 8
"""Characters: what is shorter is a word such as a key, and may stand in any text."""
MOST_LOST = 0.05
LEAST_SCORED = 16
"""Samples on which engines are judged, where the model has so many, however few were asked in private."""


@dataclass(frozen=True)
class Outcome:
    """One case's parts. why_projected: why the session ran on loopback and not over the key's network, or None."""

    key: r.CaseKey
    bench: Bench
    program: Program
    module: torch.nn.Module
    changes: CompressionReport | None
    turns: Turns
    why_projected: str | None
    secure: Report
    faults: list[str]

    def fields(self) -> dict[str, Any]:
        """Of report.CaseResult."""
        turns, built = self.turns, self.bench.built
        several = range(min(len(built.held_out), -(-LEAST_SCORED // built.batch)))
        scored = sorted({*turns.asked, *several})
        ran = [(self._baseline(p), self._decides(p, scored)) for p in self.bench.processes]
        lost = judged(ran, len(scored) * built.batch)
        baselines = (*lost, *self.bench.unavailable)
        secure, online, offline = self._secure(baselines)
        faults = list(self.faults)
        if not any((b.engine, b.dtype) == FP32 and b.status == "ok" for b in baselines):
            faults.append("torch eager in fp32 did not run, so that there is nothing to compare with")
        if other_inputs(baselines, self.bench.expected):
            faults.append(
                "torch eager in fp32 gives other answers in a process of its own: the model, or its example, is not the "
                "same each time that it is made; draw it with a fixed seed"
            )
        if not all(output.isfinite().all() for output in turns.outputs):
            faults.append("decrypted outputs are not finite")
        accuracy, used = self._accuracy(), self._energy(offline is not None)
        if decides_otherwise(accuracy.secure, accuracy.compressed, accuracy.samples):
            faults.append(
                f"decrypted answers decide otherwise: {accuracy.metric} is {accuracy.secure:.4g}, and "
                f"{accuracy.compressed:.4g} of the same model in plaintext"
            )
        for phase, energy in used.items():
            secure[phase] |= {"energy_joules": energy.joules, "energy_source": energy.source}
        secure["accuracy"] = accuracy.model_dump()
        reasons = [reason for reason in (secure["invalid_reason"], *faults) if reason]
        fit = [b for b in baselines if b.reason is None]
        who = "secure" if self.why_projected is None else "projected secure"
        ratios = overheads(online, offline if self.secure.program.dealer else None, fit, who)
        return {
            "valid": not reasons,
            "invalid_reason": "; ".join(reasons) or None,
            "projected": self.why_projected,
            "model": self._facts(),
            "session": secure,
            "online": online,
            "offline": offline,
            "throughput": throughput(online, offline, built.batch, built.tokens),
            "online_energy": used["online"],
            "offline_energy": used["offline"],
            "baselines": baselines,
            "overheads": ratios,
            "accuracy": accuracy,
        }

    def _secure(self, baselines: tuple[r.Baseline, ...]) -> tuple[dict[str, Any], r.Timed, r.Timed | None]:
        """The parties' report beside plaintext, and the caller's latencies; projected where the network was not there."""
        turns, secure = self.turns, self.secure
        fp32 = next((b for b in baselines if (b.engine, b.dtype) == FP32 and b.latency is not None), None)
        if fp32 is not None and fp32.latency is not None:
            plain = Plaintext(fp32.engine, fp32.dtype, fp32.threads, summarise(fp32.latency.runs_ms))
            secure = secure.with_plaintext(plain)
        document = secure.to_dict()
        dealt = self.secure.program.dealer
        added = {"online": 0.0, "offline": 0.0}
        if self.why_projected is not None:
            document, added = projected_report(
                document, self.key.network.partition(":")[0], self.why_projected
            )
        online = timed(
            [ms + added["online"] for ms in turns.online_ms],
            _plus(turns.cold_online_ms, added["online"]),
            turns.blocks,
        )
        if not dealt:
            return document, online, None
        offline = timed(
            [ms + added["offline"] for ms in turns.offline_ms],
            _plus(turns.cold_offline_ms, added["offline"]),
            turns.blocks,
        )
        return document, online, offline

    def _baseline(self, process: PlaintextProcess) -> r.Baseline:
        """Scored on what was asked in private, so that its accuracy is of the same samples."""
        turns, bench = self.turns, self.bench
        given = {i: bench.outputs(process, i) for i in sorted(set(turns.asked))}
        outputs = [output for i in turns.asked if (output := given[i]) is not None]
        found, times_ms = process.baseline(), turns.plaintext_ms.get(process.name, [])
        if found.status != "ok" or not times_ms or len(outputs) < len(turns.asked):
            return found
        floats = [bench.expected[i] for i in turns.asked]
        latency = timed(times_ms, blocks=turns.blocks)
        speed = throughput(latency, None, bench.built.batch, bench.built.tokens)
        return found.model_copy(
            update={
                "latency": latency,
                "samples_per_second": speed.samples_per_second,
                "tokens_per_second": speed.tokens_per_second,
                "energy": energy_of(turns.plaintext_spent[found.name], bench.built.batch),
                "accuracy": bench.built.score(outputs, turns.asked, floats),
                "max_absolute_error": greatest(outputs, floats),
            }
        )

    def _decides(self, process: PlaintextProcess, scored: Sequence[int]) -> float | None:
        """The metric on these held-out batches, none of them twice; None where the engine gives none."""
        bench = self.bench
        outputs = [bench.outputs(process, i) for i in scored]
        known = [output for output in outputs if output is not None]
        floats = [bench.expected[i] for i in scored]
        return bench.built.score(known, scored, floats) if len(known) == len(scored) else None

    def _energy(self, dealt: bool) -> dict[str, r.Energy]:
        """By phase; setup's is of a session, and what nothing was dealt for is unknown and not 0."""
        turns, samples = self.turns, self.bench.built.batch
        setup = [] if turns.setup_spent is None else [turns.setup_spent]
        return {
            "setup": energy_of(setup, samples),
            "offline": energy_of(turns.offline_spent, samples) if dealt else r.Energy(),
            "online": energy_of(turns.online_spent, samples),
        }

    def _facts(self) -> r.ModelFacts:
        bench, public = self.bench, self.program.public()
        return r.ModelFacts(
            title=bench.subject.title,
            weights=bench.subject.weights,
            input=bench.subject.input,
            samples=bench.built.batch,
            tokens=bench.built.tokens,
            parameters=sum(p.numel() for p in bench.built.module.parameters()),
            float_bytes=_bytes(bench.built.module),
            compressed_bytes=_bytes(self.module),
            program_bytes=file_bytes(self.program),
            public_program_bytes=file_bytes(public),
            compression=None if self.changes is None else self.changes.to_dict(),
        )

    def _accuracy(self) -> r.Accuracy:
        """On the samples of the timed inferences: secure is what was decrypted there."""
        turns, bench = self.turns, self.bench
        floats = [bench.expected[i] for i in turns.asked]
        with torch.inference_mode():
            seen = {i: flat(self.module(*bench.built.held_out[i])) for i in set(turns.asked)}
        compressed = [seen[i] for i in turns.asked]
        score = bench.built.score
        return r.Accuracy(
            metric=bench.built.metric,
            samples=len(set(turns.asked)) * bench.built.batch,
            float=score(floats, turns.asked, floats),
            compressed=score(compressed, turns.asked, floats),
            secure=score(turns.outputs, turns.asked, floats),
            max_absolute_error=greatest(turns.outputs, compressed),
            compression_error=greatest(compressed, floats),
        )


def judged(ran: Sequence[tuple[r.Baseline, float | None]], samples: int) -> tuple[r.Baseline, ...]:
    """An engine that decides otherwise than fp32 is quick for another answer: it is told, and never taken for the best.

    ran: each with its metric on the same different samples, so many.
    """
    fp32 = next((metric for b, metric in ran if (b.engine, b.dtype) == FP32), None)

    def why(found: r.Baseline, metric: float | None) -> str | None:
        if (
            found.status != "ok"
            or metric is None
            or fp32 is None
            or not decides_otherwise(metric, fp32, samples)
        ):
            return found.reason
        return (
            f"accuracy {metric:.4g} on {samples} samples, fp32 {fp32:.4g}: not taken for the best plaintext"
        )

    return tuple(b.model_copy(update={"reason": why(b, metric)}) for b, metric in ran)


def decides_otherwise(metric: float, reference: float, samples: int) -> bool:
    """Whether a metric is worse by more than MOST_LOST, and by more than one sample."""
    return metric < reference - max(MOST_LOST, 1 / samples) - 1e-9


def other_inputs(baselines: Sequence[r.Baseline], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the same engine with the same weights answered something else, by more than rounding explains."""
    fp32 = next((b for b in baselines if (b.engine, b.dtype) == FP32 and b.latency is not None), None)
    if fp32 is None:
        return False
    scale = max((float(output.abs().max()) for output in expected if output.numel()), default=0.0)
    worst = fp32.max_absolute_error
    return worst is None or worst > 1e-3 * max(scale, 1e-6)


def throughput(online: r.Timed, offline: r.Timed | None, samples: int, tokens: int | None) -> r.Throughput:
    """Of inferences one after another; without an offline phase the totals are the online figures."""
    seconds = None if not online.latency_ms else online.latency_ms / 1000
    total = seconds
    if offline is not None:
        total = None if seconds is None or offline.latency_ms is None else seconds + offline.latency_ms / 1000

    def rate(count: int | None, per: float | None) -> float | None:
        return None if count is None or not per else count / per

    return r.Throughput(
        samples_per_second=rate(samples, seconds),
        tokens_per_second=rate(tokens, seconds),
        total_samples_per_second=rate(samples, total),
        total_tokens_per_second=rate(tokens, total),
    )


def greatest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float | None:
    """The greatest absolute difference; None where it is not finite."""
    worst = max_absolute_error(found, expected)
    return worst if math.isfinite(worst) else None


def file_bytes(program: Program) -> int:
    """Of the program as a .si file."""
    with tempfile.TemporaryDirectory(prefix="secureinfer-") as folder:
        file = Path(folder) / "program.si"
        program.save(file)
        return file.stat().st_size


def _plus(value: float | None, more: float) -> float | None:
    return None if value is None else value + more


def _bytes(module: torch.nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def fault_of(error: BaseException) -> r.Fault:
    """For a report: the error's type, and text of ours alone.

    Another's exception, such as one of the user's model, may quote what the model was given: its text goes to the log, which
    is stderr, and not into a file that is passed on. So does what an error of ours quotes of its cause.
    """
    name = type(error).__name__
    if not isinstance(error, SecureInferError):
        log.error("%s: %s", name, error)
        return r.Fault(type=name, message="an unexpected error; its text is on stderr, and not kept here")
    return r.Fault(type=name, message=_own_text(error) or name)


def _own_text(error: SecureInferError) -> str:
    text, cause = str(error), error.__cause__ or error.__context__
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        quoted = str(cause).strip()
        if not isinstance(cause, SecureInferError) and len(quoted) >= LEAST_QUOTED and quoted in text:
            log.error("%s: %s", type(error).__name__, text)
            text = text.replace(quoted, f"{type(cause).__name__} (its text is on stderr)")
        cause = cause.__cause__ or cause.__context__
    return text
