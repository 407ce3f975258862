"""Intervals hold as often as they say, and none is given where too few runs support one."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from secureinfer.measure.intervals import (
    Interval,
    change_interval,
    mean_interval,
    percentile_interval,
    ratio_interval,
    student_quantile,
)
from secureinfer.measure.latency import summarise

SEEDS = 2000


@pytest.mark.parametrize(
    ("probability", "degrees", "table"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.975, 30, 2.042), (0.995, 4, 4.604)],
)
def test_students_factors_are_those_of_the_tables(probability: float, degrees: int, table: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(table, abs=5e-4)


def _share(holds: list[bool]) -> float:
    return sum(holds) / len(holds)


@pytest.mark.parametrize("count", [3, 10])
def test_the_mean_lies_in_its_interval_in_19_of_20_samples(count: int) -> None:
    found = []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        interval = mean_interval([draw.gauss(100, 5) for _ in range(count)])
        assert interval is not None
        found.append(interval.low <= 100 <= interval.high)
    assert 0.93 <= _share(found) <= 0.97


@pytest.mark.parametrize(("percent", "count"), [(50, 6), (50, 25), (90, 60)])
def test_a_percentile_lies_in_its_interval_whatever_the_distribution(percent: int, count: int) -> None:
    true = -math.log(1 - percent / 100)  # of an exponential variable
    found = []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        interval = percentile_interval([draw.expovariate(1) for _ in range(count)], percent)
        assert interval is not None
        found.append(interval.low <= true <= interval.high)
    assert _share(found) >= 0.93


@pytest.mark.parametrize(("percent", "least"), [(50, 6), (90, 36), (99, 368)])
def test_a_percentile_has_no_interval_where_no_run_bounds_it(percent: int, least: int) -> None:
    assert percentile_interval([float(v) for v in range(least - 1)], percent) is None
    assert percentile_interval([float(v) for v in range(least)], percent) is not None


def _pairs(seed: int, count: int, noise: float = 0.03) -> tuple[list[float], list[float]]:
    """Secure and plaintext runs, 100 to 1, of blocks in which the machine is up to twice as slow for both."""
    draw = random.Random(seed)
    machine = [draw.uniform(1, 2) for _ in range(count)]
    return (
        [100 * m * math.exp(draw.gauss(0, noise)) for m in machine],
        [m * math.exp(draw.gauss(0, noise)) for m in machine],
    )


@pytest.mark.parametrize("count", [3, 5, 20])
def test_the_ratio_lies_in_its_interval_in_19_of_20_samples(count: int) -> None:
    found = []
    for seed in range(SEEDS):
        interval = ratio_interval(*_pairs(seed, count))
        assert interval is not None
        found.append(interval.low <= 100 <= interval.high)
    assert 0.93 <= _share(found) <= 0.97


def test_pairing_takes_out_what_slows_both_sides_and_wrong_pairs_do_not() -> None:
    secure, plain = _pairs(1, 12)
    paired, mixed = ratio_interval(secure, plain), ratio_interval(secure, plain[5:] + plain[:5])
    assert paired is not None and mixed is not None
    assert paired.high / paired.low < 1.1 < 1.2 < mixed.high / mixed.low


def test_there_is_no_ratio_of_too_few_or_unpaired_runs() -> None:
    assert ratio_interval([2.0, 2.0], [1.0, 1.0]) is None
    assert ratio_interval([2.0, 2.0, 2.0], [1.0, 1.0]) is None
    assert ratio_interval([2.0, 2.0, 2.0], [1.0, 0.0, 1.0]) is None
    assert mean_interval([1.0, 2.0]) is None and percentile_interval([], 50) is None


def test_a_change_of_a_fifth_is_found_and_noise_is_none() -> None:
    def runs(draw: random.Random, scale: float) -> list[float]:
        stalls = [2.0 if draw.random() < 0.05 else 1.0 for _ in range(12)]
        return [scale * stall * math.exp(draw.gauss(0, 0.05)) for stall in stalls]

    false, found = [], []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        before, same, slower = runs(draw, 1.0), runs(draw, 1.0), runs(draw, 1.2)
        _, noise = change_interval(before, same)
        ratio, change = change_interval(before, slower)
        assert noise is not None and change is not None and change.low <= ratio <= change.high
        false.append(noise.low > 1)
        found.append(change.low > 1)
    assert _share(false) <= 0.04 and _share(found) >= 0.93


def test_intervals_stand_in_a_summary_as_json_and_are_null_where_unknown() -> None:
    many, few = (dataclasses.asdict(summarise([float(v) for v in range(10, 10 + n)])) for n in (40, 2))
    assert json.loads(json.dumps(many))["latency_ms_p90_interval"] == {
        "low": 41.0,
        "high": 49.0,
        "confidence": 0.95,
    }
    assert many["latency_ms_interval"]["low"] < many["latency_ms"] < many["latency_ms_interval"]["high"]
    assert many["latency_ms_p99_interval"] is None and few["latency_ms_interval"] is None


def test_an_interval_of_wild_values_is_still_a_number() -> None:
    _, wide = change_interval([1e-9, 1.0, 1e9], [1e-9, 1.0, 1e9], 0.9999)
    assert isinstance(wide, Interval) and math.isfinite(wide.high)
