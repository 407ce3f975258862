"""The engines, each loaded once and asked in turns. A peer's parties are processes that this one ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

import secureinfer as si
from secureinfer.config import cores

from . import child
from .case import Case
from .row import Row, judged

ROOT = Path(__file__).parents[3]
SPU_PYTHON = "SECUREINFER_SPU_PYTHON"
SPU_PACKAGES = ("spu==0.9.5", "safetensors>=0.5,<1")
WARM_TURNS = 3
"""Of an engine whose local steps are compiled meanwhile, before the wait for the compiler."""

_SPU_SENT = re.compile(r"Link details: total send bytes (\d+)")


class EngineError(Exception):
    """An engine that ended, stalled, or was given other weights or another input; no error of the library."""


class UnavailableError(EngineError):
    """An engine that is not on this machine, and how to get it."""


class Engine(Protocol):
    def turn(self) -> None: ...

    def row(self, row: Row) -> Row: ...

    def close(self) -> None: ...


def _judge(row: Row, answers: Sequence[Tensor], case: Case) -> Row:
    error, why = judged(answers, case.expected)
    return replace(row, error=error, status="ok" if why is None else "wrong", why=why)


class Plain:
    """torch in this process, eager, float32."""

    def __init__(self, case: Case, threads: int) -> None:
        self._case, self._threads = case, threads
        self._times, self._answers = list[float](), list[Tensor]()

    def turn(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._case.plain(*self._case.inputs)  # its pages are cold after the others' turns
                started = time.perf_counter()
                self._answers.append(self._case.plain(*self._case.inputs))
                self._times.append(1e3 * (time.perf_counter() - started))
        finally:
            torch.set_num_threads(before)

    def row(self, row: Row) -> Row:
        row = replace(
            row, first_ms=self._times[0], latency_ms=tuple(self._times[1:]), threads=self._threads, processes=1,
            model_digest=self._case.model_digest, input_digest=self._case.input_digest,
            versions={"torch": torch.__version__},
        )  # fmt: skip
        return _judge(row, self._answers, self._case)

    def close(self) -> None:
        pass


class Ours:
    """A session between three processes over mutual TLS, through the public calls; material is dealt before each turn."""

    def __init__(
        self, case: Case, protocol: str, threads: int, *, torch_compile: bool, compile_seconds: float, timeout: float
    ) -> None:  # fmt: skip
        self._case, self._threads, self._compiled = case, threads, torch_compile
        self._online, self._offline, self._answers = list[float](), list[float](), list[Tensor]()
        started = time.perf_counter()
        program = si.compile(case.quantised, case.inputs, protocol=protocol)
        self._compile_ms = 1e3 * (time.perf_counter() - started)
        # As shipped, a party that all others wait for computes with all cores; a stated number would hold it to that.
        stated = None if threads == max(1, cores() // 2) else threads
        self._session = si.local_session(
            program, threads=stated, torch_compile=torch_compile, timeout=timeout
        )
        self._setup_ms = 1e3 * (time.perf_counter() - started) - self._compile_ms
        try:
            if torch_compile and compile_seconds:
                for _ in range(WARM_TURNS):
                    self.turn()
                time.sleep(compile_seconds)
                for kept in (self._online, self._offline):
                    del kept[:]
        except BaseException:
            self.close()
            raise

    def turn(self) -> None:
        started = time.perf_counter()
        self._session.prepare(1)
        dealt = time.perf_counter()
        answer = self._session.infer(*self._case.inputs)
        ended = time.perf_counter()
        self._offline.append(1e3 * (dealt - started))
        self._online.append(1e3 * (ended - dealt))
        self._answers.append(answer)

    def row(self, row: Row) -> Row:
        report, plan = self._session.report().to_dict(), self._session.program.plan.totals
        row = replace(
            row, first_ms=self._online[0], latency_ms=tuple(self._online[1:]), offline_ms=tuple(self._offline[1:]),
            setup_ms=self._setup_ms, bytes=report["online"]["bytes"], rounds=report["online"]["rounds"],
            dealt_bytes=plan.dealt_bytes, setup_bytes=report["setup"]["bytes"], threads=self._threads, processes=3,
            model_digest=self._case.model_digest, input_digest=self._case.input_digest,
            settings={"protocol": report["program"]["protocol"], "torch_compile": self._compiled,
                      "compile_ms": self._compile_ms, "unsafe": report["program"]["unsafe"]},
            versions={k: report["environment"][k] for k in ("secureinfer", "torch", "crypten")},
        )  # fmt: skip
        return _judge(row, self._answers, self._case)

    def close(self) -> None:
        self._session.close()


class TwoParties:
    """A peer's two processes, of a module of this package. The data owner's clock is read, from plain values to its answer.

    public: what else both parties are told. logged: bytes that a party says it sent, in its log after a turn. Raises
    EngineError with the last words of a party that ends, and where it stays silent for timeout seconds.
    """

    def __init__(
        self, case: Case, python: str, module: str, threads: int, *, timeout: float,
        environment: Mapping[str, str] | None = None, logged: re.Pattern[str] | None = None,
        public: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._case, self._threads, self._timeout, self._logged = case, threads, timeout, logged
        self._public = dict(public or {})
        self._resources = contextlib.ExitStack()
        self._turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._late = False
        try:
            self._start(python, module, {**os.environ, **(environment or {})})
            self._ready = [self._answer(party) for party in range(2)]
            for said, digest, what in zip(
                self._ready, (case.model_digest, case.input_digest), ("model", "input"), strict=True
            ):
                if said["digest"] != digest:
                    raise EngineError(f"this engine was given another {what} than the others")
        except BaseException:
            self.close()
            raise

    def _start(self, python: str, module: str, environment: dict[str, str]) -> None:
        folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="secureinfer-")))
        self._case.save(folder, timeout=self._timeout, ports=_free_ports(2), **self._public)
        self._parties: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        for rank in range(2):
            log = self._resources.enter_context((folder / f"log{rank}").open("w+", errors="replace"))
            command = [python, "-m", f"{__package__}.{module}", str(rank), str(folder), str(self._threads)]
            try:
                party = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )  # fmt: skip
            except OSError as why:
                raise UnavailableError(f"{python}: {why.strerror}") from why
            self._parties.append(party)
            self._logs.append(log)
            self._resources.callback(_end, party)

    def _answer(self, rank: int) -> dict[str, Any]:
        """One line of a party, both watched: a party that waits for one that is gone would wait for its own deadline."""
        done = threading.Event()

        def watched() -> None:
            stop = time.monotonic() + self._timeout
            while not done.wait(0.2):
                self._late = self._late or time.monotonic() > stop
                if self._late or any(p.poll() is not None for p in self._parties):
                    for party in self._parties:
                        party.kill()
                    return

        watcher = threading.Thread(target=watched, daemon=True)
        watcher.start()
        line = cast(IO[str], self._parties[rank].stdout).readline()
        done.set()
        watcher.join()
        if not line:
            raise EngineError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        if self._late:
            return f"it stayed silent for {self._timeout:g} s"
        codes = [party.wait() for party in self._parties]
        first = next((i for i, code in enumerate(codes) if code not in (0, -9, child.ORPHANED)), 0)
        self._logs[first].seek(0)
        said = [line.strip() for line in self._logs[first].read().splitlines() if line.strip()]
        return f"party {first} ended with {codes[first]}" + (f": {said[-1][:400]}" if said else "")

    def turn(self) -> None:
        for party in self._parties:
            with contextlib.suppress(BrokenPipeError):  # it ended: its answer says how
                pipe = cast(IO[str], party.stdin)
                pipe.write("run\n")
                pipe.flush()
        self._turns.append((self._answer(0), self._answer(1)))

    def _bytes(self) -> float | None:
        said = [sum(t[i]["bytes"] for i in range(2)) for t in self._turns if t[1].get("bytes") is not None]
        if not said:
            return None
        if self._logged is None:
            return float(said[0])
        sent = 0.0
        for log in self._logs:
            log.seek(0)
            found = self._logged.findall(log.read())
            if not found:
                return None
            sent += float(found[-1])
        return sent + float(said[-1])

    def row(self, row: Row) -> Row:
        times = [1e3 * turn[1]["seconds"] for turn in self._turns]
        rounds = [turn[1]["rounds"] for turn in self._turns if turn[1].get("rounds") is not None]
        row = replace(
            row, first_ms=times[0], latency_ms=tuple(times[1:]),
            setup_ms=1e3 * max(said["setup_seconds"] for said in self._ready), bytes=self._bytes(),
            rounds=rounds[0] if rounds else None, threads=self._threads, processes=2,
            model_digest=self._ready[0]["digest"], input_digest=self._ready[1]["digest"],
            settings=self._ready[1]["settings"], versions=self._ready[1]["versions"],
        )  # fmt: skip
        return _judge(row, [torch.tensor(turn[1]["output"]) for turn in self._turns], self._case)

    def close(self) -> None:
        self._resources.close()


def _end(party: subprocess.Popen[str]) -> None:
    party.kill()
    party.wait()
    for pipe in (party.stdin, party.stdout):
        with contextlib.suppress(BrokenPipeError):
            cast(IO[str], pipe).close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def crypten(case: Case, threads: int, timeout: float) -> Engine:
    return TwoParties(case, sys.executable, "crypten_stock", threads, timeout=timeout)


def spu(case: Case, python: str | None, threads: int, timeout: float, *, gelu: str = "erf") -> Engine:
    """python: of SPU's environment."""
    if not python:
        raise UnavailableError(
            f"{SPU_PYTHON} is not set; `python -m benchmarks peers --setup DIR` makes an environment and uses it"
        )
    return TwoParties(
        case, python, "spu_semi2k", threads, timeout=timeout, logged=_SPU_SENT,
        environment={"JAX_PLATFORMS": "cpu"}, public={"gelu": gelu},
    )  # fmt: skip


