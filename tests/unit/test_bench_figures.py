"""Figures of a report are what their definitions say, worked out by hand."""

from __future__ import annotations

import pytest

from secureinfer.bench.figures import energy_of, overheads, timed, total
from secureinfer.bench.report import Baseline, Energy
from secureinfer.measure.energy import Spent


def baseline(engine: str, dtype: str, *runs_ms: float, status: str = "ok") -> Baseline:
    return Baseline.model_validate(
        {"engine": engine, "dtype": dtype, "status": status, "latency": timed(runs_ms) if runs_ms else None}
    )


EAGER = baseline("torch eager", "fp32", 2.0, 4.0, 3.0)
QUICK = baseline("onnxruntime", "int8", 1.0, 1.0, 1.0)
ONLINE = timed([200.0, 400.0, 300.0], 900.0)
OFFLINE = timed([20.0, 40.0, 30.0], 90.0)


def test_latencies_keep_their_runs_in_order_and_the_cold_one_apart() -> None:
    assert ONLINE.runs_ms == (200.0, 400.0, 300.0)
    assert (ONLINE.count, ONLINE.latency_ms, ONLINE.latency_ms_p50) == (3, 300, 300)
    assert ONLINE.cold_latency_ms == 900 and ONLINE.latency_ms_p90 is None
    assert ONLINE.latency_ms_interval is not None and ONLINE.latency_ms_p50_interval is None
    assert timed([]).latency_ms is None


def test_overheads_are_of_both_phases_against_fp32_and_the_quickest_and_name_both_sides() -> None:
    found = {(o.phase, o.against): o for o in overheads(ONLINE, OFFLINE, [EAGER, QUICK], "mpc")}
    assert {k: o.ratio for k, o in found.items()} == {
        ("online", "fp32"): 100,
        ("online", "best"): 300,
        ("total", "fp32"): 110,
        ("total", "best"): 330,
    }
    assert found["total", "best"].numerator == "mpc offline + online latency"
    assert found["total", "best"].denominator == "onnxruntime int8"
    interval = found["online", "fp32"].interval  # each run is 100 times its pair, however slow the block was
    assert interval is not None and (interval.low, interval.high) == (pytest.approx(100), pytest.approx(100))


def test_without_an_offline_phase_the_total_is_what_is_online() -> None:
    found = {(o.phase, o.against): o for o in overheads(ONLINE, None, [EAGER])}
    assert found["total", "fp32"].ratio == found["online", "fp32"].ratio == 100
    assert found["total", "fp32"].numerator == "secure online latency"
    assert found["online", "best"].denominator == "torch eager fp32"


def test_what_did_not_run_is_no_baseline() -> None:
    failed = [
        baseline("onnxruntime", "fp32", 0.1, status="failed"),
        baseline("torch.compile", "fp32", status="unavailable"),
    ]
    assert overheads(ONLINE, OFFLINE, failed) == ()
    assert {o.against for o in overheads(ONLINE, OFFLINE, [*failed, QUICK])} == {"best"}


def test_runs_that_do_not_pair_give_a_ratio_without_an_interval() -> None:
    (first, *_) = overheads(ONLINE, None, [baseline("torch eager", "fp32", 3.0, 3.0)])
    assert first.ratio == 100 and first.interval is None
    unpaired = total(ONLINE, timed([30.0]))
    assert unpaired.latency_ms == 330 and unpaired.runs_ms == ()


def test_energy_is_of_one_inference_and_one_sample() -> None:
    found = energy_of([Spent(1, 6, 4, "rapl"), (Spent(2, 12, 8, "rapl"), 2)], samples=4)
    assert (found.joules, found.joules_per_sample, found.above_idle_joules, found.source) == (
        6,
        1.5,
        4,
        "rapl",
    )


@pytest.mark.parametrize(
    "spent",
    [
        [],
        [Spent(1, 6, 4, "rapl"), Spent(1, None, None, None)],
        [Spent(1, 6, 4, "rapl"), Spent(1, 6, None, "estimated")],
    ],
)
def test_energy_is_unknown_as_a_whole_if_a_part_of_it_is(spent: list[Spent]) -> None:
    assert energy_of(spent, samples=1) == Energy()


def test_an_estimate_has_nothing_above_idle() -> None:
    assert energy_of([Spent(1, 6, None, "estimated")], 1).above_idle_joules is None
