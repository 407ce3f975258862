"""Truncation, comparison and zero sharing: exact, unbiased, and where CrypTen's own fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from secureinfer.backends.mpc import protocols, ring, runtime
from secureinfer.backends.mpc.dealer import Dealer, draw
from secureinfer.backends.mpc.party import Party
from secureinfer.backends.mpc.randomness import Seed
from secureinfer.errors import CorrelationError, UnsafeError
from secureinfer.transport.memory import memory_links

SESSION = bytes(16)


def trace(function: Callable[..., Any], shapes: list[tuple[int, ...]], parties: int) -> list[Any]:
    party = Party(0, tuple(f"p{i}" for i in range(parties)), tracing=True)
    with runtime.activate(party):
        function(party, *(torch.empty(s, dtype=torch.int64, device="meta") for s in shapes))
    return party.requests


def together(
    function: Callable[..., Any], *shares: list[torch.Tensor], parties: int = 2, seed: int = 0
) -> list[Any]:
    """Run function(party, *its shares) at each party with dealt material; its result at each."""
    names = tuple(f"p{i}" for i in range(parties))
    requests = trace(function, [tuple(s[0].shape) for s in shares], parties)
    keys = [bytes([seed % 256, seed // 256, i]) * 11 for i in range(parties)]
    dealer = Dealer(names, requests, {}, session_id=SESSION, manifest_digest="00")
    dealer.seeds = [Seed(k[:32], SESSION) for k in keys]
    links = memory_links(names, SESSION, deadline=20)
    results: list[Any] = [None] * parties
    corrections = {(r.step, r.record): dealer.correction(0, r) for r in requests}

    def run(rank: int) -> None:
        party = Party(rank, names, links[names[rank]])
        mine = Seed(keys[rank][:32], SESSION)
        material = {}
        for r in requests:
            parts = draw(r.kind, mine, rank, (0, r.step, r.record))
            if rank == 0:
                parts.update(corrections[r.step, r.record])
            material[r.step, r.record] = (r.kind, parts)
        party.material[0] = material
        for i in range(parties):
            for pair in ((i, (i + 1) % parties), ((i + 1) % parties, i)):
                party.pair_seeds[pair] = Seed(f"pair {pair}".encode().ljust(32), SESSION)
        with runtime.activate(party):
            results[rank] = function(party, *(s[rank] for s in shares))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(parties)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def share(x: torch.Tensor, parties: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rest = [torch.randint(-(2**63), 2**63 - 1, x.shape, generator=generator) for _ in range(parties - 1)]
    return [x - sum(rest, torch.zeros_like(x)), *rest]


def truncated(x: torch.Tensor, bits: int, parties: int = 2, seed: int = 0) -> torch.Tensor:
    results = together(
        lambda p, s: protocols.truncate(p, s, bits), share(x, parties, seed), parties=parties, seed=seed
    )
    return sum(results[1:], results[0])


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("bits", [1, 16, 32, 33, 61])
def test_truncation_is_exact_to_one_unit_up_to_the_ends_of_the_range(bits: int, parties: int) -> None:
    ends = torch.tensor([0, 1, -1, 2**62 - 1, -(2**62) + 1, 2**61, -(2**61)])
    x = torch.cat([ends, torch.randint(-(2**62) + 1, 2**62, (5000,))])
    error = truncated(x, bits, parties) - torch.div(x, 1 << bits, rounding_mode="floor")
    assert set(error.tolist()) <= {0, 1}


def cryptens_truncation(x: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    """What CrypTen does with two parties: each divides its own share."""
    a, b = share(x, 2, seed)
    return torch.div(a, 1 << bits, rounding_mode="trunc") + torch.div(b, 1 << bits, rounding_mode="trunc")


@pytest.mark.parametrize("size", [1e5, 1e6, 1e7])
def test_no_entry_is_wrong_where_cryptens_truncation_fails(size: float) -> None:
    """Field report 17: x * 1.0 over 20,000 entries, over many seeds. The twin: CrypTen's own gives wrong entries."""
    x = torch.full((20_000,), round(size * 2**16)) << 16  # after the product with 1.0
    wrong, theirs = 0, 0
    for seed in range(3):
        wrong += int(((truncated(x, 16, seed=seed) - (x >> 16)).abs() > 1).sum())
        theirs += int(((cryptens_truncation(x, 16, seed) - (x >> 16)).abs() > 1).sum())
    assert wrong == 0
    if size >= 1e7:
        assert theirs > 0


def test_truncation_has_no_bias() -> None:
    """Field report 19: the mean signed error of 1e5 products is about 0; flooring would give half a unit."""
    x = torch.randint(-(2**40), 2**40, (100_000,), generator=torch.Generator().manual_seed(5))
    exact = x.double() / 2**16
    bias = float((truncated(x, 16).double() - exact).mean())
    floored = float((torch.div(x, 1 << 16, rounding_mode="floor").double() - exact).mean())
    assert abs(bias) < 0.01
    assert floored < -0.4  # the twin


