"""A CKKS program file that compiling does not give is refused by the data owner before it makes a key, or it is harmless.

The model owner writes the file, and the data owner makes keys and ciphertexts for it: whatever stands in it costs no more
than a program that compiling gives, and fails with one typed error.
"""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import secureinfer as si
from secureinfer.backends import catalog, make_engine
from secureinfer.backends.ckks import limits
from secureinfer.errors import ProgramFileError, SecureInferError
from secureinfer.plan.manifest import manifest_digest, write_manifest
from secureinfer.plan.program import Program
from secureinfer.transport.memory import memory_links

from .ckks_pair import MODEL, NAMES, OWNER, Pair

pytestmark = pytest.mark.needs("he")

MOST_SECONDS = 2.0
MOST_BYTES = 64 << 20
"""Of memory, beyond what the file itself has."""
X = torch.rand(1, 4, generator=torch.Generator().manual_seed(6))

Raw = dict[str, Any]
Constants = dict[str, torch.Tensor]
Change = Callable[[Raw, Constants], None]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h * h)


def compiled(**options: Any) -> Program:
    calibration = [(torch.rand(1, 4),) for _ in range(8)]
    return si.compile(Squares().eval(), (X,), backend="ckks", calibration=calibration, **options)


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled()


@pytest.fixture(scope="module")
def batch() -> Program:
    x = torch.rand(3, 4)
    return si.compile(Squares().eval(), (x,), backend="ckks", calibration=[(x,)], ckks={"layout": "batch"})


def parts(program: Program) -> tuple[Raw, Constants]:
    raw = write_manifest(program.graph, program.plan, "ckks", "ckks", program.options)
    return json.loads(json.dumps(raw)), {n: t.clone() for n, t in program.constants.items()}


def loaded(raw: Raw, constants: Constants, folder: Path) -> Program:
    """What a data owner reads: the file of that manifest and those constants, whose digest is right."""
    head = {"manifest": raw, "digest": manifest_digest(raw, constants), "weights_digest": None}
    with zipfile.ZipFile(folder / "program.si", "w") as file:
        file.writestr("manifest.json", json.dumps(head))
        file.writestr("public.safetensors", safetensors.torch.save(constants))
    return Program.load(folder / "program.si", allow_private=False)


def engine(program: Program) -> Any:
    links = memory_links(NAMES, bytes(16))[OWNER]
    return make_engine(
        OWNER, program, me=OWNER, compute_parties=NAMES, dealer="", links=links, clock=links[MODEL].clock,
        session_id=bytes(16),
    )  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    start = time.thread_time()
    try:
        yield
        assert time.thread_time() - start < MOST_SECONDS, "it took too long"
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, "it took too much memory"
    finally:
        tracemalloc.stop()


def refusal(program: Program, change: Change, folder: Path) -> ProgramFileError:
    raw, constants = parts(program)
    change(raw, constants)
    with pytest.raises(ProgramFileError) as caught:
        file = loaded(raw, constants, folder)
        with bounded():
            engine(file)
    return caught.value


@pytest.mark.parametrize("layout", ["slots", "batch"])
def test_what_compiling_gives_is_accepted(
    layout: str, program: Program, batch: Program, tmp_path: Path
) -> None:
    """The twin of all below."""
    made = program if layout == "slots" else batch
    file = loaded(*parts(made), tmp_path)
    assert file.manifest_digest == made.manifest_digest
    with bounded():
        engine(file)


# --- what stands where ---


def edge(raw: Raw, name: str) -> list[Any]:
    return next(row for row in raw["graph"]["edges"] if row[0] == name)


def put(raw: Raw, constants: Constants, name: str, value: torch.Tensor) -> None:
    """Another constant, and the edge that says so."""
    row = edge(raw, name)
    row[1], row[2] = list(value.shape), str(value.dtype).removeprefix("torch.")
    constants[name] = value.contiguous()


