"""The README's example and commands run as they stand; and every page's links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from secureinfer import cli

from .test_terminals import settings

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "parties").rglob("*.md")),
]


def example() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    return str(found)


def differences(output: str) -> list[float]:
    """The numbers of the one tensor that the example prints: secure minus plaintext."""
    (shown,) = re.findall(r"tensor\((\[\[.*?\]\])", output, flags=re.DOTALL)
    return [float(x) for x in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", shown)]


def missing_links(text: str, folder: Path) -> list[str]:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [link for link in links if "://" not in link and not (folder / link).exists()]


def test_the_example_has_about_ten_lines() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 12


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_as_shown_and_its_answer_is_right(tmp_path: Path) -> None:
    out = run(example(), tmp_path)
    found = differences(out)
    assert len(found) == 12 and max(map(abs, found)) < 5e-3
    assert "online" in out and "dealer" in out


@pytest.mark.needs("he")
def test_the_example_runs_on_encrypted_data_too(tmp_path: Path) -> None:
    code = example()
    assert code.count('backend="mpc"') == 1
    out = run(code.replace('backend="mpc"', 'backend="ckks"'), tmp_path)
    found = differences(out)
    assert len(found) == 12 and max(map(abs, found)) < 5e-2  # a polynomial stands for GELU
    assert "ckks.matrix" in out and "online" in out and "dealer" not in out


def test_a_wrong_answer_in_the_output_is_seen() -> None:
    found = differences("tensor([[ 1.0e-05, -2.0000e-01],\n        [3.1e-06, 0.0000]], grad_fn=<Sub>)")
    assert found == [1e-05, -0.2, 3.1e-06, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert missing_links(page.read_text(encoding="utf-8"), page.parent) == []


def test_a_planted_dead_link_is_found() -> None:
    text = "[a](README.md) [b](absent.md#part) [c](https://example.org/x)"
    assert missing_links(text, ROOT) == ["absent.md"]


# --- commands ---


def commands(text: str) -> list[str]:
    """The lines of all indented blocks, without comments."""
    lines = re.findall(r"^    (\S.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return [line.split(" #")[0].strip() for line in lines]


README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = [line for line in commands(README) if line.startswith("secureinfer ")]


def understood(line: str) -> None:
    """Parse one command line; it is not run."""
    _, name, *arguments = shlex.split(line)
    group: Any = typer.main.get_command(cli.app)
    group.commands[name].make_context(name, arguments)


def test_the_readme_shows_every_command() -> None:
    assert {line.split()[1] for line in OURS} == {
        "demo",
        "compile",
        "plan",
        "certs",
        "party",
        "infer",
        "bench",
    }


@pytest.mark.parametrize("line", OURS)
def test_every_command_is_understood(line: str) -> None:
    understood(line)


def test_a_planted_command_with_an_option_that_is_not_there_is_found() -> None:
    (planted,) = commands("text\n\n    secureinfer compile minilm --outfile minilm.si   # a comment\n")
    with pytest.raises(Exception, match="--outfile"):
        understood(planted)


def test_targets_and_extras_that_are_named_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {m for line in commands(README) if line.startswith("make ") for m in line.split()[1:]} <= {
        *targets
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"secureinfer\[(\w+)\]", README)
    assert named and set(named) <= extras.keys()


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, Any]:
    """A folder with the shipped settings, on ports that are free, and `secureinfer` on the path."""
    shutil.copytree(ROOT / "parties", tmp_path / "parties")
    for role, made in settings(tmp_path, "minilm").items():
        made.rename(tmp_path / "parties" / role / f"{role}.toml")
    command = tmp_path / "bin" / "secureinfer"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m secureinfer "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}, "text": True}


def ran(line: str, shell: dict[str, Any]) -> str:
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=400, **shell)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return str(done.stdout)


def test_the_commands_for_encryption_run_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's own test is in test_diagnosis.py."""
    monkeypatch.chdir(tmp_path)
    compiling, planning = (shlex.split(line)[1:] for line in OURS if "digits" in line)
    assert cli.run(compiling) == 0
    assert "digits.public.si: without them, for the data owner" in capsys.readouterr().out
    assert cli.run(planning) == 0
    out = capsys.readouterr().out
    assert "ckks.matrix" in out and "rotations" in out and "estimate ms" in out


@pytest.mark.slow
@pytest.mark.needs("hf")
def test_the_commands_for_three_terminals_run_as_shown(shell: dict[str, Any]) -> None:
    lines = commands(README)
    block = lines[lines.index(next(line for line in OURS if "compile minilm" in line)) :][:6]
    assert [line.split()[1] for line in block if line in OURS] == [
        "compile",
        "certs",
        "party",
        "party",
        "infer",
    ]
    daemons: list[subprocess.Popen[str]] = []
    try:
        for line in block:
            if " party " in line:
                daemons.append(
                    subprocess.Popen(["bash", "-c", f"exec {line}"], stderr=subprocess.PIPE, **shell)
                )
                assert "listens on port" in daemons[-1].stderr.readline()  # type: ignore[union-attr]
            else:
                out = ran(line, shell)
    finally:
        for daemon in daemons:
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            daemon.wait(timeout=20)
    assert "Similarity of each pair" in out and "1 and 2" in out
