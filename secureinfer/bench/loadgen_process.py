"""One run of MLPerf LoadGen: its process is asked and answered here, in the caller's own thread."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import select
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SessionError, UsageError
from ..transport.spawn import spawn
from .loadgen_conf import Conf, Scenario
from .loadgen_log import Verdict, read_logs
from .loadgen_worker import END, FAULT, JSON, QUERIES, pairs, receive, send, send_done

WORKER_MODULE = "secureinfer.bench.loadgen_worker"
START_SECONDS = 60.0
GRACE_SECONDS = 1.0


def loadgen_version() -> str:
    """Raises UsageError where LoadGen is not installed."""
    if importlib.util.find_spec("mlperf_loadgen") is None:
        raise UsageError(
            "loads need MLPerf LoadGen, which is not installed: pip install 'secureinfer[bench]'"
        )
    return importlib.metadata.version("mlcommons-loadgen")


@dataclass(frozen=True)
class Ran:
    """What a run did. queries: that LoadGen issued; seconds: from the first of them to the last answer."""

    verdict: Verdict
    settings: dict[str, Any]
    queries: int
    inferences: int
    seconds: float


class LoadGen:
    """A process with LoadGen and its settings, for one run. Its logs are in a private folder that goes with it.

        with LoadGen(conf, model, "Server", inputs=8) as loadgen:
            ran = loadgen.run({"server_target_qps": 20.0}, infer)

    Whatever ends the block ends the process: LoadGen never waits for an answer that is not to come.
    """

    def __init__(self, conf: Conf, model: str, scenario: Scenario, *, inputs: int) -> None:
        loadgen_version()
        self._folder = tempfile.TemporaryDirectory(prefix="secureinfer-loadgen-")
        try:
            self._process, self._sock = spawn(WORKER_MODULE)
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            self._sock.settimeout(START_SECONDS)
            start = {
                "file": str(conf.path),
                "model": model,
                "scenario": scenario,
                "inputs": inputs,
                "folder": self._folder.name,
            }
            self._send(start)
            self.settings = self._json()
            """LoadGen's, as it read them from the file."""
        except BaseException:
            self.close()
            raise

    def run(
        self,
        overrides: Mapping[str, Any],
        infer: Callable[[int], None],
        after: Callable[[], None] = lambda: None,
    ) -> Ran:
        """Run the load until LoadGen ends it, each sample one after another. May be called once.

        overrides: settings in place of the file's. infer: one inference on held-out inputs of this index; what it raises
        ends the run and passes. after: called when LoadGen has the answer, which it does not wait for.
        Raises SessionError where LoadGen's process fails.
        """
        self._send(dict(overrides))
        settings = self._json()
        self._sock.settimeout(None)
        waiting: deque[tuple[int, int]] = deque()
        queries = inferences = 0
        first = last = time.perf_counter()
        while True:
            # Queries wait here and not in the socket, which holds few and would then hold up LoadGen's clockwork.
            while not waiting or select.select([self._sock], [], [], 0)[0]:
                kind, payload = self._receive()
                if kind == END:
                    verdict = read_logs(Path(self._folder.name))
                    return Ran(verdict, settings, queries, inferences, last - first)
                if kind != QUERIES:
                    raise SessionError("LoadGen's process said what was not expected in a run")
                if not queries:
                    first = time.perf_counter()
                queries += 1
                waiting.extend(pairs(payload))
            sample, index = waiting.popleft()
            infer(index)
            with self._gone():
                send_done(self._sock, sample)
            inferences += 1
            last = time.perf_counter()
            after()

    def close(self) -> None:
        """End the process, in a run or not, and remove its logs. May be called twice."""
        self._sock.close()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._folder.cleanup()

    def __enter__(self) -> LoadGen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, body: dict[str, Any]) -> None:
        with self._gone():
            send(self._sock, JSON, json.dumps(body, allow_nan=False).encode())

    def _json(self) -> dict[str, Any]:
        kind, payload = self._receive()
        found = json.loads(payload)
        if kind != JSON or not isinstance(found, dict):
            raise SessionError("LoadGen's process did not say its settings")
        return found

    def _receive(self) -> tuple[bytes, bytes]:
        with self._gone():
            kind, payload = receive(self._sock)
        if kind == FAULT:
            fault = json.loads(payload)
            raise SessionError(f"LoadGen failed: {fault['type']}: {fault['message']}")
        return kind, payload

    @contextlib.contextmanager
    def _gone(self) -> Any:
        try:
            yield
        except TimeoutError:
            raise SessionError(f"LoadGen's process said nothing for {START_SECONDS:g} s") from None
        except (EOFError, OSError) as error:
            raise SessionError(f"LoadGen's process is gone ({error})") from None
