"""What `demo` and `infer` print, on a session that answers in plain."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from secureinfer import demo, inference, minilm
from secureinfer.errors import InputError
from secureinfer.graph.ir import DATA_OWNER, Edge, Graph, Visibility
from secureinfer.measure.baseline import Baseline, unrest
from secureinfer.measure.figures import CallerTimings, ProgramInfo
from secureinfer.measure.load import OtherLoad
from secureinfer.measure.report import Report, build_report
from secureinfer.plan.spec import Cost
from secureinfer.terminal import Terminal

ERROR = 1e-3


class TinyEncoder(torch.nn.Module):
    """Embeds a sentence by counts of its ids: enough to tell sentences apart."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hot = torch.nn.functional.one_hot(ids % 64, 64) * mask.unsqueeze(-1)
        return torch.nn.functional.normalize(hot.sum(1).float(), dim=-1)


class PlainSession:
    """A session that computes in plain, is off by ERROR, and remembers what it was asked."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.calls: list[Any] = []
        self.prepared = 0

    def __enter__(self) -> PlainSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("closed")

    def prepare(self, count: int = 1) -> None:
        self.prepared += count

    def infer(self, *positional: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        inputs = (*positional, *named.values())
        self.calls.append(inputs)
        return TinyEncoder()(*inputs) + ERROR

    def report(self) -> Report:
        online = {i: 700.0 for i, c in enumerate(self.calls) if c != "closed"}
        return build_report(
            ProgramInfo("ab", None, "mpc", "crypten"), [], CallerTimings(100.0, {0: 50.0}, online)
        )


def graph(batch: int, tokens: int, dtype: str = "int64") -> Graph:
    edges = {
        name: Edge(name, (batch, tokens), dtype, Visibility.PRIVATE, DATA_OWNER)
        for name in ("input_ids", "attention_mask")
    }
    parameters = {name: {"edge": name} for name in edges}
    spec = {"positional": list(edges), "parameters": parameters}
    return Graph((), edges, tuple(edges), (), (), (), input_spec=spec)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of our own, so that no pretrained model is needed: one id a character."""

    def tokenize(sentences: list[str], tokens: int, _: Path) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [[ord(c) for c in s[:tokens]] + [0] * (tokens - len(s)) for s in sentences]
        ids = torch.tensor(rows)
        return ids, (ids != 0).long()

    for module in (demo, inference):
        monkeypatch.setattr(module, "tokenize", tokenize)
    monkeypatch.setattr(demo, "tokenizer_file", lambda: Path("unused"))
    monkeypatch.setattr(demo, "reference", lambda *_: (TinyEncoder(), ()))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, words: None) -> PlainSession:
    plain = PlainSession(graph(2, 8))
    program = SimpleNamespace(plan=SimpleNamespace(totals=Cost("xxxxx", 100, 200), steps=()))
    for module in (demo, inference):
        monkeypatch.setattr(module.api, "compile", lambda *_, **__: program)
        monkeypatch.setattr(module.api, "local_session", lambda *_, **__: plain)
        monkeypatch.setattr(module.api, "connect", lambda *_, **__: plain)
    public = SimpleNamespace(graph=plain.graph, backend="mpc")
    monkeypatch.setattr(inference, "load_settings", lambda _: SimpleNamespace(program=Path("absent.si")))
    monkeypatch.setattr(inference.Program, "load", lambda *_, **__: public)
    return plain


