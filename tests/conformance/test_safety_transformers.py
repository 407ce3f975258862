"""Rules R1 to R7 on attention, layer norms and smooth functions: what they open, under which masks, and each broken rule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from secureinfer.backends.mpc import attention as plans
from secureinfer.backends.mpc import windows
from secureinfer.backends.mpc.correlations import Product
from secureinfer.backends.mpc.fast.attention import Buckets, Exponent, NotEmpty
from secureinfer.backends.mpc.fast.curves import CurveWindow
from secureinfer.backends.mpc.fast.gates import Gate
from secureinfer.backends.mpc.fast.opening import Window
from secureinfer.backends.mpc.fast.pieces import PieceWindow
from secureinfer.backends.mpc.fast.scaled import Scaled
from secureinfer.backends.mpc.party import Party, Place
from secureinfer.backends.mpc.randomness import Seed, Stream
from secureinfer.graph.ops import run_reference
from secureinfer.plan.program import Program

from .parties import Parties
from .test_hostile_transformers import IDS, MASK, Block, block
from .test_safety import ledger_faults, same_nonces
from .test_safety_fast import uneven

RECORDS = (Scaled, CurveWindow, PieceWindow, Gate, Buckets, NotEmpty, Exponent, Product)
OTHER = torch.tensor([[9, 1, 2, 6, 4], [0, 5, 7, 0, 0]])


@functools.cache
def program() -> Program:
    return block()


@pytest.fixture(params=["counts", "a tournament"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a row's maximum is found: the range of its scores decides."""
    if request.param == "a tournament":
        monkeypatch.setattr(plans, "MOST_BUCKETS", 0)
    return str(request.param)


@dataclass(frozen=True)
class Word:
    """One opening as one party saw it. bits: those that its mask covers."""

    kind: str
    what: str
    xor: bool
    bits: int
    share: torch.Tensor
    opened: torch.Tensor
    mask: Place | None


