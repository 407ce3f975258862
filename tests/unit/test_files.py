"""A model reference and an input file are read as they are, or refused with what to do."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

from secureinfer.errors import InputError, UsageError
from secureinfer.files import (
    call_of,
    load_reference,
    named_tensors,
    read_sentences,
    read_tensors,
    tokenizer_beside,
)
from secureinfer.graph.ir import DATA_OWNER, Edge, Graph, Visibility

MODEL = """
import torch
example = torch.zeros(2, 3)
pair = (torch.nn.Linear(3, 4), example)
def build():
    return torch.nn.Linear(3, 4), (example,)
def calibrated():
    return torch.nn.Linear(3, 4), example, [example, (example + 1,)]
def keywords():
    return torch.nn.Linear(3, 4), {"input": example}
def uncalibrated():
    return torch.nn.Linear(3, 4), example, []
def nothing():
    return 7
class Box:
    build = staticmethod(build)
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "planted_model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize("name", ["pair", "build", "Box.build"])
def test_a_file_gives_a_model_and_example_inputs(model_file: Path, name: str) -> None:
    model, inputs, calibration = load_reference(f"{model_file}:{name}")
    assert isinstance(model, torch.nn.Linear)
    assert [t.shape for t in inputs] == [(2, 3)]
    assert calibration is None


def test_a_file_may_give_calibration_and_keyword_inputs(model_file: Path) -> None:
    _, inputs, calibration = load_reference(f"{model_file}:calibrated")
    assert len(inputs) == 1 and calibration is not None and len(calibration) == 2
    _, inputs, calibration = load_reference(f"{model_file}:keywords")
    assert list(inputs) == ["input"] and calibration is None


def test_a_module_beside_the_user_counts(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_file.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model, _, _ = load_reference("planted_model:build")
    assert isinstance(model, torch.nn.Linear)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("{file}", "no model reference"),
        ("{file}:absent", "has no 'absent'"),
        ("{file}:nothing", "is a int"),
        ("{file}:uncalibrated", "list of one or more inputs"),
        ("absent_file.py:build", "no file absent_file.py"),
        ("absent_module.sub:build", "no module absent_module.sub"),
        ("model.pt", "safetensors"),
        ("model.bin", "safetensors"),
        (":build", "no model reference"),
    ],
)
def test_a_bad_reference_is_refused_with_the_reason(model_file: Path, reference: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_reference(reference.format(file=model_file))


def test_a_fault_inside_the_users_module_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import absent_dependency_of_mine")
    with pytest.raises(ModuleNotFoundError, match="absent_dependency_of_mine"):
        load_reference(f"{tmp_path / 'broken.py'}:build")


def graph(*inputs: tuple[str, str, tuple[int, ...]]) -> Graph:
    edges = {n: Edge(n, shape, dtype, Visibility.PRIVATE, DATA_OWNER) for n, dtype, shape in inputs}
    return Graph((), edges, tuple(edges), (), (), ())


TWO = graph(("ids", "int64", (2, 3)), ("x", "float32", ()))


def test_npz_and_json_give_the_inputs_in_the_graphs_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.float32(1.5), ids=np.arange(6).reshape(2, 3))
    (tmp_path / "in.json").write_text(json.dumps({"x": 1.5, "ids": [[0, 1, 2], [3, 4, 5]]}))
    for name in ("in.npz", "in.json"):
        ids, x = read_tensors(tmp_path / name, TWO).values()
        assert ids.dtype == torch.int64 and torch.equal(ids, torch.arange(6).reshape(2, 3))
        assert x.dtype == torch.float32 and x.shape == () and x.item() == 1.5


def test_npy_and_a_bare_json_list_are_the_only_input(tmp_path: Path) -> None:
    one = graph(("x", "float32", (2,)))
    np.save(tmp_path / "in.npy", np.array([1, 2], dtype=np.float32))
    (tmp_path / "in.json").write_text("[1, 2]")
    for name in ("in.npy", "in.json"):
        (x,) = read_tensors(tmp_path / name, one).values()
        assert torch.equal(x, torch.tensor([1.0, 2.0]))