# What an engine is called, what its row says before it has run, and what loads it.
Opening = tuple[Row, Callable[[], Engine]]


def measure(openings: Sequence[Opening], runs: int, progress: Callable[[str], None]) -> list[Row]:
    """Rows in the order given. Each engine is loaded once; then they take turns, runs times after a first time.

    An engine that fails, in loading or in a turn, is a row with its error's type and text, and the others go on.
    """
    rows = [row for row, _ in openings]
    with contextlib.ExitStack() as stack:
        live: dict[int, Engine] = {}

        def tried(index: int, act: Callable[[], None]) -> None:
            try:
                act()
            except (
                Exception
            ) as why:  # whatever a foreign engine raises is its row's, and not the end of the others
                live.pop(index, None)
                gone = isinstance(why, UnavailableError | ImportError)
                text = next(iter(str(why).splitlines()), "") or "it does not say why"
                rows[index] = replace(
                    rows[index],
                    status="unavailable" if gone else "failed",
                    why=f"{type(why).__name__}: {text}",
                )

        def opened(index: int) -> None:
            live[index] = openings[index][1]()
            stack.callback(live[index].close)

        def told(index: int) -> None:
            rows[index] = live[index].row(rows[index])

        for index, (row, _) in enumerate(openings):
            progress(f"loading {row.label}")
            tried(index, lambda index=index: opened(index))  # type: ignore[misc]
        for turn in range(runs + 1):
            for index, engine in list(live.items()):
                progress(f"turn {turn} of {runs}: {rows[index].label}")
                tried(index, engine.turn)
        for index in list(live):
            tried(index, lambda index=index: told(index))  # type: ignore[misc]
    return rows
