"""The fast MPC kernels beside the generic ones, beside CrypTen as it is shipped, and beside plaintext, in one run.

All parties are processes on this machine's cores. Cases: the fraud MLP 30-64-32-2 at batch 8, ResNet-18 at 224 x 224, and an
int8 linear layer 128 x 768 by 768 x 3072. Sessions stay open side by side and take turns, so that noise meets them alike.
Material is dealt beforehand (offline); CrypTen's trusted first party makes its own within its run, which is said in its row.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import secureinfer as si
from secureinfer.bench import command
from secureinfer.bench.command import document

PROTOCOLS = ("fast", "crypten")
COMPILE_SECONDS = 90
PEER = Path(__file__).with_name("peers") / "crypten_stock.py"


@dataclass(frozen=True)
class Row:
    """Median online latency of one case under one engine, and what its plan declares."""

    case: str
    engine: str
    online_ms: float
    error: float | None
    rounds: int | None = None
    bytes: int | None = None
    dealt_bytes: int | None = None
    offline_ms: float | None = None


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2)]
    return nn.Sequential(*layers), torch.randn(8, 30)


def resnet18() -> tuple[nn.Module, torch.Tensor]:
    import torchvision

    return torchvision.models.resnet18(), torch.randn(1, 3, 224, 224)


def resnet18_int8() -> tuple[nn.Module, torch.Tensor]:
    model, x = resnet18()
    return si.compress(model.eval(), [si.Quantize(weights="int8")])[0], x


def linear() -> tuple[nn.Module, torch.Tensor]:
    model, _ = si.compress(nn.Sequential(nn.Linear(768, 3072)), [si.Quantize(weights="int8")])
    return model, torch.randn(128, 768)


@contextlib.contextmanager
def sessions(model: nn.Module, x: torch.Tensor, threads: int, fuse: bool) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        opened = {}
        for protocol in PROTOCOLS:
            program = si.compile(model, x, protocol=protocol)
            fused = fuse and protocol == "fast"
            session = si.local_session(program, threads=threads, torch_compile=fused)
            opened[protocol] = stack.enter_context(session)
        yield opened


def measure(
    name: str, make: Callable[[], tuple[nn.Module, torch.Tensor]], runs: int, threads: int, cold: int = 1
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of plaintext and both protocols, and each session's report.

    cold: runs that are not counted. More than one: local steps are compiled meanwhile, for the fast kernels.
    """
    torch.manual_seed(0)
    model, x = make()
    model.eval()
    with torch.inference_mode():
        expected = model(x)
    plain: list[float] = []
    online: dict[str, list[float]] = {p: [] for p in PROTOCOLS}
    offline: dict[str, list[float]] = {p: [] for p in PROTOCOLS}
    errors = dict.fromkeys(PROTOCOLS, 0.0)
    rows, reports = [], {}
    torch.set_num_threads(threads)
    with sessions(model, x, threads, cold > 1) as opened:
        for run in range(runs + cold):
            if cold > 1 and run == cold - 1:
                time.sleep(COMPILE_SECONDS)
            for protocol, session in opened.items():
                started = time.perf_counter()
                session.prepare(1)
                dealt = time.perf_counter()
                got = session.infer(x)
                ended = time.perf_counter()
                if run >= cold:
                    offline[protocol].append(dealt - started)
                    online[protocol].append(ended - dealt)
                errors[protocol] = max(errors[protocol], float((got - expected).abs().max()))
            with torch.inference_mode():
                model(x)
                started = time.perf_counter()
                model(x)
                plain.append(time.perf_counter() - started)
        rows.append(Row(name, f"torch fp32, {threads} threads", 1e3 * statistics.median(plain), 0.0))
        for protocol, session in opened.items():
            total = session.program.plan.totals
            label = f"{protocol}, torch.compile" if cold > 1 and protocol == "fast" else protocol
            rows.append(
                Row(
                    name, label, 1e3 * statistics.median(online[protocol]), errors[protocol], total.rounds,
                    total.bytes, total.dealt_bytes, 1e3 * statistics.median(offline[protocol]),
                )
            )  # fmt: skip
            reports[protocol] = session.report().to_dict()
    return rows, reports


