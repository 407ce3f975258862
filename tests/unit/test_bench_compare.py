"""Comparing two reports: what is slower or fatter is told, and noise is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from secureinfer.bench.compare import compare
from secureinfer.bench.comparison import Comparison
from secureinfer.bench.figures import timed
from secureinfer.bench.report import Baseline, BenchReport, CaseKey, CaseResult, ModelFacts
from secureinfer.errors import UsageError

from .bench_reports import ENVIRONMENT, case, failed, load, merged, report

SEEDS = 300


def worse(found: Comparison) -> list[str]:
    return [row.figure for row in found.worse]


def test_a_report_is_the_same_as_itself() -> None:
    same = report(case())
    found = compare(same, same)
    assert not found.regressed and {row.verdict for row in found.rows} == {"same", "shown"}
    assert "nothing became slower or fatter" in str(found)


@pytest.mark.parametrize(("runs", "noise"), [(9, 0.03), (9, 0.15), (3, 0.05)])
def test_noise_alone_is_hardly_ever_told(runs: int, noise: float) -> None:
    alarms = [
        compare(
            report(case(seed, runs=runs, noise=noise)), report(case(seed + SEEDS, runs=runs, noise=noise))
        ).regressed
        for seed in range(SEEDS)
    ]
    assert sum(alarms) / SEEDS <= 0.03


def test_a_comparison_that_took_any_difference_of_means_would_cry_wolf() -> None:
    """The same reports by the ratio of means alone: what the intervals are for."""
    alarms = []
    for seed in range(SEEDS):
        found = compare(report(case(seed, noise=0.15)), report(case(seed + SEEDS, noise=0.15)))
        alarms.append(any(r.unit == "x" and (r.ratio or 0) > 1.05 for r in found.rows))
    assert sum(alarms) / SEEDS > 0.3


@pytest.mark.parametrize(("runs", "noise"), [(9, 0.05), (5, 0.03), (3, 0.02)])
def test_a_fifth_slower_is_found(runs: int, noise: float) -> None:
    found = [
        "online / torch eager fp32"
        in worse(
            compare(
                report(case(seed, runs=runs, noise=noise)),
                report(case(seed + SEEDS, runs=runs, noise=noise, secure=1.2)),
            )
        )
        for seed in range(SEEDS)
    ]
    assert sum(found) / SEEDS >= 0.9


def test_a_fifth_quicker_is_better_and_no_regression() -> None:
    found = compare(report(case(1)), report(case(2, secure=1 / 1.2)))
    assert not found.regressed
    assert [r.verdict for r in found.rows if r.figure == "online / torch eager fp32"] == ["better"]


def test_a_machine_that_is_twice_as_slow_for_both_sides_is_no_regression() -> None:
    alarms = [
        compare(report(case(seed)), report(case(seed + SEEDS, machine=2.0))).regressed
        for seed in range(SEEDS)
    ]
    assert sum(alarms) / SEEDS <= 0.03
    absolute = next(
        r for r in compare(report(case(1)), report(case(2, machine=2.0))).rows if r.figure == "online latency"
    )
    assert absolute.verdict == "shown" and absolute.ratio == pytest.approx(2, rel=0.15)


def test_absolute_times_would_have_told_it() -> None:
    """The planted fault: without plaintext beside it nothing but absolute time is left, and the slow machine is told."""
    found = compare(report(case(1, baselines=())), report(case(2, machine=2.0, baselines=())))
    assert "online latency" in worse(found)


def test_other_environments_are_told_and_absolute_times_not_judged_in_them() -> None:
    other = report(case(2, machine=2.0, baselines=()), environment=ENVIRONMENT | {"processor": "Another"})
    found = compare(report(case(1, baselines=())), other)
    assert not found.regressed and found.environment == {"processor": ("A processor", "Another")}
    assert "processor: A processor before, Another now" in str(found)
    newer = report(case(1), environment=ENVIRONMENT | {"secureinfer": "0.2.0", "load_average": 0.3})
    assert compare(report(case(1)), newer).environment == {}  # the versions are what is compared


@pytest.mark.parametrize(
    ("session", "figure"),
    [
        ({"online": {"bytes": 5001}}, "online bytes"),
        ({"online": {"rounds": 13}}, "online rounds"),
        ({"offline": {"bytes": 9001}}, "dealt bytes"),
        ({"setup": {"bytes": 701}}, "setup bytes"),
        ({"online": {"peak_memory_bytes": 880_000_000}}, "online peak memory"),
        ({"offline": {"peak_memory_bytes": 440_000_000}}, "offline peak memory"),
    ],
)
def test_one_byte_one_round_or_a_tenth_of_memory_more_is_told(session: dict[str, Any], figure: str) -> None:
    before, after = report(case(1)), report(case(1, session=session))
    assert worse(compare(before, after)) == [figure]
    assert not compare(after, before).regressed
    told = " ".join(str(compare(before, after)).split())
    assert "WORSE" in told and "1 figure(s) became slower or fatter" in told
    if "bytes" in figure and "memory" not in figure:
        assert "1 B" in told  # to the byte: 5.00 kB and 5.00 kB would tell nothing


def test_memory_within_the_tolerance_is_the_same_and_the_tolerance_is_the_users() -> None:
    before = report(case(1))
    after = report(case(1, session={"online": {"peak_memory_bytes": 830_000_000}}))
    assert not compare(before, after).regressed
    assert worse(compare(before, after, tolerance=0.01)) == ["online peak memory"]


def test_compressed_ciphertexts_may_differ_by_a_few_bytes_and_not_by_a_tenth() -> None:
    def ckks(count: int) -> BenchReport:
        return report(
            case(1, session={"program": {"planned": {"exact_bytes": False}}, "online": {"bytes": count}})
        )

    assert not compare(ckks(5000), ckks(5010)).regressed
    assert worse(compare(ckks(5000), ckks(5500))) == ["online bytes"]


def test_a_larger_program_is_told() -> None:
    facts = case(1).model
    assert isinstance(facts, ModelFacts)
    after = report(case(1, model=facts.model_copy(update={"compressed_bytes": 8000, "program_bytes": 9900})))
    assert worse(compare(report(case(1)), after)) == ["model", "program"]


def test_energy_beyond_tolerance_and_noise_is_told_and_less_is_not() -> None:
    assert worse(compare(report(case(1)), report(case(1, energy=1.3)))) == ["online energy"]
    assert not compare(report(case(1)), report(case(1, energy=1.03))).regressed


def test_energy_of_another_source_or_environment_is_shown_and_not_judged() -> None:
    after = case(1, energy=2.0)
    estimated = after.online_energy.model_copy(update={"source": "estimated"})
    found = compare(report(case(1)), report(after.model_copy(update={"online_energy": estimated})))
    row = next(r for r in found.rows if r.figure == "online energy")
    assert row.verdict == "shown" and row.note == "not judged: rapl before, estimated now"
    assert not compare(report(case(1)), report(after, environment=ENVIRONMENT | {"cores": 4})).regressed


def test_what_failed_what_is_missing_and_what_is_new_is_told() -> None:
    other = CaseKey(model="resnet")
    gone = compare(report(case(1), case(1, key=other)), report(case(1), complete=False))
    assert not gone.regressed and "missing" in str(gone) and "the sweep was stopped" in str(gone)
    new = compare(report(case(1)), report(case(1), case(1, key=other)))
    assert not new.regressed and "it is new" in str(new)
    broken = compare(report(case(1)), report(failed()))
    assert worse(broken) == ["case"] and "it fails now: PeerError: dealer: it is gone" in str(broken)
    assert not compare(report(failed()), report(failed())).regressed
    mended = compare(report(failed()), report(case(1)))
    assert [r.verdict for r in mended.rows] == ["better"]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (False, False)])
def test_what_is_not_valid_is_told_and_not_judged(before: bool, after: bool) -> None:
    def reason(valid: bool) -> dict[str, Any]:
        return {"valid": valid, "invalid_reason": None if valid else "too short"}

    found = compare(
        report(case(1, **reason(before))),
        report(case(1, secure=2.0, session={"online": {"bytes": 9}}, **reason(after))),
    )
    assert not found.regressed and "not valid" in str(found) and "too short" in str(found)


def test_another_model_or_other_threads_are_not_like_for_like() -> None:
    facts = case(1).model
    assert facts is not None
    other = case(1, secure=2.0, model=facts.model_copy(update={"title": "Another perceptron"}))
    assert [r.verdict for r in compare(report(case(1)), report(other)).rows] == ["shown"]
    threads = case(1, secure=2.0, settings={"threads": 1}, session={"online": {"bytes": 5001}})
    found = compare(report(case(1)), report(threads))
    assert worse(found) == ["online bytes"] and "threads None before, 1 now" in str(found)
    longer = case(1, settings={"threads": None, "seconds": 60.0})  # the same, measured for longer
    assert not any(r.figure == "case" for r in compare(report(case(1)), report(longer)).rows)


def test_another_plaintext_stands_in_where_eager_fp32_did_not_run() -> None:
    def without(found: Any) -> Any:
        kept = tuple(b for b in found.baselines if b.engine != "torch eager")
        return found.model_copy(update={"baselines": kept})

    found = compare(report(without(case(1))), report(without(case(2, secure=1.3))))
    assert "online / onnxruntime int8" in worse(found)


def test_without_the_runs_the_intervals_of_the_means_are_taken() -> None:
    def without(found: Any) -> Any:
        def bare(timing: Any) -> Any:
            return timing.model_copy(update={"runs_ms": ()})

        baselines = tuple(
            b if b.latency is None else b.model_copy(update={"latency": bare(b.latency)})
            for b in found.baselines
        )
        return found.model_copy(
            update={"online": bare(found.online), "offline": bare(found.offline), "baselines": baselines}
        )

    before = report(without(case(1, runs=40)))
    assert "online / torch eager fp32" in worse(
        compare(before, report(without(case(2, runs=40, secure=1.5))))
    )
    assert not compare(before, report(without(case(2, runs=40)))).regressed


def test_two_runs_say_nothing_and_it_is_told_that_they_do() -> None:
    found = compare(report(case(1, runs=2)), report(case(2, runs=2, secure=3.0)))
    assert not found.regressed and "an interval takes 3 runs" in str(found)


def test_loads_are_shown_and_a_load_that_fails_now_is_a_regression() -> None:
    before = report(loads=(load(),))
    slower = compare(before, report(loads=(load(qps=10.0),)))
    assert not slower.regressed and [r.ratio for r in slower.rows if r.figure == "rate"] == [0.5]
    broken = load(status="failed", valid=False, fault={"type": "PeerError", "message": "gone"})
    assert worse(compare(before, report(loads=(broken,)))) == ["case"]
    empty = load(valid=False, invalid_reasons=("the pool ran empty",))
    assert "the pool ran empty" in str(compare(before, report(loads=(empty,))))


def test_the_json_is_whole_and_versioned() -> None:
    data = json.loads(
        json.dumps(compare(report(case(1)), report(case(2, secure=1.5))).to_dict(), allow_nan=False)
    )
    assert data["schema"] == "secureinfer.compare/1" and data["regressed"] is True
    row = next(r for r in data["rows"] if r["figure"] == "online / torch eager fp32")
    assert (
        row["verdict"] == "worse" and 1.05 < row["interval"]["low"] < row["ratio"] < row["interval"]["high"]
    )


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_is_no_part_is_refused(tolerance: float) -> None:
    with pytest.raises(UsageError, match="such as 0.05"):
        compare(report(), report(), tolerance)


def test_sessions_of_another_shape_are_unknown_and_no_error() -> None:
    odd = case(1, session=merged({}, {"online": None, "offline": {"bytes": "many"}, "program": None}))
    found = compare(report(case(1)), report(odd))
    row = next(r for r in found.rows if r.figure == "online bytes")
    assert row.verdict == "shown" and row.note == "not judged: unknown now"
    assert not found.regressed


def test_a_baseline_without_latency_is_not_paired() -> None:
    bare = tuple(Baseline(engine="torch eager", dtype="fp32", status="ok") for _ in range(1))
    assert compare(report(case(1, baselines=bare)), report(case(1, baselines=bare))).regressed is False


def test_nothing_beside_nothing_is_said_to_be_nothing() -> None:
    assert "nothing to compare" in str(compare(report(), report()))


# Networks: what was computed, and what a delay does to ratios.

WAN = CaseKey(model="mlp", network="wan")


def over_wan(found: CaseResult, more_ms: float, **changes: Any) -> CaseResult:
    """The same case with a network's delay in each private run."""
    online, offline = (
        timed([ms + more_ms for ms in part.runs_ms], part.cold_latency_ms)
        for part in (found.online, found.offline)
        if part is not None
    )
    return found.model_copy(update={"key": WAN, "online": online, "offline": offline, **changes})


