"""Which cases a sweep runs, and an estimate of what is left that is honest while it knows little."""

from __future__ import annotations

import random
import re

import pytest

import secureinfer as si
from secureinfer.bench.cases import DEFAULT, LOAD, QUICK, STUDY, chosen, sweep
from secureinfer.bench.progress import Progress, duration, guess_seconds
from secureinfer.bench.report import CaseKey

# Cases.


def test_a_sweep_is_every_combination_once_in_the_order_given() -> None:
    keys = sweep(["fraud-mlp", "mlp-64"], ["none", "int8"], ["mpc,ckks"], ["loopback", "wan"], [1, 8, 1])
    assert len(keys) == len(set(keys)) == 2 * 2 * 2 * 2 * 2
    assert str(keys[0]) == "fraud-mlp/none/mpc/loopback/1"
    assert str(keys[-1]) == "mlp-64/int8/ckks/wan/8"


def test_what_is_not_said_is_the_plain_case_and_the_models_own_batch() -> None:
    assert [str(k) for k in sweep(["fraud-mlp", "minilm"])] == [
        "fraud-mlp/none/mpc/loopback/1",
        "minilm/none/mpc/loopback/6",
    ]
    assert sweep(["my/own.py:net"]) == [CaseKey(model="my/own.py:net")]


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        ((["frog"],), "no model 'frog'; there are logistic, fraud-mlp"),
        ((["frog"], [], [], [], [1]), "no model 'frog'"),
        ((["logistic"], ["int4"]), "no compression 'int4'; there are none, int8"),
        ((["logistic"], [], ["gpu"]), "no backend 'gpu'; there are mpc, crypten, ckks"),
        ((["logistic"], [], [], ["moon"]), "no network 'moon'; there are loopback, lan, wan"),
        ((["logistic"], [], [], [], [0]), "1 sample or more, got 0"),
        (([],), "name a model"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_those_that_do(
    lists: tuple[list[str], ...], why: str
) -> None:
    with pytest.raises(si.UsageError, match=why):
        sweep(*lists)  # type: ignore[arg-type]


def test_built_in_sweeps_have_no_case_twice_and_the_study_has_what_it_promises() -> None:
    for keys in (QUICK, DEFAULT, STUDY):
        assert len(keys) == len(set(keys))
    for model, batch in (("minilm", 6), ("bert-base", 1), ("resnet18", 1), ("fraud-mlp", 1)):
        for backend in ("mpc", "ckks"):
            for compression in ("none", "int8"):
                assert CaseKey(model=model, compression=compression, backend=backend, batch=batch) in STUDY
    for model in ("minilm", "fraud-mlp"):
        assert {k.network for k in STUDY if k.model == model} == {"loopback", "lan", "wan"}


def test_a_command_takes_a_built_in_sweep_or_the_part_of_it_that_fits() -> None:
    assert chosen([]) == list(DEFAULT)
    assert chosen([], quick=True) == list(QUICK)
    assert chosen([], study=True) == list(STUDY)
    assert {k.backend for k in chosen([], None, ["ckks"], quick=True)} == {"ckks"}
    assert {k.batch for k in chosen([], batches=[6])} == {6}
    assert chosen(["mlp-64"], quick=True) == [CaseKey(model="mlp-64")]
    assert chosen([], load=True) == [LOAD]
    with pytest.raises(si.UsageError, match="the quick sweep has no such case; name models"):
        chosen([], networks=["wan:projected"], quick=True)
    with pytest.raises(si.UsageError, match="no backend 'gpu'"):
        chosen([], backends=["gpu"])


# Progress.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


KEYS = sweep(
    ["fraud-mlp", "mlp-64", "mlp-256", "logistic"], ["none", "int8"], ["mpc", "ckks"], ["loopback", "lan"]
)


def guesses(keys: list[CaseKey]) -> dict[CaseKey, float]:
    seen: set[str] = set()
    found = {}
    for key in keys:
        found[key] = guess_seconds(key, first=key.model not in seen)
        seen.add(key.model)
    return found


def test_it_is_wide_at_first_and_narrow_once_cases_have_ended() -> None:
    clock = Clock()
    progress = Progress(KEYS, clock=clock)
    ratios = []
    for key, guess in guesses(KEYS).items():
        low, high = progress.between()
        ratios.append(high / low)
        progress.begin(key)
        clock.now += guess
        progress.end(key, guess)
    assert ratios[0] > 3
    assert ratios[8] < ratios[2] < ratios[1] < ratios[0]
    assert ratios[8] < 1.6
    assert progress.between() == (0.0, 0.0)
    assert progress.text() == ""


@pytest.mark.parametrize("slower", [0.4, 1.0, 3.0])
def test_it_learns_how_slow_this_machine_is(slower: float) -> None:
    clock = Clock()
    progress = Progress(KEYS, clock=clock)
    known = guesses(KEYS)
    for key in KEYS[:12]:
        progress.begin(key)
        clock.now += slower * known[key]
        progress.end(key, slower * known[key])
    left = slower * sum(known[key] for key in KEYS[12:])
    low, high = progress.between()
    assert low < left < high
    unlearnt = sum(known[key] for key in KEYS[12:])
    assert slower == 1.0 or not low < unlearnt < high


def test_two_times_in_three_the_truth_lies_between() -> None:
    """Cases that scatter around a machine's speed: too often inside would say that it is wider than it knows."""
    source = random.Random(0)
    inside = asked = 0
    for _ in range(150):
        clock, factor = Clock(), source.lognormvariate(0, 0.7)
        took = {key: factor * guess * source.lognormvariate(0, 0.4) for key, guess in guesses(KEYS).items()}
        progress = Progress(KEYS, clock=clock)
        for i, key in enumerate(KEYS[:-1]):
            if i in (0, 2, 6, 12, 24):
                low, high = progress.between()
                inside += low <= sum(took[k] for k in KEYS[i:]) <= high
                asked += 1
            progress.begin(key)
            clock.now += took[key]
            progress.end(key, took[key])
    assert 0.55 < inside / asked < 0.8


def test_a_case_that_takes_ever_longer_is_never_about_to_end() -> None:
    clock = Clock()
    key = CaseKey(model="fraud-mlp")
    progress = Progress([key], clock=clock)
    progress.begin(key)
    highest = []
    for now in (0.0, 30.0, 300.0, 3000.0):
        clock.now = now
        low, high = progress.between()
        assert 0 < low < high
        highest.append(high)
    assert highest[1] < highest[0]  # on time, it comes nearer
    assert highest[3] > highest[2] > 60


def test_what_failed_and_what_was_there_already_teach_nothing() -> None:
    known = guesses(KEYS)

    def after(seconds: float | None, *, ok: bool) -> float:
        clock = Clock()
        progress = Progress(KEYS, clock=clock)
        progress.begin(KEYS[0])
        clock.now += seconds or 0.0
        progress.end(KEYS[0], seconds, ok=ok)
        low, high = progress.between()
        return (low * high) ** 0.5

    left = sum(list(known.values())[1:])
    assert after(2.0, ok=False) == pytest.approx(left)
    assert after(2.0, ok=True) < 0.5 * left  # the same, taken for a case that ran
    # What was there prepared no model: the next case of it must.
    assert after(None, ok=True) == pytest.approx(left + known[KEYS[0]] - guess_seconds(KEYS[0], first=False))


def test_a_case_that_was_announced_twice_began_once_and_its_models_preparation_counts() -> None:
    clock = Clock()
    progress = Progress(KEYS[:2], clock=clock)
    progress.begin(KEYS[0])
    clock.now += 1000  # the model and plaintext engines
    progress.begin(KEYS[0])
    clock.now += 10
    progress.end(KEYS[0], 10)
    assert progress.between()[0] > 2 * guess_seconds(KEYS[1], first=False)


def test_it_reads_as_people_would_say_it() -> None:
    clock = Clock()
    progress = Progress(KEYS, clock=clock)
    assert re.fullmatch(r"between \d+ and \d+ min left", progress.text())
    known = guesses(KEYS)
    texts = []
    for key in KEYS:
        progress.begin(key)
        clock.now += known[key]
        progress.end(key, known[key])
        texts.append(progress.text())
    assert re.fullmatch(r"about \d+ min left", texts[12])
    assert texts[-1] == ""
    assert [duration(s) for s in (1, 42, 70, 240, 5400, 9500)] == [
        "5 s",
        "40 s",
        "1 min",
        "4 min",
        "1.5 h",
        "2.5 h",
    ]
