"""Whole int8 transformers: every layer's hidden states and the answer of secure runs against the same model in float64.

The program is the one that people run: it reveals the answer alone, and hidden states are put together here from what the
parties hold. `make test` has a narrow BERT; the slow tests have BERT-base and the pretrained MiniLM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.backends.mpc import engine
from secureinfer.backends.mpc.values import Share
from secureinfer.plan.program import Program
from secureinfer.transport.memory import memory_links

from . import parties
from .models import INT8
from .parties import Parties
from .test_models import gelu_to_relu, mask_ignored, one_head_dropped, uniform_attention

pytestmark = pytest.mark.needs("hf")

GREATEST_ERROR, LEAST_COSINE = 2e-2, 0.9999
"""Of an answer's values; of each place's hidden state after each layer."""

TOKENS, RUNS = 128, 50
SHARPNESS = (1.0, 4.0, 6.0)
"""Times query and key weights: as they are drawn, attention is nearly uniform; times 6, a few places get all of it."""

NARROW: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512,
    "initializer_range": 0.05,
}  # fmt: skip
"""Weights are drawn wider, so that the products of 128 are as large as those of BERT-base's 768."""

CLS, SEP = 1, 2
PATIENCE_SECONDS = 900.0
"""Before a party gives up: nothing here fails because a machine is slow."""


@dataclass(frozen=True)
class Model:
    """layers: whose hidden states there are, the embeddings' among them. plain: ids, mask -> (hidden states, answer)."""

    program: Program
    layers: int
    head: int
    plain: Callable[[torch.Tensor, torch.Tensor], tuple[tuple[torch.Tensor, ...], torch.Tensor]]


class Logits(torch.nn.Module):
    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def texts(count: int, vocabulary: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, mask) of random words between [CLS] and [SEP]: about half the length, one to three words, the whole length."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        least, most = ((48, 80), (3, 5), (TOKENS, TOKENS))[i % 3]
        length = int(torch.randint(least, most + 1, (), generator=g))
        ids = torch.randint(3, vocabulary, (1, TOKENS), generator=g)
        mask = (torch.arange(TOKENS) < length).long().unsqueeze(0)
        ids[0, 0], ids[0, length - 1] = CLS, SEP
        found.append((ids * mask, mask))
    return found


def bert(sharpness: float, **sizes: Any) -> Model:
    """`BertForSequenceClassification(BertConfig(**sizes))` with int8 weights."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**sizes)
    torch.manual_seed(3)
    model: Any = BertForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".query." in name or ".key." in name:
                parameter.mul_(sharpness)
    small, _ = si.compress(Logits(model).eval(), [INT8])
    examples = texts(3, config.vocab_size, seed=4)
    program = si.compile(small, examples[2], calibration=examples)
    double: Any = copy.deepcopy(small).double()

    def plain(ids: torch.Tensor, mask: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        with torch.no_grad():
            out = double.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        return out.hidden_states, out.logits

    head = config.hidden_size // config.num_attention_heads
    return Model(program, config.num_hidden_layers + 1, head, plain)


class Secure:
    """A session that also keeps what each party holds of every layer's hidden states."""

    def __init__(self, program: Program, layers: int) -> None:
        self._graph = program.graph
        norms = [n for n in self._graph.nodes if n.op == "layer_norm"]
        self._edges = [n.outputs[0] for n in norms if not n.path.endswith("attention.output.LayerNorm")]
        if len(self._edges) != layers:
            raise ValueError(f"{layers} hidden states were expected, and the program has {len(self._edges)}")
        self._held: dict[tuple[str, int], Share] = {}
        self.parties = Parties(program)

    def watch(self, lookup: Callable[[str], Any]) -> Callable[[str], Any]:
        """The engine's choice of a kernel, whose results are kept where they are hidden states."""

        def watched(kernel: str) -> Any:
            def call(step: Any) -> Any:
                values = lookup(kernel)(step)
                for name, value in zip(step.node.outputs, values, strict=False):
                    if name in self._edges and isinstance(value, Share):
                        self._held[name, step.party.rank] = value
                return values

            return call

        return watched

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        self._held.clear()
        (answer,) = self.parties.infer(ids, mask)
        return [self._state(name) for name in self._edges], answer

    def _state(self, name: str) -> torch.Tensor:
        edge = self._graph.edge(name)
        total = self._held[name, 0].tensor + self._held[name, 1].tensor
        unused = 64 - edge.ring_bits
        return ((total << unused) >> unused).double() / 2**edge.scale