def constant(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda raw, constants: put(raw, constants, name, make(constants[name].clone()))


def entry(value: int, *at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor[at] = value
        return tensor

    return make


def dropped(name: str) -> Change:
    def change(raw: Raw, constants: Constants) -> None:
        del constants[name]
        graph = raw["graph"]
        graph["edges"].remove(edge(raw, name))
        graph["constants"].remove(name)

    return change


def node(raw: Raw, name: str) -> dict[str, Any]:
    return next(n[4] for n in raw["graph"]["nodes"] if n[0] == name)


def attribute(name: str, key: str, value: Any) -> Change:
    return lambda raw, constants: node(raw, name).__setitem__(key, value)


def both(*changes: Change) -> Change:
    def change(raw: Raw, constants: Constants) -> None:
        for each in changes:
            each(raw, constants)

    return change


FIRST, SECOND, SQUARE = "pow_0.matrix0", "outputs.matrix0", "pow_0"
INPUTS, OUTPUTS = "inputs.layout", "outputs.layout"
ROWS, OFFSETS = f"{FIRST}.rows", f"{FIRST}.offsets"
SLOTS = 4096

LAYOUTS: dict[str, tuple[Change, str]] = {
    "a value that does not exist": (constant(INPUTS, entry(4, 0, 9)), "do not exist"),
    "a value far away": (constant(INPUTS, entry(1 << 40, 0, 9)), "do not exist"),
    "a value below nothing": (constant(INPUTS, entry(-2, 0, 9)), "do not exist"),
    "a layout of floats": (constant(INPUTS, lambda t: t.double()), "no table of integers"),
    "a layout of odd floats": (constant(INPUTS, lambda t: t.double() * float("nan")), "no table of integers"),
    "a layout of bytes": (constant(INPUTS, lambda t: t.to(torch.int8)), "no table of integers"),
    "a layout of half as many slots": (constant(INPUTS, lambda t: t[:, ::2]), "no layout of ciphertexts"),
    "a layout without ciphertexts": (constant(INPUTS, lambda t: t[:0]), "no layout of ciphertexts"),
    "a flat layout": (constant(INPUTS, lambda t: t.reshape(-1)), "no table of integers"),
    "a layout of too many ciphertexts": (
        constant(INPUTS, lambda t: t.expand(limits.MOST_CIPHERTEXTS + 1, -1)), "no layout of ciphertexts",
    ),
    "a layout of more ciphertexts than it counts": (constant(INPUTS, lambda t: t.expand(3, -1)), "are not what its layout"),
    "no layout of inputs": (dropped(INPUTS), "there is no inputs.layout"),
    "no layout of outputs": (dropped(OUTPUTS), "there is no outputs.layout"),
    "outputs that stand nowhere": (constant(OUTPUTS, lambda t: torch.full_like(t, -1)), "stands in no slot"),
    "outputs that stand somewhere else": (constant(OUTPUTS, lambda t: t.roll(1, 1)), "do not stand where"),
    "more results than ciphertexts": (constant(OUTPUTS, lambda t: t.expand(2, -1)), "do not stand where"),
    "a row below all slots": (constant(ROWS, entry(-1, 0)), "stand nowhere"),
    "a row beyond all ciphertexts": (constant(ROWS, entry(1 << 40, 0)), "stand nowhere"),
    "a row in a ciphertext of its own, far away": (constant(ROWS, entry(1000 * SLOTS, 0)), "stand nowhere"),
    "a row in a ciphertext of its own": (constant(ROWS, entry(3 * SLOTS, 0)), "are not what its layout"),
    "two rows in one slot": (constant(ROWS, entry(1, 0)), "overlap"),
    "a row too many": (constant(ROWS, lambda t: torch.cat([t, t[-1:] + 1])), "stand nowhere"),
    "rows of floats": (constant(ROWS, lambda t: t.float()), "no table of integers"),
    "no rows": (dropped(ROWS), "there is no"),
    "no offsets": (dropped(OFFSETS), "there is no"),
    "an offset in a ciphertext that does not exist": (constant(OFFSETS, entry(1, 0, 0)), "leave its ciphertexts"),
    "an offset before all ciphertexts": (constant(OFFSETS, entry(-1, 0, 0)), "leave its ciphertexts"),
    "an offset beyond the slots": (constant(OFFSETS, entry(SLOTS + 1, 0, 1)), "leave its ciphertexts"),
    "offsets of three": (constant(OFFSETS, lambda t: t.repeat(1, 2)[:, :3]), "offsets of .* are none"),
    "flat offsets": (constant(OFFSETS, lambda t: t.reshape(-1)), "no table of integers"),
    "offsets in millions": (
        constant(OFFSETS, lambda t: t[:1].expand(limits.MOST_OFFSETS + 1, -1)), "offsets of .* are none",
    ),
    "a fold of three blocks": (attribute(FIRST, "blocks", 3), "overlap"),
    "a fold of no block": (attribute(FIRST, "blocks", 0), "blocks of .* is not an integer"),
    "a fold of more blocks than slots": (attribute(FIRST, "blocks", 1 << 30), "blocks of .* is not an integer"),
    "a fold of as many blocks as slots": (attribute(FIRST, "blocks", SLOTS), "overlap"),
    "a stride to nowhere": (attribute(FIRST, "stride", -1), "stride of .* is not an integer"),
    "a stride of nothing": (attribute(FIRST, "stride", 0), "overlap"),
    "no baby step": (attribute(FIRST, "babies", 0), "babies of .* is not an integer"),
    "other baby steps": (attribute(SECOND, "babies", 4096), "are not what its layout|other keys"),
    "a sum of one number": (attribute(FIRST, "sums", [2]), "sums of .* are none"),
    "a sum of nothing": (attribute(FIRST, "sums", [0, 1]), "sums of .* are none"),
    "a sum of half a million": (attribute(FIRST, "sums", [1 << 19, 1]), "sums of .* are none"),
    "sums of many": (attribute(FIRST, "sums", [64, 1] * 32), "sums of .* are none"),
    "a sum of text": (attribute(FIRST, "sums", "ab"), "sums of .* are none"),
    "a sum of fractions": (attribute(FIRST, "sums", [2.5, 1]), "sums of .* are none"),
    "a sum without its layout": (attribute(FIRST, "sums", [2, 1]), "there is no"),
    "a matrix on what does not exist": (attribute(SECOND, "base", "nowhere"), "no stage or no base"),
    "a matrix on itself": (attribute(SECOND, "base", "outputs"), "no stage or no base"),
    "a matrix of no stage": (attribute(SECOND, "stage", 7), "no stage or no base"),
    "a matrix of another stage": (attribute(SECOND, "stage", "pow_0"), "outputs do not stand"),
    "fewer ciphertexts than are sent": (attribute(FIRST, "ciphertexts", 0), "cost|are not what its layout"),
    "fewer rotations than there are": (attribute(SECOND, "rotations", 1), "are not what its layout"),
}  # fmt: skip


@pytest.mark.parametrize("what", LAYOUTS)
def test_a_layout_that_compiling_does_not_give_is_refused(
    what: str, program: Program, tmp_path: Path
) -> None:
    change, says = LAYOUTS[what]
    error = refusal(program, change, tmp_path)
    assert re.search(says, str(error)), error


# --- options and attributes ---


def option(name: str, value: Any) -> Change:
    return lambda raw, constants: raw["options"].__setitem__(name, value)


OPTIONS: dict[str, list[Any]] = {
    "degree": ["8192", 8192.0, True, 4096, 16384, 1 << 40, -1],
    "first_bits": ["a", 10, 61, 200, 0.5],
    "scale_bits": ["a", 1, 60, -5, 1e9],
    "levels": ["a", 0, -1, 99, 10**9, 2.0],
    "special_bits": ["a", 20, 61, 300],
    "split": [0, 3, "1", 1.0, True, 2],
    "layout": ["", "batch", "unknown", 1],
    "late_rescaling": [0, 1, "yes"],
    "noise": [-1.0, 2.0, 1e308, "a", True],
    "returned": [0, 2, -1, 1 << 50, "1", 1.0, True],
    "galois_keys": [0, 1, -1, 1 << 20, 600, "3", 1.5],
    "circuit_privacy": [1, 39, 41, -40, True, "40", 40.0],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_compiling_does_not_write_is_refused(
    name: str, program: Program, tmp_path: Path
) -> None:
    for value in OPTIONS[name]:
        error = refusal(program, option(name, value), tmp_path)
        assert "compile the model again" in str(error), (name, value, error)


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"circuit_privacy"}))
def test_an_option_that_is_missing_is_refused(name: str, program: Program, tmp_path: Path) -> None:
    assert refusal(program, lambda raw, constants: raw["options"].pop(name) and None, tmp_path)


