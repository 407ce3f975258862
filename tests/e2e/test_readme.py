"""The README's example runs as it stands, from standard input; and every page's links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_example_runs_as_shown_and_its_answer_is_right(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input=example(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = differences(done.stdout)
    assert len(found) == 12 and max(map(abs, found)) < 5e-3
    assert "online" in done.stdout and "dealer" in done.stdout


def test_a_wrong_answer_in_the_output_is_seen() -> None:
    found = differences("tensor([[ 1.0e-05, -2.0000e-01],\n        [3.1e-06, 0.0000]], grad_fn=<Sub>)")
    assert found == [1e-05, -0.2, 3.1e-06, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert missing_links(page.read_text(encoding="utf-8"), page.parent) == []


def test_a_planted_dead_link_is_found() -> None:
    text = "[a](README.md) [b](absent.md#part) [c](https://example.org/x)"
    assert missing_links(text, ROOT) == ["absent.md"]
