"""A small run of `python -m benchmarks peers` with real processes, and what is left of it when it is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPU = "SECUREINFER_SPU_PYTHON"
CALL = [sys.executable, "-m", "benchmarks", "peers", "--small", "--look-up", "private"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_engines_take_turns_on_the_same_weights_and_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CALL, "--runs", "2", "--no-torch-compile", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "peers.json").read_text())
    rows = {found["engine"]: found for found in told["rows"]}
    assert list(rows) == ["plaintext", "fast", "crypten", "crypten_stock", "spu", "spu_tanh"]
    assert (rows["spu"]["status"] == "unavailable") is (SPU not in os.environ)
    ran = [found for found in rows.values() if found["status"] in ("ok", "wrong")]
    assert len(ran) >= 4, [(name, found["why"]) for name, found in rows.items()]
    for found in ran:
        assert (found["model_digest"], found["input_digest"]) == (told["model_digest"], told["input_digest"])
        assert len(found["latency_ms"]) == 2 and found["error"] is not None
    for name in ("plaintext", "fast", "crypten"):
        assert rows[name]["status"] == "ok", rows[name]["why"]
    for found in ran[1:]:
        assert found["bytes"] > 0
    assert rows["crypten_stock"]["rounds"] > 0 and rows["fast"]["rounds"] > 0


def test_a_killed_run_leaves_no_process() -> None:
    with subprocess.Popen(
        [*CALL, "--engine", "crypten_stock", "--runs", "10000"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as run:  # fmt: skip
        assert run.stderr is not None
        assert any(line.startswith("turn 1 ") for line in run.stderr)
        parties = list(_children(run.pid))
        run.send_signal(signal.SIGKILL)
        run.wait()
        stop = time.monotonic() + 20
        while any(map(_runs, parties)) and time.monotonic() < stop:
            time.sleep(0.1)
    assert len(parties) == 2 and not any(map(_runs, parties))


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield int(folder.name)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
