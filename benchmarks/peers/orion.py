"""Orion (`orion-fhe` on Lattigo) on the two image models, in a process and a Python environment of its own.

    python3.12 -m benchmarks.peers.orion --setup DIR            make that environment; Python 3.10 to 3.12
    DIR/bin/python -m benchmarks.peers.orion MODEL [--case FILE] [--runs N | --turns] [--threads N]

MODEL is `square_mlp` or `lola`, with Orion's own parameters for its examples of the same names. FILE is a safetensors file
with the weights and an `input`; without one they are drawn. Prints one line of JSON, after it has taken turns as
turns.py says. Started as a module from the project's folder: as a script, this file would hide the package `orion`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

from . import turns

# Orion bounds scipy and numpy itself; torch is held where it was tried. safetensors reads the case.
PACKAGES = ("orion-fhe==1.0.2", "torch==2.13.0", "safetensors>=0.5,<1")
NEWEST_PYTHON = (3, 12)

# configs/mlp.yml and configs/lola.yml of Orion, which are the same. Q and P have 217 bits: within the 218 of the standard of
# 2018 for 128 bits at this N, past the 214 of the guidelines of 2024 that ours keep. The ring gives 8192 slots.
PARAMETERS: dict[str, Any] = {
    "LogN": 13,
    "LogQ": [29, 26, 26, 26, 26, 26],
    "LogP": [29, 29],
    "LogScale": 26,
    "H": 8192,
    "RingType": "ConjugateInvariant",
}
OPTIONS = {
    "margin": 2, "embedding_method": "hybrid", "backend": "lattigo", "fuse_modules": True, "debug": False, "io_mode": "none",
}  # fmt: skip
SHAPES = {"square_mlp": (1, 784), "lola": (1, 1, 28, 28)}


def setup(folder: str) -> None:
    if sys.version_info[:2] > NEWEST_PYTHON:
        sys.exit(f"Orion's wheels are for Python 3.10 to 3.12 and this is {platform.python_version()}")
    venv.create(folder, with_pip=True)
    python = Path(folder).absolute() / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", *PACKAGES], check=True)
    sys.stderr.write(f"SECUREINFER_ORION_PYTHON={python}\n")


def build(name: str) -> Any:
    """The layers of benchmarks/ckks_models.py, under the same names, as Orion's."""
    import orion.nn as on
    from torch import nn

    layers = {
        "square_mlp": lambda: [on.Linear(784, 128), on.Quad(), on.Linear(128, 128), on.Quad(), on.Linear(128, 10)],
        "lola": lambda: [
            on.Conv2d(1, 5, kernel_size=2, stride=2), on.Quad(), on.Flatten(), on.Linear(980, 100), on.Quad(),
            on.Linear(100, 10),
        ],
    }  # fmt: skip

    class Net(on.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers[name]())

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    return Net()


def measure(name: str, case: str | None, runs: int | None, out: Any) -> dict[str, Any]:
    import orion
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, x = build(name), torch.rand(*SHAPES[name])
    if case is not None:
        from safetensors.torch import load_file

        given = load_file(case)
        x = given.pop("input")
        net.layers.load_state_dict(given)
    net.eval()
    with torch.no_grad():
        expected = net(x)
    started = time.perf_counter()
    orion.init_scheme({"ckks_params": PARAMETERS, "orion": OPTIONS})
    keys = time.perf_counter()
    orion.fit(net, x)
    level = orion.compile(net)  # the rotation keys that the layers need are made here
    compiled = time.perf_counter()
    net.he()
    error = 0.0

    def once() -> tuple[float, ...]:
        nonlocal error
        started = time.perf_counter()
        encrypted = orion.encrypt(orion.encode(x, level))
        ready, used = time.perf_counter(), time.process_time()
        answer = net(encrypted)
        used, evaluated = time.process_time() - used, time.perf_counter()
        got = answer.decrypt().decode()
        ended = time.perf_counter()
        error = max(error, float((got.flatten() - expected.flatten()).abs().max()))
        return ended - started, ready - started, evaluated - ready, ended - evaluated, used

    versions = {
        "orion": importlib.metadata.version("orion-fhe"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    taken = turns.seconds(turns.take(once, runs, out))
    return {
        "engine": f"Orion {versions['orion']}",
        "model": name,
        **taken,
        "setup_seconds": compiled - started,
        "scheme_seconds": keys - started,
        "error": error,
        "parameters": PARAMETERS,
        "threads": int(os.environ["GOMAXPROCS"]),
        "versions": versions,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers.orion")
    parser.add_argument("model", nargs="?", choices=sorted(SHAPES))
    parser.add_argument("--setup", metavar="DIR")
    parser.add_argument("--case", metavar="FILE")
    parser.add_argument("--runs", type=int, default=5, help="after a first one that stands apart")
    parser.add_argument(
        "--turns", action="store_true", help="one run for each line that comes in, at least two"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of Go: Lattigo evaluates on one, the collector takes more"
    )
    given = parser.parse_args(arguments)
    if given.setup:
        setup(given.setup)
        return
    if given.model is None:
        parser.error("which model?")
    if os.environ.get("GOMAXPROCS") != str(given.threads):  # Go sees only what the process was started with
        call = [sys.executable, "-m", "benchmarks.peers.orion", *arguments]
        os.execve(call[0], call, {**os.environ, "GOMAXPROCS": str(given.threads)})
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # Orion tells its progress
        document = measure(given.model, given.case, None if given.turns else given.runs + 1, out)
    turns.close(document, out)


if __name__ == "__main__":
    main(sys.argv[1:])