def test_the_demo_measures_secure_against_plaintext(
    session: PlainSession, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.run(Terminal(as_json=True), runs=3)
    data = json.loads(capsys.readouterr().out)
    assert session.prepared == 3 and len(session.calls) == 3 + 1 and session.calls[-1] == "closed"
    assert len(data["pairs"]) == 15
    assert all(abs(p["difference"] - (p["secure"] - p["plaintext"])) < 1e-7 for p in data["pairs"])
    report = data["report"]
    assert report["accuracy"]["max_absolute_error"] == pytest.approx(ERROR, rel=1e-2)
    assert report["plaintext"]["processes"] == 1 and report["plaintext"]["count"] >= 10
    assert report["overhead"]["online"]["ratio"] == pytest.approx(700 / report["plaintext"]["latency_ms"])


def test_a_baseline_on_a_busy_machine_is_not_to_be_quoted() -> None:
    def baseline(times_ms: list[float], others: float | None) -> Baseline:
        load = OtherLoad()
        load.cores = others
        return Baseline(times_ms, load)

    quiet = baseline([10.0, 11.0, 90.0], 0.1)
    assert unrest(quiet, baseline([12.0, 14.0, 13.0], None), 1) == []
    (drift,) = unrest(quiet, baseline([20.0, 21.0, 22.0], 0.1), 1)
    assert "11.0 ms before" in drift and "21.0 ms after" in drift
    (busy,) = unrest(quiet, baseline([10.0, 11.0, 12.0], float(os.cpu_count() or 1)), 1)
    assert "not quiet" in busy and "after" in busy


def test_the_demo_shows_pairs_and_cost_to_people(
    session: PlainSession, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.run(Terminal(), runs=2)
    caught = capsys.readouterr()
    for part in ("secure", "plaintext", "difference", "online overhead", "greatest error"):
        assert part in caught.out
    assert "private inference 2 of 2" in caught.err


def test_sentences_go_in_whole_batches_and_the_padding_is_dropped(
    session: PlainSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.txt").write_text("abc\nabd\nxyz\n")
    tokenizer = tmp_path / "t.json"
    tokenizer.write_text("{}")
    out = tmp_path / "out.npz"
    inference.infer_sentences(Terminal(as_json=True), Path("unused"), tmp_path / "s.txt", out, tokenizer)
    data = json.loads(capsys.readouterr().out)
    assert [call[0].shape for call in session.calls if call != "closed"] == [(2, 8), (2, 8)]
    similar = torch.tensor(data["similarities"])
    assert similar.shape == (3, 3)
    assert similar[0, 1] > similar[0, 2]
    assert np.load(out, allow_pickle=False)["embeddings"].shape == (3, 64)


def test_one_sentence_gives_no_table_but_its_embedding(
    session: PlainSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.txt").write_text("abc\n")
    (tmp_path / "t.json").write_text("{}")
    inference.infer_sentences(Terminal(), Path("unused"), tmp_path / "s.txt", None, tmp_path / "t.json")
    shown = capsys.readouterr().out
    assert "an embedding of 64 numbers" in shown and "--output" in shown
    assert "Similarity of each pair" not in shown


def test_a_missing_tokenizer_is_named(session: PlainSession, tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("abc\n")
    with pytest.raises(InputError, match="--tokenizer"):
        inference.infer_sentences(
            Terminal(), Path("unused"), tmp_path / "s.txt", None, tmp_path / "absent.json"
        )


def test_tensors_go_in_and_out_by_name(
    session: PlainSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.arange(16).reshape(2, 8)
    np.savez(tmp_path / "in.npz", attention_mask=np.ones_like(ids), input_ids=ids)
    inference.infer_tensors(Terminal(as_json=True), Path("unused"), tmp_path / "in.npz", tmp_path / "out.npz")
    data = json.loads(capsys.readouterr().out)
    assert torch.equal(session.calls[0][0], torch.from_numpy(ids))
    written = np.load(tmp_path / "out.npz", allow_pickle=False)["output"]
    np.testing.assert_allclose(written, data["outputs"]["output"])


@pytest.mark.parametrize("odd", [graph(2, 8, "float32"), Graph((), {}, (), (), (), ())])
def test_a_program_that_takes_no_sentences_says_what_it_takes(odd: Graph) -> None:
    assert inference.sentence_shape(graph(2, 8)) == (2, 8)
    with pytest.raises(InputError, match="takes no sentences"):
        inference.sentence_shape(odd)


def test_only_one_matrix_counts_as_embeddings() -> None:
    assert inference.embeddings_of({"embeddings": torch.zeros(2, 3)}).shape == (2, 3)
    for odd in (torch.zeros(2), (torch.zeros(2, 3), torch.zeros(2, 3))):
        with pytest.raises(InputError, match="one embedding a sentence"):
            inference.embeddings_of(odd)


def test_many_pairs_are_cut_to_the_most_similar(capsys: pytest.CaptureFixture[str]) -> None:
    n = 12
    Terminal().answer({}, inference.pair_table([f"[s{i}]" for i in range(n)], torch.eye(n)))
    shown = capsys.readouterr().out
    assert shown.count(" and ") == inference.MOST_PAIRS and "most similar of 66" in shown
    assert " 12  [s11]" in shown  # a bracket in a sentence is no markup
    assert "Similarity of each pair\n" in shown  # whole, though the table is narrower


@pytest.mark.needs("hf")
def test_the_reference_is_the_published_encoder() -> None:
    """Our wrapper gives sentence-transformers' own embeddings (its pooling and normalisation)."""
    from sentence_transformers import SentenceTransformer

    model = minilm.load_encoder()
    sentences = [*minilm.SENTENCES, *minilm.EXAMPLES, ""]
    with torch.inference_mode():
        ours = model(*minilm.tokenize(sentences, 16, minilm.tokenizer_file()))
    theirs = SentenceTransformer(str(minilm.model_folder()), device="cpu")
    theirs.max_seq_length = 16
    expected = torch.from_numpy(theirs.encode(sentences, show_progress_bar=False))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
