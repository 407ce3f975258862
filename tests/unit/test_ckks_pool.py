"""Matrices that several processes share: the shares are all of the matrix, the values are the same, and no process stays."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secureinfer.backends.ckks.arithmetic import Arithmetic, Keys
from secureinfer.backends.ckks.client import Client
from secureinfer.backends.ckks.context import Context
from secureinfer.backends.ckks.params import Parameters
from secureinfer.backends.ckks.pool import Pool
from secureinfer.backends.ckks.proposals import choose, for_packed
from secureinfer.backends.ckks.sealed import dump, load
from secureinfer.backends.ckks.server import Matrix, SpreadMatrix
from secureinfer.backends.ckks.terms import Term, share
from secureinfer.errors import SessionError

pytestmark = pytest.mark.needs("he")

PARAMETERS = Parameters(8192, 45, 40, 1, 50)
ZERO = np.zeros(1)


def term(target: int, giant: int, source: int, baby: int) -> Term:
    return Term(target, giant, source, baby, ZERO)


keys = st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 3), st.integers(0, 6))


@settings(max_examples=60, deadline=None)
@given(st.sets(keys, min_size=1, max_size=60), st.integers(1, 4))
def test_the_shares_are_the_whole_and_none_is_empty(
    found: set[tuple[int, int, int, int]], processes: int
) -> None:
    terms = [term(t, 7 * g, i, b) for t, g, i, b in sorted(found)]
    parts = share(terms, processes, 16384, 12)
    assert 1 <= len(parts) <= processes and all(parts)
    assert sorted(map(id, (t for part in parts for t in part))) == sorted(map(id, terms))


def test_little_work_is_not_shared_and_much_is() -> None:
    assert len(share([term(0, 0, 0, b) for b in range(2)], 4, 8192, 2)) == 1
    much = [term(0, 20 * g, 0, b) for g in range(20) for b in range(20)]
    assert len(share(much, 2, 16384, 12)) == 2


@pytest.fixture(scope="module")
def parts() -> tuple[Context, Client, Arithmetic, list[bytearray], Matrix]:
    context = Context(PARAMETERS)
    rng = np.random.default_rng(0)
    matrix, bias = rng.normal(size=(64, 300)) / 20, rng.normal(size=64)
    mask = np.ones(matrix.shape, dtype=bool)
    plan = choose(for_packed(mask, PARAMETERS.slots), mask, 8192, 2, encrypts=True)
    assert plan is not None
    client = Client(context, sorted(plan.steps()))
    blobs = client.evaluation_keys(public=False)
    api = context.api
    made = [
        load(kind(), context.context, blob, "keys", "peer")
        for kind, blob in zip((api.RelinKeys, api.GaloisKeys), blobs, strict=True)
    ]
    a = Arithmetic(context, Keys(*made))
    alone = Matrix(context, plan, matrix, bias, 1, PARAMETERS.scale, PARAMETERS.scale)
    return context, client, a, blobs, alone


def shared(monkeypatch: pytest.MonkeyPatch, context: Context, blobs: list[bytearray]) -> Pool:
    """A pool that is always worth it."""
    from secureinfer.backends.ckks import server

    def halves(terms: list[Term], processes: int, *_: object) -> list[list[Term]]:
        return [terms[::2], terms[1::2]]

    monkeypatch.setattr(server, "share", halves)
    monkeypatch.setattr(server, "HAND_OVER_PRIMES_MS", 0.0)
    pool = Pool(context.parameters, 2, "model_owner")
    pool.helper(0)
    pool.keys(blobs[0], blobs[1])
    pool.wait()
    return pool


def values(context: Context, client: Client, results: list[object]) -> np.ndarray:
    return np.stack([client.decrypt(memoryview(dump(x)), "peer") for x in results])


def test_a_matrix_of_two_processes_gives_what_one_gives(parts, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    context, client, a, blobs, alone = parts
    rng = np.random.default_rng(1)
    x = rng.normal(size=300)
    sent = [client.encrypt(slots) for slots in alone.plan.source.pack(x)]
    given = [load(context.new(), context.context, s, "an input", "peer") for s in sent]
    rng = np.random.default_rng(0)
    matrix, bias = rng.normal(size=(64, 300)) / 20, rng.normal(size=64)
    pool = shared(monkeypatch, context, blobs)
    try:
        two = Matrix(
            context, alone.plan, matrix, bias, 1, PARAMETERS.scale, PARAMETERS.scale, pool=pool, serial="m"
        )
        for raw in (None, dict(enumerate(sent))):
            got = alone.plan.target.unpack(values(context, client, two.apply(a, given, raw)))
            assert np.abs(got - (matrix @ x + bias)).max() < 1e-5
    finally:
        pool.close()
    assert (
        np.abs(
            alone.plan.target.unpack(values(context, client, alone.apply(a, given))) - matrix @ x - bias
        ).max()
        < 1e-5
    )


def test_rows_of_two_processes_give_what_one_gives(parts, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    context, client, a, blobs, _ = parts
    rng = np.random.default_rng(2)
    matrix, bias, x = rng.normal(size=(6, 4)), rng.normal(size=6), rng.normal(size=(4, PARAMETERS.slots))
    matrix[5] = 0  # a row that nothing is taken for
    sent = [client.encrypt(column) for column in x]
    given = [(load(context.new(), context.context, s, "an input", "peer"), s) for s in sent]
    pool = shared(monkeypatch, context, blobs)
    try:
        rows = SpreadMatrix(
            context, matrix, bias, 1, PARAMETERS.scale, PARAMETERS.scale, pool=pool, serial="m", first=True
        )
        assert rows.shared
        got = values(context, client, rows.apply(a, iter(given)))
    finally:
        pool.close()
    assert np.abs(got - (matrix @ x + bias[:, None])).max() < 1e-5


def test_a_process_that_is_killed_ends_the_computation_and_none_stays(
    parts, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    context, client, a, blobs, alone = parts
    given = [
        load(context.new(), context.context, client.encrypt(slots), "an input", "peer")
        for slots in alone.plan.source.pack(np.ones(300))
    ]
    pool = shared(monkeypatch, context, blobs)
    process = pool.helpers[0].process
    two = Matrix(
        context,
        alone.plan,
        np.ones((64, 300)),
        None,
        1,
        PARAMETERS.scale,
        PARAMETERS.scale,
        pool=pool,
        serial="m",
    )
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(SessionError, match="shares the computing has ended"):
        two.apply(a, given)
    pool.close()
    other = Pool(context.parameters, 2, "model_owner")
    process = other.helper(0).process
    other.close()
    end = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.poll() == 0
