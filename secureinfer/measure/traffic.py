"""Bytes and rounds of a session: each frame counted once, and both ends of every link compared."""

from __future__ import annotations

from collections.abc import Sequence

from .stats import PHASES, Phase, RunStats, WorkerStats


def bytes_of(run: RunStats) -> tuple[int, int]:
    """(sent, received) by one party in one run, all links."""
    return (
        sum(link.bytes_sent for link in run.links.values()),
        sum(link.bytes_received for link in run.links.values()),
    )


def run_bytes(workers: Sequence[WorkerStats], phase: Phase) -> dict[int, int]:
    """inference -> bytes of that run over all links, each frame counted once, at its sender."""
    total: dict[int, int] = {}
    for worker in workers:
        for run in worker.runs(phase):
            total[run.inference] = total.get(run.inference, 0) + bytes_of(run)[0]
    return total


def run_rounds(workers: Sequence[WorkerStats], phase: Phase) -> dict[int, int]:
    """inference -> greatest Lamport count of any party at its end: the longest chain of messages."""
    rounds: dict[int, int] = {}
    for worker in workers:
        for run in worker.runs(phase):
            if run.rounds is not None:
                rounds[run.inference] = max(rounds.get(run.inference, 0), run.rounds)
    return rounds


def link_differences(workers: Sequence[WorkerStats]) -> list[str]:
    """Every place where what one party sent is not what the other received, as text."""
    by_name = {worker.party: worker for worker in workers}
    sent: dict[tuple[str, str, Phase, int], tuple[int, int]] = {}
    received: dict[tuple[str, str, Phase, int], tuple[int, int]] = {}
    for worker in workers:
        for phase in PHASES:
            for run in worker.runs(phase):
                for peer, link in run.links.items():
                    if peer not in by_name:
                        continue  # statistics of that peer are not at hand; nothing to compare
                    sent[worker.party, peer, phase, run.inference] = (link.bytes_sent, link.frames_sent)
                    received[peer, worker.party, phase, run.inference] = (
                        link.bytes_received,
                        link.frames_received,
                    )
    found = []
    for key in sorted(sent.keys() | received.keys()):
        a, b = sent.get(key, (0, 0)), received.get(key, (0, 0))
        if a != b:
            source, target, phase, inference = key
            found.append(
                f"{phase} {inference}: {source} sent {a[0]} bytes in {a[1]} frames to {target}, "
                f"which received {b[0]} in {b[1]}"
            )
    return found
