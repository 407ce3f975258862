"""MLPerf LoadGen in a process of its own: it asks over an inherited socket, and is answered there.

LoadGen is C++ with state of its own: it writes to standard output and into the working folder, reads `audit.config`
there, loads its defaults with the first settings file alone, and a run that began cannot be ended. In a process of
its own none of that reaches the caller, who ends a run by ending the process. When the caller is
gone, this removes the folder of the run too.

Frames to the caller: a kind (one byte), the length (u32), the payload: settings, queries (id and index, u64 each), the
end, or a fault. From the caller: frames with JSON until the run begins, then ids (u64) of samples that are done.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

JSON, QUERIES, END, FAULT = b"J", b"Q", b"E", b"F"

_HEAD = struct.Struct("<cI")
_ID = struct.Struct("<Q")
_PAIR = struct.Struct("<QQ")
_MOST_BYTES = 1 << 30
_SEND_BUFFER_BYTES = 1 << 20

SETTINGS = (
    "min_duration_ms",
    "max_duration_ms",
    "min_query_count",
    "max_query_count",
    "single_stream_expected_latency_ns",
    "single_stream_target_latency_percentile",
    "multi_stream_expected_latency_ns",
    "multi_stream_target_latency_percentile",
    "multi_stream_samples_per_query",
    "server_target_qps",
    "server_target_latency_ns",
    "server_target_latency_percentile",
    "server_coalesce_queries",
    "server_max_async_queries",
    "offline_expected_qps",
    "performance_issue_unique",
    "performance_issue_same",
    "sample_concatenate_permutation",
    "qsl_rng_seed",
    "sample_index_rng_seed",
    "schedule_rng_seed",
)
"""Of LoadGen's TestSettings: what a run reports."""


def send(sock: socket.socket, kind: bytes, payload: bytes) -> None:
    sock.sendall(_HEAD.pack(kind, len(payload)) + payload)


def receive(sock: socket.socket) -> tuple[bytes, bytes]:
    """The next frame. Raises EOFError where the other side is gone."""
    kind, length = _HEAD.unpack(_exact(sock, _HEAD.size))
    if length > _MOST_BYTES:
        raise EOFError(f"a frame of {length} bytes is no frame")
    return kind, _exact(sock, length)


def send_done(sock: socket.socket, sample: int) -> None:
    sock.sendall(_ID.pack(sample))


def pairs(payload: bytes) -> list[tuple[int, int]]:
    """Of queries: each sample's id and which of the held-out inputs it is."""
    return [(int(sample), int(index)) for sample, index in _PAIR.iter_unpack(payload)]


def _exact(sock: socket.socket, size: int) -> bytes:
    out = bytearray()
    while len(out) < size:
        data = sock.recv(min(size - len(out), 1 << 20))
        if not data:
            raise EOFError("the other side is gone")
        out += data
    return bytes(out)


def _read_json(sock: socket.socket) -> dict[str, Any]:
    _, payload = receive(sock)
    found = json.loads(payload)
    if not isinstance(found, dict):
        raise EOFError("not a message of this protocol")
    return found


def _answer(sock: socket.socket, loadgen: Any, folder: str) -> None:
    """Tell LoadGen what is done, as the caller says it; the end of this process when the caller is gone."""
    try:
        while True:
            (sample,) = _ID.unpack(_exact(sock, _ID.size))
            loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample, 0, 0)])
    except (EOFError, OSError):
        # StartTest would wait for answers that nobody gives any more. A caller that was killed removes nothing itself.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _settings(loadgen: Any, start: dict[str, Any]) -> Any:
    settings = loadgen.TestSettings()
    if settings.FromConfig(start["file"], start["model"], start["scenario"], 1) != 0:
        raise ValueError(f"LoadGen cannot read {start['file']}")
    settings.scenario = getattr(loadgen.TestScenario, start["scenario"])
    settings.mode = loadgen.TestMode.PerformanceOnly
    # LoadGen's defaults know models by name, and a private model may have the name of one of them.
    settings.performance_sample_count_override = 0
    settings.use_token_latencies = settings.infer_token_latencies = False
    settings.print_timestamps = False
    return settings


def _run(sock: socket.socket) -> None:
    # Before anything that takes time: a caller that goes meanwhile leaves the folder to this process.
    start = _read_json(sock)
    loadgen = importlib.import_module("mlperf_loadgen")
    os.chdir(start["folder"])
    settings = _settings(loadgen, start)
    try:
        send(sock, JSON, json.dumps({name: getattr(settings, name) for name in SETTINGS}).encode())
        changes = _read_json(sock)
    except (EOFError, OSError):
        shutil.rmtree(start["folder"], ignore_errors=True)
        raise
    for name, value in changes.items():
        setattr(settings, name, value)
    send(sock, JSON, json.dumps({name: getattr(settings, name) for name in SETTINGS}).encode())

    def issue(samples: Sequence[Any]) -> None:
        with contextlib.suppress(OSError):  # the thread that reads ends this process
            send(sock, QUERIES, b"".join(_PAIR.pack(s.id, s.index) for s in samples))

    threading.Thread(
        target=_answer, args=(sock, loadgen, start["folder"]), name="answers", daemon=True
    ).start()
    output = loadgen.LogOutputSettings()
    output.outdir = start["folder"]
    output.prefix = "mlperf_log_"
    output.copy_summary_to_stdout = output.copy_detail_to_stdout = False
    logs = loadgen.LogSettings()
    logs.log_output, logs.enable_trace = output, False
    inputs = int(start["inputs"])
    library = loadgen.ConstructQSL(inputs, inputs, lambda _: None, lambda _: None)
    system = loadgen.ConstructSUT(issue, lambda: None)
    loadgen.StartTestWithLogSettings(system, library, settings, logs, os.path.join(start["folder"], "none"))
    send(sock, END, b"")


def main(arguments: list[str]) -> None:
    sock = socket.socket(fileno=int(arguments[1]))
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        _run(sock)
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            send(sock, FAULT, json.dumps({"type": type(error).__name__, "message": str(error)}).encode())
    # Without the interpreter's end, which would wait for LoadGen's threads.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
