"""The API from a plain script without a __main__ guard, from standard input, and from a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import torch
import secureinfer as si

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
x = torch.randn(2, 4)
with si.local_session(si.compile(model, (x,))) as session:
    error = (session.infer(x) - model(x)).abs().max().item()
print("close" if error < 1e-3 else f"error {error}")
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_a_plain_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(CODE)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    assert done.stdout == "close\n", done.stderr


@pytest.mark.slow
def test_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable],
        input=CODE,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    assert done.stdout == "close\n", done.stderr


@pytest.mark.needs("notebook")
def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel: an event loop is running in it, and its output streams are not files."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(o.get("text", "") for o in notebook.cells[0].outputs if o.output_type == "stream")
    assert printed.endswith("close\n"), notebook.cells[0].outputs
