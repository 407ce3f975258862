"""What the harness is given: users' models that misbehave, and files that no benchmark wrote."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from secureinfer import cli
from secureinfer.bench.models import subject
from secureinfer.bench.outcome import fault_of, other_inputs
from secureinfer.bench.report import Baseline, BenchReport, CaseKey, read, write
from secureinfer.bench.runner import Effort
from secureinfer.bench.shown import summary
from secureinfer.bench.sweep import Folder, Plan, Watcher, sweep
from secureinfer.errors import CompileError, InputError, UsageError
from secureinfer.measure.counters import Absent
from secureinfer.measure.energy import EnergyMeter

from .bench_reports import case, load, report

SECRET = "row 4111-1111-1111-1111"
OWN = f"""
import sys
import torch
from torch import nn
x = torch.randn(4, 3)
def good():
    print("printed by the model's file")
    return nn.Linear(3, 2), x
def raises():
    raise RuntimeError("{SECRET}")
def exits():
    sys.exit(3)
half = (nn.Linear(3, 2).half(), x.half())
class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, *, features):
        return self.layer(features)
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            sys.exit(7)
        return self.layer(x)
late = (Late(), x)
misnamed = (Keyword(), {{"x": x}})
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_models.py"
    file.write_text(OWN)
    return file


# Users' models.


def test_what_a_users_file_draws_is_the_same_in_every_process(own: Path) -> None:
    """Plaintext engines make it anew in theirs: other inputs there were taken for other answers."""
    torch.manual_seed(1)
    first = subject(f"{own}:good").build(2)
    torch.manual_seed(2)
    second = subject(f"{own}:good").build(2)
    assert torch.equal(first.examples[0], second.examples[0])
    assert torch.equal(first.module(*first.examples), second.module(*second.examples))
    assert torch.initial_seed() == 2


def test_inputs_that_are_not_the_same_each_time_are_told() -> None:
    def eager(worst: float | None) -> tuple[Baseline, ...]:
        latency = case(1).online
        return (
            Baseline(
                engine="torch eager", dtype="fp32", status="ok", latency=latency, max_absolute_error=worst
            ),
        )

    expected = [torch.tensor([[2.0, -1.0]])]
    assert not other_inputs(eager(1e-6), expected) and not other_inputs((), expected)
    assert other_inputs(eager(1.3), expected) and other_inputs(eager(None), expected)


def test_what_a_users_file_prints_is_no_part_of_the_answer(own: Path, capsys: Any) -> None:
    subject(f"{own}:good").build(1)
    out = capsys.readouterr()
    assert out.out == "" and "printed by the model's file" in out.err


def test_a_file_that_ends_the_process_ends_no_sweep(own: Path) -> None:
    with pytest.raises(UsageError, match=r"ends the process \(3\)"):
        subject(f"{own}:exits").build(1)


def test_half_precision_is_measured_in_float32(own: Path) -> None:
    assert subject(f"{own}:half").build(4).examples[0].dtype is torch.float32


def test_names_that_forward_does_not_take_are_told(own: Path) -> None:
    with pytest.raises(UsageError, match="names x, and its forward takes features"):
        subject(f"{own}:misnamed").build(1)


def test_the_text_of_anothers_exception_goes_to_the_log_and_not_into_the_report(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError) as raised:
        subject(f"{own}:raises").build(1)
    with caplog.at_level(logging.ERROR):
        fault = fault_of(raised.value)
    assert SECRET in str(raised.value), "the planted fault: its text would have stood in the report"
    assert fault.type == "RuntimeError" and SECRET not in fault.message and "stderr" in fault.message
    assert SECRET in caplog.text


def test_what_an_error_of_ours_quotes_of_anothers_goes_to_the_log_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def quoting() -> None:
        try:
            raise ValueError(SECRET)
        except ValueError as error:
            raise CompileError(f"the model cannot be exported: {error}; wrap it") from error

    with pytest.raises(CompileError) as raised:
        quoting()
    with caplog.at_level(logging.ERROR):
        fault = fault_of(raised.value)
    assert fault.message == "the model cannot be exported: ValueError (its text is on stderr); wrap it"
    assert SECRET in caplog.text
    assert fault_of(UsageError("ours stays whole")).message == "ours stays whole"


def test_a_forward_that_ends_the_process_is_a_case_that_failed_and_the_next_one_runs(own: Path) -> None:
    plan = Plan(
        tuple(CaseKey(model=f"{own}:{name}") for name in ("late", "raises")), Effort(engines=(), least_runs=2)
    )
    with EnergyMeter(sources=[Absent("rapl", "none")]) as meter:
        found = sweep(plan, None, Watcher(), meter=meter)
    assert [case.status for case in found.cases] == ["failed", "failed"]
    assert [case.fault.type for case in found.cases if case.fault] == ["SystemExit", "RuntimeError"]


