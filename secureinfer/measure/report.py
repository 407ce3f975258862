"""Report: what a session cost, for each phase and party, beside plaintext; stable and versioned as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from .environment import environment, network_between
from .figures import CallerTimings, PhaseReport, Plaintext, ProgramInfo
from .gather import faults, phase_report
from .stats import PHASES, Phase, parse_worker

SCHEMA = "secureinfer.report/1"


@dataclass(frozen=True)
class Report:
    """The cost of a session. str(report) is for people, to_dict() for programs."""

    program: ProgramInfo
    environment: Mapping[str, Any]
    network: Mapping[str, Any]
    phases: Mapping[Phase, PhaseReport]
    roles: Mapping[str, str]
    faults: tuple[str, ...] = ()
    plaintext: Plaintext | None = None
    accuracy: Mapping[str, Any] | None = None

    @property
    def setup(self) -> PhaseReport:
        return self.phases["setup"]

    @property
    def offline(self) -> PhaseReport:
        return self.phases["offline"]

    @property
    def online(self) -> PhaseReport:
        return self.phases["online"]

    @property
    def invalid_reason(self) -> str | None:
        return "; ".join(self.faults) or None

    @property
    def valid(self) -> bool:
        return not self.faults

    def with_plaintext(
        self,
        plaintext: Plaintext,
        *,
        accuracy: Mapping[str, Any] | None = None,
        faults: Sequence[str] = (),
    ) -> Report:
        """The same report beside a plaintext baseline, which makes the overheads known.

        faults: why the baseline is not to be quoted, if anything.
        """
        return dataclasses.replace(
            self,
            plaintext=plaintext,
            accuracy=accuracy or self.accuracy,
            faults=(*self.faults, *faults),
        )

    def overhead(self) -> dict[str, Any]:
        """Secure latency over plaintext latency, online and total; each names what it divides by what.

        Where there is no dealer, nothing runs offline, and online is all there is.
        """
        online = self.online.figures.latency.latency_ms
        offline = self.offline.figures.latency.latency_ms
        base = None if self.plaintext is None else self.plaintext.latency.latency_ms
        what = "offline + online latency_ms"
        total = None if online is None or offline is None else online + offline
        if not self.program.dealer:
            what, total = "online latency_ms, there is no offline phase", online
        below = None if self.plaintext is None else f"plaintext latency_ms, {self.plaintext.engine}"
        return {
            "online": _ratio(online, base, "online latency_ms", below),
            "total": _ratio(total, base, what, below),
        }

    def to_dict(self) -> dict[str, Any]:
        program = self.program
        return {
            "schema": SCHEMA,
            "program": {
                "manifest_digest": program.manifest_digest,
                "weights_digest": program.weights_digest,
                "backend": program.backend,
                "protocol": program.protocol,
                "unsafe": list(program.unsafe),
                "dealer": program.dealer,
                "planned": {**program.planned, "exact_bytes": program.exact_bytes} if program.steps else None,
            },
            "environment": dict(self.environment),
            "network": dict(self.network),
            "valid": self.valid,
            "invalid_reason": self.invalid_reason,
            **{phase: self.phases[phase].to_dict() for phase in PHASES},
            "plaintext": None if self.plaintext is None else self.plaintext.to_dict(),
            "overhead": self.overhead(),
            "accuracy": None if self.accuracy is None else dict(self.accuracy),
        }

    def __rich__(self) -> RenderableType:
        from .table import tables

        return tables(self)

    def __str__(self) -> str:
        from .table import render

        return render(self)


def build_report(
    program: ProgramInfo,
    workers_stats: Sequence[Any],
    caller: CallerTimings,
    plaintext: Plaintext | None = None,
    *,
    network: Mapping[str, Any] | None = None,
    socket_bytes: Mapping[Phase, int] | None = None,
) -> Report:
    """Gather what every worker counted into a Report.

    workers_stats: one JSON mapping (or WorkerStats) a party. socket_bytes: phase -> bytes of all its runs
    together, from an independent counter, if there was one.
    Raises WireError if a party's statistics are malformed.
    """
    workers = [parse_worker(raw) for raw in workers_stats]
    sockets = socket_bytes or {}
    phases = {p: phase_report(p, program, workers, caller.of(p), sockets.get(p)) for p in PHASES}
    return Report(
        program=program,
        environment=environment(),
        network=dict(network or network_between([])),
        phases=phases,
        roles={w.party: w.role for w in workers},
        faults=tuple(faults(program, workers, phases["online"])),
        plaintext=plaintext,
    )


def _ratio(
    above: float | None, below: float | None, numerator: str, denominator: str | None
) -> dict[str, Any]:
    return {
        "ratio": above / below if above is not None and below else None,
        "numerator": numerator,
        "numerator_ms": above,
        "denominator": denominator,
        "denominator_ms": below,
    }