Change = Callable[[int, Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class Watch:
    """Openings and dealt parts by rank, filled while engines run; and a planted fault in what a record holds."""

    words: dict[int, list[Word]]
    dealt: dict[int, list[tuple[Any, dict[str, torch.Tensor]]]]
    change: Change | None = None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    found = Watch({0: [], 1: []}, {0: [], 1: []})
    take, to_all = Party.take, Party.open_together

    def taken(self: Party, kind: Any) -> Any:
        parts = take(self, kind)
        if not self.tracing:
            self.__dict__.setdefault("kinds", {})[self.mask] = kind
            found.dealt[self.rank].append((kind, dict(parts)))
            if found.change is not None:
                parts = found.change(self.rank, kind, dict(parts))
        return parts

    def opened_all(self: Party, listed: Any) -> Any:
        opened = to_all(self, listed)
        if not self.tracing:
            flat = [(w, x, bits) for w in listed for x, bits in w.items]
            for (w, share, bits), total in zip(flat, opened, strict=True):
                kind = self.__dict__["kinds"][w.mask]
                if w.what in ("bit", "carry") and bits == 8:  # an index into the last merge's table
                    bits = (windows.direct_entries(kind.high - kind.low) - 1).bit_length()
                word = Word(type(kind).__name__, w.what, w.xor, bits, share.clone(), total.clone(), w.mask)
                found.words[self.rank].append(word)
        return opened

    monkeypatch.setattr(Party, "take", taken)
    monkeypatch.setattr(Party, "open_together", opened_all)
    yield found


def infer(runs: int, *, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    with Parties(program()) as parties:
        return [parties.infer(ids, MASK)[0] for _ in range(runs)]


# -- R1


@pytest.mark.parametrize("parties", [2, 3])
def test_no_mask_hides_two_values(parties: int, form: str) -> None:
    with Parties(program(), parties=parties, audit=True) as session:
        for ids in (IDS, OTHER):
            session.infer(ids, MASK)
        for openings in session.openings.values():
            assert len(openings) > 60 and {o.inference for o in openings} == {0, 1}
            assert ledger_faults(openings) == []


@pytest.mark.parametrize("kind", RECORDS, ids=lambda k: k.__name__)
def test_a_record_that_is_used_again_is_seen(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the second inference takes the first one's records of one kind."""
    take = Party.take

    def forgetful(self: Party, wanted: Any) -> Any:
        parts = take(self, wanted)
        if type(wanted) is kind and not self.tracing:
            kept = self.__dict__.setdefault("kept", {})
            parts, self._mask = kept.setdefault((self.step, self._record), (parts, self._mask))
        return parts

    monkeypatch.setattr(Party, "take", forgetful)
    with Parties(program(), audit=True) as session:
        for ids in (IDS, OTHER):
            session.infer(ids, MASK)
        faults = [f for name in session.names for f in ledger_faults(session.openings[name])]
    assert any(f[0] == "reused" for f in faults)


# -- R4, R7


def spread(watch: Watch, runs: int) -> list[tuple[str, ...]]:
    """What is not uniform: what a data owner sends, what is opened, its differences from run to run, and those of the
    words that one record masks."""
    groups: dict[tuple[str, str, str, int], list[torch.Tensor]] = {}

    def add(name: str, word: Word, values: torch.Tensor, bits: int | None = None) -> None:
        groups.setdefault((name, word.kind, word.what, bits or word.bits), []).append(
            values.reshape(-1).long()
        )

    for word in watch.words[1]:
        add("sent", word, word.share)
    words = watch.words[0]
    steps = len(words) // runs
    by_mask: dict[Place | None, list[Word]] = {}
    for i, word in enumerate(words):
        by_mask.setdefault(word.mask, []).append(word)
        add("opened", word, word.opened)
        if i >= steps:
            before = words[i - steps].opened.long()
            add("apart", word, word.opened ^ before if word.xor else word.opened.long() - before)
    for together in by_mask.values():
        for a, b in itertools.combinations(together, 2):
            if a.opened.numel() == b.opened.numel():
                add(
                    "beside",
                    a,
                    a.opened.long().reshape(-1) - b.opened.long().reshape(-1),
                    min(a.bits, b.bits),
                )
    return [
        (*key[:3], fault) for key, values in groups.items() for fault in uneven(torch.cat(values), key[3])
    ]


def test_what_is_sent_and_opened_for_one_input_is_uniform(form: str, watch: Watch) -> None:
    infer(30)
    seen = {(w.kind, w.what) for w in watch.words[0]}
    assert seen >= {
        ("Scaled", "window"), ("Scaled", "factor"), ("PieceWindow", "window"), ("CurveWindow", "window"),
        ("CurveWindow", "curve"), ("Exponent", "exponent"), ("Gate", "window"), ("Gate", "bit"), ("Product", "beaver"),
    }  # fmt: skip
    counted = {("Buckets", "bucket"), ("NotEmpty", "count"), ("NotEmpty", "bit")}
    assert seen >= counted if form == "counts" else not seen & counted
    assert spread(watch, 30) == []


def part_is(kind: type, name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Change:
    def change(rank: int, wanted: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**parts, name: make(parts)} if type(wanted) is kind else parts

    return change


def zeroed(kind: type, name: str) -> Change:
    def change(rank: int, wanted: Any, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        held = type(wanted) is kind and name in parts
        return {**parts, name: torch.zeros_like(parts[name])} if held else parts

    return change


UNMASKED = {
    "the value of a product": (zeroed(Scaled, "r"), "Scaled", "window"),
    "the factor of a product": (zeroed(Scaled, "a"), "Scaled", "factor"),
    "a curve's argument": (zeroed(CurveWindow, "r"), "CurveWindow", "window"),
    "a curve's value": (zeroed(CurveWindow, "r2"), "CurveWindow", "curve"),
    "a curve's bits": (zeroed(CurveWindow, "b"), "CurveWindow", "bit"),
    "a positive value": (zeroed(PieceWindow, "r"), "PieceWindow", "window"),
    "the index of a zone": (zeroed(PieceWindow, "b"), "PieceWindow", "bit"),
    "a bucket": (zeroed(Buckets, "r"), "Buckets", "bucket"),
    "a count": (zeroed(NotEmpty, "r"), "NotEmpty", "count"),
    "whether a bucket is empty": (zeroed(NotEmpty, "b"), "NotEmpty", "bit"),
    "an exponent": (zeroed(Exponent, "r"), "Exponent", "exponent"),
    "an exponential": (zeroed(Gate, "r"), "Gate", "window"),
    "whether an exponential counts": (zeroed(Gate, "b"), "Gate", "bit"),
    "queries": (zeroed(Product, "a"), "Product", "beaver"),
    "a result": (zeroed(Window, "r"), "Window", "window"),
    "half of an exponent": (
        part_is(Exponent, "r", lambda parts: parts["r"] & 0xFFF), "Exponent", "exponent",
    ),
    "a value under its argument's mask": (
        part_is(CurveWindow, "r2", lambda parts: parts["r"].int()), "CurveWindow", "window",
    ),
    "a factor under its value's mask": (
        part_is(Scaled, "a", lambda p: -p["r"].long() if p["a"].shape == p["r"].shape else p["a"]), "Scaled", "window",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNMASKED)
def test_a_mask_that_does_not_hide_is_seen(what: str, watch: Watch) -> None:
    """Planted faults: a mask that is zero or short at every party, or that a record has twice."""
    watch.change, kind, word = UNMASKED[what]
    infer(8)
    assert any(f[1:3] == (kind, word) for f in spread(watch, 8))


# -- dealt shares


def dealt_faults(watch: Watch) -> dict[tuple[str, str], list[str]]:
    """Parts of which the share of one party is not uniform: each share alone must say nothing."""
    groups: dict[tuple[str, str, int, int], list[torch.Tensor]] = {}
    for rank, listed in watch.dealt.items():
        for kind, parts in listed:
            for part in kind.parts():
                if type(kind) in RECORDS and part.without is None:
                    key = (type(kind).__name__, part.name, part.bits or 8 * part.dtype.itemsize, rank)
                    groups.setdefault(key, []).append(parts[part.name].reshape(-1).long())
    found = {key: uneven(torch.cat(values), key[2]) for key, values in groups.items()}
    return {key[:2]: faults for key, faults in found.items() if faults}


def test_each_partys_share_of_what_is_dealt_is_uniform(watch: Watch) -> None:
    infer(4)
    assert {type(kind) for kind, _ in watch.dealt[0]} >= set(RECORDS)
    assert dealt_faults(watch) == {}


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("hot", "Buckets"), ("table", "NotEmpty"), ("inside", "Exponent"), ("powers", "Exponent"),
        ("cubics", "PieceWindow"), ("trig", "CurveWindow"), ("quotient_a", "Scaled"), ("bit_value", "Gate"),
        ("zone_value2", "CurveWindow"), ("square", "Scaled"),
    ],
)  # fmt: skip
def test_a_dealt_table_that_is_not_shared_is_seen(
    label: str, kind: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the data owner's share is zero, so that the model owner has the whole table, and with it the mask."""
    stream, tensor = Seed.stream, Stream.tensor

    def named(self: Seed, inference: int, step: int, value: int, name: str) -> Stream:
        out = stream(self, inference, step, value, name)
        out.__dict__["unshared"] = name == label
        return out

    def drawn(
        self: Stream, shape: Any, dtype: torch.dtype = torch.int64, device: Any = "cpu"
    ) -> torch.Tensor:
        return tensor(self, shape, dtype, device) * (0 if self.__dict__.get("unshared") else 1)

    monkeypatch.setattr(Seed, "stream", named)
    monkeypatch.setattr(Stream, "tensor", drawn)
    infer(1)
    assert (kind, label) in dealt_faults(watch)


# -- what is masked is what the protocol says


def test_under_equal_masks_each_opening_moves_as_its_value_alone(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7, against plaintext: the argument of GELU, and every score's distance from the rough maximum of its row."""
    same_nonces(monkeypatch)
    traces: list[dict[str, torch.Tensor]] = []
    tensors = {**program().constants, **(program().weights or {})}
    for ids in (IDS, OTHER):
        trace: dict[str, torch.Tensor] = {}
        given = dict(zip(program().graph.inputs, (ids, MASK), strict=True))
        run_reference(program().graph, tensors, given, trace=trace)
        traces.append(trace)
        infer(1, ids=ids)
    words = watch.words[0]
    half = len(words) // 2
    assert [(w.kind, w.what) for w in words[:half]] == [(w.kind, w.what) for w in words[half:]]
    nodes = {n.op: n for n in program().graph.nodes}

    def moved(kind: str, what: str) -> torch.Tensor:
        at = next(i for i, w in enumerate(words) if (w.kind, w.what) == (kind, what))
        bits = words[at].bits
        apart = words[at].opened.long() - words[half + at].opened.long()
        return ((apart + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))

    (argument,) = nodes["gelu"].inputs
    scale = program().graph.edge(argument).scale
    expected = traces[0][argument] - traces[1][argument]
    got = moved("CurveWindow", "window").double() / 2.0**scale
    assert float((got.reshape(expected.shape) - expected).abs().max()) < 2e-3
    q, k, _, keep = nodes["attention"].inputs
    scores = [t[q] @ t[k] for t in traces]
    kept = traces[0][keep].bool().expand(scores[0].shape)
    exponents = moved("Exponent", "exponent").double().reshape(scores[0].shape) / 2.0**plans.ARGUMENT_BITS
    off = exponents - (scores[0] - scores[1])  # less how far the rough maxima moved: whole units
    assert float((off - off.round())[kept].abs().max()) < 0.02
    assert float(off[kept].abs().max()) < 16


def test_the_model_answers_as_plaintext_does(form: str) -> None:
    with torch.no_grad():
        expected = Block().eval()(IDS, MASK)
    assert float((infer(1)[0] - expected).abs().max()) < 2e-3


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Gate, "bit_top"), (CurveWindow, "zone_top2"), (CurveWindow, "bit_top"), (Window, "top"),
        (Scaled, "top_a"), (Scaled, "quotient_a"),
    ],
)  # fmt: skip
def test_a_top_bit_that_is_ignored_is_seen(kind: type, part: str, watch: Watch) -> None:
    """Planted fault: what a mask's wrap-around needs is left out."""
    watch.change = zeroed(kind, part)
    with torch.no_grad():
        expected = Block().eval()(IDS, MASK)
    assert any(float((got - expected).abs().max()) > 0.05 for got in infer(4))
