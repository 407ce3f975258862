"""Which method multiplies: those that pass a test of extreme values in this process, and of them the fastest.

Some int8 back ends saturate silently on processors without VNNI, and a float64 product may be emulated. So a method is
tested once in each process and on each device, before it is used. Speed is measured once too, in a few
milliseconds, as rates from which the time of any product is estimated. All methods give the same values, so that
parties need not choose alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import InputError
from . import limbs
from .limbs import METHODS, Method, Work

MEASURE_SECONDS, MEASURE_TURNS = 0.04, 20
LARGE = (64, 512, 512)
# Left and right extremes: bytes 0xFF, 0x80, 0x7F, 0x01, 0x00, 0x55 and both ends of the signed range.
LEFT = [
    -1,
    limbs.BYTE_SIGNS,
    0x7F7F7F7F7F7F7F7F,
    0x0101010101010101,
    0,
    0x5555555555555555,
    -(1 << 63),
    (1 << 63) - 1,
]
RIGHT = {8: [-128, 127, -1, 0, 85, -127], 20: [(1 << 19) - 1, 1 - (1 << 19), 0x7F7F, -0x8080, 0], 64: LEFT}
SIZES = [(1, 1, 1), (3, 7, 5), (8, 31, 17), (33, 64, 64), (16, 257, 33)]


def passes(method: Method, device: torch.device) -> bool:
    """Whether the method is exact on this device for extreme values and the longest sums it relies on."""
    try:
        return all(
            _exact(method, device, size, width, lanes)
            for width in RIGHT
            for size in [*SIZES, (len(LEFT), method.longest // limbs.byte_digits(width), 6)]
            for lanes in (1, 3)
        )
    except (RuntimeError, NotImplementedError):  # the device has no such product
        return False


def _exact(method: Method, device: torch.device, size: tuple[int, int, int], width: int, lanes: int) -> bool:
    """Rows of one extreme by columns of another, so that each result is inner * left * right.

    lanes: only every so many places along the sum are set, so that what falls into one lane of a vector unit differs.
    """
    m, k, n = size
    left = torch.tensor(LEFT, device=device).repeat(-(-m // len(LEFT)))[:m]
    right = torch.tensor(RIGHT[width], device=device).repeat(-(-n // len(RIGHT[width])))[:n]
    x = torch.zeros((m, k), dtype=torch.int64, device=device)
    x[:, ::lanes] = left[:, None]
    w = right.expand(1, k, n)
    if width == 8:
        w = w.to(torch.int8)
    form = method.form(w, width)
    result = method.combine(method.split(x.unsqueeze(0), form, 64), form, 64)
    return torch.equal(result[0], -(-k // lanes) * left[:, None] * right[None, :])


@dataclass(frozen=True)
class Size:
    """A product of [G, M, K] by [G, K, N]. cut: elements of x to split, fewer than G M K in a convolution."""

    groups: int
    m: int
    k: int
    n: int
    cut: int


@dataclass(frozen=True)
class Rates:
    """Seconds: of a call, of a multiply-add in a product of limbs, and of an addition into an int64 element."""

    call: float
    product: float
    element: float

    def estimate(self, size: Size, work: Work, made: bool) -> float:
        """Seconds for a product. made: the form of w is there already."""
        m, k, n = size.m, size.k, size.n
        products = work.products * m * k * (n + work.packing) * self.product
        elements = work.sums * m * n + (0 if made else 8 * work.form * k * n)
        read = work.form * k * n  # a short product waits for the memory that w comes from
        each = work.calls * self.call + products + (elements + read) * self.element
        return size.groups * each + work.split * size.cut * self.element


def measure(names: Sequence[str], device: torch.device) -> dict[str, Rates]:
    """Rates of these methods, from a small and a larger product and one pass over a tensor.

    In turns, and the shortest time counts: other work on the machine only adds.
    """

    def product(method: Method, m: int, k: int, n: int) -> Callable[[], object]:
        form = method.form(torch.ones((1, k, n), dtype=torch.int8, device=device), 8)
        cut = method.split(torch.ones((1, m, k), dtype=torch.int64, device=device), form, 64)
        return lambda: method.combine(cut, form, 64)

    total = torch.zeros(1 << 16, dtype=torch.int64, device=device)
    part = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("", "addition"): lambda: total.add_(part, alpha=256)
    }
    for name in names:
        runs[name, "small"] = product(METHODS[name], 1, 4, 4)
        runs[name, "large"] = product(METHODS[name], *LARGE)
    # The time of this thread does not count what other programs take away, but neither what other threads do.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    started = time.perf_counter()
    for turn in range(MEASURE_TURNS):
        if turn > 3 and time.perf_counter() - started > MEASURE_SECONDS:
            break
        for key, run in runs.items():
            if key[1] == "small":
                run()  # the products before it have taken its code from the caches
            before = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[key] = min(best[key], clock() - before)
    element = best["", "addition"] / total.numel()
    found = {}
    for name in names:
        (m, k, n), work = LARGE, METHODS[name].work(LARGE[1], 8, 64)
        large, small = best[name, "large"], best[name, "small"]
        rest = large - small - element * work.sums * m * n
        rate = max(rest, large / 3) / (work.products * m * k * (n + work.packing))
        found[name] = Rates(small / work.calls, rate, element)
    return found


@dataclass(frozen=True)
class _Key:
    device: torch.device
    threads: int


_lock = threading.RLock()
_passed: dict[tuple[str, torch.device], bool] = {}
_rates: dict[_Key, dict[str, Rates]] = {}
_choices: dict[tuple[object, ...], Method] = {}


def usable(name: str, device: torch.device) -> bool:
    """Whether the method passed its test here; it is tested at the first question."""
    with _lock:
        if (name, device) not in _passed:
            with torch.inference_mode():
                _passed[name, device] = passes(METHODS[name], device)
        return _passed[name, device]


def rates(device: torch.device) -> dict[str, Rates]:
    """Measured rates of the usable methods, at the number of threads in use now."""
    key = _Key(device, torch.get_num_threads())
    if (found := _rates.get(key)) is None:
        with _lock, torch.inference_mode():
            if (found := _rates.get(key)) is None:
                names = [n for n in ("int64", "int8", "float64") if usable(n, device)]
                if "int8" not in names and usable("int8-signed", device):
                    names.append("int8-signed")
                if not names:
                    raise InputError(
                        f"no exact product of integers on {device}; move the tensors to another device"
                    )
                found = _rates[key] = measure(names, device)
    return found


def choose(device: torch.device, size: Size, width: int, ring_bits: int, made: bool) -> Method:
    """The method with the shortest estimated time for a right operand of that width. made: its form is kept."""
    key = (device, torch.get_num_threads(), size, width, ring_bits, made)
    if (method := _choices.get(key)) is None:
        times = {
            name: rate.estimate(size, METHODS[name].work(size.k, width, ring_bits), made)
            for name, rate in rates(device).items()
        }
        method = METHODS[min(times, key=lambda name: times[name])]
        if len(_choices) > 4096:
            _choices.clear()
        _choices[key] = method
    return method


def forced(name: str, device: torch.device) -> Method:
    """The method of this name. Raises InputError if there is none, or if it failed its test on this device."""
    if name not in METHODS:
        raise InputError(f"no method {name!r}; there are {', '.join(METHODS)}")
    if not usable(name, device):
        raise InputError(f"method {name!r} is not exact on {device}, or not there")
    return METHODS[name]


def forget() -> None:
    """Test and measure again at the next use."""
    with _lock:
        for cache in (_passed, _rates, _choices):
            cache.clear()
