"""Local steps of the fast kernels, fused by torch.compile where a party's settings ask for it; the same functions otherwise.

A step that only reads and writes memory is bound by how often it passes over it: fused it is five to thirty times as fast.
Compiling takes seconds for each form of a step, so that it happens in a thread of its own, on zeros of the same kinds, and
each step runs as it is until its form is ready. What cannot be compiled (there is no C++ compiler) stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LEAST = 1 << 14
"""Elements of the last dimension from which a call is worth fusing."""

_SAMPLE = 1 << 12
_LOG = logging.getLogger("secureinfer.fused")

Key = tuple[Any, ...]
Step = Callable[..., Any]


class Compiler:
    """Compiles steps in the background, a form at a time. compile: torch.compile, or a test's."""

    def __init__(self, compile: Callable[[Step], Step] | None = None) -> None:
        # Only lengths vary, see _work: with dynamic=True numbers of bits become symbols as well, and the compiler of torch
        # 2.14 then gives wrong words for shifts.
        self._compile = compile or (lambda step: torch.compile(step, dynamic=False))
        self._ready: dict[Key, Step | None] = {}
        self._jobs: queue.SimpleQueue[tuple[Key, Step, tuple[Any, ...]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = 0
        self._changed = threading.Condition()

    def call(self, step: Step, *args: Any) -> Any:
        """step(*args), by its compiled form once there is one."""
        key = _key(step, args)
        with self._changed:
            known = key in self._ready
            if not known:
                self._ready[key] = None
                self._left += 1
                self._jobs.put((key, step, tuple(_sample(a) for a in args)))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="fuse", daemon=True)
                    self._thread.start()
        fused = self._ready[key] if known else None
        return step(*args) if fused is None else fused(*args)

    def wait(self, timeout: float) -> bool:
        """Until everything that was asked for is compiled, or was given up. False past the time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, timeout)

    def _work(self) -> None:
        while True:
            key, step, sample = self._jobs.get()
            try:
                for a in sample:
                    if isinstance(a, torch.Tensor):
                        torch._dynamo.mark_dynamic(a, a.dim() - 1)
                fused = self._compile(_copy(step, len(self._ready)))
                with torch.inference_mode(), contextlib.redirect_stderr(None):
                    fused(*sample)
                self._ready[key] = fused
            except Exception as error:  # the compiler raises every kind; the step works without it
                _LOG.warning("%s is not fused: %s", step.__name__, type(error).__name__)
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


def _copy(step: Step, number: int) -> Step:
    """The step with code of its own: torch.compile counts the forms of one code, and gives up at the eighth."""
    code = step.__code__.replace(co_name=f"{step.__name__}_{number}")
    return types.FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)


def _key(step: Step, args: tuple[Any, ...]) -> Key:
    """Step, and of each tensor type, device and all sizes but the last, which any compiled form takes."""
    return (
        step,
        *(
            (a.dtype, a.device, a.shape[:-1], a.is_inference()) if isinstance(a, torch.Tensor) else a
            for a in args
        ),
    )


def _sample(a: Any) -> Any:
    """Zeros in place of secrets, of the same kind: a compiled form tells tensors made in inference mode from others."""
    if not isinstance(a, torch.Tensor):
        return a
    with torch.inference_mode(a.is_inference()):
        return torch.zeros((*a.shape[:-1], _SAMPLE), dtype=a.dtype, device=a.device)


_compiler: Compiler | None = None


def enable(cache: Path | None = None) -> Compiler:
    """Fuse from now on in this process. cache: a folder of this user alone for what was compiled, for later sessions."""
    global _compiler
    folder = (
        cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secureinfer" / "compiled"
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Compiled code is loaded from there: never from a folder that others may write to.
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others; code is not loaded from it")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    _compiler = _compiler or Compiler()
    return _compiler


def disable() -> None:
    global _compiler
    _compiler = None


def run(step: Step, *args: Any) -> Any:
    """step(*args), fused where that is enabled and worth it. Tensors have the elements in their last dimension."""
    if _compiler is None:
        return step(*args)
    first = next(a for a in args if isinstance(a, torch.Tensor))
    if first.shape[-1] < LEAST:
        return step(*args)
    return _compiler.call(step, *args)
