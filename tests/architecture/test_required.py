"""A skip of something that CI promises to have is a failure; anywhere else it is a skip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SUITE = """
import pytest

@pytest.mark.needs("he")
def test_with_encryption():
    pytest.skip("the library is here and the test still skips")

def test_without():
    pass
"""


def outcome(folder: Path, require: str, suite: str = SUITE) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_planted.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = needs(thing): x\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            str(folder),
        ],
        env={**os.environ, "SECUREINFER_REQUIRE": require},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_missing_thing_is_skipped_where_nobody_promised_it(tmp_path: Path) -> None:
    code, text = outcome(tmp_path, "")
    assert code == 0 and "1 passed, 1 skipped" in text


def test_a_skip_of_a_promised_thing_fails_and_says_why(tmp_path: Path) -> None:
    code, text = outcome(tmp_path, "he")
    assert code == 1 and "1 passed" in text and "skipped" not in text.splitlines()[-1]
    assert "SECUREINFER_REQUIRE names he" in text


def test_a_promise_of_something_else_changes_nothing(tmp_path: Path) -> None:
    assert outcome(tmp_path, "hf")[0] == 0


@pytest.mark.parametrize(
    ("require", "suite"), [("quantum", SUITE), ("", SUITE.replace('needs("he")', 'needs("quantum")'))]
)
def test_an_unknown_name_is_a_usage_error(tmp_path: Path, require: str, suite: str) -> None:
    code, text = outcome(tmp_path, require, suite)
    assert code == 4 and "quantum" in text and "known:" in text
