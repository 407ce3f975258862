"""CKKS from the command line: a program from a file of one's own, its plan, and two terminals without a dealer."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from secureinfer import cli
from secureinfer.files import load_reference

from .test_terminals import secureinfer, settings, start

pytestmark = pytest.mark.needs("he")

MODEL = """
import torch

def build():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.SiLU(), torch.nn.Linear(16, 3))
    return model.eval(), torch.rand(2, 6), [torch.rand(2, 6) for _ in range(32)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encrypted")
    (folder / "scorer.py").write_text(MODEL)
    out = secureinfer(
        "compile", f"{folder / 'scorer.py'}:build", "--backend", "ckks", "--approximate",
        "--out", str(folder / "scorer.si"), "--json",
    )  # fmt: skip
    assert json.loads(out)["compression"]["transforms"][0]["layers"][0]["changed"]
    secureinfer("certs", "--out", str(folder / "certs"))
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> Iterator[Path]:
    """A data owner's settings, with a model owner up, and nobody at the dealer's address."""
    files = settings(folder, "scorer")
    party = start("model-owner", files["model_owner"])
    yield files["data_owner"]
    party.send_signal(signal.SIGTERM)
    assert party.wait(timeout=20) == 0


def test_the_plan_shows_levels_and_what_stands_for_an_activation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = str(folder / "scorer.public.si")
    assert cli.run(["plan", public]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("level", "rotations", "ckks.matrix", "ckks.polynomial", "<="))
    assert "silu, degree" in text and "fitted on ±" in text
    assert cli.run(["plan", public, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["backend"] == "ckks" and plan["totals"]["rounds"] == 2
    assert plan["totals"]["exact_bytes"] is False and plan["totals"]["dealt_bytes"] == 0
    (fitted,) = [step for step in plan["steps"] if "fit" in step]
    assert fitted["fit"]["outside"] == 0 and fitted["level"] > 0


def test_the_model_owner_alone_answers_and_the_answer_is_right(config: Path, folder: Path) -> None:
    x = np.random.default_rng(5).random((2, 6), dtype=np.float32)
    np.save(folder / "x.npy", x)
    arguments = ["infer", "--config", str(config), "--input", str(folder / "x.npy")]
    said = json.loads(secureinfer(*arguments, "--output", str(folder / "y.npz"), "--json"))
    model, _, _ = load_reference(f"{folder / 'scorer.py'}:build")
    with torch.no_grad():
        expected = model(torch.from_numpy(x)).numpy()
    answer = np.load(folder / "y.npz", allow_pickle=False)["output"]
    np.testing.assert_allclose(answer, expected, atol=2e-2)  # the polynomial's error, and the noise
    report = said["report"]
    assert set(report["online"]["parties"]) == {"data_owner", "model_owner"}
    assert report["program"]["backend"] == "ckks" and report["program"]["dealer"] is False
    planned = report["program"]["planned"]
    assert report["online"]["rounds"] == planned["rounds"] == 2
    assert (
        report["online"]["bytes"] <= planned["bytes"] and report["setup"]["bytes"] <= planned["setup_bytes"]
    )


def test_a_dealer_refuses_to_start_with_it(folder: Path) -> None:
    files = settings(folder, "scorer")
    out = secureinfer("party", "--role", "dealer", "--config", str(files["dealer"]), "--json", code=2)
    assert "dealer" in json.loads(out[out.index('{\n  "error"') :])["error"]["message"]
