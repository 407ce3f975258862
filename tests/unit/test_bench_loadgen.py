"""MLPerf LoadGen over a session in this process: what it calls invalid, what a server holds, what a fault leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secureinfer.bench import loadgen_process, rates
from secureinfer.bench.loadgen import recorded, run_load
from secureinfer.bench.loadgen_conf import BUILT_IN, SCENARIOS, read_conf, scenario_named
from secureinfer.bench.loadgen_fields import Request
from secureinfer.bench.loadgen_log import parse
from secureinfer.bench.loadgen_process import LoadGen
from secureinfer.bench.report import CaseKey, LoadResult
from secureinfer.errors import PeerError, UsageError
from secureinfer.measure.counters import Absent
from secureinfer.measure.energy import EnergyMeter

pytestmark = pytest.mark.needs("bench")

KEY = CaseKey(model="sleeper", backend="ckks", batch=4)
HALF = """\
# A percentile of 50 is shown by 7 queries, and so in a moment.
*.*.min_duration = 0
*.SingleStream.target_latency_percentile = 50
*.MultiStream.target_latency_percentile = 50
*.MultiStream.samples_per_query = 3
*.MultiStream.min_query_count = 20
*.SingleStream.min_query_count = 20
*.Server.target_latency_percentile = 50
*.Server.target_latency = 40
*.Server.min_query_count = 25
"""


class Sleeper:
    """A session whose inference takes this long; nothing is dealt."""

    room = None

    def __init__(self, seconds: float = 0.0, fault: Callable[[int], None] = lambda _: None) -> None:
        self.seconds = seconds
        self.fault = fault
        self.asked: list[Any] = []
        self.threads: set[int] = set()

    def infer(self, *inputs: Any) -> None:
        self.asked.append(inputs)
        self.threads.add(threading.get_ident())
        self.fault(len(self.asked))
        if self.seconds:
            time.sleep(self.seconds)

    def prepare(self, n: int = 1, wait: bool = True) -> None:
        raise AssertionError("there is no dealer")

    def prepared(self, *, refresh: bool = True) -> int:
        raise AssertionError("there is no dealer")


@pytest.fixture
def half(tmp_path: Path) -> Path:
    (tmp_path / "half.conf").write_text(HALF)
    return tmp_path / "half.conf"


def load(session: Sleeper, scenario: str, file: Path | str, **options: Any) -> LoadResult:
    named = scenario_named(scenario)
    request = Request(KEY, named, read_conf(file, KEY.model, named), **options)
    inputs = [(index,) for index in range(5)]
    return recorded(request, lambda: contextlib.nullcontext(session), inputs, dealt=False)


# --- scenarios ---


def test_streams_and_offline_are_loadgens_own_and_count_inferences_of_a_batch(half: Path) -> None:
    session = Sleeper(0.002)
    one, many, offline = (load(session, s, half) for s in ("single-stream", "multi-stream", "offline"))
    assert [r.scenario for r in (one, many, offline)] == ["SingleStream", "MultiStream", "Offline"]
    for result in (one, many, offline):
        assert result.valid and result.status == "ok" and result.invalid_reasons == () and result.pool is None
        assert result.loadgen is not None and "Result is : VALID" in (result.summary or "")
    assert (one.samples_per_query, many.samples_per_query) == (1, 3)
    assert one.latency_ms_p50 is not None and one.latency_ms_p50 >= 2.0
    assert many.latency_ms_p50 is not None and many.latency_ms_p50 >= 6.0, "one after another"
    assert many.qps is not None and many.samples_per_second == pytest.approx(many.qps * 3 * 4)
    assert offline.queries == 1 and offline.latency_ms is None
    assert offline.qps is not None and offline.samples_per_second == pytest.approx(offline.qps * 4)
    assert one.latency_ms_p99 is None, "of 20 queries"
    assert one.target_percentile == 50 and one.settings["file"] == "half.conf"
    assert session.threads == {threading.get_ident()}, "a session is for one thread"
    assert set(session.asked) == {(index,) for index in range(5)}


def test_a_run_that_is_too_short_is_invalid_with_loadgens_reasons() -> None:
    short = load(Sleeper(), "single-stream", "quick", min_duration_s=0, min_queries=10)
    assert not short.valid and short.status == "ok"
    assert short.invalid_reasons == (
        "LoadGen: Early stopping satisfied: NO",
        "LoadGen: Only processed 10 queries.",
        "LoadGen: Need to process at least 64 queries for early stopping.",
    )
    enough = load(Sleeper(), "single-stream", "quick", min_duration_s=0, min_queries=80)
    assert enough.valid and enough.queries == 80


def test_a_least_duration_holds_the_streams_that_long() -> None:
    result = load(Sleeper(0.001), "single-stream", "quick", min_duration_s=0.3)
    assert result.valid and result.queries is not None and result.queries > 64
    assert result.settings["min_duration_ms"] == 300 and result.seconds > 0.3


def test_what_a_server_holds_falls_when_the_session_is_slowed(half: Path) -> None:
    quick, slow = load(Sleeper(0.001), "server", half), load(Sleeper(0.01), "server", half)
    for result in (quick, slow):
        assert result.target_latency_ms == 40 and result.target_percentile == 50
        assert result.qps and result.trials and any(not t.valid for t in result.trials), "the limit was found"
        best = max(t.target_qps for t in result.trials if t.valid)
        assert result.settings["server_target_qps"] == pytest.approx(best)
        assert all(t.why is None if t.valid else t.why for t in result.trials)
    assert slow.qps is not None and slow.qps < 1 / 0.01 + 10
    assert quick.qps is not None and quick.qps > slow.qps


def test_a_bound_below_the_latency_alone_is_held_at_no_rate_and_it_says_why() -> None:
    result = load(Sleeper(0.02), "server", "quick", target_p99_ms=10)
    assert (result.qps, result.samples_per_second, result.valid) == (0.0, 0.0, False)
    assert result.invalid_reasons[0].startswith(
        "no rate holds 10 ms: the least latency alone, of 20 inferences"
    )
    assert "LoadGen: Performance constraints satisfied: NO" in result.invalid_reasons
    assert len(result.trials) == 1 and not result.trials[0].valid
    assert result.latency_ms_p50 is not None and result.latency_ms_p50 >= 20


def test_a_server_run_too_short_for_its_percentile_is_invalid_though_a_rate_was_found() -> None:
    result = load(Sleeper(0.002), "server", "quick", target_p99_ms=200, min_queries=60, min_duration_s=0)
    assert not result.valid and result.qps
    assert "LoadGen: Early stopping satisfied: NO" in result.invalid_reasons


# --- faults and what they leave ---


def failing(at: int, error: BaseException) -> Callable[[int], None]:
    def fault(call: int) -> None:
        if call == at:
            raise error

    return fault


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_of_an_inference_ends_the_run_and_is_recorded(scenario: str) -> None:
    session = Sleeper(0.001, failing(40, PeerError("dealer", "its process ended")))
    begin = time.monotonic()
    # LoadGen would go on for 100 s.
    options: dict[str, Any] = {"target_p99_ms": 1000} if scenario == "Server" else {}
    result = load(session, scenario, "quick", min_duration_s=100, **options)
    assert result.status == "failed" and result.fault is not None and not result.valid
    assert (result.fault.type, result.fault.message) == ("PeerError", "dealer: its process ended")
    assert len(session.asked) == 40 and time.monotonic() - begin < 50


def test_an_interrupt_passes_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = _spawned(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        load(
            Sleeper(0.001, lambda n: signal.raise_signal(signal.SIGINT) if n == 40 else None),
            "offline",
            "official",
        )
    assert started and all(process.poll() is not None for process in started)


def test_an_interrupt_passes_while_no_query_comes(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = _spawned(monkeypatch)
    half.write_text(HALF + "*.Server.target_qps = 0.001\n")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        load(Sleeper(), "server", half)
    assert started and all(process.poll() is not None for process in started)


def test_a_loadgen_that_dies_is_a_fault_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    started = _spawned(monkeypatch)
    result = load(
        Sleeper(0.001, lambda n: started[-1].kill() if n == 40 else None),
        "single-stream",
        "quick",
        min_duration_s=100,
    )
    assert result.status == "failed" and result.fault is not None
    assert result.fault.type == "SessionError" and "LoadGen's process is gone" in result.fault.message


def _spawned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    started: list[Any] = []
    spawn = loadgen_process.spawn

    def watched(module: str) -> Any:
        found = spawn(module)
        started.append(found[0])
        return found

    monkeypatch.setattr(loadgen_process, "spawn", watched)
    return started


@pytest.mark.parametrize("where", ["in a run", "before it"])
def test_a_caller_that_is_ended_by_a_signal_leaves_neither_logs_nor_process(
    tmp_path: Path, where: str
) -> None:
    script = (
        "import time\n"
        "from secureinfer.bench.loadgen_conf import read_conf\n"
        "from secureinfer.bench.loadgen_process import LoadGen\n"
        "with LoadGen(read_conf('quick', 'm', 'SingleStream'), 'm', 'SingleStream', inputs=4) as loadgen:\n"
        "    def infer(_):\n"
        "        print(loadgen._process.pid, flush=True)\n"
        "        time.sleep(60)\n"
        f"    {'loadgen.run({}, infer)' if where == 'in a run' else 'infer(0)'}\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as caller:
        assert caller.stdout is not None
        process = int(caller.stdout.readline())
        assert [p.name.startswith("secureinfer-loadgen-") for p in tmp_path.iterdir()] == [True]
        caller.terminate()
    stop = time.monotonic() + 30
    while (list(tmp_path.iterdir()) or _runs(process)) and time.monotonic() < stop:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir()) and not _runs(process)


def _runs(process: int) -> bool:
    """One that ended may stand in the table until somebody waits for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Dealt(Sleeper):
    """What is dealt takes 3 J an inference, and the inference 1. deals_on: in the background too."""

    room = 100

    def __init__(self, deals_on: bool) -> None:
        super().__init__()
        self.deals_on, self.level, self.joules = deals_on, 0, 0.0

    def prepare(self, n: int = 1, wait: bool = True) -> None:
        if wait or self.deals_on:
            self.level += n
            self.joules += 3.0 * n

    def prepared(self, *, refresh: bool = True) -> int:
        return self.level

    def infer(self, *inputs: Any) -> None:
        super().infer(*inputs)
        self.level -= 1
        self.joules += 1.0


