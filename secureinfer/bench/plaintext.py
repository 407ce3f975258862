"""A plaintext engine in a process of its own: its memory is its own, and its death costs one baseline, not the sweep."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import PeerError, SecureInferError
from ..session.launch import Child
from ..session.tensors import unpack
from .engines import engines as engines
from .plaintext_worker import LOG
from .report import Baseline

log = logging.getLogger("secureinfer.bench")

ANSWER_SECONDS = 600.0
"""Without an answer for so long, beyond the time that was asked for, an engine counts as failed."""
EXIT_SECONDS = 2.0
MOST_LOG = 4000


class PlaintextProcess:
    """One (engine, dtype) of `engines(device)` on one model and batch.

    subject, batch: as models.subject takes them. state: what subject.save_state wrote, so that all engines have the same
    weights and nothing is trained twice. threads: for intra-op work; None: the quicker of one and all cores, chosen in
    warm-up. cache: folder for what torch.compile may find again, in a later process of the same model; None: a private one.

    The process starts and loads at once, and several may do so side by side; which number of threads is quickest is found in
    `ready`. What goes wrong in it, its death included, becomes `status` and `reason`: no method raises
    for that, and from then on they give nothing.
    """

    def __init__(
        self,
        subject: str,
        batch: int,
        engine: str,
        dtype: str,
        *,
        state: Path,
        threads: int | None = None,
        device: str = "cpu",
        cache: Path | None = None,
    ) -> None:
        self.engine, self.dtype, self.device = engine, dtype, device
        self.status: Literal["starting", "ok", "unavailable", "failed"] = "starting"
        self.reason: str | None = None
        self._loaded = False
        self._facts: dict[str, Any] = {}
        self._memory: dict[str, Any] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="secureinfer-plaintext-"))
        start = {
            "subject": subject,
            "batch": batch,
            "engine": engine,
            "dtype": dtype,
            "state": str(state.resolve()),
            "threads": threads,
            "device": device,
            "folder": str(self._folder),
        }
        found = cache or self._folder
        environment = {
            "TMPDIR": str(self._folder),
            "TORCHINDUCTOR_CACHE_DIR": str(found / "inductor"),
            "TRITON_CACHE_DIR": str(found / "triton"),
            # In the process itself: no other processes that wait beside the runs.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        self._child: Child | None = None
        try:
            self._child = Child("secureinfer.bench.plaintext_worker", self.name, start, environment)
        except PeerError as error:
            self._end("failed", str(error))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}"

    @property
    def pid(self) -> int | None:
        """None once it has ended."""
        return None if self._child is None else self._child.process.pid

    def loaded(self, timeout: float) -> bool:
        """Wait until it has loaded and compiled. False where it cannot; `reason` says why.

        timeout: seconds; then its process is ended.
        """
        if self.status == "starting" and not self._loaded:
            self._loaded = "loaded" in self._answer(None, [], timeout)[0]
        return self._loaded and self.status in ("starting", "ok")

    def ready(self, timeout: float) -> bool:
        """Wait until it has warmed up and chosen its threads too, for which the machine should be quiet. As `loaded`."""
        if self.loaded(timeout) and self.status == "starting":
            body, _ = self._answer({"op": "settle"}, ["starting"], timeout)
            if "ready" in body:
                self._facts = body["ready"]
                self.status = "ok"
        return self.status == "ok"

    def outputs(self, index: int) -> list[Tensor]:
        """Of held_out[index]: every tensor of the output structure, float32, in its order. Empty without figures."""
        body, blobs = self._answer({"op": "outputs", "index": index}, ["ok"], ANSWER_SECONDS)
        if "tensors" not in body:
            return []
        found = list(unpack(body["tensors"], blobs).values())
        if not all(bool(tensor.isfinite().all()) for tensor in found):
            self._end("failed", f"its outputs of held-out batch {index} are not finite")
            return []
        return found

    def time(self, index: int, least_runs: int = 1, least_seconds: float = 0.0) -> list[float]:
        """Milliseconds of each run of held_out[index], until both bounds are reached. Empty without figures."""
        request = {"op": "time", "index": index, "least_runs": least_runs, "least_seconds": least_seconds}
        body, _ = self._answer(request, ["ok"], ANSWER_SECONDS + 2 * least_seconds)
        return [float(ms) for ms in body.get("times_ms", [])]

    def baseline(self, **figures: Any) -> Baseline:
        """What is known of it, for the report; other fields of Baseline as given.

        Peak memory is of its process while it ran the model; loading, exporting and compiling are no part of it.
        load_seconds: from the model in memory to its first output.
        """
        body, _ = self._answer({"op": "memory"}, ["ok"], ANSWER_SECONDS)
        self._memory = body or self._memory
        known = {
            "engine": self.engine,
            "dtype": self.dtype,
            "device": self.device,
            "status": "failed" if self.status == "starting" else self.status,
            "reason": "it was not waited for" if self.status == "starting" else self.reason,
            "peak_memory_bytes": self._memory.get("peak"),
            "peak_gpu_memory_bytes": self._memory.get("peak_gpu"),
            **self._facts,
        }
        return Baseline.model_validate({**known, **figures})

    def close(self) -> None:
        """End the process and remove what it wrote. Status and facts stay."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> PlaintextProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self, request: dict[str, Any] | None, allowed: Sequence[str], timeout: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """The answer to a request, or to the start; nothing, with `status` and `reason` set, where there is none."""
        if self._child is None or (request is not None and self.status not in allowed):
            return {}, []
        try:
            if request is None:
                body, blobs = self._child.receive(timeout)
            else:
                body, blobs = self._child.request(request, timeout=timeout)
        except SecureInferError as error:
            self._end("failed", self._why(error, timeout))
            return {}, []
        if isinstance(body.get("unavailable"), str):
            self._end("unavailable" if self.status == "starting" else "failed", body["unavailable"])
        elif isinstance(body.get("failed"), str):
            self._end("failed", body["failed"])
        else:
            return body, blobs
        return {}, []

    def _why(self, error: SecureInferError, timeout: float) -> str:
        """A process that died says by which signal; one that lives was too slow."""
        process = self._child.process if self._child is not None else None
        code = None
        if process is not None:
            with contextlib.suppress(Exception):
                code = process.wait(EXIT_SECONDS if "deadline" not in str(error) else 0.1)
        if code is None:
            return f"no answer within {timeout:g} s"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    def _end(self, status: Literal["unavailable", "failed"], reason: str) -> None:
        self.status, self.reason = status, reason
        if log.isEnabledFor(logging.DEBUG):
            with contextlib.suppress(OSError):
                tail = (self._folder / LOG).read_text(errors="replace")[-MOST_LOG:]
                log.debug("%s: %s\n%s", self.name, reason, tail)
        if self._child is not None:
            self._child.kill()
            self._child = None
        shutil.rmtree(self._folder, ignore_errors=True)


def max_absolute_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The greatest difference of two flat lists of outputs; infinite where shapes differ or a value is not finite."""
    if [tuple(t.shape) for t in found] != [tuple(t.shape) for t in expected]:
        return float("inf")
    worst = [
        float((a.detach().double() - b.detach().double()).abs().max())
        for a, b in zip(found, expected, strict=True)
        if a.numel()
    ]
    return max((w if torch.tensor(w).isfinite() else float("inf") for w in worst), default=0.0)
