"""How long a sweep still takes: a guess for each case, corrected by what the finished ones took, as wide as it is unsure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .report import CaseKey

UNSURE, UNEVEN = 0.7, 0.4
"""Deviations of logarithms: of guesses from this machine's speed (a factor of 2), and of one case from the others (1.5)."""


@dataclass(frozen=True)
class Guess:
    """Of one model, seconds on two cores. prepare: building it and all plaintext engines, once for all of its cases.

    compile: for a backend, by its name. infer: offline and online of one inference. link_bytes, rounds: of MPC, one
    inference with its dealing, for networks.
    """

    prepare: float
    compile: dict[str, float]
    infer: dict[str, float]
    link_bytes: float = 0.0
    rounds: int = 12


_SMALL = Guess(20, {"mpc": 1, "crypten": 1, "ckks": 5}, {"mpc": 0.03, "crypten": 0.03, "ckks": 0.1}, 4e5)
_IMAGE = Guess(25, {"mpc": 3, "crypten": 3, "ckks": 10}, {"mpc": 0.05, "crypten": 0.05, "ckks": 1}, 1e6, 24)
GUESSES = {
    "digits-cnn": _IMAGE,
    "lenet": Guess(
        30, {"mpc": 3, "crypten": 3, "ckks": 20}, {"mpc": 0.1, "crypten": 0.1, "ckks": 6}, 2e6, 40
    ),
    "minilm": Guess(80, {"mpc": 4, "crypten": 4, "ckks": 3}, {"mpc": 3, "crypten": 5}, 6.4e8, 832),
    "bert-tiny": Guess(40, {"mpc": 1, "crypten": 1, "ckks": 1}, {"mpc": 1, "crypten": 2}, 1.4e8, 300),
    "bert-base": Guess(240, {"mpc": 20, "crypten": 20, "ckks": 8}, {"mpc": 20, "crypten": 40}, 4.5e9, 1700),
    "resnet18": Guess(100, {"mpc": 6, "crypten": 6, "ckks": 3}, {"mpc": 2.5, "crypten": 2.5}, 4.6e8, 90),
}
"""Other models are taken to be small. A backend that is missing refuses the model."""

START = 5.0
NETWORK = {"lan": (1e9, 0.5e-3), "wan": (12.5e6, 40e-3)}
"""Bytes a second, and seconds that a message takes."""


def guess_seconds(key: CaseKey, *, first: bool, seconds: float = 30.0, runs: int = 5) -> float:
    """first: of its model and batch, so that both are prepared in it. seconds, runs: that its turns take at least."""
    guess = GUESSES.get(key.model, _SMALL)
    total = guess.compile[key.backend] + (guess.prepare if first else 0.0)
    one = guess.infer.get(key.backend)
    if one is None:
        return total
    network, _, projected = key.network.partition(":")
    if network in NETWORK and not projected:
        rate, delay = NETWORK[network]
        if key.backend == "ckks":
            one += 2 * delay + 2e6 / rate
            total += 50e6 / rate  # keys
        else:
            one += guess.rounds * delay + guess.link_bytes / rate
    return total + START + max(seconds, (runs + 1) * one)


class Progress:
    """What is left of a sweep. keys: the cases that are to run, in their order. seconds, runs: as of guess_seconds.

    How much slower this machine is than the guesses is a factor that is learnt, in logarithms, from each finished case.
    """

    def __init__(
        self,
        keys: Iterable[CaseKey],
        *,
        seconds: float = 30.0,
        runs: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._left = list(dict.fromkeys(keys))
        self._seconds, self._runs = seconds, runs
        self._prepared: set[tuple[str, int]] = set()
        self._learnt: list[float] = []
        self._running: CaseKey | None = None
        self._since = 0.0

    def begin(self, key: CaseKey) -> None:
        """The case begins; being told twice of the same one changes nothing."""
        if key != self._running:
            self._running, self._since = key, self._clock()

    def end(self, key: CaseKey, seconds: float | None = None, *, ok: bool = True) -> None:
        """The case has ended. seconds: that it took, at least; None for one that was there already and did not run.

        One that failed (not ok) took as long as it took to fail, which says nothing of others.
        """
        if key not in self._left:
            return
        guess = self._guesses()[key]
        self._left.remove(key)
        ran = key == self._running
        took = max(seconds or 0.0, self._clock() - self._since if ran else 0.0)
        if ran:
            self._running = None
        if seconds is None:
            return
        self._prepared.add((key.model, key.batch))
        if ok:
            self._learnt.append(math.log(max(took, 1e-3) / guess))

    def _guesses(self) -> dict[CaseKey, float]:
        """Of each case that is left, before anything is learnt."""
        prepared, guesses = set(self._prepared), {}
        for key in self._left:
            group = (key.model, key.batch)
            first = group not in prepared
            guesses[key] = guess_seconds(key, first=first, seconds=self._seconds, runs=self._runs)
            prepared.add(group)
        return guesses

    def between(self) -> tuple[float, float]:
        """Seconds that are left, at least and at most, as two in three times. (0, 0) with nothing left."""
        count = len(self._learnt)
        mean = sum(self._learnt) / count if count else 0.0
        spread = sum((x - mean) ** 2 for x in self._learnt)
        uneven = (2 * UNEVEN**2 + spread) / (2 + max(0, count - 1))
        precision = 1 / UNSURE**2 + count / uneven
        factor = math.exp(count / uneven * mean / precision)
        rest, squares = self._rest(factor)
        if not rest:
            return 0.0, 0.0
        # The factor's own doubt is the same for all cases; each one's own evens out over many.
        deviation = math.sqrt(1 / precision + uneven * squares / rest**2)
        return rest * math.exp(-deviation), rest * math.exp(deviation)

    def _rest(self, factor: float) -> tuple[float, float]:
        """Seconds that are left, and the sum of each case's, squared."""
        elapsed = self._clock() - self._since if self._running is not None else 0.0
        parts = []
        for key, guess in self._guesses().items():
            whole = guess * factor
            # What has taken longer than was thought is not about to end: it takes some of that again.
            parts.append(max(whole - elapsed, 0.2 * elapsed) if key == self._running else whole)
        return sum(parts), sum(part**2 for part in parts)

    def text(self) -> str:
        """Such as "about 4 min left", or "between 3 and 6 min left" while no more is known; empty with nothing left."""
        low, high = self.between()
        if not high:
            return ""
        if high < 5:
            return "a few seconds left"
        if high / low < 1.5:
            return f"about {duration(math.sqrt(low * high))} left"
        begin, end = duration(low), duration(high)
        if begin == end:
            return f"about {end} left"
        number, _, unit = begin.partition(" ")
        return f"between {number if end.endswith(f' {unit}') else begin} and {end} left"


def duration(seconds: float) -> str:
    """Rounded as much as a guess is: "40 s", "4 min", "2.5 h"."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    if seconds < 90 * 60:
        return f"{max(1, round(seconds / 60))} min"
    return f"{round(seconds / 1800) / 2:g} h"
