"""Who may import whom: the contracts of pyproject.toml hold, and each of them would notice a breach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )


def test_the_package_keeps_its_contracts() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        ("plan/planted.py", "from ..session import planted", "Layers"),
        ("measure/planted.py", "from ..graph import ir", "Layers"),
        ("graph/planted.py", "from ..compression import adopt", "Layers"),
        ("errors.py", "from . import api", "Layers"),
        ("session/planted.py", "import crypten", "crypten is imported"),
        ("backends/mpc/planted.py", "import tenseal", "tenseal is imported"),
        ("measure/planted.py", "import grpc", "grpc is imported"),
        ("backends/mpc/catalog.py", "from . import planted", "A catalog is pure"),
    ],
)
def test_a_planted_breach_of_each_contract_is_found(
    tmp_path: Path, path: str, line: str, contract: str
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "secureinfer", tmp_path / "secureinfer", ignore=shutil.ignore_patterns("__pycache__")
    )
    package = tmp_path / "secureinfer"
    for folder in (package / "session", package / "backends" / "mpc"):
        (folder / "planted.py").write_text("import crypten\n" if folder.name == "mpc" else "")
    with (package / path).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [row for row in done.stdout.splitlines() if " BROKEN" in row]
    assert [row for row in broken if row.startswith(contract)], done.stdout


@pytest.mark.parametrize("late", ["crypten", "tenseal", "grpc", "transformers"])
def test_compiling_and_planning_need_no_cryptography_and_no_network_library(late: str) -> None:
    """`import secureinfer` and the catalogs load neither a backend's library nor gRPC."""
    code = f"""
import sys
sys.modules[{late!r}] = None  # importing it raises ImportError
import secureinfer as si
import secureinfer.backends.mpc.catalog
si.compile, si.Program
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