class Joules:
    """The counter of such a session."""

    name, lost, poll_seconds = "rapl", None, None

    def __init__(self, session: Dealt) -> None:
        self._session = session

    def joules(self) -> float:
        return self._session.joules


@pytest.mark.parametrize("deals_on", [True, False])
@pytest.mark.parametrize("pool", [30, None])
def test_the_energy_of_a_load_holds_the_dealing_of_all_that_it_used(
    half: Path, deals_on: bool, pool: int | None
) -> None:
    session = Dealt(deals_on)
    request = Request(KEY, "SingleStream", read_conf(half, KEY.model, "SingleStream"), pool=pool)
    with EnergyMeter(sources=(Joules(session),), cpu_time=Absent("estimated", "not here")) as meter:
        result = recorded(request, lambda: contextlib.nullcontext(session), [(1,)], dealt=True, meter=meter)
    assert result.status == "ok" and result.pool is not None, result.fault
    assert result.pool.used == 20 and not result.pool.empty
    assert result.pool.at_end == (30 if deals_on and pool else result.pool.at_start - 20)
    assert result.energy.joules == pytest.approx(4.0) and result.energy.source == "rapl"


def test_nothing_is_printed_and_no_file_is_left_or_read_in_the_working_folder(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir(), temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(work)
    # LoadGen takes settings from a file of this name where it runs.
    (work / "audit.config").write_text("*.*.min_query_count = 3\n")
    result = load(Sleeper(), "single-stream", half)
    assert result.valid and result.queries == 20
    assert [p.name for p in work.iterdir()] == ["audit.config"] and list(temporary.iterdir()) == []
    assert capfd.readouterr() == ("", "")


# --- settings ---


def test_settings_in_a_file_are_read_alike_by_the_first_run_and_later_ones(half: Path) -> None:
    # LoadGen loads its own defaults with the first file of a process alone.
    first, second = load(Sleeper(), "single-stream", half), load(Sleeper(), "single-stream", half)
    drop = "single_stream_expected_latency_ns"
    assert {k: v for k, v in first.settings.items() if k != drop} == {
        k: v for k, v in second.settings.items() if k != drop
    }
    assert first.settings["min_duration_ms"] == 0 and first.queries == second.queries == 20


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_official_settings_are_mlperfs_and_none_is_below_loadgens_own(tmp_path: Path, scenario: Any) -> None:
    """LoadGen's own stand in it: a file that says nothing leaves them."""
    silent = tmp_path / "silent.conf"
    silent.write_text("# nothing\n")
    found = []
    for file in ("official", silent):
        with LoadGen(read_conf(file, "m", scenario), "m", scenario, inputs=4) as loadgen:
            found.append(loadgen.settings)
    ours, theirs = found
    assert ours["min_duration_ms"] == theirs["min_duration_ms"] == 600_000
    assert ours["min_query_count"] >= theirs["min_query_count"] >= 100
    assert ours["max_query_count"] == ours["max_duration_ms"] == 0
    others = {
        name
        for name in theirs
        if name not in ("min_query_count", "server_target_latency_ns") and ours[name] != theirs[name]
    }
    assert not others
    # The rules ask 24576 samples of a model without a number of its own.
    assert scenario != "Offline" or ours["min_query_count"] == 24_576


@pytest.mark.parametrize("scenario", ["single-stream", "multi-stream", "offline"])
def test_official_settings_run_whole_with_their_duration_cut(scenario: str) -> None:
    result = load(Sleeper(), scenario, "official", min_duration_s=0.0)
    assert result.status == "ok" and result.valid, result.fault or result.invalid_reasons
    assert result.settings["file"] == "official" and result.settings["min_duration_ms"] == 0
    assert (result.queries, result.samples_per_query) in ((100, 1), (662, 8), (1, 24_576))


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_built_in_settings_state_a_duration_and_a_count(name: str, scenario: Any) -> None:
    assert {"min_duration", "min_query_count"} <= read_conf(name, "any", scenario).stated


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            "*.Server.target_latency = 2.5",
            "line 1: LoadGen reads target_latency as a whole number, got '2.5'",
        ),
        ("*.Server.min_duraton = 5", "min_duraton is no setting of a load"),
        ("*.Server.mode = 1", "mode is no setting of a load"),
        ("*.Sever.min_duration = 5", "no scenario 'Sever'"),
        ("*.Server.min_duration=5", "with spaces around ="),
        ("min_duration = 5", "expected model.scenario.key = value"),
    ],
)
def test_what_loadgen_would_pass_over_in_silence_is_refused(tmp_path: Path, line: str, wrong: str) -> None:
    (tmp_path / "user.conf").write_text(line + "\n")
    with pytest.raises(UsageError) as caught:
        read_conf(tmp_path / "user.conf", "any", "Server")
    assert wrong in str(caught.value)


