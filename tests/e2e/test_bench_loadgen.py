"""MLPerf LoadGen over real private sessions: what is dealt before a load, beside it, and a pool that does not keep up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.bench import loadgen_server
from secureinfer.bench.loadgen import recorded, run_load
from secureinfer.bench.loadgen_conf import read_conf, scenario_named
from secureinfer.bench.loadgen_fields import Request
from secureinfer.bench.pool import DealtPool
from secureinfer.bench.report import CaseKey, LoadResult
from secureinfer.measure.energy import EnergyMeter
from secureinfer.plan.program import Program
from secureinfer.session.client import Session
from secureinfer.session.local import LocalParties

pytestmark = pytest.mark.needs("bench")

KEY = CaseKey(model="small-mlp")
INPUTS = [(torch.rand(1, 16),) for _ in range(4)]
CONF = """\
*.*.min_duration = 0
*.SingleStream.target_latency_percentile = 50
*.SingleStream.min_query_count = 30
*.Offline.min_query_count = 30
*.Server.target_latency_percentile = 50
*.Server.target_latency = 2000
*.Server.min_query_count = 40
"""
"""A percentile of 50 is shown by 7 queries. The bound is far from what any machine takes: no test here is of speed."""


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    return si.compile(torch.nn.Sequential(*layers).eval(), INPUTS[0])


@pytest.fixture(scope="module")
def session(program: Program) -> Iterator[Session]:
    limits = {"limits": {"prepared_inferences": 200}}
    parties = LocalParties(program, threads=1, overrides={"data_owner": limits, "model_owner": limits})
    with parties.session() as opened:
        yield opened


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "small.conf").write_text(CONF)
    return tmp_path / "small.conf"


def load(session: Any, scenario: str, conf: Path, **options: Any) -> LoadResult:
    named = scenario_named(scenario)
    request = Request(KEY, named, read_conf(conf, KEY.model, named), **options)
    with EnergyMeter(sources=()) as meter:
        return recorded(request, lambda: contextlib.nullcontext(session), INPUTS, dealt=True, meter=meter)


class Slowed:
    """A real session whose inferences take longer by this much."""

    def __init__(self, session: Session, seconds: float) -> None:
        self._session = session
        self._seconds = seconds

    def infer(self, *inputs: Any) -> Any:
        time.sleep(self._seconds)
        return self._session.infer(*inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def test_prepared_counts_what_is_dealt_and_not_yet_used(session: Session) -> None:
    assert session.prepared() == 0 and session.room == 200
    session.prepare(3)
    assert session.prepared(refresh=False) == session.prepared() == 3
    session.infer(*INPUTS[0])
    assert session.prepared() == 2
    session.prepare(1, wait=False)
    stop = time.monotonic() + 60
    while session.prepared() < 3 and time.monotonic() < stop:
        time.sleep(0.01)
    assert session.prepared() == 3
    for _ in range(3):
        session.infer(*INPUTS[0])
    assert session.prepared() == 0


@pytest.mark.parametrize("scenario", ["single-stream", "offline"])
def test_what_is_dealt_beforehand_is_counted_in_what_is_sustained(
    session: Session, conf: Path, scenario: str
) -> None:
    result = load(session, scenario, conf)
    assert result.valid, result.invalid_reasons or result.fault
    pool = result.pool
    assert pool is not None and pool.beforehand and not pool.empty and pool.dealt == 0
    assert pool.at_start - pool.at_end == pool.used >= 30 and pool.offline_latency_ms
    assert result.samples_per_second and result.sustained_samples_per_second
    assert result.sustained_samples_per_second < result.samples_per_second
    assert result.energy.source == "estimated" and result.energy.joules
    while session.prepared():
        session.infer(*INPUTS[0])


def test_a_bounded_pool_is_dealt_for_beside_the_load(session: Session, conf: Path) -> None:
    result = load(session, "single-stream", conf, pool=4)
    assert result.valid and result.pool is not None and not result.pool.beforehand
    assert result.pool.capacity == result.pool.at_start == 4 and result.pool.used == 30
    assert result.pool.dealt >= 26 and result.pool.at_end == 4
    while session.prepared():
        session.infer(*INPUTS[0])


def test_a_server_holds_a_rate_with_its_pool_as_full_at_the_end(session: Session, conf: Path) -> None:
    result = load(session, "server", conf, pool=16)
    assert result.status == "ok", result.fault
    assert result.valid and result.qps, result.invalid_reasons
    pool = result.pool
    assert pool is not None and pool.at_end >= pool.at_start == pool.capacity == 16 and not pool.empty
    assert any(t.valid for t in result.trials)
    while session.prepared():
        session.infer(*INPUTS[0])


@pytest.mark.slow
def test_a_pool_that_is_not_refilled_is_found_out(
    session: Session, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DealtPool, "replenish", lambda self: None)
    monkeypatch.setattr(loadgen_server, "LOWEST_SHARE", 0.9)  # no rate would do: two are enough
    emptied = load(session, "server", conf, pool=8)
    assert not emptied.valid and emptied.qps == 0.0
    assert any("the pool was empty for" in reason for reason in emptied.invalid_reasons)
    assert all(not t.valid and t.why and "the pool was empty" in t.why for t in emptied.trials)
    fallen = load(session, "server", conf, pool=60)
    assert not fallen.valid and fallen.pool is not None and not fallen.pool.empty
    assert any("the pool fell from 60 to 20 prepared inferences" in r for r in fallen.invalid_reasons)
    while session.prepared():
        session.infer(*INPUTS[0])


@pytest.mark.slow
def test_a_slowed_session_breaks_its_bound(session: Session, conf: Path) -> None:
    conf.write_text(CONF.replace("= 2000", "= 20"))
    result = load(Slowed(session, 0.03), "server", conf, pool=4)
    assert not result.valid and result.qps == 0.0
    assert result.invalid_reasons[0].startswith("no rate holds 20 ms: the least latency alone")
    assert result.latency_ms_p50 is not None and result.latency_ms_p50 >= 30


@pytest.mark.slow
def test_run_load_opens_real_parties_and_ends_them(program: Program, conf: Path) -> None:
    said: list[str] = []
    result = run_load(
        program,
        INPUTS,
        KEY,
        "server",
        settings_file=conf,
        min_queries=20,
        threads=1,
        progress=said.append,
    )
    assert result.status == "ok" and result.qps and result.pool is not None, result.fault
    assert result.target_latency_ms == 2000 and result.target_percentile == 50
    assert any("starting the parties" in text for text in said) and any("trying" in text for text in said)


def test_a_session_that_cannot_open_is_recorded(program: Program) -> None:
    result = run_load(program.public(), INPUTS, KEY, "offline", settings_file="quick")
    assert result.status == "failed" and result.fault is not None
    assert result.fault.type == "ProgramFileError"


@pytest.mark.needs("he")
@pytest.mark.slow
def test_without_a_dealer_there_is_no_pool(conf: Path) -> None:
    program = si.compile(torch.nn.Linear(16, 2).eval(), INPUTS[0], backend="ckks")
    key = CaseKey(model="linear", backend="ckks")
    result = run_load(program, INPUTS, key, "single-stream", settings_file=conf, threads=1)
    assert result.valid and result.pool is None, result.fault or result.invalid_reasons
    assert result.sustained_samples_per_second == pytest.approx(result.samples_per_second, rel=0.1)
