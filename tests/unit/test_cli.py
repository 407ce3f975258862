"""The command: exit codes 0, 1 and 2, one clear line for each error, JSON on request, help that teaches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from secureinfer import cli, errors
from secureinfer.errors import InputError, PeerError, SecureInferError, UnsupportedModelError, UnsupportedNode
from secureinfer.terminal import Terminal

COMMANDS = ["demo", "compile", "plan", "certs", "party", "infer"]

Caught = pytest.CaptureFixture[str]


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `secureinfer plan` fail in its own way."""

    def load(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("secureinfer.plan.program.Program.load", load)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example_and_every_command_has_json(command: str, capsys: Caught) -> None:
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example:  secureinfer {command}" in text
    assert "--json" in text


def test_help_lists_every_command(capsys: Caught) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize(
    "wrong", [[], ["fly"], ["plan"], ["demo", "--runs", "0"], ["party", "--role", "king"], ["plan", "a", "b"]]
)
def test_a_wrong_call_exits_2(wrong: list[str], capsys: Caught) -> None:
    assert cli.run(wrong) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("ids: got float32, expected int64; convert with .long()"), 2),
        (errors.SettingsError("unknown key 'prot'"), 2),
        (PeerError("dealer", "no answer within 5 s"), 1),
        (errors.ProgramFileError("x.si is truncated"), 1),
        (RuntimeError("boom"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Caught, error: BaseException, code: int
) -> None:
    failing(monkeypatch, error)
    assert cli.run(["plan", "x.si"]) == code
    caught = capsys.readouterr()
    assert caught.out == ""
    assert len(caught.err.strip().splitlines()) == 1
    if isinstance(error, SecureInferError):
        assert caught.err.strip() == f"error: {error}"
    if isinstance(error, RuntimeError):
        assert "unexpected RuntimeError: boom" in caught.err and "--debug" in caught.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Caught) -> None:
    failing(monkeypatch, RuntimeError("boom"))
    assert cli.run(["--debug", "plan", "x.si"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_under_json_is_json(monkeypatch: pytest.MonkeyPatch, capsys: Caught) -> None:
    failing(monkeypatch, UnsupportedModelError([UnsupportedNode("fft", "aten.fft", "mix", "no kernel")]))
    assert cli.run(["plan", "x.si", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "unsupported_model"
    assert error["nodes"] == [{"node": "fft", "operator": "aten.fft", "path": "mix", "reason": "no kernel"}]


def test_a_missing_program_is_a_clear_failure(capsys: Caught, tmp_path: Path) -> None:
    assert cli.run(["plan", str(tmp_path / "absent.si")]) == 1
    assert "absent.si" in capsys.readouterr().err


def test_a_missing_input_or_an_odd_ending_is_a_wrong_call(capsys: Caught, tmp_path: Path) -> None:
    (tmp_path / "in.doc").write_text("x")
    for name, says in (("absent.txt", "there is no file"), ("in.doc", "neither sentences")):
        assert cli.run(["infer", "--config", "x.toml", "--input", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("out", ["absent/out.npz", "."])
@pytest.mark.parametrize("command", ["infer", "compile"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    command: str, out: str, capsys: Caught, tmp_path: Path
) -> None:
    (tmp_path / "in.npz").write_bytes(b"")
    work = {
        "infer": ["--config", "absent.toml", "--input", str(tmp_path / "in.npz"), "--output"],
        "compile": ["absent.py:build", "--out"],
    }
    assert cli.run([command, *work[command], str(tmp_path / out)]) == 2
    assert "error: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("work", [["demo"], ["infer", "--config", "absent.toml", "--input"]])
def test_a_network_that_makes_no_sense_is_a_wrong_call_before_the_work(
    work: list[str], capsys: Caught, tmp_path: Path
) -> None:
    (tmp_path / "in.npz").write_bytes(b"")
    rest = [str(tmp_path / "in.npz")] if work[0] == "infer" else []
    assert cli.run([*work, *rest, "--network", "projected:wan"]) == 2
    assert "'projected:wan' is no network" in capsys.readouterr().err


def test_outputs_are_npz_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: Caught, tmp_path: Path
) -> None:
    (tmp_path / "in.npz").write_bytes(b"")
    given: list[Path] = []
    monkeypatch.setattr("secureinfer.inference.infer_tensors", lambda *a: given.append(a[3]))
    work = ["infer", "--config", "absent.toml", "--input", str(tmp_path / "in.npz"), "--output"]
    for name in ("out", "out.npz"):
        assert cli.run([*work, str(tmp_path / name)]) == 0
    assert given == [tmp_path / "out.npz"] * 2
    assert cli.run([*work, str(tmp_path / "out.txt")]) == 2
    assert "say --output out.npz" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_grpc() -> None:
    code = """
import sys
from secureinfer.cli import run
code = run(["--help"])
sys.exit(code or sum(m in sys.modules for m in ("torch", "grpc", "crypten", "transformers")))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_progress_is_plain_lines_on_stderr_without_a_terminal(capsys: Caught) -> None:
    terminal = Terminal()
    with terminal.working("dealing [4 of 8]"):
        pass
    terminal.answer({"a": 1}, "shown [bold]")
    caught = capsys.readouterr()
    assert caught.out == "shown [bold]\n"
    first, second = caught.err.splitlines()
    assert first == "dealing [4 of 8] ..." and second.startswith("dealing [4 of 8]: 0.0 s")


def test_under_json_stdout_is_one_document_and_stderr_is_silent(capsys: Caught) -> None:
    terminal = Terminal(as_json=True)
    with terminal.working("dealing"):
        terminal.note("a note")
    terminal.answer({"a": 1}, "shown")
    caught = capsys.readouterr()
    assert json.loads(caught.out) == {"a": 1}
    assert caught.err == ""


def test_unknown_figures_never_reach_json_as_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Terminal(as_json=True).answer({"a": float("nan")})