def stock(name: str, model: nn.Sequential, x: torch.Tensor, runs: int) -> Row:
    """CrypTen as it is shipped, two processes over gloo; for models of linear layers and ReLUs."""
    with tempfile.TemporaryDirectory(prefix="secureinfer-") as folder:
        save_file({**model.state_dict(), "input": x}, Path(folder) / "case.safetensors")
        command = [sys.executable, str(PEER)]
        with subprocess.Popen([*command, "0", folder, str(runs + 1)], stdout=subprocess.DEVNULL) as other:
            out = subprocess.run(
                [*command, "1", folder, str(runs + 1)],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            other.wait(60)
    if out.returncode:
        sys.stderr.write(out.stderr[-2000:])
        return Row(name, "crypten 0.4.1 as shipped: unavailable", float("nan"), None)
    found = json.loads(out.stdout.splitlines()[-1])
    with torch.inference_mode():
        expected = model(x).flatten()
    error = float((torch.tensor(found["output"]) - expected).abs().max())
    label = "crypten 0.4.1 as shipped, gloo, trusted first party (dealing included)"
    return Row(name, label, 1e3 * statistics.median(found["seconds"][1:]), error)


def run(
    *, quick: bool = False, threads: int = 1, progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    runs = 5 if quick else 30
    progress("fraud MLP")
    rows, _ = measure("fraud MLP, batch 8", mlp, runs, threads)
    torch.manual_seed(0)
    model, x = mlp()
    rows.append(stock("fraud MLP, batch 8", model, x, runs))
    name = "int8 linear 128x768 by 768x3072"
    progress(name)
    layers, reports = measure(name, linear, 3 if quick else 9, threads)
    rows += layers
    (layer,) = [found for found in reports["fast"]["online"]["layers"] if found["path"] == "0"]
    rows.append(Row(name, "fast: the layer's steps, product and cut", layer["latency_ms"], None))
    if not quick:
        rows += measure(f"{name}, compiled", linear, 15, threads, cold=4)[0]
        progress("ResNet-18, with compiling: some minutes")
        rows += measure("ResNet-18, 224x224", resnet18, 3, threads)[0]
        rows += measure("ResNet-18, 224x224, compiled", resnet18, 5, threads, cold=4)[0]
        rows += measure("int8 ResNet-18, 224x224, compiled", resnet18_int8, 5, threads, cold=4)[0]
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown; ratios are to the same case's fast row."""
    lines = [
        "| case | engine | online | ratio to fast | rounds | online MB | dealt MB | offline | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    fast = {r.case: r.online_ms for r in rows if r.engine in ("fast", "fast, torch.compile")}

    def shown(value: float | None, form: str, unit: float = 1.0) -> str:
        return "" if value is None else form.format(value / unit)

    for r in rows:
        cells = [
            r.case, r.engine, f"{r.online_ms:,.2f} ms", f"{r.online_ms / fast[r.case]:.3g}", shown(r.rounds, "{:.0f}"),
            shown(r.bytes, "{:.3f}", 1e6), shown(r.dealt_bytes, "{:.3f}", 1e6), shown(r.offline_ms, "{:,.1f} ms"),
            shown(r.error, "{:.1e}"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return document("secureinfer.mpc/1", rows)


def main(arguments: Sequence[str]) -> None:
    """`--quick` for fewer runs and no ResNet, `--json` for one JSON document, `--threads N` for each party."""
    threads = int(arguments[arguments.index("--threads") + 1]) if "--threads" in arguments else 1
    command.run(arguments, functools.partial(run, threads=threads), table, as_json)
