"""Places for the parties of a local session, a network namespace for each, by the name of the network between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from ..errors import UsageError
from ..session.local import Place
from .namespaces import inside
from .network import LABEL, LAN, WAN, Condition, Network

LOOPBACK = "loopback"
EMULATED: dict[str, Condition] = {"lan": LAN, "wan": WAN}


def condition_of(network: str) -> Condition:
    """What "lan" or "wan" is. Raises UsageError for another name."""
    if network not in EMULATED:
        raise UsageError(f"there is no network {network!r} to emulate; choose {' or '.join(EMULATED)}")
    return EMULATED[network]


@contextlib.contextmanager
def places(network: str, roles: Sequence[str]) -> Iterator[Mapping[str, Place] | None]:
    """Where each role runs, for `local_session(places=...)`; None for "loopback", where all run here.

        with places("wan", ("data_owner", "model_owner", "dealer")) as found:
            with local_session(program, places=found) as session: ...

    Whatever still runs there at the end is ended, and the namespaces go. Those of a process that was killed go when the next
    are made; the parties themselves end with their caller, as on the loopback.
    Raises UsageError for a network that has no name here, SessionError that says why this machine cannot emulate one.
    """
    if network == LOOPBACK:
        yield None
        return
    with Network(roles, condition_of(network)) as made:
        yield {
            role: Place(made.address(role), tuple(inside(made.namespace(role), ())), f"{LABEL}:{network}")
            for role in roles
        }