NEEDED = {
    FIRST: ("stage", "base", "level", "stride", "blocks", "babies", "rotations", "products", "ciphertexts", "results",
            "estimate_ms"),
    SQUARE: ("coefficients", "level", "depth", "ciphertexts", "estimate_ms", "error", "range", "outside", "radius"),
}  # fmt: skip
JUNK = [None, "x", -1, 1e300, [], [1.0], True, 1 << 45]


@pytest.mark.parametrize(("where", "name"), [(w, n) for w, names in NEEDED.items() for n in names])
def test_an_attribute_that_is_missing_or_of_another_kind_is_refused(
    where: str, name: str, program: Program, tmp_path: Path
) -> None:
    assert refusal(program, lambda raw, constants: node(raw, where).pop(name) and None, tmp_path)
    for value in JUNK:
        if name in ("error", "range", "outside", "radius", "estimate_ms") and value in (1e300, 1 << 45, True):
            continue  # a number, and shown as it is
        raw, constants = parts(program)
        node(raw, where)[name] = value
        with pytest.raises(SecureInferError), bounded():
            engine(loaded(raw, constants, tmp_path))


# --- parties, inputs, costs ---


def owners(raw: Raw, constants: Constants) -> None:
    """A second input, of a second data owner."""
    raw["graph"]["inputs"].append("y")
    raw["graph"]["edges"].append(["y", [1, 4], "float32", "private", "bank", 64, 16, 1.0])


