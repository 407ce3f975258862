"""Whether the machine was quiet: judged in the timed windows of each side, and in the choice of threads."""

from __future__ import annotations

from typing import Any, cast

import pytest

from secureinfer.bench.quiet import CHOICE, PLAINTEXT, SECURE, Mark, Quiet
from secureinfer.bench.runner import Effort, Turns, _enough
from secureinfer.measure.energy import EnergyMeter, Reading


class Machine:
    """A clock of one's own; `run` passes time in which we and others take so many cores."""

    def __init__(self) -> None:
        self.at = self.ours = self.busy = 0.0

    def read(self) -> Reading:
        return Reading(self.at, None, self.ours)

    def run(self, quiet: Quiet, side: str | None, seconds: float, ours: float, others: float) -> None:
        begin = quiet.mark()
        self.at += seconds
        self.ours += ours * seconds
        self.busy += (ours + others) * seconds
        if side is not None:
            quiet.add(side, begin, quiet.mark())


def machine() -> tuple[Machine, Quiet]:
    found = Machine()
    return found, Quiet(cast(EnergyMeter, found), lambda: found.busy)


def test_a_quiet_machine_has_no_fault() -> None:
    found, quiet = machine()
    for _ in range(40):
        found.run(quiet, SECURE, 0.1, 1.8, 0.1)
        found.run(quiet, PLAINTEXT, 0.05, 1.0, 0.1)
    assert quiet.faults() == []


def test_what_slows_plaintext_alone_is_told_and_the_average_of_the_case_would_have_hidden_it() -> None:
    found, quiet = machine()
    for _ in range(20):
        found.run(quiet, SECURE, 1.0, 1.0, 0.0)
        found.run(quiet, PLAINTEXT, 0.1, 1.0, 1.0)
    average = (found.busy - found.ours) / found.at
    assert average < 0.25, "the planted fault: judged over the whole case this is a quiet machine"
    (fault,) = quiet.faults()
    assert "1.0 of its" in fault and fault.endswith("2.0 s of plaintext")


def test_what_ran_outside_the_timed_windows_is_no_fault() -> None:
    found, quiet = machine()
    for _ in range(10):
        found.run(quiet, None, 5.0, 0.0, 2.0)
        found.run(quiet, SECURE, 1.0, 1.0, 0.0)
    assert quiet.faults() == []


def test_a_burst_is_told_though_the_side_was_quiet_on_average() -> None:
    found, quiet = machine()
    for i in range(10):
        found.run(quiet, SECURE, 1.0, 1.0, 1.0 if i in (3, 4) else 0.0)
    (fault,) = quiet.faults()
    assert "2.0 of the 10.0 s of private inferences" in fault


def test_a_disturbed_choice_of_threads_is_told() -> None:
    found, quiet = machine()
    found.run(quiet, CHOICE, 0.6, 1.0, 1.0)
    assert "the choice of plaintext's threads" in quiet.faults()[0]


@pytest.mark.parametrize("seconds", [0.05, 0.19])
def test_a_window_too_short_for_the_kernels_ticks_says_nothing(seconds: float) -> None:
    found, quiet = machine()
    found.run(quiet, PLAINTEXT, seconds, 1.0, 2.0)
    assert quiet.faults() == []


@pytest.mark.parametrize("end", [Mark(Reading(9.0, None, None), 5.0), Mark(Reading(9.0, None, 1.0), None)])
def test_where_the_system_does_not_tell_nothing_is_said(end: Any) -> None:
    found, quiet = machine()
    quiet.add(SECURE, quiet.mark(), end)
    assert quiet.faults() == []


# How long is enough.


@pytest.mark.parametrize(
    ("count", "ms", "seconds", "enough"),
    [
        (400, 2.5, 99.0, False),  # the planted fault: as many as most_runs, and too short to be quoted
        (450, 2.5, 99.0, True),
        (450, 2.5, 0.0, True),  # more than most_runs, and a second of them
        (100, 20.0, 1.0, False),  # until `seconds` have passed
        (100, 20.0, 9.0, True),
        (1, 5000.0, 99.0, False),
    ],
)
def test_a_quick_model_runs_until_it_can_be_quoted(
    count: int, ms: float, seconds: float, enough: bool
) -> None:
    effort = Effort(least_runs=2, most_runs=400, seconds=5.0)
    assert _enough(Turns(online_ms=[ms] * count), effort, seconds) is enough
