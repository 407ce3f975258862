"""Three terminals: the shipped settings, a dealer and a model owner started by hand, and `secureinfer infer`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from secureinfer.files import load_reference

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "secureinfer"]

MODEL = """
import torch

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(16, 8)
        self.out = torch.nn.Linear(8, 4)

    def forward(self, ids, mask):
        keep = mask.to(torch.float32)
        weights = keep / keep.sum(1, keepdim=True).clamp(min=1)
        return self.out(torch.matmul(weights.unsqueeze(1), self.table(ids)).squeeze(1))

def build():
    torch.manual_seed(3)
    ids = torch.arange(10).reshape(2, 5)
    return Encoder().eval(), (ids, torch.ones_like(ids))
"""

WORDS = ["[PAD]", "[UNK]", "cats", "dogs", "sleep", "run"]


def secureinfer(*arguments: str, code: int = 0, timeout: float = 120) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def start(role: str, config: Path) -> subprocess.Popen[str]:
    party = subprocess.Popen(
        [*COMMAND, "party", "--role", role, "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert party.stderr is not None
    line = party.stderr.readline()
    assert "listens on port" in line, line + party.stderr.read()
    return party


def settings(folder: Path, program: str) -> dict[str, Path]:
    """The settings of parties/, with files in `folder` and ports that are free here."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [str(s.getsockname()[1]) for s in held]
    files = {}
    for role in ("data_owner", "model_owner", "dealer"):
        text = (ROOT / "parties" / role / f"{role}.toml").read_text()
        for old, new in (
            ("../../", f"{folder}/"),
            ("minilm", program),
            ("7401", ports[0]),
            ("7402", ports[1]),
            ("7410-7419", "0-0"),
            ("7420-7429", "0-0"),
        ):
            text = text.replace(old, new)
        files[role] = folder / f"{role}.toml"
        files[role].write_text(text)
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terminals")


@pytest.fixture(scope="module")
def config(folder: Path) -> Iterator[Path]:
    """A data owner's settings, with a model owner and a dealer up."""
    (folder / "encoder.py").write_text(MODEL)
    secureinfer("compile", f"{folder / 'encoder.py'}:build", "--out", str(folder / "encoder.si"))
    secureinfer("certs", "--out", str(folder / "certs"))
    files = settings(folder, "encoder")
    parties = [start("dealer", files["dealer"]), start("model-owner", files["model_owner"])]
    yield files["data_owner"]
    for party in parties:
        party.send_signal(signal.SIGTERM)
    for party in parties:
        assert party.wait(timeout=20) == 0


def reference(folder: Path) -> torch.nn.Module:
    return load_reference(f"{folder / 'encoder.py'}:build")[0]


def test_tensors_in_a_file_give_the_models_answer(config: Path, folder: Path) -> None:
    ids = np.array([[1, 2, 3, 4, 5], [15, 0, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    np.savez(folder / "in.npz", ids=ids, mask=mask)
    arguments = ["infer", "--config", str(config), "--input", str(folder / "in.npz")]
    out = secureinfer(*arguments, "--output", str(folder / "out.npz"), "--json")
    answer = np.load(folder / "out.npz", allow_pickle=False)["output"]
    with torch.no_grad():
        expected = reference(folder)(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    np.testing.assert_allclose(answer, expected, atol=1e-3)
    report = json.loads(out)["report"]
    assert set(report["online"]["parties"]) == {"data_owner", "model_owner", "dealer"}
    assert report["online"]["rounds"] == report["program"]["planned"]["rounds"]
    assert report["online"]["bytes"] == report["program"]["planned"]["bytes"]


def test_sentences_give_the_similarity_of_each_pair(config: Path, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "encoder.tokenizer.json"))  # where `compile` would leave a model's own
    (folder / "sentences.txt").write_text("cats sleep\ndogs run\ncats run\n")
    out = secureinfer("infer", "--config", str(config), "--input", str(folder / "sentences.txt"), "--json")
    found = torch.tensor(json.loads(out)["similarities"])
    ids = torch.tensor([[2, 4, 0, 0, 0], [3, 5, 0, 0, 0], [2, 5, 0, 0, 0]])
    with torch.no_grad():
        plain = torch.nn.functional.normalize(reference(folder)(ids, (ids != 0).long()), dim=-1)
    torch.testing.assert_close(found, plain @ plain.T, atol=1e-2, rtol=0)


def test_a_private_program_at_the_data_owner_is_refused(config: Path, folder: Path) -> None:
    wrong = folder / "wrong.toml"
    wrong.write_text(config.read_text().replace("encoder.public.si", "encoder.si"))
    np.savez(folder / "in.npz", ids=np.zeros((2, 5), np.int64), mask=np.ones((2, 5), np.int64))
    arguments = ["infer", "--config", str(wrong), "--input", str(folder / "in.npz"), "--json"]
    error = json.loads(secureinfer(*arguments, code=1))["error"]
    assert error["code"] == "program_file" and "private weights" in error["message"]


def test_a_wrong_dtype_is_a_wrong_call_that_names_the_input(config: Path, folder: Path) -> None:
    np.savez(folder / "bad.npz", ids=np.zeros((2, 5)), mask=np.ones((2, 5), np.int64))
    arguments = ["infer", "--config", str(config), "--input", str(folder / "bad.npz"), "--json"]
    error = json.loads(secureinfer(*arguments, code=2))["error"]
    assert "ids" in error["message"] and "int64" in error["message"]


def test_a_port_in_use_is_one_line_of_our_own(config: Path, folder: Path) -> None:
    """gRPC's own log stays out, unless the user asked for it."""
    command = [*COMMAND, "party", "--role", "dealer", "--config", str(folder / "dealer.toml")]
    for asked, lines in ({}, 1), ({"GRPC_VERBOSITY": "ERROR"}, 2):
        plain = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**plain, **asked})
        assert done.returncode == 1
        said = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(said) >= lines and said[-1].startswith("error: no free port"), said
        assert asked or len(said) == 1, said


def test_a_role_that_the_settings_do_not_have_is_a_wrong_call(config: Path, folder: Path) -> None:
    out = secureinfer(
        "party", "--role", "dealer", "--config", str(folder / "model_owner.toml"), "--json", code=2
    )
    assert "model_owner" in json.loads(out)["error"]["message"]


@pytest.mark.slow
@pytest.mark.needs("hf")
def test_minilm_in_three_terminals_gives_the_same_answer_as_plaintext(tmp_path: Path) -> None:
    from secureinfer.minilm import SENTENCES, load_encoder, similarities, tokenize, tokenizer_file

    secureinfer("compile", "minilm", "--out", str(tmp_path / "minilm.si"))
    secureinfer("certs", "--out", str(tmp_path / "certs"))
    files = settings(tmp_path, "minilm")
    (tmp_path / "sentences.txt").write_text("\n".join(SENTENCES))
    parties = [start("dealer", files["dealer"]), start("model-owner", files["model_owner"])]
    try:
        arguments = ["--config", str(files["data_owner"]), "--input", str(tmp_path / "sentences.txt")]
        out = secureinfer("infer", *arguments, "--json", timeout=300)
    finally:
        for party in parties:
            party.send_signal(signal.SIGTERM)
            party.wait(timeout=20)
    with torch.inference_mode():
        expected = similarities(load_encoder()(*tokenize(SENTENCES, 16, tokenizer_file())))
    torch.testing.assert_close(torch.tensor(json.loads(out)["similarities"]), expected, atol=5e-3, rtol=0)
