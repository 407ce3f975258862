"""A Program and its file: what it holds, what its digest covers, what a reader refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from secureinfer.api import compile as compile_model
from secureinfer.api import connect
from secureinfer.backends.plaintext.engine import PlaintextEngine
from secureinfer.errors import CorrelationError, ProgramFileError, SessionError, SettingsError
from secureinfer.plan.manifest import Fault, check_graph
from secureinfer.plan.program import MANIFEST, PUBLIC, WEIGHTS, Program

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.nn.functional.pad(self.first(x).relu() * torch.tensor([1.0, 2.0, 0.5]).repeat(2), (0, 0))
        return {"logits": self.second(h), "padded": nn.functional.pad(x, (1, 0), value=-float("inf"))}


def small(**options: Any) -> Program:
    return compile_model(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.LayerNorm(3)), X, **options)


@pytest.fixture(scope="module")
def program() -> Program:
    return compile_model(Model().eval(), X, backend="plaintext")


@pytest.fixture
def file(program: Program, tmp_path: Path) -> Path:
    path = tmp_path / "model.si"
    program.save(path)
    return path


# What comes back.


def test_a_program_comes_back_from_its_file_as_it_was(program: Program, file: Path) -> None:
    loaded = Program.load(file)
    assert loaded.graph == program.graph and loaded.plan == program.plan
    assert (loaded.backend, loaded.protocol, loaded.options) == (
        "plaintext",
        "plaintext",
        {"precision_bits": 16},
    )
    assert (
        loaded.manifest_digest == program.manifest_digest and loaded.weights_digest == program.weights_digest
    )
    assert loaded.weights is not None and program.weights is not None
    for mine, theirs in ((program.weights, loaded.weights), (program.constants, loaded.constants)):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    x = {"x": X}
    one, other = (PlaintextEngine(p).run(0, x) for p in (program, loaded))
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_mpc_programs_keep_their_costs(tmp_path: Path) -> None:
    compiled = small()
    compiled.save(tmp_path / "p.si")
    loaded = Program.load(tmp_path / "p.si")
    assert loaded.plan.totals == compiled.plan.totals and loaded.plan.totals.bytes > 0
    assert str(loaded.plan) == str(compiled.plan)


def test_the_public_part_holds_no_weight(program: Program, file: Path, tmp_path: Path) -> None:
    public = program.public()
    assert public.is_public and public.weights is None and not program.is_public
    assert (
        public.manifest_digest == program.manifest_digest and public.weights_digest == program.weights_digest
    )
    public.save(tmp_path / "public.si")
    assert zipfile.ZipFile(tmp_path / "public.si").namelist() == [MANIFEST, PUBLIC]
    loaded = Program.load(tmp_path / "public.si", allow_private=False)
    assert loaded.is_public and loaded.manifest_digest == program.manifest_digest
    assert loaded.weights_digest == program.weights_digest
    raw = (tmp_path / "public.si").read_bytes()
    assert program.weights is not None
    for name, tensor in program.weights.items():
        assert tensor.numpy().tobytes()[:16] not in raw, name
    assert (
        program.weights["second.weight"].numpy().tobytes()[:16] in file.read_bytes()
    )  # the twin: it would be found


def test_a_private_file_is_refused_where_it_must_not_be(file: Path) -> None:
    with pytest.raises(ProgramFileError, match="holds private weights.*public"):
        Program.load(file, allow_private=False)


def test_a_private_file_is_for_its_owner_alone(program: Program, file: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(p.name for p in file.parent.iterdir()) == ["model.si"]  # nothing temporary is left


def test_weights_are_float32_in_the_file(file: Path) -> None:
    tensors = safetensors.torch.load(zipfile.ZipFile(file).read(WEIGHTS))
    assert tensors and all(t.dtype == torch.float32 for t in tensors.values())


# Digests.


def with_tensors(program: Program, **changes: Any) -> Program:
    fields = {
        "backend": program.backend, "protocol": program.protocol, "options": program.options,
        "constants": program.constants, "weights": program.weights,
    }  # fmt: skip
    graph = changes.pop("graph", program.graph)
    plan = changes.pop("plan", program.plan)
    return Program(graph, plan, **{**fields, **changes})


def test_a_changed_weight_does_not_change_the_manifest_digest(program: Program) -> None:
    """Rule R6: a digest of weights would let the data owner test guesses."""
    assert program.weights is not None
    changed = with_tensors(program, weights={k: v + 1 for k, v in program.weights.items()})
    assert changed.manifest_digest == program.manifest_digest
    assert changed.weights_digest != program.weights_digest


def test_retraining_does_not_change_the_manifest_digest() -> None:
    model, digests = Model().eval(), set()
    for step in (0.0, 1e-3, -2e-3):
        with torch.no_grad():
            model.first.weight += step
        digests.add(compile_model(model, X, backend="plaintext").manifest_digest)
    assert len(digests) == 1


def test_equal_weights_have_unequal_digests_in_two_programs(program: Program) -> None:
    """The salt: without it a weights digest could be tested against a guess."""
    assert with_tensors(program).weights_digest != program.weights_digest


def widened(program: Program) -> Program:
    edges = dict(program.graph.edges)
    edges["x"] = dataclasses.replace(edges["x"], bound=1024.0)
    return with_tensors(program, graph=dataclasses.replace(program.graph, edges=edges))


CHANGES: dict[str, Callable[[Program], Program]] = {
    "constant": lambda p: with_tensors(p, constants={k: v + 1 for k, v in p.constants.items()}),
    "range": widened,
    "option": lambda p: with_tensors(p, options={"precision_bits": 17}),
    "unsafe switch": lambda p: with_tensors(p, options={**p.options, "unsafe_trusted_first_party": True}),
    "backend": lambda p: with_tensors(p, backend="other"),
    "protocol": lambda p: with_tensors(p, protocol="other"),
    "reveal": lambda p: with_tensors(p, graph=dataclasses.replace(p.graph, reveal_to=("model_owner",))),
    "kernel": lambda p: with_tensors(
        p,
        plan=dataclasses.replace(
            p.plan, steps=(dataclasses.replace(p.plan.steps[0], kernel="k"), *p.plan.steps[1:])
        ),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_everything_public_changes_the_manifest_digest(program: Program, what: str) -> None:
    assert program.constants
    assert CHANGES[what](program).manifest_digest != program.manifest_digest


# What a reader refuses.


def rewrite(source: Path, target: Path, change: Callable[[dict[str, bytes]], None], **how: Any) -> Path:
    """A copy of a program file with other members."""
    with zipfile.ZipFile(source) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w", **how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return target


def manifest_change(path: list[Any], value: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        head = json.loads(members[MANIFEST])
        place = head
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        members[MANIFEST] = json.dumps(head).encode()

    return change


def test_the_rewriting_helper_itself_keeps_a_program_readable(file: Path, tmp_path: Path) -> None:
    assert Program.load(rewrite(file, tmp_path / "same.si", lambda m: None)).graph


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramFileError, match=r"no program file .*nothing\.si"):
        Program.load(tmp_path / "nothing.si")
    with pytest.raises(ProgramFileError, match="folder"):
        Program.load(tmp_path)
    with pytest.raises(ProgramFileError, match="cannot write"):
        small(backend="plaintext").save(tmp_path / "no" / "such" / "folder.si")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        b"PK\x03\x04",
        b"hello, world" * 100,
        b"PK\x05\x06" + bytes(18),
        b"\x80\x04\x95" + bytes(50),
    ],
    ids=["empty", "two bytes", "signature", "text", "empty zip", "pickle"],
)
def test_foreign_content_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.si").write_bytes(content)
    with pytest.raises(ProgramFileError, match=r"x\.si"):
        Program.load(tmp_path / "x.si")


def test_a_torch_file_is_refused(tmp_path: Path) -> None:
    """It is a zip too, with a pickle inside."""
    buffer = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), buffer)
    (tmp_path / "model.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ProgramFileError):
        Program.load(tmp_path / "model.pt")


def test_every_truncation_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for length in random.Random(0).sample(range(len(data)), 60):
        (tmp_path / "cut.si").write_bytes(data[:length])
        with pytest.raises(ProgramFileError):
            Program.load(tmp_path / "cut.si")


def drop(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda members: members.pop(name) and None


def rename(old: str, new: str) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        members[new] = members.pop(old)

    return change


ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], None], str]] = {
    "no manifest": (drop(MANIFEST), "members"),
    "no tensors": (drop(PUBLIC), "members"),
    "absolute name": (rename(PUBLIC, "/etc/passwd"), "members"),
    "climbing name": (rename(WEIGHTS, "../weights.safetensors"), "members"),
    "another member": (lambda m: m.update({"extra.txt": b"x"}), "truncated, or an archive"),
    "manifest not JSON": (lambda m: m.update({MANIFEST: b"{"}), "damaged"),
    "manifest not text": (lambda m: m.update({MANIFEST: b"\xff\xfe"}), "damaged"),
    "manifest with NaN": (lambda m: m.update({MANIFEST: b'{"manifest": NaN}'}), "NaN"),
    "deep manifest": (lambda m: m.update({MANIFEST: b"[" * 100_000}), "deep|damaged"),
    "huge integer": (lambda m: m.update({MANIFEST: b"9" * 10_000}), "damaged"),
    "tensors not safetensors": (lambda m: m.update({PUBLIC: b"x" * 100}), "truncated|damaged"),
    "tensors empty": (lambda m: m.update({PUBLIC: b""}), "truncated"),
    "tensors huge header": (lambda m: m.update({PUBLIC: b"\xff" * 8}), "truncated"),
    "missing constant": (lambda m: m.update({PUBLIC: safetensors.torch.save({})}), "exactly the tensors"),
    "weights of another model": (
        lambda m: m.update({WEIGHTS: safetensors.torch.save({"w": X})}), "exactly the tensors",
    ),
    "weights without salt": (
        lambda m: m.update({WEIGHTS: safetensors.torch.save(safetensors.torch.load(m[WEIGHTS]))}), "salt",
    ),
    "another version": (manifest_change(["manifest", "version"], 99), "version is 99.*reads 1"),
    "another format": (manifest_change(["manifest", "format"], "onnx"), "not a program's manifest"),
    "another key": (manifest_change(["manifest", "more"], 1), "exactly the keys"),
    "another digest": (manifest_change(["digest"], "0" * 64), "digest does not match"),
    "another weights digest": (manifest_change(["weights_digest"], "0" * 64), "weights are not those"),
    "reveal to a stranger": (manifest_change(["manifest", "graph", "reveal_to"], ["thief"]), "takes no part"),
    "no outputs": (manifest_change(["manifest", "graph", "outputs"], []), "outputs"),
    "unknown operator": (manifest_change(["manifest", "graph", "nodes", 0, 1], "exec"), "does not know"),
    "wrong operator": (manifest_change(["manifest", "graph", "nodes", 0, 1], "softmax"), "does not fit its operands"),
    "wrong shape": (manifest_change(["manifest", "graph", "edges", 0, 1], [3, 5]), "does not fit|shape"),
    "negative size": (manifest_change(["manifest", "graph", "edges", 0, 1], [-3, 4]), "size"),
    "huge size": (manifest_change(["manifest", "graph", "edges", 0, 1], [1 << 39, 1 << 39]), "too many"),
    "boolean size": (manifest_change(["manifest", "graph", "edges", 0, 1], [True, 4]), "size"),
    "infinite bound": (manifest_change(["manifest", "graph", "edges", 0, 7], 1e999), "Infinity|finite"),
    "public input": (manifest_change(["manifest", "graph", "edges", 0, 3], "public"), "wrong party"),
    "input of the model owner": (manifest_change(["manifest", "graph", "edges", 0, 4], "model_owner"), "wrong party"),
    "plan too short": (manifest_change(["manifest", "plan"], []), "one step a node"),
    "odd messages": (manifest_change(["manifest", "plan", 0, 1], "q"), "patterns"),
    "negative cost": (manifest_change(["manifest", "plan", 0, 2], -1), "cost"),
    "no precision": (manifest_change(["manifest", "options"], {}), "precision_bits"),
    "odd structure": (manifest_change(["manifest", "graph", "output_spec"], {"edge": "x"}), "structure"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_tampered_file_is_refused_with_the_reason(file: Path, tmp_path: Path, name: str) -> None:
    change, says = ARCHIVES[name]
    with pytest.raises(ProgramFileError, match=says):
        Program.load(rewrite(file, tmp_path / "t.si", change))


def test_an_edge_cannot_claim_to_be_public(program: Program) -> None:
    """Planted fault: a manifest that declares a shared edge public, or private to somebody, would have it opened."""
    from secureinfer.graph.ir import Visibility

    shared = [e for e in program.graph.edges.values() if e.visibility is Visibility.SHARED]
    assert shared
    check_graph(program.graph)
    for claim in (
        (Visibility.PUBLIC, None),
        (Visibility.PRIVATE, "data_owner"),
        (Visibility.PRIVATE, "model_owner"),
    ):
        edges = dict(program.graph.edges)
        edges[shared[0].name] = dataclasses.replace(shared[0], visibility=claim[0], owner=claim[1])
        with pytest.raises(Fault, match="visibility"):
            check_graph(dataclasses.replace(program.graph, edges=edges))


def test_a_compressed_archive_is_refused(file: Path, tmp_path: Path) -> None:
    """A zip bomb is a compressed member: none is read."""

    def bomb(members: dict[str, bytes]) -> None:
        members[MANIFEST] = b" " * (200 << 20)

    bombed = rewrite(file, tmp_path / "bomb.si", bomb, compression=zipfile.ZIP_DEFLATED)
    assert bombed.stat().st_size < 1 << 20
    with pytest.raises(ProgramFileError, match="compressed"):
        Program.load(bombed)


def test_an_oversized_manifest_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        __import__("secureinfer.plan.program", fromlist=["MAX_BYTES"]).MAX_BYTES, MANIFEST, 100
    )
    with pytest.raises(ProgramFileError, match="too large"):
        Program.load(file)


def test_two_members_of_one_name_are_refused(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(tmp_path / "two.si", "w") as double:
        double.writestr(MANIFEST, archive.read(MANIFEST))
        with pytest.warns(UserWarning, match="Duplicate"):
            double.writestr(MANIFEST, archive.read(MANIFEST))
        double.writestr(PUBLIC, archive.read(PUBLIC))
    with pytest.raises(ProgramFileError, match="members"):
        Program.load(tmp_path / "two.si")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_get_past_the_reader(
    program: Program, tmp_path: Path, data: st.DataObject
) -> None:
    """Whatever a few bytes become: the same program, or one typed error; and never other weights or another graph."""
    path = tmp_path / "fuzz.si"
    program.save(path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "copy"]))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "delete":
            del raw[at : at + data.draw(st.integers(1, 8))]
        else:
            start = data.draw(st.integers(0, len(raw) - 1))
            raw[at : at + 16] = raw[start : start + 16]
    path.write_bytes(raw)
    try:
        loaded = Program.load(path)
    except ProgramFileError as error:
        assert str(error)
    else:
        assert (
            loaded.manifest_digest == program.manifest_digest
            and loaded.weights_digest == program.weights_digest
        )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), junk=JSON)
def test_any_value_at_any_place_of_the_manifest_is_survived(
    program: Program, file: Path, tmp_path: Path, data: st.DataObject, junk: Any
) -> None:
    """One place of the manifest becomes arbitrary JSON: refused with one error, since the digest covers every place."""

    def change(members: dict[str, bytes]) -> None:
        head = json.loads(members[MANIFEST])
        place: Any = head
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 3)) == 0:
                place[key] = junk
                break
            place = inner
        members[MANIFEST] = json.dumps(head).encode()

    target = rewrite(file, tmp_path / "junk.si", change)
    try:
        loaded = Program.load(target)
    except ProgramFileError as error:
        assert str(error)
    else:
        assert loaded.manifest_digest == program.manifest_digest


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), member=st.sampled_from([PUBLIC, WEIGHTS]))
def test_damaged_tensors_never_get_past_the_reader(
    program: Program, file: Path, tmp_path: Path, data: st.DataObject, member: str
) -> None:
    """The same inside the members, where the archive's own checksum is right."""

    def change(members: dict[str, bytes]) -> None:
        raw = bytearray(members[member])
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        members[member] = bytes(raw)

    target = rewrite(file, tmp_path / "tensors.si", change)
    try:
        loaded = Program.load(target)
    except ProgramFileError as error:
        assert str(error)
    else:
        assert (
            loaded.manifest_digest == program.manifest_digest
            and loaded.weights_digest == program.weights_digest
        )


