"""The pretrained MiniLM between real parties: every layer's hidden states and the embeddings against float64.

The program that reveals embeddings alone, with int8 weights, is in tests/conformance/test_accuracy.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import secureinfer as si
from secureinfer.minilm import load_encoder, tokenize, tokenizer_file

pytestmark = pytest.mark.needs("hf")

BATCH, TOKENS = 8, 24
GREATEST_ERROR, LEAST_COSINE = 5e-3, 0.9999

SUBJECTS = (
    "A nurse", "The second tenant", "Nobody", "Our bank in Zürich", "The court of appeal", "It", "My brother's dog",
    "Patient 4417", "An old fisherman", "The committee",
)  # fmt: skip
VERBS = (
    "signed the contract", "denies everything", "paid 1,250.00 EUR twice", "has a persistent cough", "won", "lost the key",
    "reported a leak at 3:15 a.m.", "is asleep", "asked for a second opinion", "sold the house by the lake",
)  # fmt: skip
ENDS = (
    ".", "!", "?", " because the weather changed.", ", which surprised no one at all.", " (see annex B, page 12).",
    " - or so they say...", " yesterday; today it is different.",
    " and then walked home through the snow without a coat.", "",
)  # fmt: skip
ODD = (
    "Yes.", "42", "¿Dónde está la biblioteca?", "naïve café résumé", "SELECT * FROM accounts WHERE balance < 0;", "???",
    "supercalifragilisticexpialidocious", "the the the the the the the the", "e = mc^2", "你好", "A", "no no no",
)  # fmt: skip


def varied(count: int) -> list[str]:
    """Sentences of every length and kind: plain ones, questions, figures, other scripts, repetitions, one word."""
    out = list(ODD)
    for i in range(count):
        subject, verb = SUBJECTS[i % 10], VERBS[(i * 3 + i // 10) % 10]
        out.append(f"{subject} {verb}{ENDS[(i * 7 + i // 7) % 10]}")
    return out[:count]


class EveryLayer(torch.nn.Module):
    """The hidden states after each layer, at the places that are not padding, and the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = load_encoder().encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.encoder(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        keep = attention_mask.unsqueeze(-1).to(out.last_hidden_state.dtype)
        states = tuple(h * keep for h in out.hidden_states)
        mean = states[-1].sum(1) / keep.sum(1)
        return (*states, torch.nn.functional.normalize(mean, dim=1))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sentences = varied(count)
    return [tokenize(sentences[i : i + BATCH], TOKENS, tokenizer_file()) for i in range(0, count, BATCH)]


@pytest.fixture(scope="module")
def model() -> EveryLayer:
    return EveryLayer().eval()


@pytest.fixture(scope="module")
def session(model: EveryLayer) -> Iterator[si.Session]:
    program = si.compile(model, batches(BATCH)[0])
    with si.local_session(program) as session:
        yield session


def compare(session: si.Session, model: EveryLayer, count: int) -> None:
    double = copy.deepcopy(model).double()
    for ids, mask in batches(count):
        with torch.no_grad():
            expected = double(ids, mask)
        got = session.infer(ids, mask)
        rows = mask.bool()
        for layer, (g, e) in enumerate(zip(got, expected, strict=True)):
            error = float((g.double() - e).abs().max())
            assert error <= GREATEST_ERROR, f"layer {layer}: error {error}"
            a, b = (g, e) if g.dim() == 2 else (g[rows], e[rows])
            cosine = float(torch.nn.functional.cosine_similarity(a.double(), b.double()).min())
            assert cosine >= LEAST_COSINE, f"layer {layer}: cosine {cosine}"


def test_every_layer_agrees_on_8_sentences(session: si.Session, model: EveryLayer) -> None:
    compare(session, model, 8)


@pytest.mark.slow
def test_every_layer_agrees_on_200_sentences(session: si.Session, model: EveryLayer) -> None:
    assert len(set(varied(200))) > 150
    compare(session, model, 200)


def test_the_report_says_what_the_plan_promised(session: si.Session) -> None:
    report = session.report().to_dict()
    planned = session.program.plan.totals
    assert report["online"]["rounds"] == planned.rounds
    assert report["online"]["bytes"] == planned.bytes
    assert report["offline"]["bytes"] == planned.dealt_bytes
    assert report["setup"]["bytes"] == planned.setup_bytes
