"""Rules R1 to R7 on whole models of generic kernels: what is opened, under which masks, and that a broken rule is seen.

The fast kernels are in test_safety_fast.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.backends import make_engine as make_session_engine
from secureinfer.backends.mpc import dealer as dealer_module
from secureinfer.backends.mpc import kernels, randomness, seeds
from secureinfer.backends.mpc.communicator import LinkCommunicator
from secureinfer.backends.mpc.correlations import SessionWeight, Truncation
from secureinfer.backends.mpc.engine import make_engine
from secureinfer.backends.mpc.packing import unpack
from secureinfer.backends.mpc.party import Opening, Party
from secureinfer.backends.mpc.randomness import Stream
from secureinfer.backends.mpc.values import Share
from secureinfer.errors import CorrelationError
from secureinfer.graph.ops import run_reference
from secureinfer.plan.planner import Plan
from secureinfer.plan.program import Program
from secureinfer.transport.memory import memory_links

from .harness import Measured, run

VOCABULARY = 40


class Encoder(torch.nn.Module):
    """Embedding, a linear layer with GELU, attention with a mask, a head: every kind of opening."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 8)
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.nn.functional.gelu(self.first(self.table(ids))))
        bias = torch.where(mask.bool()[:, None, :], 0.0, float("-inf"))
        x = torch.softmax(x @ x.transpose(1, 2) / 8**0.5 + bias, -1) @ x
        return self.head(torch.relu(x))