@pytest.mark.parametrize("first", [True, False])
def test_a_computed_figure_is_never_slower_or_faster_than_a_measured_one(first: bool) -> None:
    computed = over_wan(case(1), 100.0, projected="no namespaces here")
    measured = over_wan(case(2), 900.0)
    pair = (computed, measured) if first else (measured, computed)
    found = compare(report(pair[0]), report(pair[1]))
    assert not found.regressed
    times = [r for r in found.rows if r.unit in ("x", "ms")]
    assert times and {r.verdict for r in times} == {"shown"}
    assert not any(r.unit == "J" for r in found.rows)
    assert "times and energy are not judged" in str(found) and "computed" in str(found)


def test_beside_a_measured_one_the_same_difference_is_a_regression() -> None:
    """The planted fault: without `projected` this is a case that became much slower."""
    found = compare(report(over_wan(case(1), 100.0)), report(over_wan(case(2), 900.0)))
    assert "online / torch eager fp32" in worse(found)


def test_bytes_and_rounds_of_a_computed_case_are_counted_and_stay_judged() -> None:
    computed = over_wan(case(1, session={"online": {"rounds": 13}}), 100.0, projected="asked for")
    assert worse(compare(report(over_wan(case(1), 900.0)), report(computed))) == ["online rounds"]


def test_two_computed_cases_are_compared_and_it_is_said_that_they_are() -> None:
    before, after = (
        over_wan(case(seed, secure=secure), 100.0, projected="asked for")
        for seed, secure in ((1, 1.0), (2, 2.0))
    )
    found = compare(report(before), report(after))
    assert "online / torch eager fp32" in worse(found) and "computed from a loopback run in both" in str(
        found
    )


def test_a_quicker_machine_over_the_same_network_is_no_regression() -> None:
    """Plaintext takes half of its time and the delay all of it: the ratio alone nearly doubles."""
    before, after = over_wan(case(1), 5000.0), over_wan(case(2, machine=0.5), 5000.0)
    found = compare(report(before), report(after))
    assert not found.regressed
    row = next(r for r in found.rows if r.figure == "online / torch eager fp32")
    assert (row.ratio or 0) > 1.5 and row.verdict == "unclear"


def test_a_case_is_compared_by_its_own_machine() -> None:
    """Kept from a run on another one: the report's environment is that of the last run."""
    other = case(2, machine=2.0, baselines=(), environment=ENVIRONMENT | {"processor": "Another"})
    assert not compare(report(case(1, baselines=())), report(other)).regressed
