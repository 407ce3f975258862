"""Without TenSEAL everything but a CKKS session works, and a CKKS session says at both sides what to install."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
INSTALL = "pip install 'secureinfer[he]'"

BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tenseal", "_tenseal_cpp", "_sealapi_cpp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

MODEL = """
import torch

def build():
    torch.manual_seed(3)
    return torch.nn.Linear(4, 2).eval(), torch.rand(1, 4), [torch.rand(1, 4) for _ in range(4)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program, certificates and settings of two parties, all made without TenSEAL."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "blocked").mkdir()
    (folder / "blocked" / "sitecustomize.py").write_text(BLOCK)
    (folder / "model.py").write_text(MODEL)
    command(folder, "compile", "model.py:build", "--backend", "ckks", "--out", "model.si")
    command(folder, "certs", "--out", "certs")
    np.savez(folder / "in.npz", input=np.full((1, 4), 0.5, np.float32))
    return folder


def environment(folder: Path, *, blocked: bool) -> dict[str, str]:
    path = [str(folder / "blocked")] if blocked else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}


def command(
    folder: Path, *words: str, code: int = 0, blocked: bool = True
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "secureinfer", *words], capture_output=True, text=True, cwd=folder, timeout=120,
        env=environment(folder, blocked=blocked),
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


CODE = """
import sys
try:
    import tenseal
    raise SystemExit("TenSEAL is here")
except ModuleNotFoundError:
    pass
import torch
import secureinfer as si

model, x = torch.nn.Linear(4, 2).eval(), torch.rand(1, 4)
print(si.compile(model, x).backend, si.compile(model, x, backend="plaintext").backend)
program = si.compile(model, x, backend="ckks", calibration=[(x,)])
print(program.plan.totals.rounds)
print(si.Program.load("model.public.si").manifest_digest == si.Program.load("model.si").manifest_digest)
try:
    si.local_session(program)
except si.SettingsError as error:
    print(error)
"""


def test_everything_but_a_session_works_and_that_says_what_to_install(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=folder, timeout=120,
        env=environment(folder, blocked=True),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    backends, rounds, same, error = done.stdout.splitlines()
    assert (backends, rounds, same) == ("mpc plaintext", "2", "True")
    assert INSTALL in error and "backend='mpc' works without" in error


def settings(folder: Path, port: int) -> None:
    head = 'role = "{0}"\nname = "{0}"\nprogram = "{1}"\n\n[tls]\nca = "certs/ca.pem"\ncertificate = "certs/{0}.pem"\n'
    head += 'key = "certs/{0}.key"\n\n'
    peer = f'[peers.model_owner]\nname = "model_owner"\naddress = "127.0.0.1:{port}"\n'
    (folder / "data_owner.toml").write_text(head.format("data_owner", "model.public.si") + peer)
    (folder / "model_owner.toml").write_text(head.format("model_owner", "model.si") + "[listen]\nport = 0\n")


HE = pytest.mark.needs("he")


@pytest.mark.parametrize(
    "without",
    [
        pytest.param({"model_owner"}, marks=HE),
        pytest.param({"data_owner"}, marks=[HE, pytest.mark.slow]),
        {"model_owner", "data_owner"},
    ],
    ids=["the model owner", "the data owner", "neither"],
)
def test_a_session_says_at_both_sides_who_has_to_install_it(folder: Path, without: set[str]) -> None:
    settings(folder, 0)
    up = subprocess.Popen(
        [sys.executable, "-m", "secureinfer", "party", "--role", "model-owner", "--config", "model_owner.toml"],
        cwd=folder, stderr=subprocess.PIPE, text=True, env=environment(folder, blocked="model_owner" in without),
    )  # fmt: skip
    try:
        assert up.stderr is not None
        settings(folder, int(up.stderr.readline().split("port ")[1].split()[0].rstrip(".")))
        words = ("infer", "--config", "data_owner.toml", "--input", "in.npz", "--json")
        own = "data_owner" in without
        error = json.loads(command(folder, *words, code=2 if own else 1, blocked=own).stdout)["error"]
        assert INSTALL in error["message"] and error["code"] == ("settings" if own else "peer")
        assert ("model_owner" in error["message"]) is not own  # who it is that has to
    finally:
        up.send_signal(signal.SIGTERM)
        said = up.communicate(timeout=20)[1]
    assert up.returncode == 0, said  # its daemon went on
    # Its owner can read it too; where the data owner is the first to end, perhaps no more than that.
    assert INSTALL in said or own and "data_owner ended it before it began" in said, said
