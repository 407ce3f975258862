"""Products over the ring beside torch's float32 products of the same shapes, in one run, as alternating calls.

`python -m benchmarks products [--quick] [--json]`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.mpc import products, selection
from . import command
from .command import document


@dataclass(frozen=True)
class Row:
    """One measured product. width: bits of the right operand. method: the one forced, or "chosen".

    ratio: ours / float32's, both by the same clock: with one thread the thread's processor time, from which other work
    on the machine takes nothing away, else elapsed time.
    """

    what: str
    threads: int
    width: int
    ring_bits: int
    method: str
    ours_ms: float
    float32_ms: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.float32_ms


@dataclass(frozen=True)
class Case:
    """x of one shape by w of another. options: of a convolution: stride, padding."""

    what: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    widths: tuple[tuple[int, tuple[int, ...]], ...]
    """(width, ring bits) that are measured."""
    options: tuple[int, int] | None = None


ALL = ((8, (64, 48, 40, 32)), (20, (64, 48)), (64, (64,)))
CASES = (
    Case("128x768 by 768x3072", (128, 768), (768, 3072), ALL),
    Case("8x30 by 30x64", (8, 30), (30, 64), ((8, (64,)), (64, (64,)))),
    Case("12 of 128x64 by 64x128", (12, 128, 64), (12, 64, 128), ((64, (64,)),)),
    Case("3x3, 64 channels, 56x56", (1, 64, 56, 56), (64, 64, 3, 3), ((8, (64, 40)), (20, (64,))), (1, 1)),
    Case("7x7 stride 2, 3 channels, 224x224", (1, 3, 224, 224), (64, 3, 7, 7), ((8, (64, 40)),), (2, 3)),
    Case("3x3, 512 channels, 7x7", (1, 512, 7, 7), (512, 512, 3, 3), ((8, (64, 40)), (20, (64,))), (1, 1)),
)


def _whole(shape: tuple[int, ...], width: int) -> torch.Tensor:
    if width == 8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    bound = 1 << (width - 1)
    return torch.randint(1 - bound, bound - 1, shape)


def _ours(case: Case, width: int) -> Callable[[int, str | None], torch.Tensor]:
    x, w = _whole(case.left, 64), _whole(case.right, width)
    bits = None if width == 8 else width
    if case.options is not None:
        kernel, options = products.prepare_conv(w, bits=bits), case.options
        return lambda ring, method: products.conv2d(x, kernel, *options, ring_bits=ring, method=method)
    right = products.prepare(w, bits) if w.dim() == 2 else w
    return lambda ring, method: products.matmul(x, right, ring, method=method)


def _float32(case: Case) -> Callable[[], torch.Tensor]:
    x, w = torch.randn(case.left), torch.randn(case.right)
    if case.options is None:
        return lambda: torch.matmul(x, w)
    stride, padding = case.options
    return lambda: torch.nn.functional.conv2d(x, w, stride=stride, padding=padding)


def _alternate(runs: dict[tuple[int, str | None], Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Median milliseconds of each; one call of each in turn."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for i in range(rounds + 1):
        for key, run in runs.items():
            before = clock()
            run()
            if i:  # the first call makes forms and choices
                times[key].append((clock() - before) * 1e3)
    return {key: statistics.median(values) for key, values in times.items()}


def measure(
    *, quick: bool = False, threads: Sequence[int] = (1, 2), progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Every case and method at each number of threads. quick: fewer rounds and only the chosen methods."""
    before, rows = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            for case in CASES:
                for width, rings in case.widths:
                    progress(f"{case.what}, {width}-bit weights, {count} threads")
                    rows += _rows(case, width, rings, count, quick)
    finally:
        torch.set_num_threads(before)
    return rows


def _rows(case: Case, width: int, rings: Sequence[int], threads: int, quick: bool) -> list[Row]:
    ours, plain = _ours(case, width), _float32(case)
    names = [] if quick else list(selection.rates(torch.device("cpu")))
    runs: dict[tuple[int, str | None], Callable[[], object]] = {(0, "float32"): plain}
    for ring in rings:
        for name in (None, *names):
            runs[ring, name] = lambda ring=ring, name=name: ours(ring, name)  # type: ignore[misc]
    found = _alternate(runs, 5 if quick else 15)
    return [
        Row(case.what, threads, width, ring, name or "chosen", ms, found[0, "float32"])
        for (ring, name), ms in found.items()
        if ring
    ]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| product | threads | weights | ring | method | ours | float32 | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.what} | {r.threads} | {r.width} bits | {r.ring_bits} bits | {r.method} "
            f"| {r.ours_ms:.3g} ms | {r.float32_ms:.3g} ms | {r.ratio:.2f} |"
        )
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return document("secureinfer.products/1", rows, ("ratio",))


def main(arguments: Sequence[str]) -> None:
    """`--quick` for the chosen methods only and fewer rounds, `--json` for one JSON document."""
    command.run(arguments, measure, table, as_json)
