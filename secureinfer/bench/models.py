"""The models that can be measured, by name, and what each compression and backend does with one."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..compression.quantize import Quantize
from ..compression.report import CompressionReport
from ..compression.transform import Transform
from ..errors import UsageError
from ..files import load_reference
from . import language, tabular, vision
from .subject import AGREEMENT, CLOSE, Batches, Score, agreement, close, finished, repeatable, turns
from .subject import Built as Built
from .subject import Subject as Subject
from .subject import save_state as save_state

SUBJECTS: Mapping[str, Subject] = {
    s.name: s for s in (*tabular.SUBJECTS, *vision.SUBJECTS, *language.SUBJECTS)
}

COMPRESSIONS = ("none", "int8", "approximate", "approximate+int8")
BACKENDS = ("mpc", "crypten", "ckks")


def subject(name: str) -> Subject:
    """A subject of the registry, or a user's own model: `file.py:name` or `package.module:name` (files.load_reference).

    Raises UsageError that says which there are.
    """
    if name in SUBJECTS:
        return SUBJECTS[name]
    if ":" not in name:
        raise UsageError(
            f"there is no model {name!r}; there are {', '.join(SUBJECTS)}, and file.py:name or package.module:name for "
            "your own"
        )
    return Subject(name, f"{name}, as its file makes it", "own", "as its example", _own(name))


def compressed(name: str, built: Built) -> tuple[nn.Module, CompressionReport | None]:
    """The model after a compression of COMPRESSIONS, and what was done; (the float module itself, None) for "none".

    Raises UsageError for another name, and what si.compress raises.
    """
    if name not in COMPRESSIONS:
        raise UsageError(f"there is no compression {name!r}; there are {', '.join(COMPRESSIONS)}")
    if name == "none":
        return built.module, None
    parts = name.split("+")
    known: dict[str, Transform] = {"int8": Quantize(), "approximate": built.approximate}
    transforms = [known[part] for part in parts]
    # Tuning needs weights that may change, and the float module stays what it is.
    given = copy.deepcopy(built.module).requires_grad_("approximate" in parts)
    with repeatable(1 if built.approximate.fine_tune is not None else None):
        model, report = api.compress(given, transforms, calibration=list(built.calibration))
    return model.eval().requires_grad_(False), report


def compile_options(backend: str, built: Built) -> dict[str, Any]:
    """What si.compile gets beside the model and its examples. "crypten": MPC by CrypTen's generic kernels alone.

    Raises UsageError for a backend that is not in BACKENDS.
    """
    calibration = list(built.calibration)
    if backend == "mpc":
        return {"backend": "mpc", "calibration": calibration}
    if backend == "crypten":
        return {"backend": "mpc", "protocol": "crypten", "calibration": calibration}
    if backend == "ckks":
        layout = "slots" if built.batch == 1 else "batch"
        return {"backend": "ckks", "calibration": calibration, "ckks": {"layout": layout}}
    raise UsageError(f"there is no backend {backend!r}; there are {', '.join(BACKENDS)}")


# A user's own model.


def _own(reference: str) -> Callable[[int, Path | None], Built]:
    """Inputs are those of its example and calibration, which stand in for held-out ones, since there are no others.

    Each plaintext engine makes them anew in its process: what torch draws is the same there, for its seed is fixed.
    """

    def build(batch: int, state: Path | None) -> Built:
        with theirs(reference):
            model, example, calibration = load_reference(reference)
        module = finished(copy.deepcopy(model), state)
        calls = [_positional(module, reference, c) for c in (example, *(calibration or ()))]
        batches = _of_size(calls, batch, reference)
        with torch.no_grad(), theirs(reference):
            answer = next(
                (t for t in torch.utils._pytree.tree_leaves(module(*batches[0])) if isinstance(t, Tensor)),
                None,
            )
        if answer is None:
            raise UsageError(f"{reference} gives no tensor; a model's output must hold one to be compared")
        classes = answer.dim() == 2 and answer.shape[0] == batch and answer.shape[1] > 1
        metric: tuple[str, Score] = (AGREEMENT, agreement) if classes else (CLOSE, close)
        return Built(module, batches[0], batches, batches, None, *metric)

    return build


@contextlib.contextmanager
def theirs(reference: str) -> Iterator[None]:
    """A user's own code: what it draws from torch is repeatable, what it prints is no answer, and it ends no sweep."""
    try:
        with repeatable(), contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise UsageError(
            f"{reference} ends the process ({error.code!r}) instead of giving a model; leave sys.exit away"
        ) from None


def _positional(module: nn.Module, reference: str, example: Any) -> tuple[Tensor, ...]:
    """A call's inputs as tensors in the order of forward, float32 as the model is. Raises UsageError for others."""
    if isinstance(example, Mapping):
        try:
            bound = inspect.signature(module.forward).bind(**example)
        except TypeError:
            raise UsageError(
                f"the example of {reference} names {', '.join(map(str, example)) or 'nothing'}, and its forward takes "
                f"{', '.join(inspect.signature(module.forward).parameters) or 'nothing'}"
            ) from None
        given = bound.args if not bound.kwargs else None
    else:
        given = tuple(example) if isinstance(example, tuple | list) else (example,)
    if not given or not all(isinstance(t, Tensor) and t.dim() for t in given):
        raise UsageError(
            f"{reference} is measured with tensors alone, in the order of its forward: wrap it in a module whose forward "
            "takes them so"
        )
    return tuple(t.detach().float() if t.is_floating_point() else t.detach() for t in given)


def _of_size(calls: list[tuple[Tensor, ...]], batch: int, reference: str) -> Batches:
    """The calls' rows, in batches of that many. A call whose tensors share no first dimension stays as it is."""
    sizes = {t.shape[0] for call in calls for t in call}
    if sizes == {batch}:
        return tuple(calls)
    if any(len({t.shape[0] for t in call}) > 1 for call in calls):
        raise UsageError(
            f"the inputs of {reference} share no first dimension, so no batch of {batch} can be made of them; make its "
            "example as it is to be measured"
        )
    try:
        rows = [torch.cat(parts) for parts in zip(*calls, strict=True)]
    except (RuntimeError, ValueError):
        raise UsageError(f"calibration of {reference} has inputs of other shapes than its example") from None
    count = max(1, len(rows[0]) // batch)
    return turns(count, batch, *rows)
