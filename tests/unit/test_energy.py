"""The energy meter against recorded counters and real busy processes: nothing counted twice, nothing made up."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from secureinfer.errors import UsageError
from secureinfer.measure import counters, cputime
from secureinfer.measure.counters import Absent, Nvml, Rapl, open_nvml, open_rapl
from secureinfer.measure.cputime import CpuTime, open_cpu_time
from secureinfer.measure.energy import WATTS_PER_CORE, EnergyMeter

pytestmark = pytest.mark.needs("bench")


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes here live for a moment; a meter looks for new ones twice a second."""
    monkeypatch.setattr("secureinfer.measure.cputime.FIND_SECONDS", 0.0)


RANGE_UJ = 262_143_328_850  # of a server's package, as the kernel reports it


class Clock:
    """A clock that a test sets; to sleep is to set it forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Recorded:
    """A folder as the kernel's: two packages with memory, cores inside the first, and psys around them all."""

    def __init__(self, folder: Path, range_uj: int = RANGE_UJ) -> None:
        self.folder, self.range_uj = folder, range_uj
        self.zones = {
            "package-0": folder / "intel-rapl:0",
            "core": folder / "intel-rapl:0" / "intel-rapl:0:0",
            "dram-0": folder / "intel-rapl:0" / "intel-rapl:0:1",
            "package-1": folder / "intel-rapl:1",
            "dram-1": folder / "intel-rapl:1" / "intel-rapl:1:0",
            "psys": folder / "intel-rapl:2",
        }
        self.stands = dict.fromkeys(self.zones, 1_000_000)
        for name, zone in self.zones.items():
            zone.mkdir(parents=True)
            (zone / "name").write_text(("dram" if name.startswith("dram") else name) + "\n")
            (zone / "max_energy_range_uj").write_text(f"{range_uj}\n")
            self.file(name).write_text(f"{self.stands[name]}\n")

    def file(self, name: str) -> Path:
        return self.zones[name] / "energy_uj"

    def take(self, **joules: float) -> None:
        """What each zone takes; the kernel counts on from 0 past the range."""
        for zone, amount in joules.items():
            name = zone.replace("_", "-")
            self.stands[name] = (self.stands[name] + round(1e6 * amount)) % self.range_uj
            part = self.folder / "part"
            part.write_text(f"{self.stands[name]}\n")
            os.replace(part, self.file(name))  # a kernel's counter is never seen half written


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rapl(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "intel-rapl")


def opened(recorded: Recorded, clock: Callable[[], float] = time.monotonic) -> Rapl:
    found = open_rapl([recorded.folder], clock)
    assert isinstance(found, Rapl), found
    return found


def metered(clock: Clock, *sources: Any) -> EnergyMeter:
    return EnergyMeter(
        sources=sources, cpu_time=Absent("estimated", "not here"), clock=clock, sleep=clock.sleep
    )


# --- RAPL ---------------------------------------------------------------------------------------------------------


def test_packages_and_their_memory_are_summed_and_no_zone_inside_or_around_them(
    rapl: Recorded, clock: Clock
) -> None:
    counter = opened(rapl, clock)
    rapl.take(package_0=5, core=4, dram_0=2, package_1=7, dram_1=1, psys=20)
    assert counter.joules() == pytest.approx(5 + 2 + 7 + 1)
    assert len(counter.zones) == 4


def test_one_package_without_memory_is_counted_alone(tmp_path: Path, clock: Clock) -> None:
    recorded = Recorded(tmp_path)
    for name in ("dram-1", "package-1", "dram-0"):
        for file in ("name", "energy_uj", "max_energy_range_uj"):
            (recorded.zones[name] / file).unlink()
        recorded.zones[name].rmdir()
    counter = opened(recorded, clock)
    recorded.take(package_0=5, core=4)
    assert counter.joules() == 5


def test_wraps_are_counted_on(rapl: Recorded, clock: Clock) -> None:
    counter, taken = opened(rapl, clock), 0.0
    for _ in range(6):  # 600 kJ of a range of 262 kJ: two wraps
        rapl.take(package_0=100_000)
        taken += 100_000
        clock.now += 100
        assert counter.joules() == pytest.approx(taken)
    assert taken > 2 * RANGE_UJ / 1e6


