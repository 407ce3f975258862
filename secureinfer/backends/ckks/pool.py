"""Further processes of a model owner that share its matrices: TenSEAL's bindings hold Python's lock, threads would not do.

They get their shares of the weights, the parameters and the data owner's evaluation keys over a socket, and nothing else;
they end when it closes.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...errors import PeerError, SecureInferError, SessionError
from ...transport.spawn import forbid_core_dumps, inherited_pipe, spawn
from ...transport.wire import Pipe
from .arithmetic import Arithmetic, Ciphertext, Keys
from .context import Context
from .params import Parameters
from .sealed import dump, load
from .spread import Rows
from .terms import Term, Terms

MODULE = "secureinfer.backends.ckks.pool"
CHUNK = 64
GRACE_SECONDS = 3.0
OURSELVES = "this party's own process"

Blob = bytes | bytearray | memoryview


class Helper:
    """One process. Messages go through a queue, so that this process computes its own share meanwhile."""

    def __init__(self, parameters: Parameters, party: str) -> None:
        self.process, socket = spawn(MODULE)
        self._pipe = Pipe(socket, party)
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], list[Any]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="helper", daemon=True)
        self._sender.start()
        self.post({"op": "begin", "parameters": asdict(parameters)})

    def post(self, body: dict[str, Any], blobs: Sequence[Any] = ()) -> None:
        self._queue.put((body, list(blobs)))

    def answer(self) -> tuple[dict[str, Any], list[bytearray]]:
        """Raises SessionError where the process has ended or failed."""
        try:
            body, blobs = self._pipe.receive()
        except PeerError:
            raise SessionError("a process that shares the computing has ended") from None
        if "error" in body:
            raise SessionError(f"a process that shares the computing failed: {body['error']}")
        return body, blobs

    def _send(self) -> None:
        with contextlib.suppress(SecureInferError, OSError, ValueError):
            while (message := self._queue.get()) is not None:
                self._pipe.send(*message)

    def close(self) -> None:
        self._queue.put(None)
        self._pipe.close()
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Pool:
    """The helpers of one model owner's engine, and what each of them holds."""

    def __init__(self, parameters: Parameters, processes: int, party: str) -> None:
        self.processes = processes
        self._parameters, self._party = parameters, party
        self.helpers: list[Helper] = []

    def helper(self, index: int) -> Helper:
        """Started when the first share is given to it."""
        while len(self.helpers) <= index:
            self.helpers.append(Helper(self._parameters, self._party))
        return self.helpers[index]

    def keys(self, relinearisation: Blob, galois: Blob) -> None:
        """Give them to all, and begin to load them; `wait` for the end of that."""
        for helper in self.helpers:
            helper.post({"op": "keys"}, [relinearisation, galois])

    def wait(self) -> None:
        for helper in self.helpers:
            helper.answer()

    def close(self) -> None:
        for helper in self.helpers:
            helper.close()
        self.helpers = []


class RemoteTerms:
    """A share of a matrix in a helper: as Terms, in two halves. serial: which matrix of the helper."""

    def __init__(
        self,
        helper: Helper,
        serial: str,
        level: int,
        factor: float,
        sums: Sequence[tuple[int, int]],
        terms: Sequence[Term],
    ) -> None:
        self._helper, self._serial = helper, serial
        self.sources = sorted({t.source for t in terms})
        for start in range(0, len(terms), CHUNK):
            part = terms[start : start + CHUNK]
            body = {"op": "terms", "serial": serial, "keys": [t.key for t in part]}
            helper.post(body, [np.ascontiguousarray(t.vector).data.cast("B") for t in part])
        helper.post(
            {
                "op": "matrix",
                "serial": serial,
                "level": level,
                "factor": factor,
                "sums": [list(s) for s in sums],
            }
        )

    def begin(self, given: Mapping[int, Blob]) -> None:
        """given: serialised ciphertexts."""
        self._helper.post(
            {"op": "apply", "serial": self._serial, "sources": self.sources}, [given[i] for i in self.sources]
        )

    def end(self, context: Context) -> dict[int, Ciphertext]:
        body, blobs = self._helper.answer()
        return {
            int(t): load(context.new(), context.context, b, "a sum", OURSELVES)
            for t, b in zip(body["targets"], blobs, strict=True)
        }


