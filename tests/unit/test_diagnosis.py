"""`demo --backend ckks` on a session that answers in plain: what it counts, what it shows, and when it says no."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from secureinfer import classifiers, cli, diagnosis
from secureinfer.classifiers import Data, Task, train
from secureinfer.errors import UsageError
from secureinfer.measure.baseline import Baseline
from secureinfer.measure.figures import CallerTimings, ProgramInfo
from secureinfer.measure.load import OtherLoad
from secureinfer.measure.report import Report, build_report
from secureinfer.plan.spec import Cost
from secureinfer.terminal import Terminal

ERROR = 1e-3
HELD = 40


def _data() -> Data:
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Data(x[HELD:], y[HELD:], x[:HELD], y[:HELD])


TASK = Task(
    "corners",
    "point",
    "a perceptron",
    _data,
    lambda: nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2)),
)


class PlainSession:
    """Off by ERROR, and the other way round for one sample; remembers what it was asked."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.asked: list[torch.Tensor] = []
        self.wrong = _data().held_x[7]

    def __enter__(self) -> PlainSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(x)
        answers = self.model(x) + ERROR
        turned = (x == self.wrong).all(1)
        answers[turned] = answers[turned].flip(1)
        return answers

    def report(self) -> Report:
        online = dict.fromkeys(range(len(self.asked)), 700.0)
        program = ProgramInfo("ab", None, "ckks", "ckks", dealer=False, exact_bytes=False)
        return build_report(program, [], CallerTimings(100.0, {}, online))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PlainSession]]:
    started: list[PlainSession] = []

    def compile(model: nn.Module, inputs: tuple[torch.Tensor], **given: Any) -> Any:
        assert given["backend"] == "ckks"
        assert torch.equal(given["calibration"][0], _data().x)  # the model owner's half alone
        assert torch.equal(inputs[0], _data().x[: len(inputs[0])])
        totals = Cost("0", 100, 0, frozenset({("keys", 50)}))
        options = {"degree": 8192, "levels": 3}
        return SimpleNamespace(model=model, options=options, plan=SimpleNamespace(totals=totals))

    def local_session(program: Any, network: str | None) -> PlainSession:
        started.append(PlainSession(program.model))
        return started[-1]

    monkeypatch.setattr(diagnosis.api, "compile", compile)
    monkeypatch.setattr(diagnosis.api, "local_session", local_session)
    monkeypatch.setattr(diagnosis, "check_installed", lambda *_: None)
    monkeypatch.setattr(diagnosis, "time_calls", lambda *_, **__: [1.0])
    monkeypatch.setattr(diagnosis, "time_plaintext", lambda _: Baseline([0.5] * 10, OtherLoad()))
    yield started


def test_accuracies_are_those_of_decrypted_answers(
    sessions: list[PlainSession], capsys: pytest.CaptureFixture[str]
) -> None:
    diagnosis.run(Terminal(as_json=True), runs=2, tasks=[TASK])
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["trained_on"], task["held_out"]) == (80, HELD)
    found = task["accuracy"]
    assert (found["samples"], found["answers"]) == (HELD, 2 * HELD)
    data, classifier = _data(), train(TASK, _data())

    def right(outputs: torch.Tensor) -> float:
        return float((outputs.argmax(1) == data.held_y).double().mean())

    with torch.no_grad():
        answers = classifier.polynomial(data.held_x)
        assert found["float"] == right(classifier.float_model(data.held_x))
        assert found["polynomial"] == right(answers)
        answers[7] = answers[7].flip(0)
    assert found["secure"] == right(answers) != found["polynomial"]
    assert found["same_decisions"] == HELD - 1
    assert found["max_absolute_error"] == pytest.approx(
        ERROR + float((answers[7] - answers[7].flip(0)).abs().max()), abs=ERROR
    )
    report = task["sessions"][1]["report"]
    assert report["accuracy"] == found and report["plaintext"]["processes"] == 1
    assert report["overhead"]["online"]["ratio"] == 700 / 0.5


def test_the_held_out_half_goes_at_once_and_single_samples_one_after_the_other(
    sessions: list[PlainSession], capsys: pytest.CaptureFixture[str]
) -> None:
    diagnosis.run(Terminal(as_json=True), runs=3, tasks=[TASK])
    single, batch = sessions
    assert torch.equal(torch.cat(single.asked), _data().held_x[:3])
    assert len(batch.asked) == 3 and all(torch.equal(x, _data().held_x) for x in batch.asked)
    assert (
        json.loads(capsys.readouterr().out)["tasks"][0]["sessions"][0]["report"]["accuracy"]["samples"] == 3
    )


def test_without_a_number_of_runs_a_latency_may_be_quoted() -> None:
    def enough(times_ms: list[float], samples: int = 1) -> bool:
        return diagnosis._enough(times_ms, samples, None)

    assert not enough([]) and not enough([5000.0] * 10) and enough([5000.0] * 11)
    assert not enough([90.0] * 11) and enough([90.0] * 14)
    assert not enough([5000.0, 600.0], 284) and enough([5000.0, 600.0, 600.0], 284)
    assert not enough([5000.0, 300.0, 300.0], 284)
    assert diagnosis._enough([1.0, 1.0], 1, 2)


@pytest.mark.parametrize("width", [80, 120])
def test_the_answer_fits_a_terminal(
    sessions: list[PlainSession], capsys: pytest.CaptureFixture[str], width: int
) -> None:
    terminal = Terminal()
    terminal.out.width = width
    diagnosis.run(terminal, runs=2, tasks=[TASK, TASK])
    caught = capsys.readouterr()
    tables = [
        line for line in caught.out.splitlines() if not line.startswith(("corners", "on ", "not to be"))
    ]
    assert max(map(len, tables)) <= 80
    for part in (
        "float model",
        "with polynomials",
        "secure, decrypted",
        f"{HELD - 1} of {HELD}",
        "1 point",
        "40 points",
    ):
        assert part in caught.out
    assert "degree 2 on ±" in caught.out and "…" not in caught.out
    assert "not to be quoted: corners, 1 point: too short for a latency" in caught.out
    assert "40 points at a time: private inferences" in caught.err


def test_training_gives_the_same_every_time_and_leaves_torch_as_it_was() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, second = train(TASK, _data()), train(TASK, _data())
    for one, other in zip(first.polynomial.parameters(), second.polynomial.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_what_is_not_installed_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(classifiers, "find_spec", lambda module: None)
    with pytest.raises(UsageError, match="scikit-learn, which"):
        classifiers.digits()
    assert cli.run(["demo", "--backend", "ckks", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "scikit-learn and tenseal" in message and "pip install 'secureinfer[he]'" in message


def test_a_backend_without_a_demo_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--backend", "plaintext"]) == 2
    assert "choose mpc or ckks" in capsys.readouterr().err
