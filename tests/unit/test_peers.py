"""What `python -m benchmarks peers` says of engines that answer, err, end or are not there. Its figures are no test."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor

from secureinfer.errors import UsageError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
pytest.importorskip("transformers")
from benchmarks.peers.bert import case as cases  # noqa: E402
from benchmarks.peers.bert import child, command, engines, environments, picture, row  # noqa: E402
from benchmarks.peers.bert.digest import digest  # noqa: E402


@pytest.fixture(scope="module")
def case() -> cases.Case:
    return cases.make(small=True)


class Answers:
    """An engine that gives these answers, in turn; an exception is raised."""

    def __init__(self, case: cases.Case, *answers: Tensor | Exception) -> None:
        self._case, self._rest, self._given = case, list(answers), list[Tensor]()
        self.closed = 0

    def turn(self) -> None:
        found = self._rest.pop(0)
        if isinstance(found, Exception):
            raise found
        self._given.append(found)

    def row(self, given: row.Row) -> row.Row:
        given = replace(given, latency_ms=(2.0, 4.0, 9.0), bytes=1e6, threads=1, processes=2)
        return engines._judge(given, self._given, self._case)

    def close(self) -> None:
        self.closed += 1


def opening(name: str, make: Callable[[], Any]) -> engines.Opening:
    return row.Row(name, name, "failed"), make


def measured(*openings: engines.Opening, runs: int = 1) -> list[row.Row]:
    return engines.measure(openings, runs, lambda _: None)


# --- the case ------------------------------------------------------------------------------------------------------
def test_every_engine_is_given_the_same_weights_and_the_answer_of_the_quantised_model(
    case: cases.Case,
) -> None:
    with torch.inference_mode():
        assert torch.allclose(case.quantised(*case.inputs), case.plain(*case.inputs), atol=1e-5)
        assert (case.plain(*case.inputs) - case.expected).abs().max() < 1e-5
    again = cases.make(small=True)
    assert (again.model_digest, again.input_digest) == (case.model_digest, case.input_digest)
    assert cases.make(small=True, layers=2).model_digest != case.model_digest


def test_the_mask_is_real(case: cases.Case) -> None:
    ids, mask = case.inputs
    assert 0 < int(mask.sum()) < mask.numel() and ids.all()
    with torch.inference_mode():
        unmasked = case.plain(ids, torch.ones_like(mask))
    assert (unmasked - case.expected).abs().max() > row.BOUND  # who ignores it is found out


def test_a_look_up_outside_asks_the_same_of_the_model(case: cases.Case) -> None:
    outside = cases.make(small=True, look_up=False)
    assert outside.model_digest == case.model_digest and outside.input_digest != case.input_digest
    assert torch.allclose(outside.expected, case.expected, atol=1e-6)


def test_no_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one layer"):
        cases.make(layers=0, small=True)


def test_parties_read_their_own_and_what_is_public_has_no_weight(case: cases.Case, tmp_path: Path) -> None:
    case.save(tmp_path, timeout=1.0, ports=[1, 2])
    public = json.loads((tmp_path / "case.json").read_text())
    assert public["layers"] == 1 and public["look_up"] and public["x"] == [1, 16, 200]
    assert public["weights"]["places"] == [16, 64]
    assert "bert.embeddings.position_embeddings.weight" not in public["weights"]
    assert all(isinstance(n, int) for shape in public["weights"].values() for n in shape)


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.ones((2, 3), np.float32), "b": np.zeros(1, np.int64)},
        {"a": np.zeros((3, 2), np.float32), "b": np.zeros(1, np.int64)},
        {"a": np.zeros((2, 3), np.float64), "b": np.zeros(1, np.int64)},
        {"a": np.zeros((2, 3), np.float32), "c": np.zeros(1, np.int64)},
    ],
)
def test_a_digest_tells_values_shapes_types_and_names_apart(other: dict[str, Any]) -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(1, np.int64)}
    assert digest(arrays) == digest(dict(reversed(arrays.items()))) != digest(other)


# --- rows ----------------------------------------------------------------------------------------------------------
def test_an_engine_that_fails_is_a_row_with_its_error_and_the_others_go_on(case: cases.Case) -> None:
    right = case.expected
    broken = Answers(case, right, engines.EngineError("party 1 ended with -9"))

    def absent() -> Any:
        raise engines.UnavailableError("not here")

    rows = measured(
        opening("good", lambda: Answers(case, right, right)),
        opening("broken", lambda: broken),
        opening("absent", absent),
    )
    assert [r.status for r in rows] == ["ok", "failed", "unavailable"]
    assert rows[1].why == "EngineError: party 1 ended with -9" and rows[1].latency_ms == ()
    assert rows[2].why == "UnavailableError: not here" and broken.closed == 1
    assert "**unavailable**: UnavailableError: not here" in row.table(rows, {})


def test_a_wrong_answer_is_marked_wrong_with_its_error(case: cases.Case) -> None:
    right = case.expected
    rows = measured(
        opening("fast", lambda: Answers(case, right, right + row.BOUND / 2)),
        opening("twin", lambda: Answers(case, right, right + 3 * row.BOUND)),
        opening("nan", lambda: Answers(case, right, right * torch.nan)),
        opening("shape", lambda: Answers(case, right, right[0])),
    )
    assert [r.status for r in rows] == ["ok", "wrong", "wrong", "wrong"]
    assert rows[1].error == pytest.approx(3 * row.BOUND, rel=1e-6) and "0.06" in (rows[1].why or "")
    assert "6.0e-02" in row.table(rows, {}) and "**wrong**" in row.table(rows, {})
    assert json.loads(json.dumps(row.document(rows, {}), allow_nan=False))["rows"][2]["error"] == "inf"


def test_an_answer_that_decides_otherwise_is_wrong_however_near() -> None:
    expected = torch.tensor([[0.5, 0.505]], dtype=torch.float64)
    error, why = row.judged([torch.tensor([[0.506, 0.5]])], expected)
    assert error < row.BOUND and why == "it decides otherwise than float64"


def test_medians_and_ratios_name_their_sides() -> None:
    plain = row.Row("plaintext", "torch", "ok", latency_ms=(1.0, 2.0, 3.0))
    fast = row.Row("fast", "fast", "ok", latency_ms=(30.0, 10.0, 20.0), rounds=12, bytes=2e6)
    found = row.document([plain, fast], {"what": "it"})["rows"][1]
    assert (
        found["latency_ms_p50"] == 20
        and found["online_over_plaintext"] == 10 == 10 * found["online_over_fast"]
    )
    assert (found["latency_ms_least"], found["latency_ms_greatest"]) == (10, 30)
    assert "| fast | 20 ms (10 ms–30 ms) | 10 | 1 | 2.0 | 12 |" in row.table([plain, fast], {})


def test_published_figures_are_marked_and_in_no_ratio() -> None:
    fast = row.Row("fast", "fast", "ok", latency_ms=(10.0,))
    document = row.document([fast], {})
    assert [r["kind"] for r in document["rows"]] == ["measured"]
    assert [(r["kind"], r["label"]) for r in document["published"]] == [
        ("published", "FuseFSS"), ("published", "SIGMA"),
    ]  # fmt: skip
    assert not any("over" in name or "digest" in name for r in document["published"] for name in r)
    table = row.table([fast], {})
    assert table.index("published, not measured here") > table.index("| fast |")
    assert "| FuseFSS (published) | BERT-base, 12 layers" in table


def test_the_picture_is_one_svg_with_every_engine_and_published_ones_hollow() -> None:
    rows = [
        row.Row("plaintext", "torch <fp32>", "ok", latency_ms=(1.0, 2.0)),
        row.Row("fast", "fast", "ok", latency_ms=(100.0,), bytes=5e7),
        row.Row(
            "crypten_stock", "CrypTen", "wrong", why="its erf", latency_ms=(4000.0,), bytes=7e8, error=0.3
        ),
        row.Row("spu", "SPU", "unavailable", why="not here"),
    ]
    text = picture.svg(rows)
    tree = ElementTree.fromstring(text)
    said = "".join(tree.itertext())
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(
        told in said for told in ("torch <fp32>", "unavailable: not here", "its erf", "FuseFSS, published")
    )
    assert text.count("hollow") - text.split("</style>")[0].count("hollow") == 6  # CrypTen's two and two each
    assert ElementTree.fromstring(picture.svg(rows[3:])) is not None


# --- processes -----------------------------------------------------------------------------------------------------
def test_spu_without_its_environment_says_how_to_make_one(case: cases.Case) -> None:
    (found,) = measured(opening("spu", lambda: engines.spu(case, None, 1, 60.0)))
    assert found.status == "unavailable" and "peers --setup DIR" in (found.why or "")
    (found,) = measured(opening("spu", lambda: engines.spu(case, "/nowhere/python", 1, 60.0)))
    assert found.status == "unavailable" and "/nowhere/python: No such file" in (found.why or "")


def test_an_environment_that_cannot_be_made_is_spus_row_and_no_end_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(engines.UnavailableError, match="something else"):
        environments.setup(tmp_path)
    call = ["--small", "--runs", "1", "--engine", "plaintext", "--engine", "spu", "--setup", str(tmp_path)]
    rows, _ = command.run(command.parsed(call))
    assert [(r.engine, r.status) for r in rows] == [("plaintext", "ok"), ("spu", "unavailable")]
    assert "something else" in (rows[1].why or "")


def test_a_peer_that_ends_is_named_with_its_last_words(case: cases.Case) -> None:
    (found,) = measured(
        opening("x", lambda: engines.TwoParties(case, sys.executable, "no_such_peer", 1, timeout=60.0))
    )
    assert found.status == "failed" and "no_such_peer" in (found.why or "")


def test_a_peer_that_stays_silent_is_ended(case: cases.Case, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    python.chmod(0o755)
    started = time.monotonic()
    (found,) = measured(opening("x", lambda: engines.TwoParties(case, str(python), "any", 1, timeout=1.0)))
    assert found.why == "EngineError: it stayed silent for 1 s" and time.monotonic() - started < 30


def test_a_peer_ends_when_who_started_it_is_gone() -> None:
    code = (
        "from benchmarks.peers.bert import child\nimport time\n"
        "out, lines = child.answers(), child.watch()\n"
        "child.serve(lines, out, {'digest': 'x'}, lambda: time.sleep(600) or {})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:  # fmt: skip
        assert peer.stdin is not None and peer.stdout is not None
        assert json.loads(peer.stdout.readline()) == {"digest": "x"}
        peer.stdin.write("run\n")
        peer.stdin.close()
        assert peer.wait(30) == child.ORPHANED


# --- the command ---------------------------------------------------------------------------------------------------
def test_what_the_command_takes() -> None:
    given = command.parsed(["--layers", "3", "--engine", "fast", "--engine", "spu", "--look-up", "outside"])
    assert (given.layers, given.engine, given.look_up, given.runs) == (3, ["fast", "spu"], "outside", 5)
    assert given.compile_seconds == command.COMPILE_SECONDS
    assert command.parsed(["--small"]).compile_seconds == 0.0


@pytest.mark.parametrize(
    "wrong", [["--layers", "0"], ["--engine", "x"], ["--runs", "a"], ["--timeout", "nan"]]
)
def test_a_wrong_call_exits_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as found:
        command.parsed(wrong)
    assert found.value.code == 2


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--small", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_engines_are_picked_in_the_order_of_the_table(case: cases.Case) -> None:
    found = command.openings(case, command.parsed(["--engine", "spu", "--engine", "plaintext"]))
    assert [given.engine for given, _ in found] == ["plaintext", "spu"]
    names = [given.engine for given, _ in command.openings(case, command.parsed([]))]
    assert tuple(names) == command.ENGINES


def test_plaintext_alone_gives_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--small", "--engine", "plaintext", "--json", "--out", str(tmp_path)]) == 0
    printed, kept = json.loads(capsys.readouterr().out), json.loads((tmp_path / "peers.json").read_text())
    assert printed == kept and kept["schema"] == row.SCHEMA and kept["rows"][0]["status"] == "ok"
    assert kept["rows"][0]["model_digest"] == kept["model_digest"]
    assert "Measured, in turns: BertForSequenceClassification" in (tmp_path / "peers.md").read_text()
    ElementTree.parse(tmp_path / "peers.svg")