def told(raw: Raw, constants: Constants) -> None:
    raw["graph"]["reveal_to"].append("model_owner")


def least(value: Any) -> Change:
    def change(raw: Raw, constants: Constants) -> None:
        next(n for n in raw["graph"]["nodes"] if n[0].endswith(".values"))[4]["low"] = value

    return change


def bound(value: Any) -> Change:
    return lambda raw, constants: edge(raw, raw["graph"]["inputs"][0]).__setitem__(7, value)


def cost(step: int, place: int, value: Any) -> Change:
    return lambda raw, constants: raw["plan"][step].__setitem__(place, value)


def twice(raw: Raw, constants: Constants) -> None:
    """One output, named twice, in a structure that asks for both."""
    raw["graph"]["outputs"] *= 2


def renamed(raw: Raw, constants: Constants) -> None:
    """Inputs that come in where no cost is counted."""
    first = next(n for n in raw["graph"]["nodes"] if n[0] == FIRST)
    first[0] = "pow_0.matrix1"
    raw["plan"][2][1:3] = ["", 0]
    for name in (ROWS, OFFSETS):
        edge(raw, name)[0] = name.replace("matrix0", "matrix1")
        constants[name.replace("matrix0", "matrix1")] = constants.pop(name)
    raw["graph"]["constants"] = [
        n.replace("pow_0.matrix0", "pow_0.matrix1") for n in raw["graph"]["constants"]
    ]


