"""BERT on SPU's SEMI2K through its JAX front end, one of two processes over loopback, in a Python environment of its own.

`python -m benchmarks.peers.bert.spu_semi2k RANK FOLDER THREADS`, as crypten_stock.py. FM64 and SPU's own settings for all
else: 18 fractional bits, and Beaver triples by its trusted first party. GELU is jax.nn.gelu, as case.json says: with the
exact erf, as the model has it, or by tanh. Bytes are SPU's own, from its profile of operators, which is on.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from . import child
from .digest import digest

MASKED = 64.0
"""Taken from scores of masked places: exp of it is less than a unit, and what SPU's exp takes."""
Weights = dict[str, Any]


def _linear(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(w: Weights, name: str, x: Any, epsilon: float) -> Any:
    import jax
    import jax.numpy as jnp

    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]


def logits(w: Weights, x: Any, mask: Any, shape: dict[str, Any]) -> Any:
    """x: one-hot token ids, (batch, tokens, vocabulary), or word vectors; mask: 1 or 0, (batch, tokens)."""
    import jax

    heads, epsilon = shape["heads"], shape["epsilon"]
    words = x @ w["bert.embeddings.word_embeddings.weight"] if shape["look_up"] else x
    x = _norm(w, "bert.embeddings.LayerNorm", words + w["places"], epsilon)
    added = ((mask - 1) * MASKED)[:, None, None, :]
    batch, tokens, width = x.shape

    def split(name: str, x: Any) -> Any:
        return _linear(w, name, x).reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)

    for index in range(shape["layers"]):
        name = f"bert.encoder.layer.{index}"
        q, k, v = (split(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads) + added)
        mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, width)
        mixed = _linear(w, f"{name}.attention.output.dense", mixed)
        x = _norm(w, f"{name}.attention.output.LayerNorm", mixed + x, epsilon)
        y = jax.nn.gelu(_linear(w, f"{name}.intermediate.dense", x), approximate=shape["gelu"] == "tanh")
        x = _norm(w, f"{name}.output.LayerNorm", _linear(w, f"{name}.output.dense", y) + x, epsilon)
    import jax.numpy as jnp

    return _linear(w, "classifier", jnp.tanh(_linear(w, "bert.pooler.dense", x[:, 0])))


class Parts:
    """Shares over SPU's link, as lengths and bytes."""

    def __init__(self, link: Any, other: int, libspu: Any) -> None:
        self._link, self._other, self._libspu = link, other, libspu

    def send(self, share: Any) -> None:
        parts = [share.meta, *share.share_chunks]
        self._link.send(self._other, json.dumps([len(part) for part in parts]).encode())
        for part in parts:
            self._link.send(self._other, part)

    def receive(self) -> Any:
        lengths = json.loads(self._link.recv(self._other))
        parts = [self._link.recv(self._other) for _ in lengths]
        if [len(part) for part in parts] != lengths:
            sys.exit(f"a share of {lengths} bytes came as {[len(part) for part in parts]}")
        share = self._libspu.Share()
        share.meta, share.share_chunks = parts[0], parts[1:]
        return share


def main(rank: str, folder: str, threads: str) -> None:
    out, lines = child.answers(), child.watch()
    started = time.perf_counter()
    import jax
    import numpy as np
    import spu
    from safetensors.numpy import load_file
    from spu import libspu
    from spu.utils import frontend

    shape = json.loads((Path(folder) / "case.json").read_text())
    me, other, owner = int(rank), 1 - int(rank), rank == "0"
    given = load_file(f"{folder}/{'model' if owner else 'input'}.safetensors")
    found = digest(given)
    config = libspu.RuntimeConfig(protocol=libspu.ProtocolKind.SEMI2K, field=libspu.FieldType.FM64)
    config.max_concurrency = int(threads)
    config.enable_pphlo_profile = True
    described = libspu.link.Desc()
    described.recv_timeout_ms = 1000 * int(shape["timeout"])
    for index, port in enumerate(shape["ports"]):
        described.add_party(f"party_{index}", f"127.0.0.1:{port}")
    link = libspu.link.create_brpc(described, me)
    runtime, io = spu.Runtime(link, config), spu.Io(2, config)
    parts = Parts(link, other, libspu)

    def share(name: str, array: Any, giver: int) -> int:
        """One party's array, shared into the runtime under the name. Returns the bytes that this party sent."""
        if giver != me:
            runtime.set_var(name, parts.receive())
            return 0
        shares = io.make_shares(np.ascontiguousarray(array), libspu.Visibility.VIS_SECRET, me)
        parts.send(shares[other])
        runtime.set_var(name, shares[me])
        return sum(map(len, shares[other].share_chunks))

    if owner:
        positions = given["bert.embeddings.position_embeddings.weight"][: shape["tokens"]]
        given["places"] = positions + given["bert.embeddings.token_type_embeddings.weight"][0]
    names = list(shape["weights"])
    for name in names:
        share(name, given.get(name), 0)

    def bert(*arguments: Any) -> Any:
        return logits(dict(zip(names, arguments[2:], strict=True)), arguments[0], arguments[1], shape)

    sizes = [shape["x"], shape["mask"], *shape["weights"].values()]
    executable, _ = frontend.compile(
        frontend.Kind.JAX,
        bert,
        [jax.ShapeDtypeStruct(size, np.float32) for size in sizes],
        {},
        ["x", "mask", *names],
        [libspu.Visibility.VIS_SECRET] * len(sizes),
        lambda flat: ["logits"],
    )
    setup = time.perf_counter() - started

    def once() -> dict[str, Any]:
        started = time.perf_counter()
        x = mask = None
        if not owner:
            x, mask = given["x"], given["mask"].astype(np.float32)
            if shape["look_up"]:
                x = _one_hot(x, shape["vocabulary"])
        sent = share("x", x, 1) + share("mask", mask, 1)
        runtime.run(executable)
        answer = runtime.get_var("logits")
        if owner:
            parts.send(answer)
            return {"seconds": time.perf_counter() - started, "bytes": sum(map(len, answer.share_chunks))}
        plain = io.reconstruct([parts.receive(), answer])
        return {"seconds": time.perf_counter() - started, "output": plain.tolist(), "bytes": sent}

    ready = {
        "digest": found,
        "setup_seconds": setup,
        "settings": {
            "config": str(config),
            "gelu": shape["gelu"],
            "beaver": "trusted first party (SPU's default)",
        },
        "versions": {name: importlib.metadata.version(name) for name in ("spu", "jax", "numpy")},
    }
    child.serve(lines, out, ready, once)


def _one_hot(ids: Any, vocabulary: int) -> Any:
    import numpy as np

    hot = np.zeros((*ids.shape, vocabulary), dtype=np.float32)
    np.put_along_axis(hot, ids[..., None], 1.0, -1)
    return hot


if __name__ == "__main__":
    main(*sys.argv[1:4])
