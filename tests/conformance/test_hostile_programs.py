"""A program file whose scales, rings or cuts are not those of compiling is refused before anything is sent."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.backends import catalog
from secureinfer.backends.mpc.engine import trace
from secureinfer.errors import ProgramFileError, SecureInferError
from secureinfer.graph.ir import Edge
from secureinfer.plan.check import check_plan
from secureinfer.plan.manifest import Fault, read_manifest, write_manifest
from secureinfer.plan.program import Program

from .parties import Parties
from .test_safety import ledger_faults

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
IDS = torch.tensor([1, 2])


class Model(nn.Module):
    """Raw products that are summed, compared, cut and revealed; a clamp, a table, int8 weights and generic kernels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.table = nn.Linear(4, 6), nn.Linear(6, 3), nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(self.first(x) + self.first(self.table(ids)))
        y = self.second(h)
        return y, torch.softmax(self.second(h.clamp(-1.0, 2.0)), -1), torch.relu(self.second(h)).argmax(-1)


def manifest(protocol: str = "fast", *, int8: bool = False) -> tuple[Program, dict[str, Any]]:
    model: nn.Module = Model().eval()
    model = si.compress(model, [si.Quantize()])[0] if int8 else model
    program = si.compile(model, (X, IDS), protocol=protocol)
    return program, write_manifest(program.graph, program.plan, "mpc", protocol, program.options)


