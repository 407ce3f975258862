"""What the benchmarks print, and how they are called. Their figures are no test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from secureinfer.bench.transport import Row, as_json, jobs, table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
from benchmarks import ckks, ckks_models  # noqa: E402

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
        cwd=ROOT,
    )
    assert done.returncode == 2 and "ckks" in done.stderr and "transport" in done.stderr


def test_models_are_the_same_every_time_and_take_values_from_0_to_1() -> None:
    for make in (ckks_models.matvec, ckks_models.square_mlp, ckks_models.lola):
        (model, x), (again, y) = make(), make()
        assert torch.equal(model(x), again(y)) and 0 <= float(x.min()) and float(x.max()) <= 1
    model, digits = ckks_models.digits_mlp(ckks.FULL_BATCH)
    assert digits.shape == (4096, 64) and 0 <= float(digits.min()) and float(digits.max()) <= 1
    assert float(model(digits).abs().max()) < 64


def test_an_engine_that_is_not_there_has_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ckks_models.lola()
    plain: ckks.Opening = ("torch fp32", 1, lambda: ckks.Plain(model, x))
    peer: ckks.Opening = ("Orion", 1, lambda: ckks.orion("lola", model, x, 1))
    monkeypatch.delenv(ckks.ORION_PYTHON, raising=False)
    rows = ckks.measure("case", 1, plain, peer)
    assert [row.engine for row in rows] == ["torch fp32", "Orion"] and rows[0].ratio == 1
    assert "benchmarks.peers.orion --setup" in (rows[1].unavailable or "")
    assert "| Orion: unavailable: SECUREINFER_ORION_PYTHON" in ckks.table(rows)
    assert ckks.as_json(rows)["rows"][1]["online_ms"] is None
    monkeypatch.setenv(ckks.ORION_PYTHON, "/nowhere/python")
    assert "/nowhere/python: No such file" in (ckks.measure("case", 1, peer)[0].unavailable or "")


def test_a_peer_that_fails_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ckks_models.matvec()
    monkeypatch.setenv(ckks.ORION_PYTHON, sys.executable)
    peer: ckks.Opening = ("Orion", 1, lambda: ckks.orion("no such model", model, x, 1))
    (row,) = ckks.measure("case", 1, peer)
    assert row.unavailable is not None and "no such model" in row.unavailable


def test_a_peer_with_the_same_weights_takes_turns() -> None:
    pytest.importorskip("tenseal")
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 4)), torch.rand(1, 16)
    peer: ckks.Opening = ("TenSEAL", 1, lambda: ckks.tenseal_mm(model, x, 1))
    (row,) = ckks.measure("case", 1, peer)
    assert row.unavailable is None and row.error is not None and row.error < 1e-3
