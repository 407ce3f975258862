"""Errors between processes: over a worker's pipe with their text, over gRPC with their public text alone."""

from __future__ import annotations

import logging
import traceback
from typing import Any, NoReturn

import grpc

from ..errors import (
    AuthenticationError,
    PeerError,
    SecureInferError,
    SessionError,
    UnsupportedModelError,
    catalogue,
)

log = logging.getLogger("secureinfer.session")

_CODE_KEY = "secureinfer-code"
_MAX_TEXT = 4000


def to_json(error: BaseException, party: str) -> dict[str, Any]:
    """An error for the process that started this one, which belongs to the same party."""
    error = told(error, party)
    body = {"code": error.code, "message": str(error), "detail": error.public_detail}
    if isinstance(error, PeerError):
        body["peer"] = error.peer
        body["message"] = str(error).removeprefix(f"{error.peer}: ")
    return body


def told(error: BaseException, party: str) -> SecureInferError:
    """The error itself, or one of ours in its place: a foreign one is logged, by its kind and place alone, since its text
    may quote a value.
    """
    if isinstance(error, SecureInferError):
        return error
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: unexpected %s\n%s", party, type(error).__name__, where)
    return SessionError(f"{party}: unexpected {type(error).__name__} in its worker; its log says where")


def from_json(body: dict[str, Any]) -> SecureInferError:
    cls = catalogue().get(str(body.get("code")), SessionError)
    message = str(body.get("message") or "it ended and did not say why")[:_MAX_TEXT]
    if cls is PeerError:
        return PeerError(str(body.get("peer", "")), message)
    if cls is UnsupportedModelError:
        cls = SessionError
    return cls(message, public_detail=str(body.get("detail", ""))[:_MAX_TEXT])


def abort(context: grpc.ServicerContext, error: SecureInferError) -> NoReturn:
    """End an RPC with an error's status, code and public text."""
    context.set_trailing_metadata(((_CODE_KEY, error.code),))
    context.abort(getattr(grpc.StatusCode, error.status), error.for_peer[:_MAX_TEXT])
    raise error  # not reached: abort raises


def from_rpc(error: grpc.RpcError, peer: str, deadline: float) -> SecureInferError:
    """The error that a peer ended an RPC with, or what its silence means."""
    if not isinstance(error, grpc.Call):
        return PeerError(peer, "its connection broke")
    code = dict(error.trailing_metadata() or ()).get(_CODE_KEY)
    details = "".join(c for c in (error.details() or "") if c.isprintable())[:_MAX_TEXT]
    if isinstance(code, str):
        cls = catalogue().get(code, SessionError)
        if cls is PeerError:
            return PeerError(peer, f"could not begin the session: {details}")
        if cls is UnsupportedModelError:
            cls = SessionError
        return cls(f"{peer}: {details}")
    status = error.code()
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerError(peer, f"gave no answer within {deadline:g} s")
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{peer} refused: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return SessionError(f"{peer}: it has no room for the call now; try again later")
    return PeerError(peer, f"is gone or ended the call ({status.name.lower().replace('_', ' ')})")