IDS = torch.tensor([[3, 17, 39, 5, 0], [8, 8, 1, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(3)
    return si.compile(Encoder().eval(), (IDS, MASK), protocol="crypten")


def audited(program: Program, ids: torch.Tensor = IDS) -> Measured:
    given = dict(zip(program.graph.inputs, (ids, MASK), strict=True))
    return run(program, given, audit=True)


def same_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of a session draws the same seeds; for comparing transcripts under equal masks."""
    for module in (seeds, dealer_module):
        monkeypatch.setattr(module, "fresh_nonce", lambda: b"n" * randomness.NONCE_BYTES)
    monkeypatch.setattr(dealer_module, "check_distinct", lambda seeds: None)
    monkeypatch.setattr("os.urandom", lambda n: b"s" * n)


# -- R1: a mask belongs to one value


def ledger_faults(openings: Iterable[Opening]) -> list[tuple[Any, ...]]:
    """Masks under which more than one value was opened, and openings that no mask hides (but the declared output)."""
    seen: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}
    faults: list[tuple[Any, ...]] = []
    used: dict[tuple[Any, ...], int] = {}
    last: tuple[Any, ...] | None = None
    for opening in openings:
        if opening.mask is None:
            if opening.what != "output":
                faults.append(("unmasked", opening.step, opening.what))
            continue
        # A tree's record hides six openings, each under its own triple; another mask in between ends the record's use.
        count = used.get(opening.mask, 0)
        if last != opening.mask and count:
            count = 0
        used[opening.mask] = count + 1
        last = opening.mask
        key = (*opening.mask, opening.what, count)
        before = seen.setdefault(key, opening.words)
        if before is not opening.words and not all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, opening.words, strict=True)
        ):
            faults.append(("reused", *key))
    return faults


def test_every_opening_is_masked_and_no_mask_hides_two_values(program: Program) -> None:
    for openings in audited(program).openings:
        assert len(openings) > 20
        assert ledger_faults(openings) == []


def test_a_mask_that_is_used_twice_is_seen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: every truncation of one shape takes the mask of the first."""
    take = Party.take

    def forgetful(self: Party, kind: Any) -> Any:
        parts = take(self, kind)
        if isinstance(kind, Truncation) and not self.tracing:
            kept = self.__dict__.setdefault("kept", {})
            first = kept.setdefault(kind, (parts, self._mask))
            parts, self._mask = first
        return parts

    monkeypatch.setattr(Party, "take", forgetful)
    assert any(f[0] == "reused" for f in ledger_faults(audited(program).openings[0]))


# -- token ids


def secrets_opened(openings: Iterable[Opening], secrets: Iterable[torch.Tensor]) -> list[Opening]:
    """Openings in which a secret stands in plain: the same values in the same order."""
    flat = [s.reshape(-1).long() for s in secrets]
    return [
        o
        for o, s in itertools.product(openings, flat)
        if any(w.numel() == s.numel() and torch.equal(w.reshape(-1).long(), s) for w in o.words)
    ]


def id_secrets(ids: torch.Tensor) -> list[torch.Tensor]:
    return [ids, torch.nn.functional.one_hot(ids, VOCABULARY)]


def test_token_ids_are_never_opened(program: Program) -> None:
    for openings in audited(program).openings:
        assert secrets_opened(openings, id_secrets(IDS)) == []


def test_an_opened_id_is_seen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a gather on the model owner's side, with the ids opened for it (field report 33)."""

    def gather(call: kernels.StepCall) -> list[Share]:
        party, (ids, table) = call.party, call.operands
        zero = torch.zeros(ids.edge.shape, dtype=torch.int64, device="meta" if party.tracing else "cpu")
        party._mask = None
        (opened,) = party.open([zero if ids.plain is None else ids.plain], "gather")
        rows = torch.empty(call.outputs[0].shape, dtype=torch.int64, device=zero.device)
        if not party.tracing:
            rows = call.encoded(table).tensor[opened] if party.first else torch.zeros_like(rows)
        return [Share(rows, call.scale)]

    monkeypatch.setitem(kernels._BOUND, "embedding.one_hot", gather)
    openings = audited(program).openings[0]
    assert secrets_opened(openings, id_secrets(IDS))
    assert any(f[0] == "unmasked" for f in ledger_faults(openings))


def test_changing_one_id_moves_the_answer_as_in_plaintext(program: Program) -> None:
    other = IDS.clone()
    other[0, 1] = 22
    inputs = [dict(zip(program.graph.inputs, (ids, MASK), strict=True)) for ids in (IDS, other)]
    secure = [next(iter(run(program, given).outputs.values())).double() for given in inputs]
    tensors = {**program.constants, **(program.weights or {})}
    plain = [next(iter(run_reference(program.graph, tensors, given).values())) for given in inputs]
    assert float((secure[0] - secure[1]).abs().max()) > 1e-2
    assert float(((secure[0] - secure[1]) - (plain[0] - plain[1])).abs().max()) < 1e-3


# -- R7: transcripts


def chi_square(words: torch.Tensor) -> float:
    """Of the top four bits against the uniform distribution: 15 degrees of freedom."""
    counts = torch.histc((words.reshape(-1) >> 60).double(), 16, -8, 7)
    expected = words.numel() / 16
    return float(((counts - expected) ** 2 / expected).sum())


def masked_words(openings: Iterable[Opening]) -> list[torch.Tensor]:
    return [w for o in openings if o.what != "output" for w in o.words if w.dtype == torch.int64]


def test_with_fresh_masks_the_openings_of_one_input_differ_uniformly(program: Program) -> None:
    first, second = (masked_words(audited(program).openings[0]) for _ in range(2))
    assert len(first) == len(second)
    differences = torch.cat([(a - b).reshape(-1) for a, b in zip(first, second, strict=True)])
    assert differences.numel() > 2000
    assert chi_square(differences) < 60  # P < 1e-6
    within = torch.cat(
        [
            (a.reshape(-1)[: b.numel()] - b.reshape(-1)[: a.numel()])
            for a, b in itertools.pairwise(first)
            if a.numel() and b.numel()
        ]
    )
    assert chi_square(within) < 60


def test_a_mask_from_a_short_interval_is_seen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: masks of 40 bits hide values statistically, yet their differences are small."""
    tensor = Stream.tensor

    def short(
        self: Stream, shape: Any, dtype: torch.dtype = torch.int64, device: Any = "cpu"
    ) -> torch.Tensor:
        words = tensor(self, shape, dtype, device)
        return words >> 24 if dtype == torch.int64 else words

    monkeypatch.setattr(Stream, "tensor", short)
    first, second = (masked_words(audited(program).openings[0]) for _ in range(2))
    differences = torch.cat([(a - b).reshape(-1) for a, b in zip(first, second, strict=True)])
    assert chi_square(differences) > 60


def test_under_equal_masks_openings_differ_by_the_values_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R7: each opened operand of a linear layer moves exactly as its value moves (to the rounding of truncation)."""
    same_nonces(monkeypatch)
    other = IDS.clone()
    other[1, 0] = 30
    runs = [audited(program, ids).openings[0] for ids in (IDS, other)]
    tensors = {**program.constants, **(program.weights or {})}
    traces: list[dict[str, torch.Tensor]] = []
    for ids in (IDS, other):
        trace: dict[str, torch.Tensor] = {}
        run_reference(
            program.graph, tensors, dict(zip(program.graph.inputs, (ids, MASK), strict=True)), trace=trace
        )
        traces.append(trace)
    compared = 0
    for a, b in zip(*runs, strict=True):
        step = program.plan.steps[a.step]
        assert (a.step, a.what, a.mask) == (b.step, b.what, b.mask)
        if step.kernel == "linear.weight" and a.what == "masked operand":
            operand = step.node.inputs[0]
            moved = (a.words[0] - b.words[0]).double() / 2**16
            expected = traces[0][operand] - traces[1][operand]
            assert float((moved - expected).abs().max()) < 1e-3
            compared += 1
    assert compared == 2


# -- R2, R3: seeds and indices


def engines(program: Program) -> dict[str, Any]:
    names = ("model_owner", "data_owner")
    links = memory_links([*names, "dealer"], bytes(16), deadline=5)
    return {
        name: make_engine(
            name,
            program if name == "model_owner" else program.public(),
            me=name,
            compute_parties=names,
            dealer="dealer",
            links=links[name],
            clock=next(iter(links[name].values())).clock,
            session_id=bytes(16),
        )
        for name in (*names, "dealer")
    }


def test_the_dealer_deals_each_index_once(program: Program) -> None:
    dealer = engines(program)["dealer"]
    dealer._dealer.seeds = [randomness.Seed(bytes([i]) * 32, bytes(16)) for i in range(2)]
    masks = {w: SessionWeight(torch.zeros(s).long()) for w, s in dealer._dealer._weights.items()}
    dealer._dealer._masks = masks
    dealer.prepare(4)
    for index in (4, 0, 3):
        with pytest.raises(CorrelationError, match="already dealt"):
            dealer.prepare(index)


def test_an_index_that_was_not_prepared_is_refused(program: Program) -> None:
    owner = engines(program)["data_owner"]
    with pytest.raises(CorrelationError, match="no material"):
        owner.run(0, dict(zip(program.graph.inputs, (IDS, MASK), strict=True)))


def test_an_index_that_was_skipped_is_burnt(program: Program) -> None:
    owner = engines(program)["data_owner"]
    owner.party.material.update({i: {} for i in (3, 4, 5)})
    inputs = dict(zip(program.graph.inputs, (IDS, MASK), strict=True))
    for index in (4, 3, 4):  # the first fails for want of real material, and is burnt all the same
        with pytest.raises(CorrelationError, match=f"inference {index}"):
            owner.run(index, inputs)
    assert owner.party.material.keys() == {5}


def test_dealer_and_data_owner_refuse_or_lack_the_weights(program: Program) -> None:
    names = ("model_owner", "data_owner")
    links = memory_links([*names, "dealer"], bytes(16))
    with pytest.raises(si.SessionError, match="must not hold private weights"):
        make_engine(
            "dealer",
            program,
            me="dealer",
            compute_parties=names,
            dealer="dealer",
            links=links["dealer"],
            clock=next(iter(links["dealer"].values())).clock,
            session_id=bytes(16),
        )


def test_delta_and_shares_never_go_to_the_dealer(program: Program) -> None:
    """R2: the dealer gets one nonce from each party, and nothing else."""
    names = ("model_owner", "data_owner")
    measured = audited(program)
    assert measured.outputs
    links = memory_links([*names, "dealer"], bytes(16))
    sent: list[int] = []
    for name in names:
        link = links[name]["dealer"]
        send = link.send
        link.send = lambda a, p, send=send: (sent.append(len(p)), send(a, p))[1]  # type: ignore[method-assign]
    run(program, dict(zip(program.graph.inputs, (IDS, MASK), strict=True)), links=links)
    assert sent == [32, 32]


# -- a program file from somebody else


@pytest.mark.parametrize(
    ("op", "kernel", "says"),
    [
        ("relu", "reveal", "computes reveal"),  # would open the value in the middle of the model, unmasked
        ("linear", "matmul.weight", "computes matmul"),
        ("gelu", "private.gelu", "not all operands belong to one owner"),
        ("softmax", "softmax.fast", "none of that name"),
        ("reveal", "begin", "computes begin"),
    ],
)
@pytest.mark.parametrize("role", ["model_owner", "data_owner", "dealer"])
def test_a_plan_whose_kernels_are_not_those_of_its_operators_is_refused_before_anything_is_sent(
    program: Program, role: str, op: str, kernel: str, says: str
) -> None:
    steps = list(program.plan.steps)
    at = next(i for i, step in enumerate(steps) if op in step.node.op)
    steps[at] = dataclasses.replace(steps[at], kernel=kernel)
    tampered = Program(
        program.graph, Plan(tuple(steps)), backend=program.backend, protocol=program.protocol, options=program.options,
        constants=program.constants, weights=program.weights if role == "model_owner" else None,
    )  # fmt: skip
    names = ("model_owner", "data_owner")
    links = memory_links([*names, "dealer"], bytes(16))[role]
    with pytest.raises(si.ProgramFileError, match=says):
        make_session_engine(
            role,
            tampered,
            me=role,
            compute_parties=names,
            dealer="dealer",
            links=links,
            clock=next(iter(links.values())).clock,
            session_id=bytes(16),
        )
    assert not any(link.total().frames_sent for link in links.values())


# -- R5: who gets the outputs


@pytest.mark.parametrize("reveal_to", [("data_owner",), ("model_owner",), ("data_owner", "model_owner")])
def test_the_output_goes_to_those_it_is_revealed_to_and_to_nobody_else(reveal_to: tuple[str, ...]) -> None:
    torch.manual_seed(2)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    program = si.compile(model, (x,), reveal_to=reveal_to)
    measured = run(program, dict(zip(program.graph.inputs, (x,), strict=True)), audit=True)
    ranks = {"model_owner": 0, "data_owner": 1}
    for name, rank in ranks.items():
        opened = [o for o in measured.openings[rank] if o.what == "output"]
        assert len(opened) == (name in reveal_to)
        answer = measured.results[name]
        if name in reveal_to:
            assert float((next(iter(answer.values())) - model(x).detach()).abs().max()) < 1e-3
        else:
            assert answer is None
    assert measured.bytes + 64 == program.plan.totals.bytes  # the begin frame is the session's


def test_an_owners_plain_output_is_opened_to_the_other_only_where_that_is_declared() -> None:
    x = torch.randn(2, 4)
    for reveal_to in (("data_owner",), ("model_owner",)):
        program = si.compile(torch.nn.ReLU(), (x,), reveal_to=reveal_to)
        measured = run(program, dict(zip(program.graph.inputs, (x,), strict=True)), audit=True)
        opened = [o for o in measured.openings[0] if o.what == "output"]
        assert len(opened) == (reveal_to == ("model_owner",))
        got = measured.results[reveal_to[0]]
        assert float((next(iter(got.values())) - x.relu()).abs().max()) < 1e-4


def test_three_parties_shares_of_the_outputs_tell_nothing_but_their_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """z + w and z + y for the bank: the frames of one party alone must not differ by what that party added."""

    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([0.5, -2.0, 3.25]))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = torch.relu(x + y)
            return z + self.w, z + y

    frames: list[list[torch.Tensor]] = []
    to_one = LinkCommunicator.bytes_to_one

    def seen(self: LinkCommunicator, payload: bytes, dst: int, size: int) -> Any:
        rows = to_one(self, payload, dst, size)
        if rows is not None and dst == 1:
            frames.append([unpack(row, (2, 3), 64) for row in rows])
        return rows

    monkeypatch.setattr(LinkCommunicator, "bytes_to_one", seen)
    model, x, y = Sums().eval(), torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0.25, 3.0, -8.0])
    program = si.compile(model, (x, y), owners={"x": "bank", "y": "shop"}, reveal_to=("bank",))
    answers = run(program, {"x": x, "y": y}, parties=3).outputs
    for name, expected in zip(program.graph.outputs, model(x, y), strict=True):
        assert float((answers[name] - expected.detach()).abs().max()) < 1e-4
    ((model_owner, shop),) = frames
    for rows in (model_owner, shop):
        assert float(((rows[0] - rows[1]).double() / 2**16).abs().min()) > 2**20
