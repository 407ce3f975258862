"""CKKS beside its peers, in one run: TenSEAL's own matrix product, Orion on Lattigo, and a full batch beside one sample.

Models stand in ckks_models.py. Sessions and the peers' processes stay open side by side and take turns, so that noise meets
them alike. Every figure is of one inference from values to values: encrypting, evaluating, decrypting; ours also holds the
links between its processes. A peer that is not there has a row that says why.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from safetensors.torch import save_file
from torch import nn

import secureinfer as si
from secureinfer.bench import command
from secureinfer.bench.command import document

from . import ckks_models

ROOT = Path(__file__).parents[1]
PEER_SECONDS = 1800.0
ORION_PYTHON = "SECUREINFER_ORION_PYTHON"
FULL_BATCH = 4096  # slots at N = 8192, one for each sample


class UnavailableError(Exception):
    """Why an engine has no figures here."""


@dataclass(frozen=True)
class Row:
    """Medians of one case under one engine. evaluate_cpu_ms: processor time of whoever evaluates on ciphertexts, a mean over
    all runs. setup_ms: compiling, keys, processes. ratio: see `compared`.
    """

    case: str
    engine: str
    batch: int
    online_ms: float | None = None
    evaluate_cpu_ms: float | None = None
    first_ms: float | None = None
    setup_ms: float | None = None
    online_bytes: float | None = None
    setup_bytes: float | None = None
    error: float | None = None
    parameters: dict[str, Any] | None = None
    ratio: float | None = None
    unavailable: str | None = None

    @property
    def sample_ms(self) -> float | None:
        return None if self.online_ms is None else self.online_ms / self.batch


class Contender(Protocol):
    """An engine that is set up. The first turn stands apart."""

    def turn(self) -> None: ...

    def row(self, case: str) -> Row: ...

    def close(self) -> None: ...


class Plain:
    """The same model in torch, float32, in this process."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self._model, self._x, self._times = model, x, list[float]()

    def turn(self) -> None:
        with torch.inference_mode():
            self._model(self._x)  # its pages may be cold after the others' turns
            started = time.perf_counter()
            self._model(self._x)
            self._times.append(1e3 * (time.perf_counter() - started))

    def row(self, case: str) -> Row:
        online = statistics.median(self._times[1:])
        return Row(case, "torch fp32", len(self._x), online, None, self._times[0], error=0.0)

    def close(self) -> None:
        pass


class Ours:
    """A session between real processes, through the public calls."""

    def __init__(self, model: nn.Module, x: torch.Tensor, threads: int) -> None:
        self._x, self._times, self._error = x, list[float](), 0.0
        with torch.inference_mode():
            self._expected = model(x)
        started = time.perf_counter()
        try:
            self._program = si.compile(model, x, backend="ckks")
            self._session = si.local_session(self._program, threads=threads)
        except (si.SecureInferError, ImportError) as why:
            raise UnavailableError(str(why).splitlines()[0]) from why
        self._setup_ms = 1e3 * (time.perf_counter() - started)

    def turn(self) -> None:
        started = time.perf_counter()
        got = self._session.infer(self._x)
        self._times.append(1e3 * (time.perf_counter() - started))
        self._error = max(self._error, float((got - self._expected).abs().max()))

    def row(self, case: str) -> Row:
        report = self._session.report().to_dict()
        online, setup = report["online"], report["setup"]
        used = online["parties"]["model_owner"]["cpu_seconds"]
        return Row(
            case, "secureinfer", len(self._x), statistics.median(self._times[1:]), None if used is None else 1e3 * used,
            self._times[0], self._setup_ms, online["bytes"], setup["bytes"], self._error, dict(self._program.options),
        )  # fmt: skip

    def close(self) -> None:
        self._session.close()