@pytest.mark.parametrize("parties", [2, 3])
def test_comparison_is_right_on_ties_and_at_the_ends(parties: int) -> None:
    edge = [0, 1, -1, 2, -2, 2**61, -(2**61), 2**62 - 1, -(2**62) + 1]
    x = torch.tensor(edge + torch.randint(-(2**62), 2**62, (500,)).tolist())
    thresholds = [0, 1, -1, 2**60, -(2**60)]

    def compare(p: Party, s: torch.Tensor) -> torch.Tensor:
        return protocols.at_least(p, protocols.open_masked(p, s, compare=True), thresholds)

    results = together(compare, share(x, parties), parties=parties)
    got = sum(results[1:], results[0])
    expected = torch.stack([(x >= t).long() for t in thresholds])
    assert torch.equal(got, expected)


@pytest.mark.parametrize("parties", [2, 3, 4])
def test_zero_shares_are_uniform_and_sum_to_zero(parties: int) -> None:
    """Field report 67: not (x, 0)."""
    results = together(
        lambda p, s: p.zero_share((50_000,)), [torch.zeros(1).long()] * parties, parties=parties
    )
    assert int(sum(results[1:], results[0]).abs().max()) == 0
    for r in results:
        counts = torch.histc(r.double() / 2.0**64 + 0.5, 16, 0, 1)
        assert float(((counts - r.numel() / 16) ** 2 / (r.numel() / 16)).sum()) < 60


def test_material_of_another_kind_is_refused() -> None:
    party = Party(0, ("a", "b"))
    traced = trace(lambda p, s: protocols.truncate(p, s, 16), [(4,)], 2)
    kind = traced[0].kind
    party.material[0] = {(0, 0): (kind, {})}
    party.at("online", 0, 0)
    with pytest.raises(CorrelationError, match="another kind"):
        protocols.truncate(party, torch.zeros(4, dtype=torch.int64), 17)


def test_material_is_used_once() -> None:
    party = Party(0, ("a", "b"))
    with pytest.raises(CorrelationError, match="never dealt or was already used"):
        protocols.truncate(party, torch.zeros(4, dtype=torch.int64), 16)


# -- CrypTen's own programs on our runtime


def test_trusted_first_party_is_refused_without_its_switch() -> None:
    """Field report 66: CrypTen's default provider gives rank 0 every mask."""
    party = Party(0, ("a", "b"))
    with (
        pytest.raises(UnsafeError, match="every mask"),
        runtime.activate(party, provider="trusted_first_party"),
    ):
        pass


def test_trusted_first_party_with_its_switch_warns() -> None:
    party = Party(0, ("a", "b"))
    with (
        pytest.warns(UserWarning, match="unsafe_trusted_first_party"),
        runtime.activate(party, provider="trusted_first_party", unsafe_trusted_first_party=True),
    ):
        pass


def crypten_tensor(x: torch.Tensor) -> Any:
    return runtime.ArithmeticSharedTensor.from_shares(x, precision=16)


@pytest.mark.parametrize("parties", [2, 3])
def test_cryptens_product_square_and_division_are_right(parties: int) -> None:
    """`additive` and `square`, through CrypTen's own tensors; its division is our truncation."""
    x = ring.encode(torch.linspace(-50, 50, 101, dtype=torch.float64), 16)

    def program(p: Party, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = crypten_tensor(s)
        return (t.mul(t).share, t.square().share, t.div(4).share, t.div(3).share)

    results = together(program, share(x, parties), parties=parties)
    product, square, quarter, third = (sum(r[1:], r[0]).double() / 2**16 for r in zip(*results, strict=True))
    plain = x.double() / 2**16
    assert float((product - plain**2).abs().max()) < 2e-5
    assert float((square - plain**2).abs().max()) < 2e-5
    assert float((quarter - plain / 4).abs().max()) < 2e-5
    assert float((third - plain / 3).abs().max()) < 5e-5


@pytest.mark.parametrize("parties", [2, 3])
def test_cryptens_comparison_runs_on_dealt_material(parties: int) -> None:
    """`binary` and `B2A`: CrypTen's own less-than-zero, which converts to binary shares and back."""
    from crypten.mpc.mpc import MPCTensor

    x = ring.encode(torch.tensor([-3.0, -1e-4, 0.0, 1e-4, 7.0], dtype=torch.float64), 16)

    def program(p: Party, s: torch.Tensor) -> torch.Tensor:
        return MPCTensor.from_shares(s, precision=16)._ltz().share

    results = together(program, share(x, parties), parties=parties)
    assert sum(results[1:], results[0]).tolist() == [1, 1, 0, 0, 0]


def test_cryptens_wraps_are_dealt_right() -> None:
    """`wraps`: CrypTen counts how often shares wrap around the ring."""
    from crypten.mpc.primitives import beaver

    x = torch.arange(-20, 20) << 16

    def program(p: Party, s: torch.Tensor) -> torch.Tensor:
        return beaver.wraps(crypten_tensor(s)).share

    shares = share(x, 3)
    results = together(program, shares, parties=3)
    assert torch.equal(sum(results[1:], results[0]), ring.count_wraps(shares))


def test_cryptens_generators_are_ours() -> None:
    """Field report 68: no Mersenne Twister. The same call gives other values each time, and neighbours agree."""

    def program(p: Party, s: torch.Tensor) -> torch.Tensor:
        return runtime.ArithmeticSharedTensor.PRZS((1000,)).share

    results = together(program, [torch.zeros(1).long()] * 3, parties=3)
    assert int(sum(results[1:], results[0]).abs().max()) == 0
    assert int((results[0] == results[1]).sum()) == 0
    assert not any(isinstance(g, torch.Generator) for g in runtime.crypten.generators.values())
