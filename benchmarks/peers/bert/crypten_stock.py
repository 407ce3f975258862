"""BERT on CrypTen 0.4.1 as it is shipped, one of two processes over gloo, with its own trusted first party and settings.

`python -m benchmarks.peers.bert.crypten_stock RANK FOLDER THREADS`: the model owner is rank 0 and reads model.safetensors
alone, the data owner is rank 1 and reads input.safetensors alone; case.json holds what is public. One thing is patched, so
that `import crypten` works at all: a module that its ONNX converter imports, which is not used here, and that torch no
longer has. CrypTen has no layer norm and no GELU: both are written out in its own operations (inv_sqrt, erf).
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from ..crypten_stock import load_crypten
from . import child
from .digest import digest

MASKED = 64.0
"""Taken from scores of masked places. CrypTen's exp is (1 + x/256)^256, which explodes below -512: 1e4 would."""
PATCHED = "an empty torch.onnx._internal.registration, so that it imports; nothing else"


class Bert:
    """On shares. weights: by their names in transformers; shape: what case.json says."""

    def __init__(self, weights: dict[str, Any], shape: dict[str, Any]) -> None:
        self.w, self.shape = weights, shape

    def linear(self, name: str, x: Any) -> Any:
        return x.matmul(self.w[f"{name}.weight"].t()) + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        scaled = centred * (variance + self.shape["epsilon"]).inv_sqrt()
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def embed(self, x: Any) -> Any:
        """x: one-hot token ids, (batch, tokens, vocabulary), or word vectors where the look-up is outside."""
        words = x.matmul(self.w["bert.embeddings.word_embeddings.weight"]) if self.shape["look_up"] else x
        return self.norm("bert.embeddings.LayerNorm", words + self.w["places"])

    def layer(self, name: str, x: Any, added: Any) -> Any:
        heads = self.shape["heads"]
        batch, tokens, width = x.size()
        each = width // heads

        def split(part: str) -> Any:
            y = self.linear(f"{name}.attention.self.{part}", x)
            return y.reshape(batch, tokens, heads, each).permute(0, 2, 1, 3)

        scores = split("query").matmul(split("key").transpose(2, 3)).div(math.sqrt(each)) + added
        mixed = scores.softmax(-1).matmul(split("value"))
        mixed = mixed.permute(0, 2, 1, 3).reshape(batch, tokens, width)
        x = self.norm(
            f"{name}.attention.output.LayerNorm", self.linear(f"{name}.attention.output.dense", mixed) + x
        )
        y = self.linear(f"{name}.intermediate.dense", x)
        y = y * (y.div(math.sqrt(2)).erf() + 1).mul(0.5)
        return self.norm(f"{name}.output.LayerNorm", self.linear(f"{name}.output.dense", y) + x)

    def logits(self, x: Any, mask: Any) -> Any:
        """mask: 1 or 0, (batch, tokens)."""
        batch, tokens = mask.size()
        added = (mask - 1).mul(MASKED).reshape(batch, 1, 1, tokens)
        x = self.embed(x)
        for index in range(self.shape["layers"]):
            x = self.layer(f"bert.encoder.layer.{index}", x, added)
        return self.linear("classifier", self.linear("bert.pooler.dense", x[:, 0]).tanh())


def main(rank: str, folder: str, threads: str) -> None:
    out, lines = child.answers(), child.watch()
    os.environ.update(
        RANK=rank, WORLD_SIZE="2", RENDEZVOUS=f"file://{folder}/rendezvous", DISTRIBUTED_BACKEND="gloo"
    )
    started = time.perf_counter()
    crypten = load_crypten()
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(int(threads))
    crypten.init()
    shape = json.loads((Path(folder) / "case.json").read_text())
    owner = rank == "0"
    name = "model" if owner else "input"
    given = load_file(f"{folder}/{name}.safetensors")
    found = digest({k: v.numpy() for k, v in given.items()})
    if owner:
        positions = given["bert.embeddings.position_embeddings.weight"][: shape["tokens"]]
        given["places"] = positions + given["bert.embeddings.token_type_embeddings.weight"][0]
    shares = {
        name: crypten.cryptensor(given[name] if owner else torch.zeros(size), src=0)
        for name, size in shape["weights"].items()
    }
    bert = Bert(shares, shape)
    setup = time.perf_counter() - started
    communicator = crypten.communicator.get()

    def once() -> dict[str, Any]:
        first = not taken
        crypten.cfg.communicator.verbose = first  # its own counts, in the run that stands apart
        communicator.reset_communication_stats()
        started = time.perf_counter()
        if owner:
            x, mask = torch.zeros(shape["x"]), torch.zeros(shape["mask"])
        else:
            x, mask = given["x"], given["mask"].float()
            if shape["look_up"]:
                x = torch.nn.functional.one_hot(x, shape["vocabulary"]).float()
        shared = [crypten.cryptensor(t, src=1) for t in (x, mask)]
        plain = bert.logits(*shared).get_plain_text(dst=1)
        taken.append(time.perf_counter() - started)
        stats = communicator.get_communication_stats()
        return {
            "seconds": taken[-1],
            "output": None if owner else plain.tolist(),
            # A message stands in both parties' counts, so that half of each is every message once.
            "bytes": stats["bytes"] / 2 if first else None,
            "rounds": stats["rounds"] if first else None,
        }

    taken: list[float] = []
    ready = {
        "digest": found,
        "setup_seconds": setup,
        "settings": {**crypten.config.cfg.config, "patched": PATCHED},
        "versions": {"crypten": importlib.metadata.version("crypten"), "torch": torch.__version__},
    }
    ready["settings"] = json.loads(json.dumps(ready["settings"], default=lambda o: dict(o)))
    child.serve(lines, out, ready, once)


if __name__ == "__main__":
    main(*sys.argv[1:4])
