"""How a compute party agrees its seeds: one with the dealer, two with every peer; one frame each way, one round."""

from __future__ import annotations

from ...transport.base import Address, Link
from .party import Party
from .randomness import NONCE_BYTES, Seed, agree_seed, fresh_nonce

_PLACE = Address("setup", 0, 0, 0)


def dealer_role(rank: int) -> str:
    """What a seed with the dealer is for, so that no two parties can get the same one."""
    return f"dealer and rank {rank}"


def agree(party: Party, dealer: Link, session_id: bytes, digest: str) -> Seed:
    """The seed with the dealer; and party.pair_seeds, a seed for each ordered pair of ranks that this one belongs to.

    All nonces are sent before any is awaited: one round.
    """
    mine = fresh_nonce()
    nonces = {peer: fresh_nonce() for peer in party.communicator.peers()}
    dealer.send(_PLACE, mine)
    for peer, nonce in nonces.items():
        party.links[party.names[peer]].send(_PLACE, nonce)
    theirs = bytes(dealer.receive(_PLACE, NONCE_BYTES))
    for peer, nonce in nonces.items():
        other = bytes(party.links[party.names[peer]].receive(_PLACE, NONCE_BYTES))
        low, high = (nonce, other) if party.rank < peer else (other, nonce)
        for pair in ((party.rank, peer), (peer, party.rank)):
            party.pair_seeds[pair] = agree_seed(
                low, high, session=session_id, manifest_digest=digest, role=f"zero sharing {pair}"
            )
    return agree_seed(mine, theirs, session=session_id, manifest_digest=digest, role=dealer_role(party.rank))
