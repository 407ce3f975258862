"""The harness: one sweep between real parties, resumed, with cases that fail, read back, compared and drawn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from secureinfer import cli
from secureinfer.bench.figures import per_block, timed
from secureinfer.bench.kept import Checks
from secureinfer.bench.outcome import judged
from secureinfer.bench.report import Baseline, BenchReport, CaseKey, CaseResult, read
from secureinfer.bench.runner import Effort
from secureinfer.bench.sweep import Folder, Plan, Result, Unit, Watcher, read_plan, sweep
from secureinfer.errors import InputError, UsageError
from secureinfer.measure.energy import EnergyMeter
from secureinfer.measure.intervals import ratio_interval

pytestmark = pytest.mark.needs("bench")

EFFORT = Effort(
    least_runs=3, most_runs=200, seconds=0.0, engines=(("torch eager", "fp32"), ("onnxruntime", "fp32"))
)
GOOD = CaseKey(model="logistic", backend="mpc")
REFUSED = CaseKey(model="logistic", compression="int8", backend="nosuch")
UNBUILT = CaseKey(model="nosuch")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchReport, Path]:
    folder = tmp_path_factory.mktemp("bench")
    with EnergyMeter() as meter:
        plan = Plan((GOOD, REFUSED, UNBUILT), EFFORT, "the command")
        return sweep(plan, Folder(folder), Watcher(), meter=meter), folder


def the(report: BenchReport, key: CaseKey) -> CaseResult:
    return next(case for case in report.cases if case.key == key)


def test_a_case_has_every_figure_of_both_sides(run: tuple[BenchReport, Path]) -> None:
    case = the(run[0], GOOD)
    assert case.status == "ok", case.fault
    assert case.online is not None and case.offline is not None
    assert case.online.count >= 3 and sum(case.online.runs_ms) >= 1000, "less would not be quotable"
    assert case.online.count == len(case.online.runs_ms) == len(case.offline.runs_ms)
    assert case.online.cold_latency_ms is not None and case.online.latency_ms_interval is not None
    session = case.session
    assert session is not None and session["schema"] == "secureinfer.report/1"
    for phase in ("setup", "offline", "online"):
        assert session[phase]["bytes"] > 0 and session[phase]["rounds"] > 0
        assert set(session[phase]["parties"]) == {"data_owner", "model_owner", "dealer"}
    assert session["online"]["layers"] and session["plaintext"]["engine"] == "torch eager"
    assert case.model is not None and case.model.program_bytes and case.model.samples == 1
    assert case.throughput.samples_per_second == pytest.approx(1000 / case.online.latency_ms)  # type: ignore[operator]
    assert case.throughput.tokens_per_second is None, "its samples have no tokens"
    assert case.accuracy is not None and case.accuracy.max_absolute_error is not None
    assert case.accuracy.max_absolute_error < 1e-3
    assert case.accuracy.samples <= case.online.count + 1, "what is asked again is no further sample"
    assert sum(case.online.blocks) == case.online.count


def test_plaintext_takes_as_many_turns_and_both_ratios_name_their_sides(
    run: tuple[BenchReport, Path],
) -> None:
    case = the(run[0], GOOD)
    eager, onnx = case.baseline("torch eager", "fp32"), case.baseline("onnxruntime", "fp32")
    assert eager is not None and onnx is not None and case.online is not None
    for baseline in (eager, onnx):
        assert baseline.status == "ok" and baseline.latency is not None, baseline.reason
        assert baseline.latency.count == case.online.count, "a run in each block"
        assert baseline.max_absolute_error is not None and baseline.max_absolute_error < 1e-4
        assert baseline.peak_memory_bytes and baseline.model_bytes
    quickest = min((eager, onnx), key=lambda b: b.latency.latency_ms)  # type: ignore[union-attr,arg-type,return-value]
    fp32, best = case.overhead("online", "fp32"), case.overhead("online", "best")
    total = case.overhead("total", "fp32")
    assert fp32 is not None and best is not None and total is not None
    assert (fp32.denominator, best.denominator) == ("torch eager fp32", quickest.name)
    assert total.ratio > fp32.ratio, "offline is in it"
    assert fp32.ratio == pytest.approx(fp32.numerator_ms / fp32.denominator_ms)
    assert fp32.interval is not None and fp32.interval.low <= fp32.ratio <= fp32.interval.high


def test_an_engine_that_decides_otherwise_is_told_and_never_the_best() -> None:
    head = {"engine": "torch eager", "status": "ok"}
    fp32, bf16, int8 = (Baseline.model_validate({**head, "dtype": d}) for d in ("fp32", "bf16", "int8"))
    found = judged([(fp32, 0.9), (bf16, 0.8), (int8, 0.25)], samples=10)
    assert [b.reason is None for b in found] == [True, True, False]
    assert "0.25 on 10 samples" in str(found[2].reason)
    assert judged([(fp32, 0.9), (int8, 0.25)], samples=1)[1].reason is None, "one sample says nothing"


def test_runs_of_one_block_are_one_observation() -> None:
    """Ten runs a block that share what the machine did would make an interval look three times as sure."""
    values = [base + 0.001 * i for base in (1.0, 1.5, 0.7, 1.2) for i in range(10)]
    blocks = timed(values, blocks=(10, 10, 10, 10))
    assert per_block(blocks) == pytest.approx([1.0045, 1.5045, 0.7045, 1.2045])
    plain = [1.0] * 40
    told, hidden = (ratio_interval(above, plain[: len(above)]) for above in (per_block(blocks), values))
    assert told is not None and hidden is not None
    assert told.high - told.low > 2 * (hidden.high - hidden.low)


def test_energy_is_of_one_meter_and_says_what_it_is(run: tuple[BenchReport, Path]) -> None:
    case, meter = the(run[0], GOOD), run[0].meter
    assert meter.source is not None and (meter.source != "estimated" or "stated" in str(meter.model))
    for energy in (case.online_energy, case.offline_energy, case.baselines[0].energy):
        assert energy.source == meter.source and energy.joules is not None and energy.joules >= 0
    assert case.session is not None and case.session["setup"]["energy_source"] == meter.source
    assert case.session["online"]["energy_joules"] == case.online_energy.joules


def test_a_case_that_fails_stands_there_with_its_error(run: tuple[BenchReport, Path]) -> None:
    for key, word in ((REFUSED, "there is no backend 'nosuch'"), (UNBUILT, "there is no model 'nosuch'")):
        case = the(run[0], key)
        assert case.status == "failed" and case.fault is not None and not case.valid
        assert case.fault.type == "UsageError" and word in case.fault.message


def test_the_files_are_the_report(run: tuple[BenchReport, Path]) -> None:
    report, folder = run
    assert read(folder / "report.json") == report
    assert "logistic" in (folder / "report.md").read_text()
    page = (folder / "report.html").read_text()
    assert "logistic" in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_sweep_goes_on_where_it_was(run: tuple[BenchReport, Path], tmp_path: Path) -> None:
    """Stopped while its second case begins: the first one's file is there, and is not run again."""

    class Stops(Watcher):
        def began(self, unit: Unit, number: int, count: int) -> None:
            if unit[0] == UNBUILT:
                raise KeyboardInterrupt

    class Counts(Watcher):
        def __init__(self) -> None:
            self.told: list[tuple[CaseKey, bool]] = []

        def ended(self, result: Result, *, kept: bool) -> None:
            self.told.append((result.key, kept))

    folder = Folder(tmp_path)
    folder.keep(the(run[0], GOOD), EFFORT.to_dict(), Checks())
    plan = Plan((GOOD, UNBUILT), EFFORT)
    with EnergyMeter() as meter:
        stopped = sweep(plan, folder, Stops(), meter=meter)
        assert not stopped.complete and [case.key for case in stopped.cases] == [GOOD]
        counts = Counts()
        assert read_plan(tmp_path) == plan
        whole = sweep(read_plan(tmp_path), folder, counts, meter=meter)
    assert whole.complete and [case.key for case in whole.cases] == [GOOD, UNBUILT]
    assert counts.told == [(GOOD, True), (UNBUILT, False)]
    assert the(whole, GOOD) == the(run[0], GOOD), "with the machine and the meter of its own run"