# Files that no benchmark wrote.


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report(case(1), loads=(load(),)).to_json())
    return found


def nested(depth: int) -> dict[str, Any]:
    return {} if not depth else {"a": nested(depth - 1)}


def changed(value: Any, *path: Any) -> dict[str, Any]:
    found = copy.deepcopy(document())
    at: Any = found
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("environment", "deep"), nested(300), "nested too deeply"),
        (("cases", 0, "session", "online", "bytes"), 10**400, "number that no figure can be"),
        (("cases", 0, "model", "compressed_bytes"), 10**400, "number that no figure can be"),
        (("cases", 0, "online", "latency_ms"), 1e308, "number that no figure can be"),
        (("cases", 0, "online", "runs_ms"), [5e-324] * 9, "number that no figure can be"),
    ],
)
def test_a_report_that_cannot_be_drawn_or_computed_with_is_refused(
    tmp_path: Path, path: tuple[Any, ...], value: Any, why: str
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(changed(value, *path)))
    with pytest.raises(InputError, match=why):
        read(file)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("cases", 0, "session", "online"), [1]),
        (("cases", 0, "session", "online", "rounds"), "12"),
        (("cases", 0, "session", "online", "bytes"), "x"),
        (("title",), "\ud800"),
        (("cases", 0, "key", "model"), "\x1b[31mEVIL\x07\x1b]0;title\x07"),
        (("environment", "processor"), "\x1b[2J"),
    ],
)
def test_odd_reports_are_drawn_and_compared_and_command_no_terminal(
    tmp_path: Path, path: tuple[Any, ...], value: Any, capsys: Any
) -> None:
    odd, ordinary = tmp_path / "odd.json", tmp_path / "ordinary.json"
    odd.write_text(json.dumps(changed(value, *path)))
    ordinary.write_text(json.dumps(document()))
    assert cli.run(["bench", "report", str(odd), "--out", str(tmp_path / "again")]) == 0
    assert cli.run(["bench", "compare", str(ordinary), str(odd)]) == 0
    out = capsys.readouterr()
    assert "\x1b" not in out.out + out.err and "\x07" not in out.out + out.err
    assert "\x1b" not in "".join(p.read_text() for p in tmp_path.glob("again.*"))


def test_a_file_that_cannot_be_written_is_told_and_leaves_no_half(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(UsageError, match="cannot write .*report.json: "):
        write(tmp_path / "report.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("stem", [".", "..", "/"])
def test_a_stem_that_is_a_folder_is_refused(tmp_path: Path, stem: str, capsys: Any) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(document()))
    assert cli.run(["bench", "report", str(file), "--out", stem]) == 2
    assert "is a folder" in capsys.readouterr().err


# Folders of other sweeps, and flags that would be ignored.


def test_a_sweep_with_other_settings_does_not_replace_one_that_is_there(tmp_path: Path, capsys: Any) -> None:
    Folder(tmp_path).begin(Plan((case(1).key,), Effort(least_runs=7)))
    before = (tmp_path / "sweep.json").read_text()
    assert cli.run(["bench", "nosuch.py:model", "--runs", "2", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "other settings (least_runs)" in told and "--resume" in told
    assert (tmp_path / "sweep.json").read_text() == before


@pytest.mark.parametrize("flag", [["--runs", "3"], ["--backend", "ckks"], ["--seconds", "0"], ["fraud-mlp"]])
def test_resuming_refuses_what_it_would_ignore(tmp_path: Path, flag: list[str], capsys: Any) -> None:
    Folder(tmp_path).begin(Plan((case(1).key,), Effort()))
    assert cli.run(["bench", *flag, "--resume", str(tmp_path)]) == 2
    assert "leave away" in capsys.readouterr().err


# What a terminal shows of a load.


def shown(found: BenchReport) -> str:
    from rich.console import Console

    console = Console(width=250, color_system=None)
    with console.capture() as captured:
        for part in summary(found):
            console.print(part, markup=False)
    return captured.get()


def test_a_load_is_shown_with_its_own_percentile_and_what_it_sustains() -> None:
    text = shown(report(loads=(load(target_percentile=90.0, sustained_samples_per_second=12.5),)))
    assert "20 queries/s with 90 % of them within 45" not in text
    assert "holds 20 queries/s with 90 % of them within 50 ms" in text and "99 %" not in text
    assert "12.5 samples/s with all dealing counted" in text
    assert "dealing counted" not in shown(report(loads=(load(),)))


def test_a_load_that_is_not_valid_holds_nothing() -> None:
    assert "holds" not in shown(report(loads=(load(valid=False, invalid_reasons=("too short",)),)))
