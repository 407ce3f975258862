"""The highest rate of a server that keeps its bound: a first guess from service times, then a search over runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

ARRIVALS = 20_000
STEP = 1.25
RESOLUTION = 1.1
MOST_TRIALS = 12
LOWEST_SHARE = 1 / 32
"""Of what back-to-back inferences reach: below it, waiting is rare, and it is the latency alone that breaks the bound."""

T = TypeVar("T")


def waiting_percentile_ms(service_ms: Sequence[float], rate: float, percentile: float) -> float:
    """Latency at this percentile of a queue with one server, Poisson arrivals and service times drawn from these.

    rate: a second. Lindley's recursion over a fixed seed, so that two rates differ by the rate alone.
    """
    random = np.random.default_rng(20261130)
    service = random.choice(np.asarray(service_ms, dtype=np.float64), ARRIVALS)
    gaps = random.exponential(1.0, ARRIVALS) * 1000 / rate
    # Wait of the next: max(0, wait + service - gap), in closed form from running sums and their least.
    steps = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    waits = steps - np.minimum.accumulate(steps)
    return float(np.quantile(waits + service, percentile))


def first_guess(service_ms: Sequence[float], bound_ms: float, percentile: float, most: float) -> float:
    """The highest rate that would keep the bound in such a queue, at most `most`; a low one where none does."""
    low, high = most * LOWEST_SHARE, most
    if waiting_percentile_ms(service_ms, low, percentile) > bound_ms:
        return low
    for _ in range(12):
        middle = math.sqrt(low * high)
        if waiting_percentile_ms(service_ms, middle, percentile) > bound_ms:
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True)
class Tried(Generic[T]):
    """held: as far as the search goes on from here."""

    rate: float
    held: bool
    what: T


def search(
    attempt: Callable[[float], tuple[bool, T]],
    start: float,
    lowest: float,
    *,
    resolution: float = RESOLUTION,
    most_trials: int = MOST_TRIALS,
) -> list[Tried[T]]:
    """Try rates until the highest that holds is known to `resolution` (a ratio), in the order in which they ran.

    Upwards and downwards in steps that grow, then halving between. Gives up below `lowest`.
    """
    tried: list[Tried[T]] = []
    held: float | None = None
    broken: float | None = None
    rate, step = max(start, lowest), STEP
    while len(tried) < most_trials:
        ok, what = attempt(rate)
        tried.append(Tried(rate, ok, what))
        if ok:
            held = rate if held is None else max(held, rate)
        else:
            broken = rate if broken is None else min(broken, rate)
        if held is not None and broken is not None:
            if broken / held <= resolution:
                break
            rate = math.sqrt(held * broken)
        elif held is not None:
            rate, step = held * step, step * STEP
        else:
            if rate <= lowest:
                break
            rate, step = max(lowest, rate / step), step * STEP
    return tried


def best(tried: Sequence[Tried[T]]) -> Tried[T] | None:
    """The highest that held; None where none did."""
    return max((t for t in tried if t.held), key=lambda t: t.rate, default=None)