def test_a_meter_that_did_not_know_of_wraps_would_be_found_out(
    rapl: Recorded, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_wrap(zone: Any) -> None:
        now_uj = float(zone.file.read_text())
        zone.total_uj, zone.last_uj = zone.total_uj + now_uj - zone.last_uj, now_uj

    monkeypatch.setattr(counters._Zone, "advance", without_wrap)
    with pytest.raises(AssertionError):
        test_wraps_are_counted_on(rapl, clock)


def test_a_thread_reads_often_enough_to_see_every_wrap(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, range_uj=1_000_000_000)  # 1 kJ: at 1 kW it may wrap every second
    counter = opened(recorded)
    meter = EnergyMeter(sources=[counter], cpu_time=Absent("estimated", "not here"))
    assert meter.poll_seconds == 0.25
    with meter:
        before = meter.read()
        for _ in range(4):
            recorded.take(package_0=600)
            end = time.monotonic() + 5
            while counter._zones[0].last_uj != recorded.stands["package-0"] and time.monotonic() < end:
                time.sleep(0.01)
        spent = meter.between(before, meter.read())
    assert spent.joules == pytest.approx(2400)
    assert not any(thread.name == "energy" for thread in threading.enumerate())


def test_a_counter_that_was_not_read_in_time_is_unknown_and_not_guessed(rapl: Recorded, clock: Clock) -> None:
    meter = metered(clock, opened(rapl, clock))
    before = meter.read()
    clock.now += 300  # at 1 kW 262 kJ wrap within that
    rapl.take(package_0=10)
    spent = meter.between(before, meter.read())
    assert (spent.joules, spent.source) == (None, None)
    assert "may have wrapped more than once" in meter.describe()["unavailable"][-1]


@pytest.mark.parametrize("fault", ["gone", "garbage", "out of range"])
def test_a_counter_that_fails_during_a_run_makes_it_unknown_and_says_why(
    fault: str, rapl: Recorded, clock: Clock
) -> None:
    meter = metered(clock, opened(rapl, clock))
    before = meter.read()
    file = rapl.file("dram-1")
    if fault == "gone":
        file.unlink()
    else:
        file.write_text("no number" if fault == "garbage" else str(RANGE_UJ + 1))
    clock.now += 1
    spent = meter.between(before, meter.read())
    assert (spent.seconds, spent.joules, spent.above_idle_joules, spent.source) == (1.0, None, None, None)
    assert "intel-rapl:1:0 dram could not be read any more" in meter.describe()["unavailable"][-1]
    rapl.take(dram_1=1)  # what it counted meanwhile is not known, so it stays unknown
    assert meter.read().joules is None


def test_counters_that_cannot_be_read_are_told_with_the_reason(
    rapl: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = open_rapl([rapl.folder / "not there"])
    assert isinstance(missing, Absent) and "no RAPL" in missing.why

    import builtins

    real = builtins.open

    def denied(file: Any, *args: Any, **more: Any) -> Any:
        if str(file).endswith("energy_uj"):  # as for anybody but root; tests may run as root
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **more)

    monkeypatch.setattr(builtins, "open", denied)
    found = open_rapl([rapl.folder])
    assert isinstance(found, Absent) and "requires root privileges" in found.why
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "zeus.device.cpu.rapl", None)
    found = open_rapl([rapl.folder])
    assert isinstance(found, Absent) and "pip install 'secureinfer[bench]'" in found.why


def test_a_folder_without_a_package_is_no_counter(tmp_path: Path) -> None:
    assert isinstance(open_rapl([tmp_path]), Absent)
    (tmp_path / "intel-rapl:0").mkdir()
    broken = open_rapl([tmp_path])
    assert isinstance(broken, Absent) and "Error reading package name" in broken.why


# --- NVML ---------------------------------------------------------------------------------------------------------


