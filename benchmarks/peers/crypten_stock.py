"""CrypTen 0.4.1 as it is shipped: its own kernels, over gloo, with its trusted first party. Run by benchmarks/mpc.py.

`python crypten_stock.py RANK FOLDER RUNS`: FOLDER/case.safetensors holds a model's state dictionary and an input; rank 1
prints the seconds of each run as JSON. Nothing of secureinfer is imported: only the module that a current torch lacks is put
there, so that `import crypten` works.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
import warnings
from typing import Any


def load_crypten() -> Any:
    stub = types.ModuleType("torch.onnx._internal.registration")
    stub.registry = types.SimpleNamespace()  # type: ignore[attr-defined]
    sys.modules.setdefault(stub.__name__, stub)
    warnings.simplefilter("ignore")
    import crypten

    return crypten


def main(rank: str, folder: str, runs: str) -> None:
    os.environ.update(
        RANK=rank, WORLD_SIZE="2", RENDEZVOUS=f"file://{folder}/rendezvous", DISTRIBUTED_BACKEND="gloo"
    )
    crypten = load_crypten()
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    crypten.init()
    case = load_file(f"{folder}/case.safetensors")
    x = case.pop("input")
    layers = sorted({int(name.split(".")[0]) for name in case})
    shares = {}
    for name, tensor in case.items():  # the model owner is rank 0, the data owner rank 1
        shares[name] = crypten.cryptensor(tensor, src=0)
    data = crypten.cryptensor(x, src=1)
    times = []
    out = None
    for _ in range(int(runs)):
        started = time.perf_counter()
        out = data
        for layer in layers:
            out = out.matmul(shares[f"{layer}.weight"].t()) + shares[f"{layer}.bias"]
            if layer != layers[-1]:
                out = out.relu()
        plain = out.get_plain_text(dst=1)
        times.append(time.perf_counter() - started)
    if rank == "1":
        sys.stdout.write(json.dumps({"seconds": times, "output": plain.flatten().tolist()}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