def loaded(program: Program, raw: dict[str, Any]) -> Program:
    """The program that a file with this manifest would give: read, and checked like an engine's maker does."""
    try:
        graph, plan, backend, protocol, options = read_manifest(raw)
    except Fault as error:
        raise ProgramFileError(str(error)) from error
    check_plan(graph, plan, catalog(backend, protocol), 2, options)
    return Program(
        graph, plan, backend=backend, protocol=protocol, options=options, constants=program.constants,
        weights=program.weights,
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> tuple[Program, dict[str, Any]]:
    return manifest()


SCALE, RING, BOUND = 6, 5, 7
"""Places in an edge's row."""


def edge_row(raw: dict[str, Any], wanted: Callable[[Edge], bool], program: Program) -> list[Any]:
    name = next(e.name for e in program.graph.edges.values() if wanted(e))
    return next(r for r in raw["graph"]["edges"] if r[0] == name)


def node_of(raw: dict[str, Any], op: str, at: int = 0) -> list[Any]:
    return [n for n in raw["graph"]["nodes"] if n[1] == op][at]


def is_raw(edge: Edge) -> bool:
    return edge.name.endswith(".raw") and edge.scale > 16


def is_input(edge: Edge) -> bool:
    return edge.name == "x"


def is_weight(edge: Edge) -> bool:
    return edge.name.endswith("second.weight")


def is_hidden(edge: Edge) -> bool:
    return edge.name.startswith("relu") and edge.scale == 16


def is_output(edge: Edge) -> bool:
    return edge.ring_bits < 64 and edge.scale == 16 and edge.name.startswith("linear")


CHANGES: dict[str, tuple[Callable[[Edge], bool], int, Any, str]] = {
    "a product at another scale": (is_raw, SCALE, 31, "fraction bits|not raw"),
    "a product at the scale of a value": (is_raw, SCALE, 16, "fraction bits|not raw"),
    "a product in a ring that is too small": (is_raw, RING, 16, "too small"),
    "a product in a ring of odd bits": (is_raw, RING, 44, "no window"),
    "a product in a ring of one bit": (is_raw, RING, 1, "no window"),
    "a product without a bound": (is_raw, BOUND, None, "no bound"),
    "a product with a bound that no ring holds": (is_raw, BOUND, 2.0**60, "no window"),
    "an input at another scale": (is_input, SCALE, 20, "fraction bits|not raw"),
    "an input in a small ring": (is_input, RING, 32, "ring of 32"),
    "a weight at another scale": (is_weight, SCALE, 8, "fraction bits|not raw"),
    "a hidden value at another scale": (is_hidden, SCALE, 12, "fraction bits|not raw"),
    "a hidden value with more fraction bits than its operand": (
        is_hidden,
        SCALE,
        40,
        "fraction bits|more",
    ),
    "a hidden value in a small ring": (is_hidden, RING, 32, "ring of 32"),
    "an output in a ring of 8 bits": (is_output, RING, 8, "too small"),
    "an output at a product's scale": (is_output, SCALE, 32, "fraction bits|not raw"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_edge_that_is_not_what_its_kernels_compute_with_is_refused(
    what: str, compiled: tuple[Program, dict[str, Any]]
) -> None:
    wanted, place, value, says = CHANGES[what]
    program, raw = compiled[0], copy.deepcopy(compiled[1])
    edge_row(raw, wanted, program)[place] = value
    with pytest.raises(ProgramFileError, match=says):
        loaded(program, raw)


def exact(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        node = next(n for n in raw["graph"]["nodes"] if n[1] == "rescale" and n[4]["exact"])
        node[4]["exact"] = value

    return change


def uncut(raw: dict[str, Any]) -> None:
    """The output is the product itself: without the cut, it would tell x W to its last bit."""
    graph = raw["graph"]
    at = next(i for i, n in enumerate(graph["nodes"]) if n[1] == "rescale" and n[3][0] in graph["outputs"])
    node = graph["nodes"].pop(at)
    raw["plan"].pop(at + 1)
    (hidden,), (name,) = node[2], node[3]
    graph["edges"] = [r for r in graph["edges"] if r[0] != name]
    for other in graph["nodes"]:
        other[2] = [hidden if n == name else n for n in other[2]]
    graph["outputs"] = [hidden if n == name else n for n in graph["outputs"]]
    rename_tree(graph["output_spec"], name, hidden)


def rename_tree(tree: Any, name: str, new: str) -> None:
    for key, value in (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    ):
        if value == name and key == "edge":
            tree[key] = new
        else:
            rename_tree(value, name, new)


def kernel(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        next(row for row in raw["plan"] if row[0] == old)[0] = new

    return change


def precision(bits: int) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["options"].update(precision_bits=bits)


def without_attribute(op: str, name: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: node_of(raw, op)[4].pop(name) and None


GRAPHS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an output that is cut at random": (exact(False), "not exact"),
    "a cut that is neither": (exact(None), "neither exact"),
    "an output that is never cut": (uncut, "never cut|not exact"),
    "a generic kernel on a product": (kernel("relu.window", "relu.compare"), "no value that was not cut"),
    "a generic product whose result is raw": (
        kernel("linear.window.weight", "linear.weight"),
        "fraction bits|ring",
    ),
    "62 fraction bits": (precision(62), "62 fraction bits"),
    "4 fraction bits": (precision(4), "4 fraction bits"),
    "another number of fraction bits": (precision(15), "fraction bits"),
    "a clamp without limits": (without_attribute("clamp", "min"), "does not fit"),
    "a cut without its kind": (without_attribute("rescale", "exact"), "neither exact|does not fit"),
}


@pytest.mark.parametrize("what", GRAPHS)
def test_a_graph_that_compiling_does_not_give_is_refused(
    what: str, compiled: tuple[Program, dict[str, Any]]
) -> None:
    change, says = GRAPHS[what]
    program, raw = compiled[0], copy.deepcopy(compiled[1])
    change(raw)
    with pytest.raises(ProgramFileError, match=says):
        loaded(program, raw)


def test_the_outputs_of_a_rectifier_that_cuts_at_random_are_refused() -> None:
    """A plan in which ReLU cuts a raw product and its result is revealed: its rounding would show."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    program = si.compile(model, X, exact_cuts=False)
    raw = write_manifest(program.graph, program.plan, "mpc", "fast", program.options)
    graph = raw["graph"]
    hidden = next(n[3][0] for n in graph["nodes"] if n[1] == "relu")
    last = [n for n in graph["nodes"] if n[1] != "linear" or n[3][0] in (n[2][0] for n in graph["nodes"])]
    keep = [i for i, n in enumerate(graph["nodes"]) if n in last][:2]
    graph["nodes"] = [graph["nodes"][i] for i in keep]
    raw["plan"] = [raw["plan"][0], *(raw["plan"][i + 1] for i in keep), raw["plan"][-1]]
    used = {e for n in graph["nodes"] for e in (*n[2], *n[3])}
    graph["edges"] = [r for r in graph["edges"] if r[0] in used]
    graph["weights"] = [w for w in graph["weights"] if w in used]
    graph["outputs"], graph["output_spec"] = [hidden], {"edge": hidden}
    with pytest.raises(ProgramFileError, match="a cut that outputs show is not exact"):
        loaded(program, raw)


@pytest.mark.parametrize(
    ("protocol", "int8"), [("fast", False), ("fast", True), ("crypten", False), ("crypten", True)]
)
def test_what_compiling_gives_is_accepted(protocol: str, int8: bool) -> None:
    program, raw = manifest(protocol, int8=int8)
    assert loaded(program, raw).manifest_digest == program.manifest_digest


# -- fuzz


def mutated(raw: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One to three places of edges, attributes and kernels become others that would fit somewhere."""
    raw = copy.deepcopy(raw)
    graph, plan = raw["graph"], raw["plan"]
    for _ in range(chance.randint(1, 3)):
        kind = chance.choice(
            ["scale", "ring", "bound", "kernel", "attribute", "precision", "operand", "outputs"]
        )
        row, node = chance.choice(graph["edges"]), chance.choice(graph["nodes"])
        if kind == "scale":
            row[SCALE] = chance.choice([0, 1, 8, 15, 16, 17, 31, 32, 40, 62])
        elif kind == "ring":
            row[RING] = chance.choice([1, 7, 8, 16, 24, 32, 40, 48, 56, 63, 64])
        elif kind == "bound":
            row[BOUND] = chance.choice([None, 0.0, 1e-30, 1.0, 16.0, 1e9, 2.0**46, 1e300])
        elif kind == "kernel":
            names = list(catalog("mpc", raw["protocol"]).specs)
            at = chance.randrange(len(plan))
            plan[at][0] = chance.choice([chance.choice(plan)[0], chance.choice(names)])
        elif kind == "attribute" and node[4]:
            values = [
                None,
                -1,
                0,
                1,
                2,
                0.5,
                True,
                False,
                -1e30,
                1e30,
                {"float": "inf"},
                [],
                [0],
                [1, -1],
                "x",
            ]
            node[4][chance.choice(list(node[4]))] = chance.choice(values)
        elif kind == "precision":
            raw["options"]["precision_bits"] = chance.choice([1, 7, 8, 15, 17, 20, 21, 62])
        elif kind == "operand":
            node[2][chance.randrange(len(node[2]))] = chance.choice(graph["edges"])[0]
        elif kind == "outputs":
            graph["outputs"][chance.randrange(len(graph["outputs"]))] = chance.choice(graph["edges"])[0]
    return raw


def survive(program: Program, raw: dict[str, Any], *inputs: torch.Tensor) -> str:
    """Refused with one typed error; or planned, traced and run without another, and with nothing opened unmasked."""
    try:
        other = loaded(program, raw)
    except ProgramFileError:
        return "refused"
    public = other.public()
    trace(public, ("model_owner", "data_owner"))
    with contextlib.suppress(SecureInferError), Parties(other, audit=True) as parties:
        try:
            parties.infer(*(inputs or (X, IDS)))
        finally:
            for openings in parties.openings.values():
                assert ledger_faults(openings) == []
    return "run"


@pytest.mark.parametrize(("protocol", "int8"), [("fast", False), ("fast", True), ("crypten", False)])
@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_any_other_scale_ring_cut_or_kernel_is_refused_or_harmless(
    protocol: str, int8: bool, count: int
) -> None:
    program, raw = manifest(protocol, int8=int8)
    chance = random.Random(f"{protocol} {int8} {count}")
    found = [survive(program, mutated(raw, chance)) for _ in range(count)]
    assert found.count("refused") > count // 3


def test_a_worker_would_have_run_what_is_refused(
    compiled: tuple[Program, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: without the check a file without its last cut gives the data owner the whole product."""
    program, raw = compiled[0], copy.deepcopy(compiled[1])
    uncut(raw)
    registry = catalog("mpc", "fast")
    monkeypatch.setattr(registry, "check", None)
    other = loaded(program, raw)
    with Parties(other) as parties:
        answer = parties.infer(X, IDS)[0].double() * 2**16
    assert bool((answer != answer.round()).any())  # bits below the declared precision