class FakeNvml(types.ModuleType):
    """pynvml as recorded: two boards that count millijoules, or what it raises instead."""

    def __init__(self, *millijoules: int, fault: str | None = None) -> None:
        super().__init__("pynvml")
        self.millijoules, self.fault = list(millijoules), fault

    def _may(self, what: str) -> None:
        if self.fault == what:
            raise RuntimeError({"start": "NVML Shared Library Not Found", "read": "Not Supported"}[what])

    def nvmlInit(self) -> None:
        self._may("start")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}{handle}-abc"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._may("read")
        return self.millijoules[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(1_000_000, 5_000_000)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_all_visible_gpus_are_summed_in_joules(nvml: FakeNvml) -> None:
    counter = open_nvml({})
    assert isinstance(counter, Nvml) and counter.devices == 2
    nvml.millijoules = [1_003_000, 5_004_500]
    assert counter.joules() == 7.5


@pytest.mark.parametrize(
    ("visible", "joules"), [("1", 4.5), ("1,0", 7.5), ("GPU-000", 3.0), ("1,7,0", 4.5), ("0,0", 3.0)]
)
def test_gpus_that_cuda_does_not_show_belong_to_others(nvml: FakeNvml, visible: str, joules: float) -> None:
    counter = open_nvml({"CUDA_VISIBLE_DEVICES": visible})
    assert isinstance(counter, Nvml)
    nvml.millijoules = [1_003_000, 5_004_500]
    assert counter.joules() == joules


@pytest.mark.parametrize(
    ("visible", "fault", "why"),
    [
        ("", None, "no GPU is visible"),
        ("-1", None, "no GPU is visible"),
        ("MIG-1", None, "slice of a GPU"),
        ("0", "start", "Shared Library Not Found"),
        ("0", "read", "Not Supported"),
    ],
)
def test_gpus_without_a_counter_are_told_with_the_reason(
    nvml: FakeNvml, visible: str, fault: str | None, why: str
) -> None:
    nvml.fault = fault
    found = open_nvml({"CUDA_VISIBLE_DEVICES": visible})
    assert isinstance(found, Absent) and why in found.why


def test_a_gpu_counter_that_fails_or_starts_anew_is_lost(nvml: FakeNvml) -> None:
    first, second = open_nvml({}), open_nvml({})
    nvml.fault = "read"
    assert first.joules() is None and "Not Supported" in str(first.lost)  # type: ignore[union-attr]
    nvml.fault, nvml.millijoules = None, [0, 5_000_000]
    assert second.joules() is None and "driver was loaded anew" in str(second.lost)  # type: ignore[union-attr]


def test_gpu_and_processor_are_added_and_half_of_them_is_no_sum(
    nvml: FakeNvml, rapl: Recorded, clock: Clock
) -> None:
    counter = open_nvml({})
    meter = metered(clock, counter, opened(rapl, clock))
    before = meter.read()
    nvml.millijoules[0] += 2_000
    rapl.take(package_0=3)
    after = meter.read()
    assert meter.source == "nvml+rapl"
    assert meter.between(before, after).joules == pytest.approx(5)
    nvml.fault = "read"
    assert meter.between(after, meter.read()).joules is None


# --- idle (field report 87) ---------------------------------------------------------------------------------------


def test_idle_is_measured_shown_and_taken_off(rapl: Recorded, clock: Clock) -> None:
    """187 J of work beside 327 J of an idle machine: both are told."""

    def idle(seconds: float) -> None:
        clock.sleep(seconds)
        rapl.take(package_0=32.7 * seconds)

    meter = EnergyMeter(
        sources=[opened(rapl, clock)], cpu_time=Absent("estimated", "none"), clock=clock, sleep=idle
    )
    before = meter.read()
    assert meter.between(before, meter.read()).above_idle_joules is None  # idle is not known yet
    assert meter.measure_idle(4) == pytest.approx(32.7)
    before = meter.read()
    clock.now += 10
    rapl.take(package_0=187 + 327)
    spent = meter.between(before, meter.read())
    assert spent.joules == pytest.approx(514) and spent.above_idle_joules == pytest.approx(187)
    assert meter.describe()["idle_watts"] == pytest.approx(32.7) and meter.describe()["idle_seconds"] == 4
    clock.now += 10  # a machine that rests deeper than when idle was measured gives nothing back
    rapl.take(package_0=100)
    assert meter.between(before, meter.read()).above_idle_joules == pytest.approx(0, abs=1e-9)


def test_more_than_everything_is_never_taken_off(rapl: Recorded, clock: Clock) -> None:
    meter = EnergyMeter(
        sources=[opened(rapl, clock)],
        cpu_time=Absent("estimated", "none"),
        clock=clock,
        sleep=lambda s: (clock.sleep(s), rapl.take(package_0=50 * s)),
    )
    meter.measure_idle(1)
    before = meter.read()
    clock.now += 1
    rapl.take(package_0=10)
    assert meter.between(before, meter.read()).above_idle_joules == 0


# --- estimate (field report 85) -----------------------------------------------------------------------------------


def test_an_estimate_says_that_it_is_one_and_by_which_model() -> None:
    meter = EnergyMeter(sources=[Absent("nvml", "no driver"), Absent("rapl", "no folder")])
    said = meter.describe()
    assert said["source"] == "estimated" and f"{WATTS_PER_CORE:g} W" in said["model"]
    assert said["unavailable"] == ("nvml: no driver", "rapl: no folder")
    assert meter.measure_idle(0.01) is None and said["idle_watts"] is None


def test_an_estimate_is_cpu_time_and_not_a_constant() -> None:
    meter = EnergyMeter(watts_per_core=10, sources=[])
    before = meter.read()
    time.sleep(0.3)
    rested = meter.read()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    worked = meter.read()
    rest, work = meter.between(before, rested), meter.between(rested, worked)
    assert rest.joules is not None and work.joules is not None
    assert rest.joules <= 0.6 and 2.6 <= work.joules <= 4
    assert (work.source, work.above_idle_joules) == ("estimated", None)


def test_where_nothing_can_be_known_nothing_is_said(clock: Clock) -> None:
    meter = metered(clock, Absent("rapl", "no folder"))
    spent = meter.between(meter.read(), meter.read())
    assert (meter.source, spent.joules, spent.source) == (None, None, None)
    assert meter.measure_idle(1) is None and meter.describe()["model"] is None


def test_without_psutil_the_reason_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    meter = EnergyMeter(sources=[])
    assert meter.source is None and "secureinfer[bench]" in meter.describe()["unavailable"][0]


@pytest.mark.parametrize("watts", [0.0, -1.0, float("nan"), 1e9])
def test_a_power_that_no_core_takes_is_refused(watts: float) -> None:
    with pytest.raises(UsageError, match="W, not"):
        EnergyMeter(watts, sources=[])


# --- one meter for all processes (field report 86) ----------------------------------------------------------------

BUSY = "import time\nwhile time.process_time() < {seconds}: pass\nprint(time.process_time(), flush=True)\n"


def busy(seconds: float, then: str = "") -> subprocess.Popen[str]:
    code = BUSY.format(seconds=seconds) + then
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def burn_three(meter: EnergyMeter) -> tuple[float, float]:
    """(CPU seconds that three children and their own children say they took, joules of the meter)."""
    nested = textwrap.dedent("""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.1: pass"])
        import os
        times = os.times()
        print(times.user + times.system + times.children_user + times.children_system, flush=True)
        sys.stdin.read()
    """)
    before = meter.read()
    children = [busy(0.15, nested) for _ in range(3)]
    took = 0.0
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
        took += float(child.stdout.readline())
    spent = meter.between(before, meter.read())  # while they are there
    for child in children:
        child.communicate()
    ended = meter.between(before, meter.read())  # and when they were waited for
    assert spent.joules is not None and ended.joules is not None
    assert spent.joules <= ended.joules + 0.05 <= spent.joules + 1.0
    return took, ended.joules


def test_three_busy_processes_are_counted_once() -> None:
    took, joules = burn_three(EnergyMeter(watts_per_core=1, sources=[]))
    assert took == pytest.approx(joules, rel=0.15, abs=0.06) and took >= 0.7


def test_a_meter_that_added_what_ended_children_took_twice_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def twice(self: CpuTime, now: dict[Any, Any]) -> None:
        self._lost += sum(seen.total for process, seen in self._seen.items() if process not in now)

    monkeypatch.setattr(cputime.CpuTime, "_keep_lost", twice)
    with pytest.raises(AssertionError):
        test_three_busy_processes_are_counted_once()


def test_the_machines_counter_is_read_once_however_many_processes_run(rapl: Recorded) -> None:
    meter = EnergyMeter(sources=[opened(rapl)])
    before = meter.read()
    children = [busy(0.05) for _ in range(3)]
    rapl.take(package_0=10)
    for child in children:
        child.communicate()
    assert meter.between(before, meter.read()).joules == pytest.approx(10)


def _seconds() -> CpuTime:
    found = open_cpu_time()
    assert isinstance(found, CpuTime)
    return found


@pytest.fixture
def ignored_children() -> Iterator[None]:
    import signal

    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, old)


