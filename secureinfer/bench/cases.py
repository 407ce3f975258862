"""Which cases a sweep runs: from lists of names, or one of three sweeps that are built in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from ..errors import UsageError
from .models import BACKENDS, COMPRESSIONS, SUBJECTS, subject
from .progress import Progress as Progress
from .report import CaseKey

NETWORKS: Final = ("loopback", "lan", "wan", "lan:projected", "wan:projected")


def sweep(
    models: Sequence[str],
    compressions: Sequence[str] = (),
    backends: Sequence[str] = (),
    networks: Sequence[str] = (),
    batches: Sequence[int] = (),
) -> list[CaseKey]:
    """Every combination, each once, in the order given. Empty lists: none, mpc, loopback and the model's own batches.

    A name may stand for several, with commas between them. Raises UsageError for one that does not exist, and says which do.
    """
    parts = {
        "compression": _names("compression", compressions or ("none",), COMPRESSIONS),
        "backend": _names("backend", backends or ("mpc",), BACKENDS),
        "network": _names("network", networks or ("loopback",), NETWORKS),
    }
    if wrong := [batch for batch in batches if batch < 1]:
        raise UsageError(f"a batch is 1 sample or more, got {wrong[0]}")
    if not models:
        raise UsageError(f"name a model: {', '.join(SUBJECTS)}, or file.py:name for your own")
    subjects = {model: subject(model) for model in models}
    keys = [
        CaseKey(model=model, compression=compression, backend=backend, network=network, batch=batch)
        for model, found in subjects.items()
        for batch in batches or found.batches
        for network, backend, compression in itertools.product(
            parts["network"], parts["backend"], parts["compression"]
        )
    ]
    return list(dict.fromkeys(keys))


def chosen(
    models: Sequence[str],
    compressions: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    networks: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    *,
    quick: bool = False,
    study: bool = False,
    load: bool = False,
) -> list[CaseKey]:
    """The cases of a command: every combination for models that it names, else the built-in sweep's that fit the lists.

    load: of a load, which without a model is one case, LOAD. Raises UsageError where no case is left.
    """
    lists = (compressions or (), backends or (), networks or (), batches or ())
    if models or load:
        return sweep(models or (LOAD.model,), *lists)
    name, keys = ("quick", QUICK) if quick else ("study", STUDY) if study else ("default", DEFAULT)
    known = (COMPRESSIONS, BACKENDS, NETWORKS)
    words = ("compression", "backend", "network")
    wanted = [_names(w, given, k) for w, given, k in zip(words, lists[:3], known, strict=True)]
    left = [
        key
        for key in keys
        if all(
            not w or v in w for w, v in zip(wanted, (key.compression, key.backend, key.network), strict=True)
        )
        and (not lists[3] or key.batch in lists[3])
    ]
    if not left:
        raise UsageError(
            f"the {name} sweep has no such case; name models to make them, such as: fraud-mlp --network wan"
        )
    return left


def _names(what: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


LOAD: Final = CaseKey(model="fraud-mlp")

QUICK: Final = (
    *sweep(["fraud-mlp"], backends=["mpc", "ckks"]),
    *sweep(["fraud-mlp"], networks=["lan"]),
    *sweep(["minilm"]),
)
"""Ends within three minutes on two cores."""

DEFAULT: Final = (
    *sweep(["fraud-mlp"], ["none", "int8", "approximate", "approximate+int8"], ["mpc", "ckks"]),
    *sweep(["fraud-mlp"], backends=["crypten"]),
    *sweep(["fraud-mlp"], networks=["lan", "wan"]),
    *sweep(["mlp-64", "mlp-256", "mlp-1024"], backends=["mpc", "ckks"]),
    *sweep(["digits-cnn"], backends=["mpc", "ckks"]),
    *sweep(["minilm"], ["none", "int8"]),
    *sweep(["resnet18"]),
)
"""About a quarter of an hour: each backend, network and compression, and models from 5,000 to 23 million parameters."""

STUDY: Final = (
    *sweep(["fraud-mlp", "minilm", "bert-base", "resnet18"], ["none", "int8"], ["mpc", "ckks"]),
    *sweep(["fraud-mlp"], ["none", "int8"], ["mpc", "ckks"], ["lan", "wan"]),
    *sweep(["minilm"], ["none", "int8"], ["mpc"], ["lan", "wan"]),
)
"""The case study of docs/benchmarks.md. What CKKS refuses stands in it too, with the reason."""
