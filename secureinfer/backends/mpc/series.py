"""Trigonometric series of smooth functions, with integer coefficients, and their evaluation at a public masked point.

A function f on [low, high] is fitted by least squares with a period longer than the range (a Fourier extension):
f(x) = constant + sum_k cosines[k] cos((k+1) w x) + sines[k] sin((k+1) w x), w = 2 pi / period. Given dealt shares of
cos(k w r) and sin(k w r), the public c = x + r turns each term into a public combination of shares (PROTOCOLS.md,
"Smooth functions from one opening").

The public coefficients multiply shares that are as large as the ring, so both parties must compute them bit for bit
alike, whatever their processors: everything here is integer arithmetic (a one-ulp difference in a vectorised `cos`
between AVX2 and AVX-512 would turn a result into noise). tests/unit/test_series.py fits the functions again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

COEFFICIENT_BITS = 24
"""Fraction bits of the coefficients."""

TRIG_BITS = 30
"""Fraction bits of public cosines and sines, and of the dealt shares of them."""

_TABLE_BITS = 12


@dataclass(frozen=True)
class Series:
    """A fitted function. error: greatest |series - function| on [low, high], from the fit and the rounding."""

    name: str
    low: float
    high: float
    period: int  # a power of two, in units of x
    constant: int
    cosines: tuple[int, ...]
    sines: tuple[int, ...]
    error: float

    @property
    def terms(self) -> int:
        return len(self.cosines)


def _exact_rotation(bits: int) -> tuple[list[int], list[int]]:
    """round(2**TRIG_BITS * cos and sin) of 2 pi i / 2**bits for every i, in exact integer arithmetic.

    Taylor series with 120 fraction bits on [0, pi/4], symmetry elsewhere: no floating point, so every machine agrees.
    """
    fraction = 120
    one = 1 << fraction

    def arctan_inverse(n: int) -> int:  # arctan(1/n)
        term = one // n
        total, square, k, sign = term, n * n, 1, -1
        while term:
            term //= square
            k += 2
            total += sign * (term // k)
            sign = -sign
        return total

    pi = 4 * (4 * arctan_inverse(5) - arctan_inverse(239))  # Machin
    count = 1 << bits

    def first_octant(i: int) -> tuple[int, int]:
        angle = 2 * pi * i // count
        square = angle * angle >> fraction
        cos, term, k = one, one, 0
        while term:
            term = -(term * square >> fraction) // ((k + 1) * (k + 2))
            if term in (0, -1):
                break
            cos += term
            k += 2
        sin, term, k = angle, angle, 1
        while term:
            term = -(term * square >> fraction) // ((k + 1) * (k + 2))
            if term in (0, -1):
                break
            sin += term
            k += 2
        half = 1 << (fraction - TRIG_BITS - 1)
        return (cos + half) >> (fraction - TRIG_BITS), (sin + half) >> (fraction - TRIG_BITS)

    eighth, quarter = count // 8, count // 4
    cos, sin = [0] * count, [0] * count
    for i in range(eighth + 1):
        cos[i], sin[i] = first_octant(i)
        cos[quarter - i], sin[quarter - i] = sin[i], cos[i]
    for i in range(quarter + 1):
        cos[2 * quarter - i], sin[2 * quarter - i] = -cos[i], sin[i]
    for i in range(1, 2 * quarter):
        cos[count - i], sin[count - i] = cos[i], -sin[i]
    return cos, sin


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = _exact_rotation(_TABLE_BITS)
    return torch.tensor(cos, device=device), torch.tensor(sin, device=device)


_TWO_PI_20 = 6588397
"""round(2 pi * 2**20)."""


def rotation(angle: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of 2 pi angle / 2**bits as int64 with TRIG_BITS fraction bits; error below 2**-28 (four units).

    angle: int64, any value (taken modulo 2**bits); 13 <= bits <= 60. Integer arithmetic only.
    The angle is a table entry plus a rest below 2 pi / 4096, whose sine and cosine are two Taylor terms each.
    """
    angle = angle & ((1 << bits) - 1)
    low_bits = bits - _TABLE_BITS
    index = angle >> low_bits
    rest = angle & ((1 << low_bits) - 1)
    rest = (
        rest << (28 - low_bits) if low_bits < 28 else rest >> (low_bits - 28)
    )  # of a table step, 28 fraction bits
    radians = (rest * _TWO_PI_20) >> 20  # 40 fraction bits: 2**28 rest units and 2**12 steps make a turn
    square = (radians * radians) >> 40  # below 2**62 before the shift
    small_sin = radians - torch.div((square * radians) >> 40, 6, rounding_mode="floor")
    small_cos_less_one = -(square >> 1)
    cos_table, sin_table = _tables(angle.device)
    cos, sin = cos_table[index], sin_table[index]
    s, c1 = small_sin >> 10, small_cos_less_one >> 10  # 30 fraction bits
    return cos + ((cos * c1 - sin * s) >> TRIG_BITS), sin + ((sin * c1 + cos * s) >> TRIG_BITS)


