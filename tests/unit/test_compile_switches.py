"""Switches of `secureinfer compile`: each reaches the program; what cannot work is refused before the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from secureinfer import api, cli
from secureinfer.compression.approximate import Approximate
from secureinfer.errors import CompileError, SettingsError
from secureinfer.files import load_reference
from secureinfer.plan.program import Program

MODEL = """
import torch

def build():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    return model.eval(), torch.rand(1, 4)

def rectified():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return model.eval(), torch.rand(1, 4)

def calibrated():
    return (*build(), [torch.rand(1, 4) for _ in range(8)])
"""

Caught = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compiled(capsys: Caught, *switches: str, name: str = "build") -> tuple[dict[str, Any], Program]:
    """What the command says, and the program that it wrote."""
    assert cli.run(["compile", f"model.py:{name}", *switches, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    return said, Program.load(Path(said["program"]))


def test_without_a_switch_it_is_what_the_api_gives(folder: Path, capsys: Caught) -> None:
    said, program = compiled(capsys)
    assert (said["backend"], said["protocol"]) == ("mpc", "fast")
    assert said["compression"] is None
    assert shown(said) == set()
    assert program.options["precision_bits"] == 16 and "exact_cuts" not in program.options


def test_the_protocol_is_taken(folder: Path, capsys: Caught) -> None:
    assert compiled(capsys, "--protocol", "crypten")[1].protocol == "crypten"


def test_the_plaintext_backend_is_taken(folder: Path, capsys: Caught) -> None:
    assert compiled(capsys, "--backend", "plaintext")[1].backend == "plaintext"


def shown(said: dict[str, Any]) -> set[str]:
    """Which of the model's parameters stand in the public file."""
    model = load_reference("model.py:build")[0]
    held = Program.load(Path(said["public"])).constants.values()
    return {n for n, p in model.named_parameters() if any(torch.equal(p, t) for t in held)}


def test_weights_by_name_are_public_and_others_are_not(folder: Path, capsys: Caught) -> None:
    said, program = compiled(capsys, "--public-weights", "0", "--public-weights", "2.bias")
    assert shown(said) == {"0.weight", "0.bias", "2.bias"}
    assert program.graph.weights == ("2.weight",)


def test_all_weights_can_be_public(folder: Path, capsys: Caught) -> None:
    said, program = compiled(capsys, "--all-weights-public")
    assert program.graph.weights == ()
    assert shown(said) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_public_file_is_not_said_to_have_no_weights_where_it_has_some(
    folder: Path, capsys: Caught
) -> None:
    assert (
        "with the public ones alone"
        in compiled(capsys, "--all-weights-public")[0]["files"]["program.public.si"]
    )
    assert "without them" in compiled(capsys)[0]["files"]["program.public.si"]


@pytest.mark.parametrize(
    ("switches", "exact"), [(["--exact-cuts"], True), (["--no-exact-cuts"], None), ([], True)]
)
def test_exact_cuts_are_on_or_off_or_where_they_suffice(
    folder: Path, capsys: Caught, switches: list[str], exact: bool | None
) -> None:
    assert compiled(capsys, *switches, name="rectified")[1].options.get("exact_cuts") is exact


def test_fraction_bits_are_taken(folder: Path, capsys: Caught) -> None:
    assert compiled(capsys, "--precision-bits", "12")[1].options["precision_bits"] == 12


def test_weights_become_int8_and_the_report_says_so(folder: Path, capsys: Caught) -> None:
    said, program = compiled(capsys, "--quantize", "int8")
    (transform,) = said["compression"]["transforms"]
    assert transform["name"] == "Quantize" and all(row["changed"] for row in transform["layers"])
    assert torch.int8 in {t.dtype for t in (program.weights or {}).values()}
    assert cli.run(["compile", "model.py:build", "--quantize", "int8"]) == 0
    assert "2 of 2 layers with parameters changed" in capsys.readouterr().out


def test_encryption_with_polynomials_int8_and_privacy(folder: Path, capsys: Caught) -> None:
    switches = ["--backend", "ckks", "--approximate", "--quantize", "int8", "--circuit-privacy"]
    said, program = compiled(capsys, *switches, name="calibrated")
    assert program.backend == "ckks" and program.options["circuit_privacy"] == 40
    assert [t["name"] for t in said["compression"]["transforms"]] == ["Approximate", "Quantize"]
    (activation,) = said["compression"]["transforms"][0]["layers"]
    assert activation["changed"] and activation["values"] == 8 * 8  # the calibration's, not the example's
    assert [s["fit"]["kind"].split(",")[0] for s in said["steps"] if "fit" in s] == ["gelu"]