class RemoteRows:
    """A share of the rows of a matrix whose samples have a slot each, in a helper."""

    def __init__(self, helper: Helper, serial: str, level: int, factor: float, matrix: np.ndarray) -> None:
        self._helper, self._serial = helper, serial
        body = {"op": "rows", "serial": serial, "level": level, "factor": factor, "shape": list(matrix.shape)}
        helper.post(body, [np.ascontiguousarray(matrix, dtype=np.float64).data.cast("B")])

    def take(self, column: int, data: Blob) -> None:
        self._helper.post({"op": "take", "serial": self._serial, "column": column}, [data])

    def end(self, context: Context) -> list[Ciphertext | None]:
        self._helper.post({"op": "end", "serial": self._serial})
        body, blobs = self._helper.answer()
        waiting = iter(blobs)
        return [
            load(context.new(), context.context, next(waiting), "a sum", OURSELVES) if there else None
            for there in body["rows"]
        ]


# --- the process itself ---


class _Computer:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._arithmetic: Arithmetic | None = None
        self._waiting: dict[str, list[Term]] = {}
        self._matrices: dict[str, Terms] = {}
        self._rows: dict[str, Rows] = {}
        self._totals: dict[str, list[Ciphertext | None]] = {}

    def do(self, body: dict[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[Any]] | None:
        """What is answered, if anything."""
        operation, serial = body["op"], body.get("serial", "")
        if operation == "terms":
            vectors = [np.frombuffer(b, dtype=np.float64) for b in blobs]
            new = [Term(t, g, i, b, v) for (t, g, i, b), v in zip(body["keys"], vectors, strict=True)]
            self._waiting.setdefault(serial, []).extend(new)
        elif operation == "matrix":
            sums = [(c, s) for c, s in body["sums"]]
            self._matrices[serial] = Terms(
                self._context, body["level"], body["factor"], sums, self._waiting.pop(serial)
            )
        elif operation == "rows":
            matrix = np.frombuffer(blobs[0], dtype=np.float64).reshape(body["shape"])
            self._rows[serial] = Rows(self._context, matrix, body["level"], body["factor"])
        elif operation == "keys":
            self._keys(blobs)
            return {}, []
        elif operation == "apply":
            given = {i: self._load(b) for i, b in zip(body["sources"], blobs, strict=True)}
            found = self._matrices[serial].apply(self._ready(), given)
            return {"targets": list(found)}, [dump(x) for x in found.values()]
        elif operation == "take":
            rows = self._rows[serial]
            totals = self._totals.setdefault(serial, rows.begin())
            rows.take(self._ready(), totals, body["column"], self._load(blobs[0]))
        elif operation == "end":
            totals = self._totals.pop(serial, self._rows[serial].begin())
            return {"rows": [t is not None for t in totals]}, [dump(t) for t in totals if t is not None]
        else:
            raise ValueError("an unknown operation")
        return None

    def _keys(self, blobs: list[bytearray]) -> None:
        api, context = self._context.api, self._context.context
        relinearisation = load(api.RelinKeys(), context, blobs[0], "keys", OURSELVES)
        galois = load(api.GaloisKeys(), context, blobs[1], "keys", OURSELVES) if blobs[1] else None
        self._arithmetic = Arithmetic(self._context, Keys(relinearisation, galois))

    def _ready(self) -> Arithmetic:
        if self._arithmetic is None:
            raise ValueError("no keys yet")
        return self._arithmetic

    def _load(self, data: bytearray) -> Ciphertext:
        return load(self._context.new(), self._context.context, data, "a ciphertext", OURSELVES)


def main(arguments: list[str]) -> int:
    forbid_core_dumps()
    pipe = inherited_pipe(arguments, "the model owner's worker")
    try:
        body, _ = pipe.receive()
        computer = _Computer(Context(Parameters(**body["parameters"])))
        while True:
            answer = computer.do(*pipe.receive())
            if answer is not None:
                pipe.send(*answer)
    except PeerError:
        return 0  # the worker has closed its end
    except Exception as error:
        with contextlib.suppress(SecureInferError, OSError):
            pipe.send({"error": type(error).__name__})
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