def multiples(cos: torch.Tensor, sin: torch.Tensor, terms: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(cos, sin) of k times the angle for k = 1..terms, by rotation; the error grows by 2**-29 a term."""
    out = [(cos, sin)]
    for _ in range(1, terms):
        c, s = out[-1]
        out.append(((c * cos - s * sin) >> TRIG_BITS, (s * cos + c * sin) >> TRIG_BITS))
    return out


def combine(
    series: Series, masked: torch.Tensor, period_bits: int, trig: torch.Tensor, first: bool
) -> torch.Tensor:
    """A share of series(x) with COEFFICIENT_BITS + TRIG_BITS fraction bits, from public masked = x + r.

    trig: this party's shares of cos(k w r) at [2k] and of sin(k w r) at [2k + 1], int64, shape [2 terms, *masked.shape].
    first: this party adds the public constant. period_bits: log2 of the period in ring units.
    """
    if masked.is_meta:
        return torch.empty_like(masked)
    cos, sin = rotation(masked, period_bits)
    out = torch.zeros_like(masked)
    for k, (c, s) in enumerate(multiples(cos, sin, series.terms)):
        a, b = series.cosines[k], series.sines[k]
        if a and b:
            of_cos, of_sin = (a * c + b * s) >> TRIG_BITS, (a * s - b * c) >> TRIG_BITS
        elif a:
            of_cos, of_sin = (a * c) >> TRIG_BITS, (a * s) >> TRIG_BITS
        else:
            of_cos, of_sin = (b * s) >> TRIG_BITS, (-b * c) >> TRIG_BITS
        out += of_cos * trig[2 * k] + of_sin * trig[2 * k + 1]
    if first:
        out += series.constant << TRIG_BITS
    return out


GELU_EVEN = Series(
    name="GELU(x) - x/2, erf form",
    low=-5.0,
    high=5.0,
    period=16,
    constant=32327391,
    cosines=(-26772646, -1863654, -2278482, -830811, -307986, -226984, -9370, -37770, 3176, -2848),
    sines=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    error=1e-06,
)
GELU_TANH_EVEN = Series(
    name="GELU(x) - x/2, tanh form",
    low=-5.0,
    high=5.0,
    period=16,
    constant=32013416,
    cosines=(-26170287, -2391132, -1862878, -1131650, -111875, -336601, 46883, -61258, 10385, -4995),
    sines=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    error=2e-06,
)
GELU_NARROW = Series(
    name="GELU(x) - x/2, erf form, for factors of 14 bits",
    low=-4.75,
    high=4.75,
    period=16,
    constant=28934209,
    cosines=(-20394546, -7147032, 1552203, -3229596, 959191, -767788, 160573, -66879),
    sines=(0, 0, 0, 0, 0, 0, 0, 0),
    error=2.1e-05,
)
GELU_TANH_NARROW = Series(
    name="GELU(x) - x/2, tanh form, for factors of 14 bits",
    low=-4.75,
    high=4.75,
    period=16,
    constant=27597346,
    cosines=(-17880062, -9230775, 3058968, -4174940, 1461591, -981809, 231565, -81388),
    sines=(0, 0, 0, 0, 0, 0, 0, 0),
    error=3.1e-05,
)
EXP = Series(
    name="exp(x)",
    low=-14.0,
    high=0.25,
    period=32,
    constant=52887499,
    cosines=(
        36320339,
        19591628,
        -34856121,
        -61231636,
        -29603362,
        -24793396,
        63283874,
        27546637,
        -33847178,
        -4229731,
        6046747,
        -85329,
        -261505,
        8747,
    ),
    sines=(
        64219821,
        48878600,
        71667858,
        -4674660,
        -14762201,
        -55471588,
        -36686192,
        52969478,
        13485622,
        -16538623,
        -631470,
        1572661,
        -58747,
        -21043,
    ),
    error=4e-07,
)
TANH = Series(
    name="tanh(x)",
    low=-6.0,
    high=6.0,
    period=16,
    constant=0,
    cosines=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    sines=(
        20323795,
        -397782,
        4626509,
        -251773,
        1291791,
        70028,
        172608,
        235461,
        -144642,
        226035,
        -157168,
        141807,
        -90531,
        64012,
        -35396,
        20433,
        -9118,
        4141,
        -1232,
        382,
    ),
    error=2e-06,
)
ERF = Series(
    name="erf(x)",
    low=-4.0,
    high=4.0,
    period=16,
    constant=0,
    cosines=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    sines=(
        17518098,
        5002181,
        -301692,
        4183246,
        -613289,
        341500,
        1406248,
        -1456145,
        1473553,
        -992724,
        606383,
        -288915,
        119574,
        -38383,
        9983,
        -1757,
        201,
        -2,
    ),
    error=2e-07,
)
SILU_EVEN = Series(
    name="SiLU(x) - x/2",
    low=-14.0,
    high=14.0,
    period=32,
    constant=66117106,
    cosines=(
        -55648490,
        -1261494,
        -6276842,
        -335776,
        -1807901,
        20415,
        -619483,
        76809,
        -229713,
        55413,
        -88164,
        29243,
        -33314,
        12634,
        -11658,
        4396,
        -3471,
        1081,
        -746,
        90,
    ),
    sines=(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    error=1e-05,
)
INVERSE = Series(
    name="1/u",
    low=1.0,
    high=2.0,
    period=4,
    constant=33165002,
    cosines=(35988885, 12656269, 581581, -1196834, -363608, -28972),
    sines=(-9972738, -14393457, -7507604, -1739118, -98522, 14175),
    error=2e-07,
)
INVERSE_SQRT = Series(
    name="1/sqrt(u)",
    low=1.0,
    high=2.0,
    period=4,
    constant=20850209,
    cosines=(13042963, 4736010, 471951, -304844, -105744, -8922),
    sines=(-1300934, -4021711, -2299693, -566148, -39821, 3466),
    error=1e-07,
)
SQRT = Series(
    name="sqrt(u)",
    low=1.0,
    high=2.0,
    period=4,
    constant=18495582,
    cosines=(-7734564, -3115762, -601295, 43986, 36877, 3778),
    sines=(-4011408, 747082, 890853, 271380, 27925, -451),
    error=2e-07,
)
LOG = Series(
    name="log(u)",
    low=1.0,
    high=2.0,
    period=4,
    constant=-1814705,
    cosines=(-19546702, -7366725, -1104570, 269335, 121195, 11099),
    sines=(-3085272, 3981955, 2789539, 750021, 64555, -2920),
    error=2e-07,
)
EXP_UNIT = Series(
    name="exp(u)",
    low=0.0,
    high=1.0,
    period=4,
    constant=46898305,
    cosines=(-41648169, 13795916, -2208009, -117178, 56349),
    sines=(9287045, 4363535, -3376998, 754459, -44052),
    error=2e-07,
)
