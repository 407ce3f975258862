"""In-process links join every pair of parties, with one clock a party."""

from __future__ import annotations

from secureinfer.transport.base import Address
from secureinfer.transport.memory import memory_links

AT = Address("online", 0, 1)


def test_links_join_every_pair_and_share_a_partys_clock() -> None:
    names = ["model_owner", "a", "b", "dealer"]
    links = memory_links(names, bytes(16))
    assert {x: sorted(links[x]) for x in names} == {x: sorted(set(names) - {x}) for x in names}
    for x in names:
        assert len({id(link.clock) for link in links[x].values()}) == 1
        for y in set(names) - {x}:
            links[x][y].send(AT, f"{x}{y}".encode())
    for x in names:
        for y in set(names) - {x}:
            assert bytes(links[x][y].receive(AT)) == f"{y}{x}".encode()


def test_a_chain_over_three_parties_counts_each_hop() -> None:
    links = memory_links(["a", "b", "c"], bytes(16))
    links["a"]["b"].send(AT)
    links["b"]["a"].receive(AT)
    links["b"]["c"].send(AT)
    links["c"]["b"].receive(AT)
    links["c"]["a"].send(AT)
    links["a"]["c"].receive(AT)
    assert links["a"]["c"].clock.rounds("online", 0) == 3