def test_wrong_calls_are_refused_before_anything_starts() -> None:
    call: Any = run_load
    for options, wrong in (
        ({"scenario": "interactive"}, "no scenario 'interactive'"),
        ({"scenario": "server", "settings_file": "/none.conf"}, "cannot read LoadGen's settings /none.conf"),
        ({"scenario": "offline", "target_p99_ms": 5}, "Offline has none"),
        ({"scenario": "server", "target_p99_ms": float("nan")}, "must be above 0"),
        ({"scenario": "server", "pool": 0}, "capacity is 0"),
    ):
        with pytest.raises(UsageError, match=wrong):
            call(None, [(1,)], KEY, **options)
    with pytest.raises(UsageError, match="held-out inputs"):
        call(None, [], KEY, "server")


def test_without_loadgen_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loadgen_process.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'secureinfer\[bench\]'"):
        loadgen_process.loadgen_version()


def test_a_rate_that_loadgen_writes_with_a_negative_exponent_is_read() -> None:
    summary = (
        "Result is : VALID\nScheduled samples per second : 5e-05\nCompleted samples per second    : 4.9e-05\n"
    )
    found = parse(summary, "")
    assert (found.rate, found.scheduled_rate) == (4.9e-5, 5e-5)


def test_a_summary_is_read_word_for_word() -> None:
    summary = (
        "Result is : INVALID\n  Performance constraints satisfied : NO\n  Min duration satisfied : Yes\n"
        "  Min queries satisfied : NO\n  Early stopping satisfied: Yes\nRecommendations:\n * Reduce target QPS.\n"
        " * The test exited early, before enough queries were issued.\n   See the detailed log.\n"
        "Early Stopping Result:\n * Run successful.\n\n====\nAdditional Stats\n====\n"
        "Completed samples per second    : 1.5e+03\nScheduled samples per second : 1600\n"
        "Mean latency (ns)               : 2500000\n99.00 percentile latency (ns)   : 4000000\n"
        "99.90 percentile latency (ns)   : 5000000\n"
    )
    detail = (
        ':::MLLOG {"key": "error_runtime", "value": "Ending early", "metadata": {"is_error": true}}\n'
        ':::MLLOG {"key": "x", "value": "fine", "metadata": {"is_error": false}}\n'
    )
    found = parse(summary, detail)
    assert found.reasons == (
        "LoadGen: Performance constraints satisfied: NO",
        "LoadGen: Min queries satisfied: NO",
        "LoadGen: Reduce target QPS.",
        "LoadGen: The test exited early, before enough queries were issued. See the detailed log.",
        "LoadGen: Ending early",
    )
    assert (found.rate, found.scheduled_rate) == (1500.0, 1600.0)
    assert found.latency_ms == {"mean": 2.5, "99": 4.0, "99.9": 5.0}
    assert not found.keeps_bound and found.proves_percentile