def test_a_child_that_ends_between_two_readings_is_not_lost() -> None:
    cpu = _seconds()
    before = cpu.seconds()
    busy(0.3).communicate()  # it was never seen
    assert cpu.seconds() - before >= 0.27  # the system counts in ticks of 10 ms


def test_a_child_that_nobody_waits_for_keeps_what_was_seen_of_it(ignored_children: None) -> None:
    """The system adds its time to nobody's: without polling it would be lost."""
    polled, unpolled = _seconds(), _seconds()
    child = busy(0.4, "import sys; sys.stdin.read()")
    assert child.stdout is not None
    child.stdout.readline()
    polled.seconds()
    child.communicate()
    assert polled.seconds() >= 0.35
    assert unpolled.seconds() < 0.3


def test_an_orphan_is_followed_and_what_it_took_is_kept() -> None:
    cpu = _seconds()
    code = textwrap.dedent(f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {BUSY.format(seconds=0.15)!r} + "import time; time.sleep(60)"],
                                 stdout=subprocess.PIPE)
        print(child.pid, flush=True)
        sys.stdin.readline()
        child.stdout.readline()
        print("done", flush=True)
        sys.stdin.readline()
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdin is not None
    orphan = int(parent.stdout.readline())
    try:
        cpu.seconds()
        parent.stdin.write("\n")
        parent.stdin.flush()
        parent.stdout.readline()
        parent.communicate("\n")  # it ends, and its child goes on
        followed = cpu.seconds()
        assert followed >= 0.12 and cpu.processes == 2
    finally:
        os.kill(orphan, 9)
    for _ in range(100):
        if cpu.seconds() and cpu.processes == 1:
            break
        time.sleep(0.02)
    assert cpu.seconds() >= followed - 0.02