def test_what_was_measured_in_another_way_or_is_damaged_is_run_again(
    run: tuple[BenchReport, Path], tmp_path: Path
) -> None:
    folder, case, checks = Folder(tmp_path), the(run[0], GOOD), Checks()
    folder.keep(case, EFFORT.to_dict(), checks)
    assert folder.kept((GOOD, None), EFFORT.to_dict(), checks) == case
    assert folder.kept((GOOD, None), dataclasses.replace(EFFORT, least_runs=9).to_dict(), checks) is None
    folder.file((GOOD, None)).write_text(folder.file((GOOD, None)).read_text()[:-9])
    assert folder.kept((GOOD, None), EFFORT.to_dict(), checks) is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "cannot be read"),
        ("[]", "schema None"),
        ('{"schema": "secureinfer.bench/99"}', "this version reads"),
        ('{"schema": "secureinfer.bench/1", "created": 3}', "created"),
        ('{"schema": "secureinfer.bench/1", "created": "", "environment": {}, "cases": [{}]}', "cases.0"),
        ("[" * 100_000, "cannot be read"),
        ('{"schema": "secureinfer.bench/1", "created": "", "environment": {"x": NaN}}', "NaN is no number"),
        ('{"schema": "secureinfer.bench/1", "created": "", "environment": {}, "\\u001b[31m": 1}', r"\\x1b"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(InputError, match=word):
        read(file)


def test_a_folder_without_a_sweep_cannot_go_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no sweep"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        ["nosuch"],
        ["--quick", "--study"],
        ["fraud-mlp", "--backend", "nosuch"],
        ["fraud-mlp", "--network", "moon"],
        ["fraud-mlp", "--target-p99-ms", "5"],
        ["fraud-mlp", "--engine", "abacus:fp32"],
        ["--resume", "nosuch"],
        ["fraud-mlp", "--scenario", "nosuch"],
        ["fraud-mlp", "--seconds", "inf"],
        ["fraud-mlp", "--scenario", "server", "--target-p99-ms", "0"],
        ["--resume", "nosuch", "--runs", "3"],
        ["report", "nosuch.json"],
    ],
)
def test_a_wrong_call_exits_2_before_anything_runs(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bench", *wrong]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_the_command_draws_and_compares(run: tuple[BenchReport, Path], tmp_path: Path, capsys: Any) -> None:
    report, folder = run
    file = str(folder / "report.json")
    assert cli.run(["bench", "report", file, "--out", str(tmp_path / "again"), "--json"]) == 0
    assert {Path(name).suffix for name in json.loads(capsys.readouterr().out)["files"]} == {
        ".json",
        ".md",
        ".html",
    }
    assert (tmp_path / "again.html").read_text() == (folder / "report.html").read_text()
    # Tests run side by side: the machine is not quiet, and says so. What is compared here is to the byte.
    case = the(report, GOOD).model_copy(update={"valid": True, "invalid_reason": None})
    quiet = report.model_copy(update={"cases": (case,)})
    bytes_sent = case.session["online"]["bytes"]  # type: ignore[index]
    fatter = quiet.to_json().replace(f'"bytes": {bytes_sent}', f'"bytes": {bytes_sent + 1}')
    for name, text in (("quiet", quiet.to_json()), ("fatter", fatter)):
        (tmp_path / f"{name}.json").write_text(text)
    before, after = str(tmp_path / "quiet.json"), str(tmp_path / "fatter.json")
    assert cli.run(["bench", "compare", before, before]) == 0
    assert cli.run(["bench", "compare", before, after, "--json"]) == 1
