"""Backends: plaintext (the oracle), mpc (CrypTen), each an Engine with a catalog of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SettingsError

if TYPE_CHECKING:
    from ..plan.program import Program
    from ..transport.base import Clock, Link
    from .base import Engine


def make_engine(
    role: str,
    program: Program,
    *,
    me: str,
    compute_parties: Sequence[str],
    dealer: str,
    links: Mapping[str, Link],
    clock: Clock,
    session_id: bytes,
) -> Engine:
    """The engine of one party of one session, for the program's backend. See backends/base.Engine for the order of calls.

    role: data_owner, model_owner or dealer. compute_parties: names in rank order. links: by peer name.
    Raises SettingsError for a backend that has no parties, ProgramFileError for a plan that must not run.
    """
    if program.backend == "mpc":
        from ..plan.check import check_plan
        from .mpc.catalog import CATALOG
        from .mpc.engine import make_engine as make_mpc

        check_plan(program.graph, program.plan, CATALOG, len(compute_parties), program.options)
        return make_mpc(
            role,
            program,
            me=me,
            compute_parties=compute_parties,
            dealer=dealer,
            links=links,
            clock=clock,
            session_id=session_id,
        )
    raise SettingsError(
        f"backend {program.backend!r} has no session between parties; compile with backend='mpc'"
    )
