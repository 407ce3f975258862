"""Backends: plaintext (the oracle), mpc (CrypTen), ckks (TenSEAL), each an Engine with a catalog of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import cores
from ..errors import SettingsError

if TYPE_CHECKING:
    from ..plan.program import Program
    from ..plan.spec import Registry
    from ..transport.base import Clock, Link
    from .base import Engine


CATALOGS = {
    ("mpc", "fast"): "mpc.fast.catalog",
    ("mpc", "crypten"): "mpc.catalog",
    ("ckks", "ckks"): "ckks.catalog",
    ("plaintext", "plaintext"): "plaintext.catalog",
}
"""(backend, protocol) -> where its rows are; the first of a backend is its default."""


def catalog(backend: str, protocol: str | None = None) -> Registry:
    """The rows of a backend's kernels. They are declarations: loading them needs no cryptography.

    Raises SettingsError for a backend or a protocol that does not exist.
    """
    module = CATALOGS.get((backend, protocol or default_protocol(backend)))
    if module is None:
        known = ", ".join(p for b, p in CATALOGS if b == backend)
        raise SettingsError(
            f"protocol {protocol!r} does not exist in backend {backend}; choose one of {known}"
        )
    found: Registry = importlib.import_module(f".{module}", __name__).CATALOG
    return found


def default_protocol(backend: str) -> str:
    """The first protocol of a backend. Raises SettingsError for a backend that does not exist."""
    for name, protocol in CATALOGS:
        if name == backend:
            return protocol
    known = ", ".join(dict.fromkeys(b for b, _ in CATALOGS))
    raise SettingsError(f"backend {backend!r} does not exist; choose one of {known}")


def has_dealer(backend: str) -> bool:
    """Whether a session of this backend has a dealer, and with it an offline phase. Needs no torch: daemons ask."""
    return backend == "mpc"


def has_exact_bytes(backend: str) -> bool:
    """Whether a plan's bytes are what is sent, to the byte. Ciphertexts and keys of ckks are compressed: its are bounds."""
    return backend != "ckks"


def compile_steps(backend: str) -> None:
    """Compile local steps on many values in the background from now on: see mpc/fast/fused.py. No other backend has any."""
    if backend != "mpc":
        return
    from .mpc.fast import fused

    fused.enable()


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
    spool_folder: Path | None = None,
    threads: int | None = None,
) -> Engine:
    """The engine of one party of one session, for the program's backend. See backends/base.Engine for the order of calls.

    role: data_owner, model_owner or dealer. compute_parties: names in rank order. dealer: its name, empty where the backend
    has none. links: by peer name. spool_folder: where an owner keeps dealt material, encrypted, instead of in memory.
    threads: as the settings say; of a CKKS model owner, processes that it computes with, by default one a core; of an owner
    in MPC, for what it computes while the others wait, by default all cores.
    Raises SettingsError for a backend that has no parties, ProgramFileError for a plan that must not run.
    """
    if program.backend not in ("mpc", "ckks"):
        raise SettingsError(
            f"backend {program.backend!r} has no session between parties; compile with backend='mpc' or 'ckks'"
        )
    from ..plan.check import check_plan

    registry = catalog(program.backend, program.protocol)
    check_plan(program.graph, program.plan, registry, len(compute_parties), program.options)
    if program.backend == "ckks":
        from .ckks.engine import make_engine as make_ckks

        return make_ckks(
            role,
            program,
            me=me,
            compute_parties=compute_parties,
            links=links,
            clock=clock,
            session_id=session_id,
            processes=threads or cores(),
        )
    from .mpc.engine import make_engine as make_mpc

    return make_mpc(
        role,
        program,
        me=me,
        compute_parties=compute_parties,
        dealer=dealer,
        links=links,
        clock=clock,
        session_id=session_id,
        spool_folder=spool_folder,
        cores=threads or cores(),
    )
