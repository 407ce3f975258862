"""Rules R1 to R7 on the fast kernels: what is opened, under which masks, and that each broken rule is seen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.backends.mpc import dealer as dealer_module
from secureinfer.backends.mpc import engine as engine_module
from secureinfer.backends.mpc import randomness, ring, windows
from secureinfer.backends.mpc.correlations import FixedProduct
from secureinfer.backends.mpc.engine import MpcEngine
from secureinfer.backends.mpc.fast import opening
from secureinfer.backends.mpc.fast.opening import Window
from secureinfer.backends.mpc.fast.tables import Merge
from secureinfer.backends.mpc.packing import pack
from secureinfer.backends.mpc.party import Party
from secureinfer.backends.mpc.randomness import Seed, Stream
from secureinfer.errors import CorrelationError
from secureinfer.graph.ir import Node
from secureinfer.plan.planner import Plan
from secureinfer.plan.program import Program

from .models import compiled
from .parties import Frame, Parties
from .test_safety import ledger_faults, same_nonces

MODELS = ("fraud_mlp", "fraud_mlp_int8", "lenet", "lenet_int8", "resnet18", "bert", "bert_int8")
pytestmark = pytest.mark.needs("hf")


@dataclasses.dataclass
class Seen:
    """What a session of two inferences on two inputs showed: openings by party, and every frame."""

    program: Program
    openings: dict[str, list[Any]]
    frames: list[Frame]


def other_input(x: torch.Tensor) -> torch.Tensor:
    return (x + 1) % 100 if not x.is_floating_point() else torch.flip(x, [0, -1]) * 0.5


@functools.cache
def seen(name: str) -> Seen:
    program, _, inputs = compiled(name)
    with Parties(program, audit=True, record=True) as parties:
        parties.infer(*inputs)
        parties.infer(*map(other_input, inputs))
        return Seen(program, parties.openings, parties.frames)


class Small(nn.Module):
    """A hidden layer, rectified, and scores: each kind of window."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.body(x)))
        return out


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))


def small() -> Program:
    return si.compile(Small().eval(), X)


