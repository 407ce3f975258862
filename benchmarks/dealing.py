"""What dealing in the background, and material on disk, do to the latency of an inference: ratios in one run.

Two sessions between three processes each on this machine, one with material in memory and one on disk, take turns. In each
round both answer a few prepared inferences while nothing else goes on, and then as many while more are dealt.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import secureinfer as si
from secureinfer.bench import command
from secureinfer.bench.command import document
from secureinfer.session.local import LocalParties

KINDS = ("memory", "disk")


@dataclass(frozen=True)
class Row:
    """Median latency of one inference. memory, disk: where its material lay; dealing: while more was dealt."""

    case: str
    material_bytes: int
    offline_ms: float
    memory_ms: float
    memory_dealing_ms: float
    disk_ms: float
    disk_dealing_ms: float

    @property
    def dealing_ratio(self) -> float:
        """Latency while more is dealt / alone, material in memory."""
        return self.memory_dealing_ms / self.memory_ms

    @property
    def disk_ratio(self) -> float:
        """Latency with material on disk / in memory, alone."""
        return self.disk_ms / self.memory_ms


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)]
    return nn.Sequential(*layers), torch.randn(8, 30)


def wide() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.randn(64, 256)


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "MLP 30-64-32-2, batch 8": mlp,
    "MLP 256-1024-256 with GELU, batch 64": wide,
}


def _opened(program: si.Program, kind: str, folder: str) -> si.Session:
    owner: dict[str, Any] = {"limits": {"prepared_inferences": 10_000, "material_bytes": 8 << 30}}
    if kind == "disk":
        owner |= {"material": "disk", "material_folder": folder}
    return LocalParties(program, overrides={"data_owner": owner, "model_owner": owner}).session()


def _times(session: si.Session, x: torch.Tensor, count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        session.infer(x)
        found.append(1000 * (time.perf_counter() - start))
    return found


def _round(session: si.Session, x: torch.Tensor, count: int, times: dict[str, list[float]]) -> None:
    """So many inferences alone, and as many while more are dealt than that takes."""
    session.prepare(max(0, count - session._outstanding))
    times["alone"] += _times(session, x, count)
    session.prepare(count)
    more = 2 * count
    while True:
        session.prepare(more, wait=False)
        found = _times(session, x, count)
        if session._ready < session._outstanding:  # dealing to the last
            times["dealing"] += found
            session.prepare(1)  # waits for all that was ordered: the other session's turn is quiet
            return
        more *= 2


def measure(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    count, rounds, rows = (3, 2, []) if quick else (8, 5, [])
    for case, make in CASES.items():
        progress(case)
        torch.manual_seed(0)
        model, x = make()
        program = si.compile(model.eval(), (x,))
        times: dict[str, dict[str, list[float]]] = {k: {"alone": [], "dealing": []} for k in KINDS}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            sessions = {kind: stack.enter_context(_opened(program, kind, folder)) for kind in KINDS}
            for session in sessions.values():
                session.infer(x)
            for _ in range(rounds):
                for kind, session in sessions.items():
                    _round(session, x, count, times[kind])
            offline = sessions["memory"].report().to_dict()["offline"]["latency_ms"]
            size = sessions["memory"]._room.inference_bytes
        medians = [statistics.median(times[kind][how]) for kind in KINDS for how in ("alone", "dealing")]
        rows.append(Row(case, size, float(offline), *medians))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| case | material | dealing one | alone | while dealing | ratio | from disk | disk / memory | disk, dealing |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.case} | {r.material_bytes / 1e6:.1f} MB | {r.offline_ms:.1f} ms | {r.memory_ms:.1f} ms "
            f"| {r.memory_dealing_ms:.1f} ms | {r.dealing_ratio:.2f} | {r.disk_ms:.1f} ms | {r.disk_ratio:.2f} "
            f"| {r.disk_dealing_ms:.1f} ms |"
        )
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return document("secureinfer.dealing/1", rows, ("dealing_ratio", "disk_ratio"))


def main(arguments: Sequence[str]) -> None:
    """`--quick` for fewer inferences, `--json` for one JSON document."""
    command.run(arguments, measure, table, as_json)
