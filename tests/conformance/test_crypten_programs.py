"""Programs written against CrypTen, as they are, on our links, dealer and generators: 2, 3 and 4 parties."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from secureinfer.backends.mpc.correlations import Product, Square, Truncation
from secureinfer.backends.mpc.live import crypten_party, pack, serve, unpack
from secureinfer.backends.mpc.runtime import crypten
from secureinfer.errors import CorrelationError, PeerError, SecureInferError, WireError
from secureinfer.transport.memory import memory_links

SESSION = bytes(range(16))


def parties(count: int, program: Callable[[int], Any], *, deadline: float = 30) -> list[Any]:
    """Run program(rank) at each of `count` parties with a dealer; what each returned. The first failure is raised."""
    names = [f"party{i}" for i in range(count)]
    links = memory_links([*names, "dealer"], SESSION, deadline=deadline)
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        mine = links[names[rank]]
        try:
            with crypten_party(rank, names, mine, dealer="dealer", session_id=SESSION):
                results[rank] = program(rank)
        except BaseException as e:
            failures.append(e)
            for link in mine.values():
                link.close()

    def deal() -> None:
        try:
            serve(names, links["dealer"], session_id=SESSION)
        except BaseException as e:
            failures.append(e)
            for link in links["dealer"].values():
                link.close()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)] + [
        threading.Thread(target=deal)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    if failures:  # the cause, not those that were left behind
        raise next((f for f in failures if not isinstance(f, PeerError)), failures[0])
    return results


@pytest.mark.parametrize("count", [2, 3, 4])
def test_arithmetic_comparison_and_opening(count: int) -> None:
    x, y = torch.tensor([1.5, -2.25, 40.0]), torch.tensor([3.0, 0.5, -1.0])

    def program(rank: int) -> list[torch.Tensor]:
        a, b = crypten.cryptensor(x, src=0), crypten.cryptensor(y, src=1)
        return [
            (a * b + 1).get_plain_text(),
            (a > b).get_plain_text(),
            (a.view(1, 3).matmul(b.view(3, 1))).get_plain_text(),
            a.max().get_plain_text(),
            (a / 3).get_plain_text(),
        ]

    for got in parties(count, program):
        expected = [x * y + 1, (x > y).float(), (x @ y).view(1, 1), x.max(), x / 3]
        for g, e in zip(got, expected, strict=True):
            assert float((g - e).abs().max()) < 1e-3


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_collective(count: int) -> None:
    comm = crypten.communicator

    def program(rank: int) -> dict[str, Any]:
        c = comm.get()
        mine = torch.tensor([rank, 10 * rank])
        out: dict[str, Any] = {
            "all_reduce": c.all_reduce(mine),
            "batched": c.all_reduce([mine, mine + 1], batched=True),
            "reduce": c.reduce(mine, 1),
            "gather": c.gather(mine, 0),
            "all_gather": c.all_gather(mine),
            "broadcast": c.broadcast(mine.clone(), 1),
            "scatter": c.scatter([torch.tensor([i]) for i in range(count)], 0, size=(1,)),
            "object": c.broadcast_obj(
                {"a": (1, [2.5, None]), "size": torch.Size([3])} if rank == 0 else None, 0
            ),
            "size": c.get_world_size(),
            "rank": c.get_rank(),
        }
        c.barrier()
        # a ring, with asynchronous calls
        into = torch.zeros(2, dtype=torch.int64)
        sending = c.isend(mine, (rank + 1) % count)
        receiving = c.irecv(into, src=(rank - 1) % count)
        sending.wait()
        receiving.wait()
        out["ring"] = into
        return out

    results = parties(count, program)
    total = torch.tensor([sum(range(count)), 10 * sum(range(count))])
    for rank, got in enumerate(results):
        assert torch.equal(got["all_reduce"], total)
        assert torch.equal(got["batched"][1], total + count)
        assert (got["reduce"] is None) == (rank != 1) and (rank != 1 or torch.equal(got["reduce"], total))
        assert got["gather"] == [None] if rank else [t[0].item() for t in got["gather"]] == list(range(count))
        assert [t[0].item() for t in got["all_gather"]] == list(range(count))
        assert got["broadcast"].tolist() == [1, 10]
        assert got["scatter"].tolist() == [rank]
        assert got["object"] == {"a": (1, [2.5, None]), "size": torch.Size([3])}
        assert (got["size"], got["rank"]) == (count, rank)
        assert got["ring"][0].item() == (rank - 1) % count


def test_a_logistic_regression_is_trained_on_two_parties_data() -> None:
    """CrypTen's own modules, loss and optimiser; party 0 and party 1 have samples, party 2 has none."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.tensor([[2.0, -3.0, 1.0]])
    data = [torch.randn(40, 3, generator=generator) for _ in range(2)]
    labels = [(d @ weights.t() > 0).float() for d in data]

    def program(rank: int) -> torch.Tensor:
        x = crypten.cat([crypten.cryptensor(data[i], src=i) for i in range(2)])
        y = crypten.cat([crypten.cryptensor(labels[i], src=i) for i in range(2)])
        w = crypten.cryptensor(torch.zeros(3, 1), src=0)
        for _ in range(12):
            p = x.matmul(w).sigmoid()
            w = w - x.t().matmul(p - y) * (2.0 / 80)
        return w.get_plain_text()

    results = parties(3, program)
    assert all(torch.allclose(r, results[0]) for r in results)
    x, y = torch.cat(data), torch.cat(labels)
    assert float(((x @ results[0] > 0).float() == y).float().mean()) > 0.93
    w = torch.zeros(3, 1)
    for _ in range(12):
        w = w - x.t() @ (torch.sigmoid(x @ w) - y) * (2.0 / 80)
    assert float((w - results[0]).abs().max()) < 0.05


def test_parties_that_run_different_programs_are_found() -> None:
    def program(rank: int) -> Any:
        a = crypten.cryptensor(torch.ones(3), src=0)
        return (a * a if rank == 0 else a.square()).get_plain_text()

    with pytest.raises(CorrelationError, match="do not run one program"):
        parties(2, program, deadline=5)


@pytest.mark.parametrize(
    "kind", [Product("matmul", (2, 3), (3, 4), (2, 4)), Square((5,)), Truncation((2, 2), 16)]
)
def test_a_request_survives_the_wire(kind: Any) -> None:
    assert unpack(pack(kind)) == kind


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b'{"kind": "product", "op": "os.system", "left": [1], "right": [1], "result": [1], "options": []}',
        b'{"kind": "product", "op": "mul", "left": [2], "right": [2], "result": [3], "options": []}',
        b'{"kind": "square", "shape": [1099511627775, 1099511627775]}',
        b'{"kind": "square", "shape": [-1]}',
        b'{"kind": "square", "shape": [5], "unknown": 1}',
        b'{"kind": "truncation", "shape": [5], "bits": 64}',
        b"[" * 50_000,
    ],
)
def test_a_request_that_cannot_be_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        unpack(payload)


def test_the_global_generator_is_not_offered() -> None:
    def program(rank: int) -> Any:
        return crypten.generators["global"][torch.device("cpu")].ring((3,))

    with pytest.raises(SecureInferError, match="known to every party"):
        parties(2, program, deadline=5)
