"""What the transport benchmark prints, and how it is called. Its figures are no test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from secureinfer.bench.transport import Row, as_json, jobs, table

ROWS = [Row("round trip", "ms", 8, 0.1, 0.4, 0.2), Row("one way", "GB/s", 1 << 20, 0.9, 0.45, 1.8)]


def test_a_ratio_names_both_sides() -> None:
    assert [(r.tls_ratio, r.grpc_ratio) for r in ROWS] == [(0.5, 2.0), (0.5, 0.25)]
    text = table(ROWS)
    assert "| tls | grpc | gloo |" in text and "1,024 KiB" in text and "| 0.50 | 0.25 |" in text
    assert as_json(ROWS)["rows"][1]["grpc_ratio"] == 0.25


def test_one_gigabyte_in_one_message_is_measured() -> None:
    assert any(j.size == 1 << 30 for j in jobs(quick=False))
    assert not any(j.size == 1 << 30 for j in jobs(quick=True))


def test_a_wrong_call_says_what_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nothing"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2 and "transport" in done.stderr
