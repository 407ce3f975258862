"""TenSEAL's own `CKKSVector.mm`: one encrypted row of 784 values times 784 x 128, at N = 8192, in a process of its own.

`python -m benchmarks.peers.tenseal_mm [--case FILE] [--runs N | --turns] [--threads N]`: FILE is a safetensors file with
`0.weight`, `0.bias` and `input`; without one they are drawn. Prints one line of JSON, after it has taken turns as turns.py
says. Nothing of secureinfer is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from typing import Any

from . import turns

# The shortest chain of its tutorials that one product leaves: a product at each level costs by the level.
PARAMETERS: dict[str, Any] = {"poly_modulus_degree": 8192, "coeff_mod_bit_sizes": [60, 40, 60]}
LOG_SCALE = 40


def measure(case: str | None, runs: int | None, threads: int) -> dict[str, Any]:
    import tenseal as ts
    import torch

    if case is None:
        torch.manual_seed(0)
        layer, x = torch.nn.Sequential(torch.nn.Linear(784, 128)).state_dict(), torch.rand(1, 784)
    else:
        from safetensors.torch import load_file

        layer = load_file(case)
        x = layer.pop("input")
    expected = torch.nn.functional.linear(x, layer["0.weight"], layer["0.bias"])[0]
    matrix, bias, row = layer["0.weight"].t().tolist(), layer["0.bias"].tolist(), x[0].tolist()
    started = time.perf_counter()
    context = ts.context(ts.SCHEME_TYPE.CKKS, n_threads=threads, **PARAMETERS)
    context.global_scale = 2.0**LOG_SCALE
    context.generate_galois_keys()
    setup = time.perf_counter() - started
    error = 0.0

    def once() -> tuple[float, ...]:
        nonlocal error
        started = time.perf_counter()
        encrypted = ts.ckks_vector(context, row)
        ready, used = time.perf_counter(), time.process_time()
        answer = encrypted.mm(matrix) + bias
        used, evaluated = time.process_time() - used, time.perf_counter()
        got = torch.tensor(answer.decrypt())
        ended = time.perf_counter()
        error = max(error, float((got - expected).abs().max()))
        return ended - started, ready - started, evaluated - ready, ended - evaluated, used

    versions = {
        "tenseal": importlib.metadata.version("tenseal"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    taken = turns.seconds(turns.take(once, runs, sys.stdout))
    return {
        "engine": f"TenSEAL {versions['tenseal']}, CKKSVector.mm",
        "model": "matvec",
        **taken,
        "setup_seconds": setup,
        "error": error,
        "parameters": {**PARAMETERS, "log_scale": LOG_SCALE},
        "threads": threads,
        "versions": versions,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peers.tenseal_mm")
    parser.add_argument("--case", metavar="FILE")
    parser.add_argument("--runs", type=int, default=5, help="after a first one that stands apart")
    parser.add_argument(
        "--turns", action="store_true", help="one run for each line that comes in, at least two"
    )
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    document = measure(given.case, None if given.turns else given.runs + 1, given.threads)
    turns.close(document, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
