"""Whether a result of an earlier run may stand in a report of today: by its machine, its code and its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import report as r
from .machine import machine
from .models import SUBJECTS, subject

PASSES = ("load_average",)
"""Of an environment: it is another each time, and no other machine."""
DRAWS = ("bench/page/", "bench/markdown", "bench/shown", "bench/compar", "bench/commands")
"""Code that no figure comes from."""


class Checks:
    """What today's run would be made of: digests of the code and of each model's float weights, and this machine.

    environment, code, weights: instead of this machine's, this package's and the model's own, for tests.
    """

    def __init__(
        self,
        environment: Callable[[], Mapping[str, Any]] = machine,
        code: Callable[[str], str] | None = None,
        weights: Callable[[r.CaseKey], torch.nn.Module | None] | None = None,
    ) -> None:
        if code is None:
            _package()  # as it is now, and not as somebody edits it while the sweep runs
        self._environment, self._code, self._module = environment, code or code_of, weights or _module
        self._modules: dict[tuple[str, int], torch.nn.Module | None] = {}

    def built(self, key: r.CaseKey, module: torch.nn.Module | None) -> None:
        """The case's float model as it was built now; None where it could not be."""
        self._modules[key.model, key.batch] = module

    def stamp(self, key: r.CaseKey) -> dict[str, Any]:
        """What a kept result is held to later. The digest of weights is salted, and stands in no report."""
        salt = secrets.token_hex(16)
        return {"salt": salt, "weights": self._weights(key, salt), "code": self._code(key.model)}

    def differs(
        self, key: r.CaseKey, environment: Mapping[str, Any] | None, stamp: Mapping[str, Any] | None
    ) -> str | None:
        """Why a result that was kept so has to be measured again; None where it need not be."""
        if environment is None or stamp is None:
            return "it does not say on what it was measured"
        now = self._environment()
        for name in sorted({*environment, *now} - set(PASSES)):
            if environment.get(name) != now.get(name):
                return f"{name} was {environment.get(name)}, and is {now.get(name)}"
        if stamp["code"] != self._code(key.model):
            return "the code of this package, or of the model's own file, is another"
        if stamp["weights"] != self._weights(key, str(stamp["salt"])):
            return "the model's weights are others"
        return None

    def _weights(self, key: r.CaseKey, salt: str) -> str | None:
        at = key.model, key.batch
        if at not in self._modules:
            self._modules[at] = self._module(key)
        module = self._modules[at]
        return None if module is None else weights_digest(module, salt)


def weights_digest(module: torch.nn.Module, salt: str) -> str:
    """Hex SHA-256 of a model's structure and of all its parameters and buffers."""
    found = hashlib.sha256(f"{salt}\n{module}\n".encode())
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            whole = tensor.detach().cpu().contiguous()
            found.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
            found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def code_of(model: str) -> str:
    """Hex SHA-256 of this package's source, less what only draws, and of a user's own file; not of what that imports."""
    found = hashlib.sha256(_package().encode())
    if model not in SUBJECTS:
        where = model.rpartition(":")[0]
        try:
            spec = None if where.endswith(".py") else importlib.util.find_spec(where)
            path = Path(where if spec is None or spec.origin is None else spec.origin)
            found.update(path.read_bytes())
        except (ImportError, OSError, ValueError):
            pass  # its case fails, today as then
    return found.hexdigest()


@cache
def _package() -> str:
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).as_posix().startswith(DRAWS):
            continue
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _module(key: r.CaseKey) -> torch.nn.Module | None:
    try:
        return subject(key.model).build(key.batch).module
    except (Exception, SystemExit):
        return None  # whatever it is, it is told where the case runs