def test_an_array_keeps_its_dtype_so_that_a_wrong_one_is_refused_later(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.array([1, 2], dtype=np.float64))
    (x,) = read_tensors(tmp_path / "in.npy", graph(("x", "float32", (2,)))).values()
    assert x.dtype == torch.float64


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"ids": np.zeros((2, 3))}, "missing: x"),
        ({"ids": np.zeros((2, 3)), "x": np.float32(1), "y": np.float32(1)}, "unknown: y"),
        ({"ids": np.zeros((2, 3)), "x": np.array("text")}, "not numeric"),
        ({"ids": np.array([{}], dtype=object), "x": np.float32(1)}, "cannot be read"),  # would need pickle
    ],
)
def test_a_bad_npz_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], says: str) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(InputError, match=says):
        read_tensors(tmp_path / "in.npz", TWO)


def test_a_truncated_npz_is_refused_without_advice_to_allow_pickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.float32(1.5), ids=np.arange(6).reshape(2, 3))
    for content in ((tmp_path / "in.npz").read_bytes()[:100], b"junk"):
        (tmp_path / "in.npz").write_bytes(content)
        with pytest.raises(InputError, match="no archive, or truncated") as caught:
            read_tensors(tmp_path / "in.npz", TWO)
        assert "pickle" not in str(caught.value)


@pytest.mark.parametrize("name", ["in.npz", "in.npy", "in.json"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04junk", b"PK\x03\x04", b"{"])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        read_tensors(tmp_path / name, TWO)


@pytest.mark.parametrize(
    "ids", ["31415926x", [["31415926x"]], [[1], [2, 3]], [[31415926 << 80]], {"a": 31415926}]
)
def test_json_that_is_no_array_is_refused_without_its_values(tmp_path: Path, ids: object) -> None:
    (tmp_path / "in.json").write_text(json.dumps({"x": 1.5, "ids": [ids]}))
    with pytest.raises(InputError, match="input 'ids' is not numbers of dtype int64") as caught:
        read_tensors(tmp_path / "in.json", TWO)
    assert "31415926" not in "".join(traceback.format_exception(caught.value))


def test_npy_for_two_inputs_names_them(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.zeros(3))
    with pytest.raises(InputError, match="ids, x"):
        read_tensors(tmp_path / "in.npy", TWO)


def test_sentences_are_lines_without_the_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text("Ein Satz.\n\n  Zwei Sätze. \n", encoding="utf-8")
    assert read_sentences(path) == ["Ein Satz.", "Zwei Sätze."]
    path.write_text("\n \n")
    with pytest.raises(InputError, match="no sentences"):
        read_sentences(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_sentences(path)


def test_every_tensor_of_an_output_gets_a_name() -> None:
    a, b = torch.zeros(1), torch.ones(2)
    assert list(named_tensors(a)) == ["output"]
    assert list(named_tensors((a, [b, a]))) == ["output.0", "output.1.0", "output.1.1"]
    assert list(named_tensors({"logits": a, "hidden": (b,)})) == ["logits", "hidden.0"]


def test_the_tokenizer_lies_beside_the_program() -> None:
    for name in ("minilm.si", "minilm.public.si"):
        assert tokenizer_beside(Path("there") / name) == Path("there/minilm.tokenizer.json")


def test_a_call_has_the_models_own_structure() -> None:
    spec = {
        "positional": ["ids", "pair"],
        "parameters": {"ids": {"edge": "ids"}, "pair": {"tuple": [{"edge": "pair.0"}, {"value": 2}]}},
    }
    nested = Graph((), {}, ("ids", "pair.0"), (), (), (), input_spec=spec)
    a, b = torch.zeros(1), torch.ones(2)
    call = call_of(nested, {"ids": a, "pair.0": b})
    assert call["ids"] is a and isinstance(call["pair"], tuple)
    assert call["pair"][0] is b and call["pair"][1] == 2
