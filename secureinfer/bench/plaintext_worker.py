"""One plaintext engine: `python -m secureinfer.bench.plaintext_worker FD`, started by plaintext.PlaintextProcess.

It answers over its pipe, writes nothing on the terminal, and ends when the pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SecureInferError, UsageError
from ..transport.spawn import inherited_pipe
from ..transport.wire import Pipe

if TYPE_CHECKING:
    from torch import Tensor

    from .engines import Engine
    from .subject import Batches, Built

START_SECONDS = 60.0
LOG = "output.txt"

WARM_RUNS = 2
TRIAL_RUNS = 5
TRIAL_SECONDS = 0.2
"""Of each number of threads."""

Message = tuple[dict[str, Any], list[bytearray]]


def timed(
    engine: Engine, tensors: Sequence[Tensor], least_runs: int, least_seconds: float = 0.0
) -> list[float]:
    """Milliseconds of each run, until both bounds are reached. The clock is around the model's call alone."""
    inputs = engine.inputs(tensors)
    times_ms: list[float] = []
    total_ms = 0.0
    while len(times_ms) < least_runs or total_ms < 1000 * least_seconds:
        start = time.perf_counter()
        engine.run(inputs)
        times_ms.append(1000 * (time.perf_counter() - start))
        total_ms += times_ms[-1]
    return times_ms


def choose_threads(engine: Engine, tensors: Sequence[Tensor], counts: Sequence[int]) -> int:
    """Warm up with each number of threads, and stay with the quickest; of equals, with the fewest."""
    took: dict[int, float] = {}
    for count in counts:
        engine.set_threads(count)
        timed(engine, tensors, WARM_RUNS)
        took[count] = statistics.median(timed(engine, tensors, TRIAL_RUNS, TRIAL_SECONDS))
    best = min(counts, key=lambda count: (took[count], count))
    if best != counts[-1]:
        engine.set_threads(best)
        timed(engine, tensors, WARM_RUNS)
    return best


class Served:
    """A loaded engine and the inputs that it is asked about."""

    def __init__(self, start: dict[str, Any], folder: Path) -> None:
        import torch

        from .engines import COMPILED, cores
        from .models import subject

        torch.set_num_threads(cores())
        self._start, self._folder = start, folder
        self._built: Built = subject(start["subject"]).build(start["batch"], Path(start["state"]))
        self._held_out: Batches = self._built.held_out
        self._counts = (
            [start["threads"]] if start["threads"] is not None else sorted({cores(), 1}, reverse=True)
        )
        if start["engine"] != COMPILED:
            self._load(start["engine"])

    def _load(self, engine: str) -> None:
        from .engines import load

        begin = time.perf_counter()
        start = self._start
        self._engine: Engine = load(engine, start["dtype"], self._built, start["device"], self._folder)
        self.load_seconds = time.perf_counter() - begin

    def settle(self) -> None:
        """Warm up and choose threads: to be done while nothing else runs.

        torch.compile compiles for a number of threads, and takes half a minute each time: eager tells which.
        """
        import torch

        from .engines import COMPILED, EAGER

        with torch.inference_mode():
            if self._start["engine"] == COMPILED:
                if len(self._counts) > 1:
                    self._load(EAGER)
                    self._counts = [choose_threads(self._engine, self._held_out[0], self._counts)]
                torch.set_num_threads(self._counts[0])
                self._load(COMPILED)
            self.threads = choose_threads(self._engine, self._held_out[0], self._counts)
        del self._built
        forget_peak()

    def facts(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "load_seconds": self.load_seconds,
            "quantized": self._engine.quantized,
            "model_bytes": self._engine.model_bytes,
        }

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        import torch

        from ..measure.memory import peak_gpu_memory_bytes, peak_memory_bytes
        from ..session.tensors import pack

        with torch.inference_mode():
            if body["op"] == "time":
                tensors = self._held_out[body["index"]]
                return {
                    "times_ms": timed(self._engine, tensors, body["least_runs"], body["least_seconds"])
                }, []
            if body["op"] == "outputs":
                engine = self._engine
                found = engine.outputs(engine.run(engine.inputs(self._held_out[body["index"]])))
                heads, blobs = pack({str(i): t for i, t in enumerate(found)})
                return {"tensors": heads}, list(blobs)
        return {"peak": peak_memory_bytes(), "peak_gpu": peak_gpu_memory_bytes()}, []


def forget_peak() -> None:
    """Begin anew to count the highest memory, where the system lets a process do so: what converting a model took is no part
    of what running it takes.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for i in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(i)


def be_quiet(folder: Path) -> None:
    """Whatever libraries and compilers write goes to a file, beside what they cache."""
    log = os.open(folder / LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def listen(pipe: Pipe, folder: Path) -> queue.SimpleQueue[Message]:
    """The starter's messages. When it goes, this process ends, whatever it computes."""
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(SecureInferError, OSError):
            while True:
                messages.put(pipe.receive())
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=read, name="starter", daemon=True).start()
    return messages


def main(arguments: list[str]) -> int:
    pipe = inherited_pipe(arguments, "the process that started this baseline")
    try:
        start, _ = pipe.receive(timeout=START_SECONDS)
    except SecureInferError:
        return 1
    folder = Path(start["folder"])
    be_quiet(folder)
    messages = listen(pipe, folder)
    # Nothing but a message's answer leaves here: an error is one, so that a sweep goes on without this engine.
    try:
        served = Served(start, folder)
        pipe.send({"loaded": True})
        messages.get()  # the starter's word that it may have the machine
        served.settle()
        pipe.send({"ready": served.facts()})
        while True:
            body, _ = messages.get()
            pipe.send(*served.answer(body))
    except UsageError as error:
        kind, reason = "unavailable", str(error)
    except Exception as error:
        from .engines import brief

        kind, reason = "failed", f"{type(error).__name__}: {brief(error)}"
    with contextlib.suppress(SecureInferError):
        pipe.send({kind: reason.replace(str(folder), "...")})
    messages.get()  # for ever: the starter reads, and closes the pipe
    return 1


if __name__ == "__main__":
    code = main(sys.argv)
    os._exit(code)  # threads of compilers would only delay it
