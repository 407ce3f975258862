"""Rounds, bytes and errors of ten models against baseline.json, so that a change that adds a round is seen.

`SECUREINFER_WRITE_BASELINE=1 pytest tests/conformance/test_baseline.py` writes the file anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from .harness import run
from .models import MODELS, compiled

FILE = Path(__file__).with_name("baseline.json")
WRITE = "SECUREINFER_WRITE_BASELINE" in os.environ
ROUNDING_MARGIN = 3.0
"""Cuts round at random: the greatest error of a run may be so many times that of the run that was recorded."""


def figures(name: str) -> tuple[dict[str, int], float]:
    """What the plan declares, and the greatest error of one run, relative to the greatest value."""
    program, model, inputs = compiled(name)
    totals = program.plan.totals
    declared = {
        "rounds": totals.rounds,
        "bytes": totals.bytes,
        "dealt_bytes": totals.dealt_bytes,
        "setup_bytes": totals.setup_bytes,
    }
    with torch.no_grad():
        expected = model(*inputs).double()
    got = run(program, dict(zip(program.graph.inputs, inputs, strict=True)), deadline=120)
    (output,) = got.outputs.values()
    return declared, float((output.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.needs("hf")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_costs_what_the_baseline_says(name: str) -> None:
    baseline = json.loads(FILE.read_text()) if FILE.exists() else {}
    declared, error = figures(name)
    if WRITE:
        baseline[name] = {**declared, "error": float(f"{error:.1e}")}
        FILE.write_text(json.dumps(baseline, indent=1) + "\n")
        return
    assert declared == {k: v for k, v in baseline[name].items() if k != "error"}
    assert error <= ROUNDING_MARGIN * baseline[name]["error"]


def test_the_baseline_holds_these_models_and_no_others() -> None:
    assert list(json.loads(FILE.read_text())) == list(MODELS)