@pytest.fixture(params=["direct", "opened bits"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Comparisons end in a table of additive shares, or in an opened bit: a step's size decides."""
    if request.param == "opened bits":
        monkeypatch.setattr(windows, "DIRECT_BYTES", 0)
    return str(request.param)


# -- R1: a mask belongs to one value


@pytest.mark.parametrize("name", MODELS)
def test_no_mask_hides_two_values_over_several_inferences(name: str) -> None:
    for openings in seen(name).openings.values():
        assert {o.inference for o in openings} == {0, 1} and len(openings) > 6
        assert ledger_faults(openings) == []


@pytest.mark.parametrize("kind", [Window, Merge, FixedProduct])
def test_a_record_that_is_used_again_is_seen(kind: type, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the second inference takes the record of the first: its mask, its index or its A."""
    monkeypatch.setattr(windows, "DIRECT_BYTES", 0 if kind is Merge else windows.DIRECT_BYTES)
    take = Party.take

    def forgetful(self: Party, wanted: Any) -> Any:
        parts = take(self, wanted)
        if isinstance(wanted, kind) and not self.tracing:
            kept = self.__dict__.setdefault("kept", {})
            parts, self._mask = kept.setdefault((self.step, self._record), (parts, self._mask))
        return parts

    monkeypatch.setattr(Party, "take", forgetful)
    with Parties(small(), audit=True) as parties:
        parties.infer(X)
        parties.infer(X + 1)
        faults = [f for name in parties.names for f in ledger_faults(parties.openings[name])]
    assert any(f[0] == "reused" for f in faults)


def test_no_stream_is_drawn_twice_and_none_by_two_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stream_keys(monkeypatch)
    with Parties(small()) as parties:
        for _ in range(3):
            parties.infer(X)
        dealer = [keys[id(s)] for s in parties.engines["dealer"]._dealer.seeds]  # type: ignore[attr-defined]
        drawn = [k for listed in dealer for k in listed]
        assert len(drawn) > 50 and len(set(drawn)) == len(drawn)
        for name, theirs in zip(parties.names, dealer, strict=True):
            ours = keys[id(parties.engines[name]._seed)]  # type: ignore[attr-defined]
            assert set(ours) <= set(theirs)  # the dealer draws what each party draws, and for rank 0 no more


def stream_keys(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bytes]]:
    """Keys of the streams that each seed gives, by the seed's identity."""
    keys: dict[int, list[bytes]] = {}
    make = Stream.__init__
    stream = Seed.stream
    here: dict[int, bytes] = {}

    def init(self: Stream, key: bytes) -> None:
        here[id(self)] = key
        make(self, key)

    def recorded(self: Seed, *place: Any) -> Stream:
        out = stream(self, *place)
        keys.setdefault(id(self), []).append(here.pop(id(out)))
        return out

    monkeypatch.setattr(Stream, "__init__", init)
    monkeypatch.setattr(Seed, "stream", recorded)
    return keys


def test_an_index_that_is_dealt_twice_is_seen_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stream_keys(monkeypatch)
    with Parties(small()) as parties:
        parties.infer(X)
        dealer = parties.engines["dealer"]
        with pytest.raises(CorrelationError, match="already dealt"):
            dealer.prepare(0)
        dealer._dealer._next = 0  # type: ignore[attr-defined]  # planted fault: the dealer forgets what it dealt
        dealer.prepare(0)
        drawn = keys[id(dealer._dealer.seeds[0])]  # type: ignore[attr-defined]
        assert len(set(drawn)) < len(drawn)


# -- R2: seeds, and what the dealer gets


def pieces(payload: bytes, size: int = 16) -> set[bytes]:
    return {payload[i : i + size] for i in range(0, len(payload) - size + 1, size)}


def at_the_dealer(frames: Iterable[Frame]) -> list[Frame]:
    """Frames to or from the dealer that hold a piece of what the owners send each other, or that no dealer needs."""
    between = set().union(*(pieces(f.payload) for f in frames if "dealer" not in (f.sender, f.receiver)))
    between.discard(bytes(16))
    faults = []
    for f in frames:
        if "dealer" in (f.sender, f.receiver) and (
            between & pieces(f.payload) or (f.receiver == "dealer" and len(f.payload) != 32)
        ):
            faults.append(f)
    return faults


@pytest.mark.parametrize("name", ["fraud_mlp", "fraud_mlp_int8", "lenet_int8", "bert"])
def test_the_dealer_gets_a_nonce_from_each_and_nothing_that_the_owners_exchange(name: str) -> None:
    frames = seen(name).frames
    assert [len(f.payload) for f in frames if f.receiver == "dealer"] == [32, 32]
    assert at_the_dealer(frames) == []


def test_a_masked_weight_that_reaches_the_dealer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the model owner sends its masked weights to the dealer as well."""
    send = MpcEngine._open_weights

    def everywhere(self: MpcEngine) -> None:
        links = dict(self._links)
        peer, dealer = links["data_owner"] if self.party.rank == 0 else None, links["dealer"]
        if peer is not None:
            to = peer.send
            peer.send = lambda a, p: (to(a, p), dealer.send(a, p))[0]  # type: ignore[method-assign]
        send(self)
        if peer is not None:
            peer.send = to  # type: ignore[method-assign]

    monkeypatch.setattr(MpcEngine, "_open_weights", everywhere)
    with Parties(small(), record=True) as parties:
        assert at_the_dealer(parties.frames)


def weight_frames(program: Program) -> list[Frame]:
    """Frames that hold a piece of a weight: as stored, or as it is encoded in the ring of its masks."""
    with Parties(program, record=True) as parties:
        engine: Any = parties.engines["model_owner"]
        held: set[bytes] = set()
        for weight in engine._masked_weights:
            held |= pieces(bytes(pack(engine._encoded(weight), weight.bits)))
        for tensor in (program.weights or {}).values():
            held |= pieces(tensor.contiguous().numpy().tobytes())
        for other in ("data_owner", "dealer"):
            assert parties.engines[other].__dict__.get("program", program.public()).weights is None
        parties.infer(*compiled_inputs(program))
        held.discard(bytes(16))
        return [f for f in parties.frames if held & pieces(f.payload)]


def compiled_inputs(program: Program) -> list[torch.Tensor]:
    return [torch.ones(program.graph.edge(name).shape) for name in program.graph.inputs]


@pytest.mark.parametrize("name", ["fraud_mlp", "fraud_mlp_int8", "lenet", "lenet_int8"])
def test_no_frame_holds_a_weight_and_no_other_engine_has_one(name: str) -> None:
    assert weight_frames(compiled(name)[0]) == []


@pytest.mark.parametrize("name", ["fraud_mlp", "fraud_mlp_int8"])
def test_a_weight_that_is_sent_without_a_mask_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the session's masks of weights are zero."""
    for module in (engine_module, dealer_module):
        monkeypatch.setattr(module, "mask_of_weight", lambda seed, weight, shape: torch.zeros(shape).long())
    assert {(f.sender, f.receiver) for f in weight_frames(compiled(name)[0])} == {
        ("model_owner", "data_owner")
    }


def test_each_party_has_a_seed_of_its_own_with_the_dealer() -> None:
    with Parties(small()) as parties:
        owner, data = (parties.engines[n]._seed for n in parties.names)  # type: ignore[attr-defined]
        first, second = parties.engines["dealer"]._dealer.seeds  # type: ignore[attr-defined]
        assert owner.same_as(first) and data.same_as(second) and not owner.same_as(data)


def test_equal_nonces_do_not_give_equal_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The role is in the derivation; the twin: without it the dealer refuses the session."""
    monkeypatch.setattr(dealer_module, "fresh_nonce", lambda: b"n" * randomness.NONCE_BYTES)
    monkeypatch.setattr("secureinfer.backends.mpc.seeds.fresh_nonce", lambda: b"n" * randomness.NONCE_BYTES)
    with Parties(small()):
        pass
    monkeypatch.setattr(dealer_module, "dealer_role", lambda rank: "dealer")
    monkeypatch.setattr("secureinfer.backends.mpc.seeds.dealer_role", lambda rank: "dealer")
    with pytest.raises(CorrelationError, match="one seed"):
        Parties(small())


# -- R4, R7: what is sent and opened is uniform


@dataclasses.dataclass(frozen=True)
class Word:
    """One opening as one party saw it: its own share, and the sum. bits: those that a mask covers."""

    what: str
    xor: bool
    bits: int
    share: torch.Tensor
    opened: torch.Tensor | None


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[Word]]]:
    """Openings by rank, filled while engines run."""
    found: dict[int, list[Word]] = {0: [], 1: []}
    take, to_all, to_one = Party.take, Party.open_together, Party.open_words_to

    def kind_of(self: Party, kind: Any) -> Any:
        if isinstance(kind, Window):
            self.__dict__["window"] = kind
        return take(self, kind)

    def covered(self: Party, what: str, bits: int) -> int:
        kind = self.__dict__.get("window")
        if what in ("bit", "carry") and bits == 8:  # an index into the last merge's table
            return (windows.direct_entries(kind.high - kind.low) - 1).bit_length()
        return bits

    def open_all(self: Party, listed: Any) -> Any:
        opened = to_all(self, listed)
        if not self.tracing:
            flat = [(w, x, bits) for w in listed for x, bits in w.items]
            for (w, share, bits), total in zip(flat, opened, strict=True):
                seen = covered(self, w.what, bits)
                found[self.rank].append(Word(w.what, w.xor, seen, share.clone(), total.clone()))
        return opened

    def open_one(self: Party, listed: Any, rank: int, what: str) -> Any:
        opened = to_one(self, listed, rank, what)
        if not self.tracing and what != "output":
            for i, (share, bits) in enumerate(listed):
                total = None if opened is None else opened[i].clone()
                found[self.rank].append(Word(what, False, bits, share.clone(), total))
        return opened

    monkeypatch.setattr(Party, "take", kind_of)
    monkeypatch.setattr(Party, "open_together", open_all)
    monkeypatch.setattr(Party, "open_words_to", open_one)
    yield found


def uneven(values: torch.Tensor, bits: int) -> list[str]:
    """Where values of `bits` bits are not uniform: each byte of them by chi-square, a few bits by the same."""
    flat = values.reshape(-1).long().numpy()
    faults = []
    for low in range(0, bits, 8):
        width = min(8, bits - low)
        counts = np.bincount((flat >> low) & ((1 << width) - 1), minlength=1 << width)
        expected, freedom = len(flat) / (1 << width), (1 << width) - 1
        statistic = float(((counts - expected) ** 2 / expected).sum())
        if statistic > freedom + 8 * math.sqrt(2 * freedom) + 20:  # P about 1e-10
            faults.append(f"bits {low} to {low + width - 1}: {statistic:.0f} for {freedom}")
    return faults


def grouped(listed: Iterable[tuple[str, int, torch.Tensor]]) -> dict[tuple[str, int], torch.Tensor]:
    groups: dict[tuple[str, int], list[torch.Tensor]] = {}
    for what, bits, values in listed:
        groups.setdefault((what, bits), []).append(values.reshape(-1).long())
    return {key: torch.cat(parts) for key, parts in groups.items()}


RUNS = 40


def faults_of(found: dict[int, list[Word]]) -> list[tuple[Any, ...]]:
    """Groups of what a data owner sends, of what anybody opens, and of the latter's differences, that are not uniform."""
    sent = grouped((w.what, w.bits, w.share) for w in found[1])
    opened = grouped((w.what, w.bits, w.opened) for w in found[0] if w.opened is not None)
    steps = len(found[0]) // RUNS
    apart = []
    for i, w in enumerate(found[0][steps:]):
        before = found[0][i]
        if w.opened is not None and before.opened is not None:
            difference = w.opened ^ before.opened if w.xor else w.opened.long() - before.opened.long()
            apart.append((w.what, w.bits, difference))
    return [
        (name, *key, fault)
        for name, groups in (("sent", sent), ("opened", opened), ("apart", grouped(apart)))
        for key, values in groups.items()
        for fault in uneven(values, key[1])
    ]


def repeated(x: torch.Tensor) -> None:
    with Parties(small()) as parties:
        for _ in range(RUNS):
            parties.infer(x)


@pytest.mark.parametrize("value", [0.0, 15.0])
def test_what_is_sent_and_opened_for_one_input_is_uniform(
    value: float, form: str, words: dict[int, list[Word]]
) -> None:
    repeated(torch.full_like(X, value))
    kinds = {w.what for w in words[0]}
    assert kinds >= {"masked operand", "window", "bit"} | ({"merge"} if form == "opened bits" else set())
    assert faults_of(words) == []


def mask_of(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every party's share of a window's mask is changed: the dealer draws the same, so that results stay right."""
    tensor = Stream.tensor
    stream = Seed.stream

    def named(self: Seed, inference: int, step: int, value: int, label: str) -> Stream:
        out = stream(self, inference, step, value, label)
        if label in ("r", "A"):
            out.__dict__["mask"] = True
        return out

    def drawn(
        self: Stream, shape: Any, dtype: torch.dtype = torch.int64, device: Any = "cpu"
    ) -> torch.Tensor:
        words = tensor(self, shape, dtype, device)
        return change(words) if self.__dict__.get("mask") else words

    monkeypatch.setattr(Seed, "stream", named)
    monkeypatch.setattr(Stream, "tensor", drawn)


@pytest.mark.parametrize(
    "change", [lambda w: w & ((1 << 39) - 1), lambda w: w & ((1 << 47) - 1) & ~(1 << 46), lambda w: w & ~1]
)
def test_a_mask_that_does_not_cover_its_window_is_seen(
    change: Any, words: dict[int, list[Word]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: 40 bits in a window of 48, top bits that are clear, a lowest bit that is clear."""
    mask_of(change, monkeypatch)
    repeated(torch.zeros_like(X))
    faults = faults_of(words)
    assert any(f[1] == "window" for f in faults) and any(f[1] == "masked operand" for f in faults)


def test_an_opened_bit_without_its_mask_is_seen(
    words: dict[int, list[Word]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the random bits of comparisons are all zero."""
    monkeypatch.setattr(windows, "DIRECT_BYTES", 0)
    tensor = Stream.tensor

    def zero(self: Stream, shape: Any, dtype: torch.dtype = torch.int64, device: Any = "cpu") -> torch.Tensor:
        drawn = tensor(self, shape, dtype, device)
        return drawn * 0 if dtype == torch.uint8 else drawn

    monkeypatch.setattr(Stream, "tensor", zero)
    repeated(torch.zeros_like(X))
    assert {f[1] for f in faults_of(words) if f[0] == "opened"} >= {"bit", "merge"}


def test_under_equal_masks_each_opening_moves_as_its_value_alone(
    form: str, words: dict[int, list[Word]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: c less what was masked is the same for two inputs, in every window of the model; and z XOR the compared bit."""
    same_nonces(monkeypatch)
    masked: dict[int, list[tuple[Window, torch.Tensor]]] = {0: [], 1: []}
    open_window = opening.opening

    def watched(p: Party, x: torch.Tensor, kind: Window) -> Any:
        if not p.tracing:
            masked[p.rank].append((kind, x.clone()))
        return open_window(p, x, kind)

    monkeypatch.setattr(opening, "opening", watched)
    program = small()
    for x in (X, other_input(X) + 2):
        with Parties(program) as parties:
            parties.infer(x)
    kinds = [kind for kind, _ in masked[0]]
    pairs = zip(kinds, masked[0], masked[1], strict=True)
    values = [ring.signed(a + b, kind.bits) for kind, (_, a), (_, b) in pairs]
    opened = [w.opened for w in words[0] if w.what == "window"]
    half = len(kinds) // 2
    assert half == len(opened) // 2 >= 2
    for i in range(half):
        assert kinds[i] == kinds[half + i]
        mask = [(opened[j] - values[j]) & ((1 << kinds[i].bits) - 1) for j in (i, half + i)]  # type: ignore[operator]
        assert torch.equal(*mask)
        assert not torch.equal(values[i], values[half + i])
    operands = [w.opened for w in words[0] if w.what == "masked operand"]
    moved = (operands[0] - operands[len(operands) // 2]) & ((1 << 40) - 1)  # type: ignore[operator]
    encoded = [torch.round(x.double() * 2**16).long() for x in (X, other_input(X) + 2)]
    assert torch.equal(moved, (encoded[0] - encoded[1]) & ((1 << 40) - 1))
    if form == "opened bits":
        bits = [w.opened for w in words[0] if w.what == "bit"]
        (z, other), clear = (
            (bits[0], bits[len(bits) // 2]),
            values[0].abs().minimum(values[half].abs()) > 1 << 16,
        )
        reached = [(values[j] >= 0).to(torch.uint8) for j in (0, half)]
        assert torch.equal((z[0] ^ reached[0])[clear], (other[0] ^ reached[1])[clear])  # type: ignore[index]


# -- R3: material


def test_material_for_anything_else_is_refused() -> None:
    kind = Window((2, 3), 48, 16, 16, 47, 1, gate=True)
    place = (3, 0)

    def party() -> Party:
        p = Party(1, ("model_owner", "data_owner"))
        p.material[7] = {place: (kind, {})}
        p.at("online", 7, 3)
        return p

    assert party().take(kind) == {}
    for other in (
        dataclasses.replace(kind, bits=40),
        dataclasses.replace(kind, shape=(3, 2)),
        dataclasses.replace(kind, cut=17),
        dataclasses.replace(kind, thresholds=2),
        dataclasses.replace(kind, gate=False),
        Merge((2, 3), 1, 4, False),
        FixedProduct("linear", (2, 3), (2, 3), "w", bits=48),
    ):
        with pytest.raises(CorrelationError, match="another kind or shape"):
            party().take(other)
    for inference, step in ((6, 3), (8, 3), (7, 2), (7, 4)):
        p = party()
        p.at("online", inference, step)
        with pytest.raises(CorrelationError, match="never dealt or was already used"):
            p.take(kind)
    p = party()
    p.take(kind)
    p.at("online", 7, 3)
    with pytest.raises(CorrelationError, match="already used"):
        p.take(kind)


# -- R5: the output


class Ends(nn.Module):
    """One layer, and what comes after it up to the output."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layer, self.end = nn.Linear(6, 16), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.end(self.layer(x))
        return out


ENDS = {
    "layer": nn.Identity(),
    "relu": nn.ReLU(),
    "relu, reshaped": nn.Sequential(nn.ReLU(), nn.Flatten(0)),
    "clamp": nn.Hardtanh(-0.5, 0.5),
    "pooled": nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.ReLU(), nn.MaxPool2d(2)),
    "class": type("Class", (nn.Module,), {"forward": lambda self, x: x.argmax(-1)})(),
}


def answers(program: Program, runs: int) -> list[torch.Tensor]:
    with Parties(program) as parties:
        return [parties.infer(X)[0] for _ in range(runs)]


@pytest.mark.parametrize("end", ENDS)
def test_equal_inputs_give_equal_answers(end: str, form: str) -> None:
    """Else n answers would place the bits that were cut within 1/n of a unit."""
    first, *others = answers(si.compile(Ends(ENDS[end]).eval(), X), 12)
    assert all(torch.equal(first, other) for other in others)


class Deep(nn.Module):
    """Hidden layers of the kinds that fast kernels cut: what is rounded there moves the output by a weight of a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.conv, self.last = nn.Conv1d(2, 8, 2, padding=1), nn.Linear(16, 16)
        with torch.no_grad():
            self.last.weight *= 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.max_pool1d(torch.relu(self.conv(x.reshape(8, 2, 3))), 2).flatten(1)
        out: torch.Tensor = self.last(h.clamp(-1.0, 1.0))
        return out


@pytest.mark.parametrize("int8", [False, True])
def test_with_exact_cuts_a_deep_model_answers_equal_inputs_equally(int8: bool, form: str) -> None:
    """Else a data owner, who sees each rounding's threshold, regresses the answers on it: what it finds are weights."""
    model: nn.Module = Deep().eval()
    model = si.compress(model, [si.Quantize()])[0] if int8 else model
    program = si.compile(model, X, exact_cuts=True)
    first, *others = answers(program, 12)
    assert all(torch.equal(first, other) for other in others)
    with torch.no_grad():
        assert float((first - model(X)).abs().max()) < 2e-3
    assert all(n.attrs["exact"] for n in program.graph.nodes if n.op == "rescale")
    by_itself = si.compile(model, X)
    assert program.manifest_digest == by_itself.manifest_digest
    hasty = si.compile(model, X, exact_cuts=False)
    first, *others = answers(hasty, 12)  # the twin: cuts of hidden layers at random
    assert any(not torch.equal(first, other) for other in others)


def test_exact_cuts_are_a_choice_of_the_fast_protocol() -> None:
    with pytest.raises(si.SettingsError, match="exact_cuts"):
        si.compile(Small().eval(), X, protocol="crypten", exact_cuts=True)


@pytest.mark.parametrize("int8", [False, True])
def test_an_output_is_the_product_rounded_to_the_nearest_and_nothing_more(int8: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(6, 16)).eval()
    model = si.compress(model, [si.Quantize()])[0] if int8 else model
    program = si.compile(model, X)
    (got,) = answers(program, 1)
    weights, node = program.weights or {}, next(n for n in program.graph.nodes if n.op == "linear")
    edge = program.graph.edge(node.outputs[0])
    exact = weights[node.inputs[1]].double()
    if int8:
        scale = program.graph.edge(node.inputs[-1]).scale
        exact = exact * torch.round(weights[node.inputs[-1]].double() * 2.0**scale)[:, None]
    else:
        exact = torch.round(exact * 2**16)
    x, bias = torch.round(X.double() * 2**16).long(), weights[node.inputs[2]].double()
    raw = x @ exact.long().T + torch.round(bias * 2.0**edge.scale).long()
    cut = edge.scale - 16
    assert torch.equal((got.double() * 2**16).long(), (raw + (1 << (cut - 1))) >> cut)


def test_random_cuts_of_an_output_are_seen() -> None:
    """Planted fault: exact=False at the end of the graph."""
    program = si.compile(Ends(nn.Identity()).eval(), X)

    def rounded(node: Node) -> Node:
        return dataclasses.replace(node, attrs={"exact": False}) if node.op == "rescale" else node

    steps = tuple(dataclasses.replace(s, node=rounded(s.node)) for s in program.plan.steps)
    graph = dataclasses.replace(program.graph, nodes=tuple(map(rounded, program.graph.nodes)))
    other = Program(
        graph, Plan(steps), backend="mpc", protocol="fast", options=program.options, constants=program.constants,
        weights=program.weights,
    )  # fmt: skip
    first, *others = answers(other, 12)
    assert any(not torch.equal(first, o) for o in others)


@pytest.mark.parametrize("name", MODELS)
def test_only_the_model_owner_sends_only_the_declared_outputs_only_to_the_data_owner(name: str) -> None:
    found = seen(name)
    last = found.program.plan.steps[-1].index
    frames = [f for f in found.frames if f.address.phase == "online" and f.address.step == last]
    assert {(f.sender, f.receiver) for f in frames} == {("model_owner", "data_owner")} and len(frames) == 2
    edges = [found.program.graph.edge(n) for n in found.program.graph.outputs]
    size = sum(windows.packed_bytes(e.numel, e.ring_bits) for e in edges)
    assert [len(f.payload) for f in frames] == [size, size]
    assert not any(o.what == "output" for o in found.openings["model_owner"])


def test_a_cut_output_is_sent_in_the_bits_of_its_range_and_decodes_from_them() -> None:
    program = si.compile(Ends(nn.Identity()).eval(), X)
    (edge,) = (program.graph.edge(n) for n in program.graph.outputs)
    assert edge.bound is not None and edge.ring_bits == windows.width_of(edge.bound, 16) < 40
    (got,) = answers(program, 1)
    with torch.no_grad():
        assert float((got - Ends(nn.Identity()).eval()(X)).abs().max()) < 1e-4


# -- R6: what is public


def is_power_of_two(value: float) -> bool:
    return value == 0 or math.frexp(value)[0] == 0.5


@pytest.mark.parametrize("name", MODELS)
def test_the_public_part_holds_shapes_and_powers_of_two_and_no_weight(name: str, tmp_path: Any) -> None:
    program = seen(name).program
    for edge in program.graph.edges.values():
        assert edge.bound is None or is_power_of_two(edge.bound)
        assert edge.ring_bits % 8 == 0
    program.public().save(tmp_path / "public.si")
    program.save(tmp_path / "private.si")
    public, private = ((tmp_path / f"{n}.si").read_bytes() for n in ("public", "private"))
    looked = 0
    for weight in (program.weights or {}).values():
        flat = weight.reshape(-1)
        for piece in (flat[:8], flat[-8:], flat[len(flat) // 2 :][:8]):
            raw = piece.contiguous().numpy().tobytes()
            if piece.unique().numel() >= 4:  # not all zeros or ones
                assert raw not in public and raw in private
                looked += 1
    assert looked > 3


def test_the_shifted_and_masked_weights_share_no_mask_between_rings() -> None:
    """One weight in two rings has two masks: their difference would be a weight modulo the smaller ring."""
    with Parties(small()) as parties:
        masks = parties.engines["dealer"]._dealer._masks  # type: ignore[attr-defined]
        assert len({w.label for w in masks}) == len(masks)
    seed = Seed(bytes(32), bytes(16))
    drawn = [
        dealer_module.mask_of_weight(seed, weight, (64,))
        for weight in (
            dealer_module.MaskedWeight("w", 40),
            dealer_module.MaskedWeight("w", 48),
            dealer_module.MaskedWeight("w", 48, True),
            dealer_module.MaskedWeight("w"),
        )
    ]
    for i, a in enumerate(drawn):
        assert not any(bool(((a ^ b) & ((1 << 40) - 1) == 0).any()) for b in drawn[:i])
    with pytest.raises(CorrelationError, match="already used"):
        dealer_module.mask_of_weight(seed, dealer_module.MaskedWeight("w", 40), (64,))