def test_a_data_owner_must_agree_before_a_program_shows_outputs_to_the_model_owner(tmp_path: Path) -> None:
    """The file comes from the model owner: without this, one that gives back its input would take it (security.md)."""
    compile_model(torch.nn.Identity(), (X,), reveal_to=("data_owner", "model_owner")).public().save(
        tmp_path / "p.si"
    )
    text = """
    role = "data_owner"
    name = "me"
    program = "p.si"
    tls = { ca = "ca.pem", certificate = "me.pem", key = "me.key" }
    peers.model_owner = { name = "them", address = "127.0.0.1:9" }
    peers.dealer = { name = "third", address = "127.0.0.1:9" }
    """
    settings_file = tmp_path / "me.toml"
    settings_file.write_text(text)
    with pytest.raises(SettingsError, match="outputs to the model owner"):
        connect(settings_file)
    settings_file.write_text("reveal_to_model_owner = true\n" + text)
    with pytest.raises(SettingsError, match="ca.pem|me.pem"):  # goes on to the next thing, which is not there
        connect(settings_file)


# The plaintext engine.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_plaintext_engine_gives_the_models_answer(program: Program, dtype: torch.dtype) -> None:
    engine = PlaintextEngine(program, dtype=dtype)
    engine.setup()
    engine.prepare(0)
    logits, padded = engine.run(0, {"x": X}).values()
    expected = Model().eval().to(dtype)(X.to(dtype))
    assert logits.dtype == dtype and torch.allclose(logits, expected["logits"], atol=1e-6)
    assert torch.equal(padded, expected["padded"])
    assert set(engine.step_times()) == {s.index for s in program.plan.steps}


def test_an_engine_runs_an_index_once_and_not_after_its_end(program: Program) -> None:
    engine = PlaintextEngine(program)
    engine.run(3, {"x": X})
    for index in (3, 2):
        with pytest.raises(CorrelationError):
            engine.run(index, {"x": X})
    engine.close()
    engine.close()
    with pytest.raises(SessionError):
        engine.run(4, {"x": X})


def test_plaintext_needs_the_weights(program: Program) -> None:
    with pytest.raises(ProgramFileError, match="public part"):
        PlaintextEngine(program.public())
