"""The models that are measured: the same in every process, scored honestly, and compiled or refused for each backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import secureinfer as si
from secureinfer.bench import language, subject, tabular, vision
from secureinfer.bench.models import (
    BACKENDS,
    COMPRESSIONS,
    SUBJECTS,
    Built,
    compile_options,
    compressed,
    save_state,
)
from secureinfer.bench.models import subject as find

SMALL = ("logistic", "fraud-mlp", "mlp-64")


@pytest.fixture(scope="module")
def fraud() -> Built:
    return find("fraud-mlp").build(1)


def outputs(module: nn.Module, built: Built) -> list[Tensor]:
    with torch.no_grad():
        return [module(*inputs) for inputs in built.held_out]


def scored(built: Built, found: Sequence[Tensor], floats: Sequence[Tensor]) -> float:
    return built.score(found, range(len(found)), floats)


# The registry.


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(si.UsageError, match="no model 'fraud'.*fraud-mlp.*resnet18.*file.py:name"):
        find("fraud")


def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(si.UsageError, match="1 sample or more, got 0"):
        find("logistic").build(0)


@pytest.mark.parametrize(("name", "batch"), [("logistic", 1), ("logistic", 3), ("mlp-64", 5)])
def test_inputs_have_the_batch_and_the_module_is_ready(name: str, batch: int) -> None:
    built = find(name).build(batch)
    groups = [built.examples, *built.calibration, *built.held_out]
    assert {t.shape[0] for inputs in groups for t in inputs} == {batch}
    assert built.batch == batch
    assert not built.module.training
    assert all(not p.requires_grad and p.dtype == torch.float32 for p in built.module.parameters())
    assert len({inputs[0].numpy().tobytes() for inputs in built.held_out}) == len(built.held_out) > 8


@pytest.mark.parametrize("name", SMALL)
def test_another_process_has_the_same_inputs_and_with_the_state_the_same_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = find(name).build(2)
    save_state(built.module, tmp_path / "state")
    torch.manual_seed(99)
    monkeypatch.setattr(tabular, "fitted", None)  # training again would call it
    again = find(name).build(2, tmp_path / "state")
    for ours, theirs in zip(built.held_out, again.held_out, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, outputs(built.module, built), outputs(again.module, again)))


def test_the_state_is_what_decides_and_not_a_second_training(tmp_path: Path) -> None:
    built = find("logistic").build(1)
    with torch.no_grad():
        built.module.get_parameter("bias").add_(1000)
    save_state(built.module, tmp_path / "state")
    again = find("logistic").build(1, tmp_path / "state")
    assert all(map(torch.equal, outputs(built.module, built), outputs(again.module, again)))
    assert not torch.equal(
        outputs(find("logistic").build(1).module, built)[0], outputs(built.module, built)[0]
    )


def test_the_state_of_another_model_is_refused(tmp_path: Path, fraud: Built) -> None:
    save_state(fraud.module, tmp_path / "state")
    with pytest.raises(si.UsageError, match="not the state of this model"):
        find("logistic").build(1, tmp_path / "state")


# Scores.


def test_nobody_is_asked_about_who_was_trained_on() -> None:
    data = tabular.transactions()
    trained = {row.numpy().tobytes() for row in data.x}
    assert not any(row.numpy().tobytes() in trained for row in data.held_x)
    assert 0.01 < float(data.y.float().mean()) < 0.05  # fraud is rare where it is learnt


def test_the_fraud_model_finds_most_of_both_classes_and_saying_never_scores_half(fraud: Built) -> None:
    floats = outputs(fraud.module, fraud)
    assert scored(fraud, floats, floats) > 0.8
    never = [torch.tensor([[1.0, 0.0]])] * len(floats)
    assert scored(fraud, never, floats) == 0.5


def test_balanced_accuracy_does_not_depend_on_how_rare_a_class_is() -> None:
    rare = subject.balanced([torch.tensor([0] * 97 + [1] * 3)])
    never = [torch.tensor([[1.0, 0.0]]).expand(100, 2)]
    assert rare(never, [0], never) == 0.5
    assert subject.top1([torch.tensor([0] * 97 + [1] * 3)])(never, [0], never) == 0.97  # what it would hide


def test_labels_are_those_of_the_asked_batches(fraud: Built) -> None:
    floats = outputs(fraud.module, fraud)
    picked = [7, 2, 2, 5]
    right = fraud.score([floats[i] for i in picked], picked, [floats[i] for i in picked])
    wrong = fraud.score([floats[i] for i in picked], [i ^ 1 for i in picked], [floats[i] for i in picked])
    assert right + wrong == 1.0  # each neighbour has the other label


@pytest.mark.parametrize("score", [subject.agreement, subject.top1([torch.tensor([0])] * 2)])
def test_an_answer_that_is_not_a_number_is_wrong(score: subject.Score) -> None:
    floats = [torch.tensor([[2.0, 1.0]])] * 2
    broken = [floats[0], torch.tensor([[torch.nan, torch.nan]])]  # its argmax would be 0, and right
    assert score(floats, [0, 1], floats) == 1.0
    assert score(broken, [0, 1], floats) == 0.5


def test_values_that_are_no_classes_agree_within_a_hundredth() -> None:
    floats = [torch.tensor([100.0, 1.0, 0.0, -5.0])]
    assert subject.close([floats[0] + 0.9], [0], floats) == 1.0
    assert subject.close([floats[0] + torch.tensor([0.0, 0.0, 1.1, torch.nan])], [0], floats) == 0.5


def _toy_retrieval(batch: int) -> tuple[subject.Score, list[Tensor]]:
    """Four sentences of one number, two pairs: 0 and 1 degrees, 90 and 91 degrees."""
    angles = torch.deg2rad(torch.tensor([[0.0], [1.0], [90.0], [91.0]]))

    class Encoder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x.cos(), x.sin()], 1)

    numbers = [n for (n,) in subject.turns(4 // batch, batch, torch.arange(4))]
    return language.retrieval(Encoder(), (angles,), numbers), [Encoder()(angles[n]) for n in numbers]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_paraphrase_is_found_at_every_batch_size_and_not_by_a_broken_encoder(batch: int) -> None:
    score, floats = _toy_retrieval(batch)
    every = range(len(floats))
    assert score(floats, every, floats) == 1.0
    assert score([torch.full_like(f, torch.nan) for f in floats], every, floats) == 0.0
    turned = [f @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) for f in floats]
    assert score(turned, every, floats) < 1.0


def test_there_are_twenty_four_pairs_and_no_sentence_twice() -> None:
    sentences = [s for pair in language.PAIRS for s in pair]
    assert len(language.PAIRS) == 24
    assert len(set(sentences)) == 48


# Random networks.


@pytest.mark.needs("hf")
def test_a_random_bert_decides_for_both_classes_only_once_its_head_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build() -> list[int]:
        config = {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 500,
        }
        built = language.bert(1, None, 16, **config)
        assert [tuple(t.shape) for t in built.examples] == [(1, 16), (1, 16)]
        assert built.tokens == 16
        floats = outputs(built.module, built)
        assert scored(built, floats, floats) == 1.0
        return torch.cat([subject.decisions(f) for f in floats]).bincount(minlength=2).tolist()

    assert min(build()) >= 3
    monkeypatch.setattr(language, "settled", lambda head, found: None)
    assert min(build()) <= 1


def test_pictures_of_two_seeds_differ_and_are_standardised() -> None:
    known, asked = vision.pictures(2, 32, seed=1), vision.pictures(2, 32, seed=2)
    assert not torch.equal(known, asked)
    assert torch.equal(known, vision.pictures(2, 32, seed=1))
    assert 0.5 < float(known.std()) < 2


# Compressions and backends.


def test_no_compression_is_the_float_module_itself(fraud: Built) -> None:
    assert compressed("none", fraud) == (fraud.module, None)


@pytest.mark.parametrize(
    ("name", "transforms"),
    [
        ("int8", ["Quantize"]),
        ("approximate", ["Approximate"]),
        ("approximate+int8", ["Approximate", "Quantize"]),
    ],
)
def test_a_compression_keeps_what_the_model_knows_and_the_float_model_as_it_was(
    name: str, transforms: list[str]
) -> None:
    built = find("breast-cancer").build(8)
    floats = outputs(built.module, built)
    module, report = compressed(name, built)
    assert report is not None
    assert [t.name for t in report.transforms] == transforms
    assert all(t.changed for t in report.transforms)
    found = outputs(module, built)
    assert not all(map(torch.equal, found, floats))
    assert scored(built, found, floats) > 0.93
    assert all(map(torch.equal, outputs(built.module, built), floats))
    assert not any(p.requires_grad for p in [*module.parameters(), *built.module.parameters()])


def test_an_unknown_compression_or_backend_is_refused_with_those_there_are(fraud: Built) -> None:
    with pytest.raises(si.UsageError, match=f"no compression 'int4'.*{COMPRESSIONS[-1].replace('+', '.')}"):
        compressed("int4", fraud)
    with pytest.raises(si.UsageError, match="no backend 'gpu'.*mpc, crypten, ckks"):
        compile_options("gpu", fraud)


@pytest.mark.parametrize(
    ("backend", "batch", "expected"),
    [("mpc", 8, ("mpc", "fast")), ("crypten", 8, ("mpc", "crypten")), ("ckks", 1, ("ckks", "ckks"))],
)
def test_each_backend_gets_a_program(backend: str, batch: int, expected: tuple[str, str]) -> None:
    assert backend in BACKENDS
    built = find("logistic").build(batch)
    program = si.compile(built.module, built.examples, **compile_options(backend, built))
    assert (program.backend, program.protocol) == expected


@pytest.mark.slow
@pytest.mark.needs("hf")
@pytest.mark.needs("he")
@pytest.mark.parametrize("name", [n for n in SUBJECTS if n != "bert-base"])
def test_every_model_compiles_for_mpc_and_for_ckks_or_is_refused_in_words(name: str) -> None:
    chosen = find(name)
    built = chosen.build(chosen.batches[0])
    floats = outputs(built.module, built)
    assert scored(built, floats, floats) > 0.8
    program = si.compile(built.module, built.examples, **compile_options("mpc", built))
    assert program.plan.totals.bytes > 0
    if name in ("minilm", "bert-tiny"):
        with pytest.raises(si.CompileError, match="CKKS encrypts real numbers"):
            si.compile(built.module, built.examples, **compile_options("ckks", built))
    elif name == "resnet18":
        with pytest.raises(si.UnsupportedModelError, match="too wide for CKKS"):
            si.compile(built.module, built.examples, **compile_options("ckks", built))
    else:
        si.compile(built.module, built.examples, **compile_options("ckks", built))


@pytest.mark.slow
@pytest.mark.needs("hf")
def test_bert_base_compiles_for_mpc_with_and_without_int8() -> None:
    built = find("bert-base").build(1)
    parameters = sum(p.numel() for p in built.module.parameters())
    assert 109e6 < parameters < 110e6
    for name in ("none", "int8"):
        module, _ = compressed(name, built)
        program = si.compile(module, built.examples, **compile_options("mpc", built))
        assert program.plan.totals.bytes > 1e9


# A user's own model.

OWN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, a, b):
        return self.first(a) + self.second(b)
classes = (model, torch.randn(2, 4), [torch.randn(2, 4), torch.randn(5, 4)])
named = (Two(), {"b": torch.zeros(2, 4), "a": torch.ones(2, 4)})
uneven = (Two(), (torch.zeros(2, 4), torch.zeros(1, 4)))
scalar = (Two(), {"a": torch.ones(2, 4), "b": 3.0})
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_models.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_users_model_is_measured_by_its_agreement_on_its_own_inputs(
    own: Path, batch: int, tmp_path: Path
) -> None:
    built = find(f"{own}:classes").build(batch)
    floats = outputs(built.module, built)
    assert built.batch == batch
    assert len(floats) == 9 // batch  # of the nine rows that it gives
    assert built.metric == subject.AGREEMENT
    assert scored(built, floats, floats) == 1.0
    assert scored(built, [-f for f in floats], floats) == 0.0
    save_state(built.module, tmp_path / "state")
    again = find(f"{own}:classes").build(batch, tmp_path / "state")
    assert torch.equal(again.module(*built.examples), floats[0])


def test_named_inputs_go_in_the_order_of_forward(own: Path) -> None:
    built = find(f"{own}:named").build(2)
    a, b = built.examples
    assert bool((a == 1).all()) and bool((b == 0).all())
    assert built.metric == subject.CLOSE


@pytest.mark.parametrize(
    ("name", "batch", "why"),
    [
        ("uneven", 2, "share no first dimension"),
        ("scalar", 2, "tensors alone"),
        ("nothing", 1, "has no 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(own: Path, name: str, batch: int, why: str) -> None:
    with pytest.raises(si.UsageError, match=why):
        find(f"{own}:{name}").build(batch)
