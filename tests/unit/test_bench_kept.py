"""A sweep that goes on: what it keeps says on what it ran, and is run again where machine, code or weights are others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secureinfer.bench.kept import Checks, code_of, weights_digest
from secureinfer.bench.report import CaseKey, Meter
from secureinfer.bench.runner import Effort
from secureinfer.bench.sweep import Folder, Plan, Watcher, sweep
from secureinfer.errors import UsageError
from secureinfer.measure.counters import Absent
from secureinfer.measure.energy import EnergyMeter

from .bench_reports import case

KEY = CaseKey(model="mlp")
UNIT = (KEY, None)
ENVIRONMENT = {"processor": "A", "secureinfer": "0.1.0", "load_average": 0.1}
METER = Meter(source="rapl", idle_watts=31.5, idle_seconds=3.0)
EFFORT = Effort(least_runs=3)


def model(value: float = 1.0) -> nn.Module:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.fill_(value)
        module.bias.zero_()
    return module


def checks(**changes: Any) -> Checks:
    environment = ENVIRONMENT | changes.pop("environment", {})
    value, code = changes.pop("weights", 1.0), changes.pop("code", "code")
    return Checks(
        environment=lambda: environment,
        code=lambda name: f"{code} of {name}",
        weights=lambda key: None if value is None else model(value),
    )


def kept(folder: Path, **changes: Any) -> tuple[bool, list[str]]:
    told: list[str] = []
    found = Folder(folder).kept(UNIT, EFFORT.to_dict(), checks(**changes), told.append)
    return found is not None, told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = case(1, key=KEY, environment=ENVIRONMENT, meter=METER)
    Folder(tmp_path).keep(found, EFFORT.to_dict(), checks())
    return tmp_path


def test_what_is_the_same_is_kept_however_loaded_the_machine_is_now(folder: Path) -> None:
    assert kept(folder, environment={"load_average": 1.9}) == (True, [])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"environment": {"processor": "B"}}, "processor was A, and is B"),
        ({"environment": {"secureinfer": "0.2.0"}}, "secureinfer was 0.1.0, and is 0.2.0"),
        ({"environment": {"gpus": ["one"]}}, "gpus was None"),
        ({"weights": 1.0001}, "the model's weights are others"),
        ({"weights": None}, "the model's weights are others"),
        ({"code": "edited"}, "the model's own file, is another"),
    ],
)
def test_another_machine_version_weight_or_code_is_run_again_and_it_says_which(
    folder: Path, changes: dict[str, Any], word: str
) -> None:
    found, told = kept(folder, **changes)
    assert not found and len(told) == 1 and word in told[0] and str(KEY) in told[0]


def test_a_file_of_before_that_says_no_machine_is_run_again(folder: Path) -> None:
    file = Folder(folder).file(UNIT)
    body = json.loads(file.read_text())
    del body["stamp"]
    file.write_text(json.dumps(body))
    found, told = kept(folder)
    assert not found and "does not say" in told[0]


@pytest.mark.parametrize(
    "body", ["", "[]", "{", '{"result": []}', '{"settings": {}, "stamp": 3, "result": {}}']
)
def test_leftovers_that_are_no_result_are_as_good_as_none(folder: Path, body: str) -> None:
    Folder(folder).file(UNIT).write_text(body)
    assert kept(folder) == (False, [])


def test_the_digest_of_weights_is_salted_and_stands_in_no_report(folder: Path) -> None:
    Folder(folder).keep(case(1, key=KEY, environment=ENVIRONMENT), EFFORT.to_dict(), checks())
    first, second = (weights_digest(model(), salt) for salt in ("a", "b"))
    assert first != second == weights_digest(model(), "b")
    stamp = json.loads(Folder(folder).file(UNIT).read_text())["stamp"]
    with EnergyMeter(sources=[Absent("rapl", "none")]) as meter:
        report = sweep(Plan((KEY,), EFFORT), Folder(folder), Watcher(), meter=meter, checks=checks())
    assert report.cases and stamp["weights"] not in report.to_json()


def test_all_kept_cases_have_their_own_machine_and_meter_and_the_report_has_no_empty_one(
    folder: Path,
) -> None:
    """The planted fault: this run's meter has measured no idle, and its estimate says nothing of the kept joules."""
    with EnergyMeter(sources=[Absent("rapl", "none")]) as meter:
        assert meter.describe()["idle_watts"] is None
        now = checks(environment={"load_average": 1.9})
        report = sweep(Plan((KEY,), EFFORT), Folder(folder), Watcher(), meter=meter, checks=now)
    (found,) = report.cases
    assert found.meter == METER == report.meter
    assert found.environment == ENVIRONMENT == report.environment


def test_what_fails_now_does_not_replace_figures_that_are_there(folder: Path) -> None:
    """Such as a user's file that is not found from another directory: hours of figures would be lost."""
    with EnergyMeter(sources=[Absent("rapl", "none")]) as meter:
        report = sweep(
            Plan((KEY,), EFFORT), Folder(folder), Watcher(), meter=meter, checks=checks(weights=None)
        )
    assert [found.status for found in report.cases] == ["failed"], "there is no model of this name"
    assert kept(folder) == (True, [])


def test_two_sweeps_do_not_run_in_one_folder(folder: Path) -> None:
    with EnergyMeter(sources=[Absent("rapl", "none")]) as meter:
        with Folder(folder).alone(), pytest.raises(UsageError, match="another sweep runs in"):
            sweep(Plan((KEY,), EFFORT), Folder(folder), Watcher(), meter=meter, checks=checks())
        after = sweep(Plan((KEY,), EFFORT), Folder(folder), Watcher(), meter=meter, checks=checks())
    assert after.complete and len(after.cases) == 1


def test_structure_counts_as_weights_do() -> None:
    a, b = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.GELU())
    b.load_state_dict(a.state_dict())
    assert weights_digest(a, "") != weights_digest(b, "")


def test_a_users_file_is_code_too(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("a = 1\n")
    before = code_of(f"{file}:a")
    file.write_text("a = 2\n")
    assert code_of(f"{file}:a") != before == before
    assert code_of("no.such.module:a") == code_of("no.such.module:a")


@pytest.mark.parametrize("name", ["sweep.json", "report.md"])
def test_a_folder_where_a_file_should_be_is_a_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with (
        EnergyMeter(sources=[Absent("rapl", "none")]) as meter,
        pytest.raises(UsageError, match="cannot write"),
    ):
        sweep(Plan((), EFFORT), Folder(tmp_path), Watcher(), meter=meter)
    assert not list(tmp_path.glob(".*.part"))
