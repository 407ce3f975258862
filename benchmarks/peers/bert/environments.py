"""The Python environment that SPU lives in: SPU is for Python 3.10 and 3.11, and its jax and numpy are older than ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .engines import SPU_PACKAGES, SPU_PYTHON, UnavailableError

VERSION = (3, 11)


def setup(folder: Path) -> str:
    """The interpreter of an environment with SPU in folder, made where there is none yet. Raises UnavailableError."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        if folder.exists() and any(folder.iterdir()):
            raise UnavailableError(f"{folder} holds something else than a Python environment; name another")
        _call([_interpreter(), "-m", "venv", str(folder)], "making an environment")
    try:
        _call([str(python), "-c", "import spu, safetensors"], "importing spu")
    except UnavailableError:
        _call([str(python), "-m", "pip", "install", *SPU_PACKAGES], "installing spu")
        _call([str(python), "-c", "import spu, safetensors"], "importing spu")
    sys.stderr.write(f"{SPU_PYTHON}={python}\n")
    return str(python)


def _interpreter() -> str:
    if sys.version_info[:2] == VERSION:
        return sys.executable
    found = shutil.which("python{}.{}".format(*VERSION))
    if found is None:
        raise UnavailableError("SPU needs Python {}.{}, and there is none in PATH".format(*VERSION))
    return found


def _call(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as why:
        raise UnavailableError(f"{what}: {command[0]}: {why.strerror}") from why
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UnavailableError(f"{what} failed" + (f": {said[-1][:400]}" if said else ""))
