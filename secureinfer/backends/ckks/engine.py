"""Engines of the two parties of a CKKS session.

    data owner                                   model owner
      setup:  fresh keys; relinearisation, Galois and, for circuit privacy, public key  ->  check, keep
      run:    inputs, packed and encrypted, one frame a ciphertext                      ->  matrices and polynomials
              decrypt, unpack                                        <-  outputs, one frame a ciphertext

The model owner's process never loads what makes or holds a secret key (rule K2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import ProgramFileError, SecureInferError, SessionError
from ...plan.program import Program
from ...transport.base import Clock, Link
from ..base import Engine
from .common import Common


def make_engine(
    role: str,
    program: Program,
    *,
    me: str,
    compute_parties: Sequence[str],
    links: Mapping[str, Link],
    clock: Clock,
    session_id: bytes,
    processes: int = 1,
) -> Engine:
    """The engine of one party. processes: that a model owner computes with.

    Raises ProgramFileError for a program that no compilation gives, SettingsError where TenSEAL is not installed.
    """
    if role not in ("data_owner", "model_owner"):
        raise SessionError("CKKS has a data owner and a model owner, and no dealer")
    (peer,) = (name for name in compute_parties if name != me)
    common = Common(program, links[peer], session_id)
    if role == "data_owner":
        from .data_owner import DataOwnerEngine

        return DataOwnerEngine(common)
    from .model_owner import ModelOwnerEngine

    try:
        return ModelOwnerEngine(common, me, processes)
    except SecureInferError:
        raise
    except Exception as error:  # steps that do not fit together, in its own file
        raise ProgramFileError(
            f"this program is not what compiling gives: its steps do not fit ({type(error).__name__}); compile the model "
            "again",
            public_detail="steps",
        ) from error
