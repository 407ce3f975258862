"""The traffic before TLS of two runs with different inputs has the same frames, lengths and order at every party."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import secureinfer as si
from secureinfer.backends.mpc import kernels
from secureinfer.backends.mpc.values import Share
from secureinfer.plan.program import Program
from secureinfer.transport.memory import memory_links

from .harness import run
from .test_safety import IDS, MASK, Encoder

NAMES = ("model_owner", "data_owner")
Frames = dict[str, list[tuple[str, Any, int]]]


@pytest.fixture(scope="module", params=["fast", "crypten"])
def program(request: pytest.FixtureRequest) -> Program:
    torch.manual_seed(3)
    return si.compile(Encoder().eval(), (IDS, MASK), protocol=request.param)


def frames(program: Program, inputs: Mapping[str, torch.Tensor]) -> Frames:
    """What each party sends in one session with one inference: (to whom, address, length), in order."""
    links = memory_links([*NAMES, "dealer"], bytes(16), deadline=20)
    sent: Frames = {name: [] for name in links}
    for name, peers in links.items():
        for peer, link in peers.items():

            def record(
                address: Any, payload: Any, *, here: str = name, to: str = peer, send: Any = link.send
            ) -> None:
                sent[here].append((to, address, len(payload)))
                send(address, payload)

            link.send = record  # type: ignore[method-assign]
    run(program, inputs, links=links)
    return sent


OTHER_IDS, OTHER_MASK = torch.zeros_like(IDS), torch.ones_like(MASK)


def two_runs(program: Program) -> tuple[Frames, Frames]:
    first = frames(program, dict(zip(program.graph.inputs, (IDS, MASK), strict=True)))
    second = frames(program, dict(zip(program.graph.inputs, (OTHER_IDS, OTHER_MASK), strict=True)))
    return first, second


def test_two_inputs_give_the_same_frames_lengths_and_order(program: Program) -> None:
    first, second = two_runs(program)
    assert sum(map(len, first.values())) > 150
    assert first == second


def test_a_length_that_depends_on_the_input_is_seen(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: zeros of a share are left out of one message."""
    fast = program.protocol == "fast"
    rectify, look_up = (
        ("relu.window", "embedding.window.one_hot") if fast else ("relu.compare", "embedding.one_hot")
    )
    relu = kernels.lookup(rectify)

    def sparse(call: kernels.StepCall) -> list[Any]:
        party = call.party
        if not party.tracing and party.rank == 1:
            party.links[party.names[0]].send(party._next_address(), bytes(int(_secret(call) % 7)))
        elif not party.tracing:
            party.links[party.names[1]].receive(party._next_address())
        return list(relu(call))

    def _secret(call: kernels.StepCall) -> int:
        return int(IDS_SEEN[0].sum())

    IDS_SEEN: list[torch.Tensor] = []
    embedding = kernels.lookup(look_up)

    def remember(call: kernels.StepCall) -> list[Any]:
        if call.operands[0].plain is not None and not call.party.tracing:
            IDS_SEEN[:] = [call.operands[0].plain]
        return list(embedding(call))

    monkeypatch.setitem(kernels._BOUND, rectify, sparse)
    monkeypatch.setitem(kernels._BOUND, look_up, remember)
    first, second = two_runs(program)
    assert first != second


def test_nothing_is_logged_about_values(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        frames(program, dict(zip(program.graph.inputs, (IDS, MASK), strict=True)))
    text = caplog.text
    assert not any(str(row.tolist()) in text for row in IDS)
    assert "tensor(" not in text


def test_objects_that_hold_secrets_do_not_print_them() -> None:
    from secureinfer.backends.mpc.randomness import Seed, Stream

    shown = repr(Seed(b"\x07" * 32, bytes(16))) + repr(Stream(b"\x07" * 32))
    assert "\\x07" not in shown and "0707" not in shown
    assert "123456789" not in repr(Share(torch.tensor([123456789]), 16))
