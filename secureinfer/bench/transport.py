"""Both kinds of our links, over mutual TLS, beside gloo on one machine, in one run, as alternating rounds of messages.

Two processes, one on each end: round trips of small messages, and one-way rates of messages of several sizes, ended by an
acknowledgement. CrypTen's own calls are timed (send and recv of tensors), for gloo those of torch.distributed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import SessionError
from ..transport.base import Address, Clock
from ..transport.data import DIALLERS, LISTENERS
from ..transport.limits import Limits
from ..transport.tls import Credentials, Identity, load_credentials, make_certificates
from . import command
from .command import document

SESSION, TOKEN = b"s" * 16, b"t" * 32
HERE, THERE = Identity("model_owner", "here"), Identity("data_owner", "there")
LIMITS = Limits(120.0, 20.0, 1 << 28)
WAIT_SECONDS = 60.0

Send = Callable[[torch.Tensor], None]
Receive = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One measured figure of all. Ratios: ours / gloo's; a rate is better when higher, a round trip when lower."""

    what: str
    unit: str
    message_bytes: int
    tls: float
    grpc: float
    gloo: float

    @property
    def tls_ratio(self) -> float:
        return self.tls / self.gloo

    @property
    def grpc_ratio(self) -> float:
        return self.grpc / self.gloo


class OurEnd:
    """One end of a Link, with the calls that CrypTen's communicator makes."""

    def __init__(self, kind: str, side: str, folder: Path, port: int) -> None:
        me, peer = (HERE, THERE) if side == "here" else (THERE, HERE)
        credentials = _credentials(folder, me)
        self._listener = None
        if side == "here":
            self._listener = LISTENERS[kind](
                credentials, "127.0.0.1", (port,), SESSION, {peer: TOKEN}, Clock(), LIMITS
            )
            self.port = self._listener.port
        else:
            self._link = DIALLERS[kind](
                "127.0.0.1", port, credentials, peer, SESSION, TOKEN, Clock(), LIMITS, timeout=WAIT_SECONDS
            )
        self._sent = self._got = 0

    def accept(self) -> None:
        if self._listener is not None:
            self._link = self._listener.accept(THERE.name, WAIT_SECONDS)

    def send(self, tensor: torch.Tensor) -> None:
        self._link.send(Address("online", 0, 1, self._sent), tensor.numpy().data)
        self._sent += 1

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        payload = self._link.receive(Address("online", 0, 1, self._got), like.numel())
        self._got += 1
        return torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else like

    def close(self) -> None:
        self._link.close()
        if self._listener is not None:
            self._listener.close()


class GlooEnd:
    """One end of a gloo group of two."""

    def __init__(self, side: str, folder: Path) -> None:
        self._peer = 1 if side == "here" else 0
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=1 - self._peer, world_size=2
        )

    def send(self, tensor: torch.Tensor) -> None:
        torch.distributed.send(tensor, self._peer)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(like)
        torch.distributed.recv(out, self._peer)
        return out

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def _credentials(folder: Path, me: Identity) -> Credentials:
    return load_credentials(me, folder / "ca.pem", folder / f"{me.name}.pem", folder / f"{me.name}.key")


@dataclass(frozen=True)
class Job:
    """A batch of messages. count: how many; size: bytes of each. echo: each is answered, else the last one is."""

    echo: bool
    size: int
    count: int


def jobs(quick: bool) -> list[Job]:
    share = 4 if quick else 1
    rounds = 3 if quick else 7
    one = [
        Job(True, 8, 1200 // share),
        *(Job(False, 1 << k, max(2, (1 << 29) // share >> k)) for k in (16, 20, 23, 26)),
    ]
    if not quick:
        one.append(Job(False, 1 << 30, 1))
    return one * rounds


def lead(end: OurEnd | GlooEnd, job: Job) -> float:
    """Seconds a message."""
    message, answer = torch.full((job.size,), 7, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    started = time.perf_counter()
    for _ in range(job.count):
        end.send(message)
        if job.echo:
            end.receive(message)
    if not job.echo:
        end.receive(answer)
    return (time.perf_counter() - started) / job.count


def follow(end: OurEnd | GlooEnd, job: Job) -> None:
    message = torch.zeros(job.size, dtype=torch.uint8)
    for _ in range(job.count):
        got = end.receive(message)
        if job.echo:
            end.send(got)
    if not job.echo:
        end.send(torch.zeros(8, dtype=torch.uint8))


def measure(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Run both transports against each other, alternating job by job; medians over the rounds."""
    with tempfile.TemporaryDirectory(prefix="secureinfer-") as name:
        folder = Path(name)
        make_certificates(folder, {HERE.role: [HERE.name], THERE.role: [THERE.name]})
        ours = {kind: OurEnd(kind, "here", folder, 0) for kind in LISTENERS}
        ports = [f"{kind}={end.port}" for kind, end in ours.items()]
        command = [sys.executable, "-m", __name__, name, str(int(quick)), *ports]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            try:
                for end in ours.values():
                    end.accept()
                ends: dict[str, OurEnd | GlooEnd] = {**ours, "gloo": GlooEnd("here", folder)}
                times: dict[tuple[Job, str], list[float]] = {}
                for i, job in enumerate(jobs(quick)):
                    progress(f"{i + 1} of {len(jobs(quick))}: {job.count} of {job.size} bytes")
                    for label, each in ends.items():
                        times.setdefault((job, label), []).append(lead(each, job))
                for each in ends.values():
                    each.close()
            except BaseException:
                child.kill()
                raise
            if child.wait(WAIT_SECONDS) != 0:
                raise SessionError("the other end of the transport benchmark failed")
    return [_row(job, times) for job in dict.fromkeys(jobs(quick))]


def _row(job: Job, times: dict[tuple[Job, str], list[float]]) -> Row:
    tls, grpc, gloo = (statistics.median(times[job, label]) for label in ("tls", "grpc", "gloo"))
    if job.echo:
        return Row("round trip", "ms", job.size, tls * 1e3, grpc * 1e3, gloo * 1e3)
    rate = job.size / 1e9
    return Row("one way", "GB/s", job.size, rate / tls, rate / grpc, rate / gloo)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| what | message | tls | grpc | gloo | tls / gloo | grpc / gloo |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        size = f"{r.message_bytes / 1024:,.0f} KiB" if r.message_bytes >= 1024 else f"{r.message_bytes} B"
        figures = " | ".join(f"{value:.3g} {r.unit}" for value in (r.tls, r.grpc, r.gloo))
        lines.append(f"| {r.what} | {size} | {figures} | {r.tls_ratio:.2f} | {r.grpc_ratio:.2f} |")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return document("secureinfer.transport/2", rows, ("tls_ratio", "grpc_ratio"))


def _other_end(folder: str, quick: str, *ports: str) -> None:
    ends: list[OurEnd | GlooEnd] = []
    for kind, _, port in (text.partition("=") for text in ports):
        ends.append(OurEnd(kind, "there", Path(folder), int(port)))
    ends.append(GlooEnd("there", Path(folder)))
    for job in jobs(bool(int(quick))):
        for end in ends:
            follow(end, job)
    for end in ends:
        end.close()


def main(arguments: Sequence[str]) -> None:
    """`--quick` for fewer messages, `--json` for one JSON document."""
    command.run(arguments, measure, table, as_json)


if __name__ == "__main__":
    _other_end(*sys.argv[1:])