class Peer:
    """A module of benchmarks/peers in a process of its own, with the same weights and the same input."""

    def __init__(
        self, python: str, module: str, arguments: Sequence[str], model: nn.Module, x: torch.Tensor, threads: int
    ) -> None:  # fmt: skip
        self._batch = len(x)
        self._resources = contextlib.ExitStack()
        try:
            folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="secureinfer-")))
            save_file({**model.state_dict(), "input": x.contiguous()}, folder / "case.safetensors")
            self._log = self._resources.enter_context((folder / "log").open("w+"))
            self._process = subprocess.Popen(
                [
                    python, "-m", f"benchmarks.peers.{module}", *arguments, "--turns", "--threads", str(threads),
                    "--case", str(folder / "case.safetensors"),
                ],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            )  # fmt: skip
            self._resources.callback(self._end)
            self._in = cast(IO[str], self._process.stdin)
            self._out = cast(IO[str], self._process.stdout)
            late = threading.Timer(PEER_SECONDS, self._process.kill)
            late.daemon = True
            late.start()
            self._resources.callback(late.cancel)
            self._answer()
        except OSError as why:
            self.close()
            raise UnavailableError(f"{python}: {why.strerror}") from why
        except BaseException:
            self.close()
            raise

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()

    def _answer(self) -> str:
        line = self._out.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            said = self._log.read().split("\n")
            raise UnavailableError(
                next((text for text in reversed(said) if text.strip()), f"it ended with {status}")
            )
        return line

    def turn(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended: the answer says how
            self._in.write("\n")
            self._in.flush()
        self._answer()

    def row(self, case: str) -> Row:
        self._in.close()
        found = json.loads(self._answer())
        return Row(
            case, found["engine"], self._batch, 1e3 * statistics.median(found["seconds"]),
            1e3 * found["evaluate_cpu_seconds"], 1e3 * found["first_seconds"], 1e3 * found["setup_seconds"],
            error=found["error"], parameters={**found["parameters"], "threads": found["threads"]},
        )  # fmt: skip

    def close(self) -> None:
        self._resources.close()


def orion(name: str, model: nn.Module, x: torch.Tensor, threads: int) -> Peer:
    python = os.environ.get(ORION_PYTHON)
    if not python:
        raise UnavailableError(
            f"{ORION_PYTHON} is not set; `python -m benchmarks.peers.orion --setup DIR` makes an environment and names it"
        )
    return Peer(python, "orion", [name], model, x, threads)


def tenseal_mm(model: nn.Module, x: torch.Tensor, threads: int) -> Peer:
    return Peer(sys.executable, "tenseal_mm", [], model, x, threads)


# What an engine is called where it cannot be opened, its batch, and what opens it.
Opening = tuple[str, int, Callable[[], Contender]]


def measure(case: str, runs: int, *openings: Opening) -> list[Row]:
    """Rows in the order given; the engines take turns, runs times after a first time."""
    rows: list[Row] = [Row(case, label, batch) for label, batch, _ in openings]
    with contextlib.ExitStack() as stack:
        live: dict[int, Contender] = {}

        def tried(index: int, act: Callable[[], None]) -> None:
            try:
                act()
            except (UnavailableError, si.SecureInferError) as why:
                live.pop(index, None)
                rows[index] = replace(rows[index], unavailable=str(why).splitlines()[0])

        def opened(index: int) -> None:
            live[index] = openings[index][2]()
            stack.callback(live[index].close)

        for index in range(len(openings)):
            tried(index, functools.partial(opened, index))
        for _ in range(runs + 1):
            for index, contender in list(live.items()):
                tried(index, contender.turn)
        for index, contender in live.items():
            rows[index] = contender.row(case)
    return compared(rows)


def compared(rows: Sequence[Row]) -> list[Row]:
    """With ratio: milliseconds for each sample over those of the case's first row."""
    base = rows[0].sample_ms
    return [
        replace(row, ratio=row.sample_ms / base) if row.sample_ms is not None and base else row
        for row in rows
    ]


def _beside(case: str, runs: int, threads: int, made: ckks_models.Case, *others: Opening) -> list[Row]:
    model, x = made
    ours: Opening = ("secureinfer", len(x), lambda: Ours(model, x, threads))
    plain: Opening = ("torch fp32", len(x), lambda: Plain(model, x))
    return measure(case, runs, ours, *others, plain)


def matvec(runs: int, threads: int) -> list[Row]:
    made = ckks_models.matvec()
    peer: Opening = ("TenSEAL CKKSVector.mm", 1, lambda: tenseal_mm(*made, threads))
    return _beside("784x128 times a vector", runs, threads, made, peer)


def square_mlp(runs: int, threads: int) -> list[Row]:
    made = ckks_models.square_mlp()
    peer: Opening = ("Orion", 1, lambda: orion("square_mlp", *made, threads))
    return _beside("MLP 784-128-128-10 with squares", runs, threads, made, peer)


def lola(runs: int, threads: int) -> list[Row]:
    made = ckks_models.lola()
    return _beside("LoLA", runs, threads, made, ("Orion", 1, lambda: orion("lola", *made, threads)))


def digits(runs: int, threads: int) -> list[Row]:
    """One sample beside as many as there are slots."""
    model, full = ckks_models.digits_mlp(FULL_BATCH)
    batch: Opening = ("secureinfer", FULL_BATCH, lambda: Ours(model, full, threads))
    return _beside("digits MLP 64-32-10 with squares", runs, threads, (model, full[:1]), batch)


CASES: dict[str, Callable[[int, int], list[Row]]] = {
    "matvec": matvec,
    "square_mlp": square_mlp,
    "lola": lola,
    "digits": digits,
}


def run(
    cases: Sequence[str] = tuple(CASES),
    *,
    quick: bool = False,
    threads: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    torch.set_num_threads(threads)
    rows = []
    for case in cases:
        progress(case)
        rows += CASES[case](3 if quick else 9, threads)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown; ratios are to the case's first row, for each sample."""
    lines = [
        "| case | engine | batch | online | evaluating, CPU | a sample | ratio | set-up | online MB | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def shown(value: float | None, form: str, unit: float = 1.0) -> str:
        return "" if value is None else form.format(value / unit)

    for r in rows:
        cells = [
            r.case, r.engine if r.unavailable is None else f"{r.engine}: unavailable: {r.unavailable}", f"{r.batch:,}",
            shown(r.online_ms, "{:,.2f} ms"), shown(r.evaluate_cpu_ms, "{:,.2f} ms"), shown(r.sample_ms, "{:,.3f} ms"),
            shown(r.ratio, "{:.3g}"), shown(r.setup_ms, "{:,.2f} s", 1e3), shown(r.online_bytes, "{:.3f}", 1e6),
            shown(r.error, "{:.1e}"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return document("secureinfer.ckks/1", rows, ("sample_ms",))


def main(arguments: Sequence[str]) -> None:
    """`--quick` for fewer runs, `--json` for one JSON document, `--threads N` for each engine, `--case NAME` for one."""
    threads = int(arguments[arguments.index("--threads") + 1]) if "--threads" in arguments else 1
    cases = [arguments[arguments.index("--case") + 1]] if "--case" in arguments else list(CASES)
    if not CASES.keys() >= set(cases):
        sys.exit(f"--case is one of {', '.join(CASES)}")
    command.run(arguments, functools.partial(run, cases, threads=threads), table, as_json)