OTHERS: dict[str, tuple[Change, str]] = {
    "two data owners": (owners, "several data owners|edges that nothing"),
    "an output that the model owner gets too": (told, "to the model owner"),
    "an input without a range": (bound(None), "within a bound"),
    "an input whose range is nothing": (bound(0.0), "within a bound"),
    "an input of integers": (lambda raw, constants: edge(raw, raw["graph"]["inputs"][0]).__setitem__(2, "int64"), ""),
    "a least value that is text": (least("abc"), "least value"),
    "a least value that is nothing": (least(None), "least value"),
    "a least value that no input has": (least({"float": "inf"}), "least value"),
    "a least value of five": (least(5), "least value"),
    "a cheaper plan": (cost(2, 2, 100), "another cost"),
    "a plan with fewer rounds": (cost(0, 1, ""), "another cost"),
    "a plan without its keys": (cost(0, 4, []), "another cost"),
    "a plan with cheaper keys": (cost(0, 4, [["evaluation keys", 1]]), "another cost"),
    "a plan with a dealer": (cost(0, 3, 5), "another cost"),
    "an input that is not counted": (renamed, "counts no input"),
    "outputs that are there twice": (twice, "other keys or results|stands in no slot|outputs"),
    "another kernel": (lambda raw, constants: raw["plan"][2].__setitem__(0, "ckks.add"), "that one computes"),
    "a kernel of another backend": (lambda raw, constants: raw["plan"][2].__setitem__(0, "linear.window"), "has none"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_parties_inputs_and_costs_are_those_of_compiling(what: str, program: Program, tmp_path: Path) -> None:
    change, says = OTHERS[what]
    error = refusal(program, change, tmp_path)
    assert re.search(says, str(error)), error


# --- what a data owner would have to pay ---


def many_keys(count: int) -> Change:
    """A matrix that looks at so many offsets, one rotation each, and says so everywhere."""

    def change(raw: Raw, constants: Constants) -> None:
        offsets = torch.stack([torch.zeros(count, dtype=torch.int64), torch.arange(count)], 1)
        put(raw, constants, f"{SECOND}.offsets", offsets)
        attrs = node(raw, SECOND)
        attrs.update(babies=SLOTS, blocks=1, stride=0, products=count, rotations=count - 1)
        raw["options"]["galois_keys"] = count

    return change


@pytest.mark.parametrize("count", [600, 4000])
def test_a_program_that_asks_for_hundreds_of_galois_keys_is_refused(
    count: int, program: Program, tmp_path: Path
) -> None:
    assert "Galois keys" in str(refusal(program, many_keys(count), tmp_path))
    # also if it says less than it takes
    less = both(many_keys(count), option("galois_keys", 3))
    assert "cost" in str(refusal(program, less, tmp_path)) or "rotations" in str(
        refusal(program, less, tmp_path)
    )


def test_compiling_keeps_to_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from secureinfer.backends.ckks import lowering

    for name, value in (("MOST_ROTATIONS", 2), ("MOST_KEY_BYTES", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(lowering, name, value)
            with pytest.raises(si.CompileError, match="GB of keys"):
                compiled()


@pytest.mark.parametrize("name", ["values", "rows"])
def test_a_batch_of_too_many_ciphertexts_is_refused(
    name: str, batch: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    from secureinfer.backends.ckks import reading

    monkeypatch.setattr(reading, "MOST_SPREAD", 3 if name == "values" else 1)
    with pytest.raises(ProgramFileError, match="each with a ciphertext"):
        engine(batch.public())


def test_a_program_that_reveals_to_the_model_owner_is_not_compiled() -> None:
    with pytest.raises(si.SettingsError, match="stays there"):
        compiled(reveal_to=("data_owner", "model_owner"))


# --- fuzz ---

VALUES = [
    None,
    -1,
    0,
    1,
    2,
    3,
    64,
    4095,
    4096,
    4097,
    1 << 20,
    1 << 40,
    0.5,
    True,
    False,
    1e300,
    "x",
    "slots",
    "batch",
    [],
    [2, 1],
]


def mutated(program: Program, chance: random.Random) -> tuple[Raw, Constants]:
    """One to three places of options, attributes, edges, costs and constants become others that would fit somewhere."""
    raw, constants = parts(program)
    graph = raw["graph"]
    for _ in range(chance.randint(1, 3)):
        kind = chance.choice(["option", "attribute", "constant", "edge", "cost", "operand", "outputs"])
        n = chance.choice(graph["nodes"])
        if kind == "option":
            raw["options"][chance.choice(list(raw["options"]))] = chance.choice(VALUES)
        elif kind == "attribute" and n[4]:
            n[4][chance.choice(list(n[4]))] = chance.choice(VALUES)
        elif kind == "constant" and constants:
            name = chance.choice(list(constants))
            tensor = constants[name].clone()
            if tensor.numel():
                flat = tensor.reshape(-1)
                for _ in range(chance.randint(1, 3)):
                    flat[chance.randrange(len(flat))] = chance.choice(
                        [-2, -1, 0, 1, 2, 5, 4095, 4096, 5000, 1 << 30]
                    )
            constants[name] = tensor
        elif kind == "edge":
            row = chance.choice(graph["edges"])
            row[chance.choice([1, 2, 4, 7])] = chance.choice(
                [[1, 4], [4], [1, 1], "float32", "int64", None, 1.0, 0.0]
            )
        elif kind == "cost":
            chance.choice(raw["plan"])[chance.choice([1, 2, 3])] = chance.choice(
                [0, 1, 1 << 40, "", "b", "1"]
            )
        elif kind == "operand":
            n[2][chance.randrange(len(n[2]))] = chance.choice(graph["edges"])[0]
        else:
            graph["outputs"][0] = chance.choice(graph["edges"])[0]
    return raw, constants


def survive(program: Program, chance: random.Random, folder: Path) -> str:
    """Refused with one typed error; or run to its end without another, in the time of a program that was compiled."""
    raw, constants = mutated(program, chance)
    try:
        with bounded():
            file = loaded(raw, constants, folder)
            engine(file)
    except SecureInferError:
        return "refused"
    private = Program(
        file.graph, file.plan, backend="ckks", protocol="ckks", options=file.options, constants=file.constants,
        weights=program.weights,
    )  # fmt: skip
    start = time.monotonic()
    try:
        pair = Pair(private, public=file, set_up=False)
    except ProgramFileError:
        return "refused by the model owner"
    with pair:
        found = pair.both(lambda name: pair.engines[name].setup())
        if not any(isinstance(e, Exception) for e in found.values()):
            found = pair.run(torch.rand(file.graph.edge(file.graph.inputs[0]).shape))
        # What the model owner's own file makes of its own computation ends the session with an error here.
        assert not isinstance(found[OWNER], Exception) or isinstance(found[OWNER], SecureInferError), found[
            OWNER
        ]
    assert time.monotonic() - start < 30
    return "run"


@pytest.mark.parametrize("layout", ["slots", "batch"])
@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_any_other_program_is_refused_or_harmless(
    layout: str, count: int, program: Program, batch: Program, tmp_path: Path
) -> None:
    made = program if layout == "slots" else batch
    chance = random.Random(f"{layout} {count}")
    found = [survive(made, chance, tmp_path) for _ in range(count)]
    assert found.count("refused") > count // 3


def test_a_worker_would_have_run_what_is_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: without the check, a plan that names no keys is run, and the data owner pays for what it was not told."""
    raw, constants = parts(program)
    cost(0, 4, [])(raw, constants)
    file = loaded(raw, constants, tmp_path)
    with pytest.raises(ProgramFileError):
        engine(file)
    monkeypatch.setattr(catalog("ckks"), "check", None)
    assert file.plan.totals.setup_bytes == 0
    assert engine(file)._common.packing.steps()
