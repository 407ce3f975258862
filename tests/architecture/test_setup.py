"""`make setup` goes on without TenSEAL, says so, and stops at anything else that is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def setup(folder: Path, fails: str) -> tuple[int, str, list[str]]:
    """Exit code, what was said, and pip's calls; those that name `fails` fail. No environment is made."""
    python, pip, calls = folder / "python", folder / "pip", folder / "calls"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && mkdir -p "$3" || echo Python 3.11\n')
    pip.write_text(f'#!/bin/sh\necho "$*" >> {calls}\ncase "$*" in *"{fails}"*) exit 1;; esac\n')
    for script in (python, pip):
        script.chmod(0o755)
    given = [f"PYTHON={python}", f"PIP={pip}", f"VENV={folder / 'venv'}"]
    plain = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CI")}
    done = subprocess.run(
        ["make", "--no-print-directory", "setup", *given], cwd=ROOT, env=plain, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_everything_is_installed_and_nothing_is_said_to_be_missing(tmp_path: Path) -> None:
    code, said, calls = setup(tmp_path, fails="nothing at all")
    assert code == 0 and "left out" not in said
    assert calls == ["install -e .[hf,bench,dev]", "install --only-binary tenseal -e .[he]", "check"]
    assert list((tmp_path / "venv").glob(".setup-*"))


def test_without_a_wheel_of_tenseal_ckks_is_left_out_and_setup_succeeds(tmp_path: Path) -> None:
    code, said, calls = setup(tmp_path, fails="[he]")
    assert code == 0 and "CKKS is left out" in said and "MPC is complete" in said
    assert calls[-1] == "check"
    assert list((tmp_path / "venv").glob(".setup-*"))


@pytest.mark.parametrize("fails", ["[hf,bench,dev]", "check"])
def test_anything_else_that_is_missing_stops_setup(tmp_path: Path, fails: str) -> None:
    code, _, _ = setup(tmp_path, fails=fails)
    assert code != 0
    assert not list((tmp_path / "venv").glob(".setup-*"))