def test_encryption_says_what_it_sends_and_where_ranges_come_from(folder: Path, capsys: Caught) -> None:
    assert cli.run(["compile", "model.py:build", "--backend", "ckks"]) == 0
    caught = capsys.readouterr()
    assert (
        "rounds and at most" in caught.out and "once a session" in caught.out and "dealer" not in caught.out
    )
    assert "no calibration was given" in caught.err
    assert cli.run(["compile", "model.py:calibrated", "--backend", "ckks"]) == 0
    assert "no calibration" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        (["--backend", "fly"], "'fly' does not exist"),
        (["--protocol", "fly"], "'fly' does not exist"),
        (["--backend", "ckks", "--protocol", "fast"], "'fast' does not exist in backend ckks"),
        (["--exact-cuts", "--protocol", "crypten"], "exact_cuts"),
        (["--exact-cuts", "--backend", "ckks"], "exact_cuts"),
        (["--circuit-privacy"], "circuit_privacy"),
        (["--circuit-privacy", "--backend", "plaintext"], "circuit_privacy"),
        (["--public-weights", "0", "--backend", "ckks"], "public_weights"),
        (["--all-weights-public", "--backend", "ckks"], "public_weights"),
        (["--public-weights", "0", "--all-weights-public"], "give one of them"),
        (["--quantize", "int4"], "int8"),
        (["--precision-bits", "32"], "8 to 20"),
    ],
)
def test_what_cannot_work_is_a_wrong_call_before_the_model_is_loaded(
    folder: Path, capsys: Caught, switches: list[str], says: str
) -> None:
    assert cli.run(["compile", "absent.py:build", *switches, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "settings" and says in error["message"]


def test_a_weight_that_the_model_does_not_have_is_a_wrong_call(folder: Path, capsys: Caught) -> None:
    assert cli.run(["compile", "model.py:build", "--public-weights", "head", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "settings" and "names head" in error["message"]


@pytest.mark.parametrize("calibration", [torch.rand(5, 1, 4), {"input": torch.rand(1, 4)}, "abc", 3])
@pytest.mark.parametrize("backend", ["mpc", "ckks"])
def test_calibration_that_is_no_list_is_refused_in_words(calibration: Any, backend: str) -> None:
    """A tensor of many samples is what comes to mind first."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    with pytest.raises(SettingsError, match=r"a list of inputs like the example, such as \[x\]"):
        api.compile(model, torch.rand(1, 4), backend=backend, calibration=calibration)
    with pytest.raises(SettingsError, match="a list of inputs like the example"):
        api.compress(model, [Approximate()], calibration=calibration)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["mpc", "ckks"])
def test_calibration_that_is_not_finite_is_refused_in_words(value: float, backend: str) -> None:
    wild = [torch.full((1, 4), value)]
    with pytest.raises(CompileError, match=r"not finite|NaN or infinite"):
        api.compile(torch.nn.Linear(4, 3), torch.rand(1, 4), backend=backend, calibration=wild)


@pytest.mark.parametrize("settings", [[1], 8192, "degree"])
def test_settings_of_an_expert_are_a_mapping(settings: Any) -> None:
    with pytest.raises(SettingsError, match="ckks is a mapping"):
        api.compile(torch.nn.Linear(4, 3), torch.rand(1, 4), backend="ckks", ckks=settings)


def test_every_switch_shows_itself_in_an_example() -> None:
    command: Any = typer.main.get_command(cli.app)
    for parameter in command.commands["compile"].params:
        flag = parameter.opts[0]
        if flag.startswith("--") and flag not in ("--out", "--json", "--help"):
            assert f"Example: {flag}" in parameter.help or f" {flag}" in parameter.help.split("Example:")[1]


@pytest.mark.parametrize(
    ("setting", "told"),
    [({"greatest_degree": 100}, "at most 63"), ({"split": 3}, "1 or 2 primes"), ({"degree": 4096}, "8192")],
)
def test_settings_of_an_expert_that_cannot_be_are_refused_before_anything_is_traced(
    setting: dict[str, int], told: str
) -> None:
    with pytest.raises(SettingsError, match=told):
        api.compile(torch.nn.Linear(4, 3), torch.rand(1, 4), backend="ckks", ckks=setting)
