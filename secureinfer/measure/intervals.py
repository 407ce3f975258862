"""How sure a figure is: intervals of a mean, a percentile, a ratio of paired runs and a change between two sets of runs.

All are None where there are too few values for one; none assumes more of the values than it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

CONFIDENCE = 0.95
LEAST_VALUES = 3
"""Two values have a spread, but no interval that anybody would act on: Student's factor is 12.7."""
TRIM, LEAST_TRIMMED = 0.2, 8
"""Of each end of a set of runs, as Yuen's test leaves out: a stall of the machine makes a run slow, never quick.
Of fewer values none is left out: with 5 runs of 3 % noise a change of 20 % would be found in 76 % of cases, not in all."""


@dataclass(frozen=True)
class Interval:
    """Where a figure lies with this confidence, in the figure's own unit."""

    low: float
    high: float
    confidence: float = CONFIDENCE


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Of the mean, by Student's t; never below 0 where no value is."""
    count = len(values)
    if count < LEAST_VALUES:
        return None
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
    half = student_quantile(0.5 + confidence / 2, count - 1) * deviation
    low = mean - half
    return Interval(max(0.0, low) if min(values) >= 0 else low, mean + half, confidence)


def percentile_interval(
    values: Sequence[float], percent: float, confidence: float = CONFIDENCE
) -> Interval | None:
    """Of a percentile, between two of the values in order; it holds for any distribution.

    None unless both ends lie among the values: p50 takes 6 of them, p90 36, p99 368.
    Source: David and Nagaraja, Order Statistics, section 7.1.
    """
    count, tail = len(values), (1 - confidence) / 2
    if not 0 < percent < 100:
        return None
    # The k-th smallest lies above the percentile when fewer than k values lie at or below it: Binomial(count, percent).
    below, low, high = 0.0, 0, None
    for k in range(count):
        below += _binomial(count, k, percent / 100)
        if below <= tail:
            low = k + 1
        elif high is None and below >= 1 - tail:
            high = k + 1
            break
    if low == 0 or high is None:
        return None
    ordered = sorted(values)
    return Interval(ordered[low - 1], ordered[high - 1], confidence)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Of mean(numerators) / mean(denominators), where both of an index were measured together.

    What is left of each numerator when ratio x denominator is taken off carries the spread, so that what slowed both
    sides of a pair cancels; on a logarithmic scale, with Student's t. Drawing pairs again (a bootstrap) is not used:
    of 3 pairs its 95 % held 75 %, this one 94 %.
    None with fewer than LEAST_VALUES pairs, lists of different lengths, or a value that is not positive.
    Source: Cochran, Sampling Techniques, section 6.3.
    """
    count = len(numerators)
    if count < LEAST_VALUES or count != len(denominators) or min(*numerators, *denominators) <= 0:
        return None
    above, below = math.fsum(numerators) / count, math.fsum(denominators) / count
    ratio = above / below
    rest = math.fsum((n - ratio * d) ** 2 for n, d in zip(numerators, denominators, strict=True))
    deviation = math.sqrt(rest / (count - 1) / count) / above
    factor = _factor(student_quantile(0.5 + confidence / 2, count - 1) * deviation)
    return Interval(ratio / factor, ratio * factor, confidence)


def change_interval(
    before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, Interval | None]:
    """(typical after / typical before, its interval) of two sets of positive values that are not paired with each other.

    Trimmed means of logarithms, by Yuen's test: one run that a stall made slow moves neither ratio nor interval far.
    The interval is None with fewer than LEAST_VALUES on a side.
    Source: Yuen, Biometrika 61 (1974), 165.
    """
    (mean_a, square_a, degrees_a), (mean_b, square_b, degrees_b) = _trimmed(before), _trimmed(after)
    ratio, square = math.exp(mean_b - mean_a), square_a + square_b
    if min(len(before), len(after)) < LEAST_VALUES:
        return ratio, None
    if square == 0:
        return ratio, Interval(ratio, ratio, confidence)
    degrees = square**2 / (square_a**2 / degrees_a + square_b**2 / degrees_b)
    factor = _factor(student_quantile(0.5 + confidence / 2, max(1, int(degrees))) * math.sqrt(square))
    return ratio, Interval(ratio / factor, ratio * factor, confidence)


def _factor(half: float) -> float:
    """Of a half-width in logarithms; what is wider than any figure stays a number that JSON holds."""
    return math.exp(min(half, 50.0))


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """(trimmed mean of logarithms, squared standard error, degrees of freedom)."""
    logs = sorted(math.log(v) for v in values)
    count = len(logs)
    cut = int(TRIM * count) if count >= LEAST_TRIMMED else 0
    kept = logs[cut : count - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    middle = math.fsum(winsorised) / count
    spread = math.fsum((v - middle) ** 2 for v in winsorised)
    left = len(kept)
    return math.fsum(kept) / left, spread / (left * (left - 1)) if left > 1 else 0.0, max(1, left - 1)


@lru_cache(maxsize=1024)
def student_quantile(probability: float, degrees: int) -> float:
    """The t that a Student variable stays below with this probability (0.5 to 1). degrees: of freedom, 1 or more."""
    if degrees > 1000:
        return _normal_quantile(probability)
    low, high = 0.0, 1.0
    while _student(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, exact. Source: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees % 2 == 0:
        term = total = 1.0
        for k in range(1, degrees // 2):
            term *= cosine**2 * (2 * k - 1) / (2 * k)
            total += term
        return 0.5 + sine * total / 2
    term, total = cosine, cosine if degrees > 1 else 0.0
    for k in range(1, (degrees - 1) // 2):
        term *= cosine**2 * (2 * k) / (2 * k + 1)
        total += term
    return 0.5 + (angle + sine * total) / math.pi


def _binomial(count: int, k: int, share: float) -> float:
    """P(Binomial(count, share) = k), in logarithms so that large counts neither overflow nor take long."""
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways + k * math.log(share) + (count - k) * math.log1p(-share))


def _normal_quantile(probability: float) -> float:
    return NormalDist().inv_cdf(probability)