def test_what_reading_takes_is_not_counted() -> None:
    """A process reads before and after each short inference, and would measure itself."""
    cpu = _seconds()
    begin = time.process_time()
    while time.process_time() - begin < 0.3:
        cpu.seconds()
    assert cpu.seconds() <= 0.1


def test_readings_never_go_back_while_processes_come_and_go() -> None:
    cpu = _seconds()
    children: list[subprocess.Popen[bytes]] = []
    last = 0.0
    for i in range(30):
        children.append(subprocess.Popen([sys.executable, "-S", "-c", "pass"]))
        if i % 3 == 2:
            children.pop(0).wait()
        now = cpu.seconds()
        assert now >= last
        last = now
    for child in children:
        child.wait()
    times = os.times()
    assert last <= cpu.seconds() <= times.user + times.system + times.children_user + times.children_system


def test_a_script_without_a_main_guard_may_hold_a_meter(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "intel-rapl")
    script = tmp_path / "plain.py"
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        import sys
        from secureinfer.measure.counters import open_rapl
        from secureinfer.measure.energy import EnergyMeter
        with EnergyMeter(sources=[open_rapl([Path({str(recorded.folder)!r})])]) as meter:
            before = meter.read()
            spent = meter.between(before, meter.read())
        sys.stdout.write(f"{{spent.source}} {{spent.joules}}")
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "rapl 0.0", done.stderr