@contextmanager
def session(program: Program, layers: int) -> Iterator[Secure]:
    def patient(names: Any, session: bytes, *, deadline: float) -> Any:
        return memory_links(names, session, deadline=max(deadline, PATIENCE_SECONDS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parties, "memory_links", patient)
        secure = Secure(program, layers)
        patch.setattr(engine, "lookup", secure.watch(engine.lookup))
        with secure.parties:
            yield secure


def faults(
    got: tuple[list[torch.Tensor], torch.Tensor],
    expected: tuple[tuple[torch.Tensor, ...], torch.Tensor],
    places: torch.Tensor,
) -> list[str]:
    """What is beyond the limits. places: bool (batch, tokens), those whose hidden states count."""
    found = []
    for layer, (g, e) in enumerate(zip(got[0], expected[0], strict=True)):
        cosine = float(torch.nn.functional.cosine_similarity(g[places], e[places], dim=-1).min())
        if not cosine >= LEAST_COSINE:
            found.append(f"layer {layer}: 1 - cosine = {1 - cosine:.1e}")
    error = float((got[1].double() - expected[1]).abs().max())
    if not error <= GREATEST_ERROR:
        found.append(f"answer: error {error:.1e}")
    return found


def judged(
    model: Model, runs: list[tuple[torch.Tensor, torch.Tensor]], program: Program | None = None
) -> list[str]:
    """Every fault of these runs of the model's program, or of another in its place; padding counts like other places."""
    found = []
    with session(program or model.program, model.layers) as secure:
        for i, (ids, mask) in enumerate(runs):
            every = torch.ones_like(mask).bool()
            found += [f"run {i}, {f}" for f in faults(secure(ids, mask), model.plain(ids, mask), every)]
    return found


# -- a narrow BERT


@pytest.fixture(scope="module")
def narrow() -> Model:
    return bert(4.0, **NARROW)


def test_every_layer_and_the_logits_agree(narrow: Model) -> None:
    assert judged(narrow, texts(2, NARROW["vocab_size"], seed=5)) == []


PLANTED = {
    "mask ignored": lambda program, path, head: mask_ignored(program, path),
    "uniform attention": lambda program, path, head: uniform_attention(program, path),
    "GELU -> ReLU": lambda program, path, head: gelu_to_relu(program, path),
    "one head dropped": one_head_dropped,
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_the_last_layer_alone_is_seen_there(fault: str, narrow: Model) -> None:
    planted = PLANTED[fault](narrow.program, "layer.1.", narrow.head)
    found = judged(narrow, texts(1, NARROW["vocab_size"], seed=5), planted)
    assert found and found[0].startswith("run 0, layer 2: ")


# -- BERT-base


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", SHARPNESS)
def test_bert_base_agrees_on_50_texts(sharpness: float) -> None:
    model = bert(sharpness)
    assert judged(model, texts(RUNS, 30_522, seed=6)) == []


@pytest.mark.slow
def test_a_fault_in_the_last_layer_of_bert_base_is_seen() -> None:
    model = bert(4.0)
    for name, plant in PLANTED.items():
        found = judged(model, texts(1, 30_522, seed=6), plant(model.program, "layer.11.", model.head))
        assert found and found[0].startswith("run 0, layer 12: "), name


# -- the pretrained MiniLM


@pytest.mark.slow
def test_pretrained_int8_minilm_agrees_on_200_sentences() -> None:
    from secureinfer.minilm import load_encoder
    from tests.e2e.test_minilm import batches

    small, _ = si.compress(load_encoder(), [INT8])
    runs = batches(200)
    double: Any = copy.deepcopy(small).double()
    found = []
    with session(si.compile(small, runs[0]), 7) as secure:
        for i, (ids, mask) in enumerate(runs):
            with torch.no_grad():
                states = double.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True)
                expected = states.hidden_states, double(ids, mask)
            found += [f"batch {i}, {f}" for f in faults(secure(ids, mask), expected, mask.bool())]
    assert found == []