# --- the search ---


@pytest.mark.parametrize("start", [1.0, 80.0, 99.0, 101.0, 900.0])
def test_the_search_finds_the_highest_rate_that_holds_from_wherever_it_starts(start: float) -> None:
    tried = rates.search(lambda rate: (rate <= 100.0, None), start, 0.5, most_trials=30)
    found = rates.best(tried)
    assert found is not None and 100 / rates.RESOLUTION <= found.rate <= 100.0
    assert len(tried) <= 12


def test_the_search_gives_up_below_the_lowest_rate_and_never_tries_less() -> None:
    tried = rates.search(lambda rate: (False, None), 80.0, 10.0)
    assert rates.best(tried) is None and min(t.rate for t in tried) == 10.0


def test_the_first_guess_is_that_of_a_queue_with_these_service_times() -> None:
    # M/D/1: at a load of one half the mean wait is half a service time.
    service = [10.0] * 8
    assert rates.waiting_percentile_ms(service, 1e-6, 0.99) == pytest.approx(10.0)
    low, high = (rates.waiting_percentile_ms(service, rate, 0.99) for rate in (50.0, 90.0))
    assert 25 < low < 50 < high
    guess = rates.first_guess(service, low, 0.99, 100.0)
    assert 45 < guess <= 55
    assert rates.first_guess([20.0], 10.0, 0.99, 50.0) == 50.0 * rates.LOWEST_SHARE
