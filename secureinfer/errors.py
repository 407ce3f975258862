"""Every error a caller can see: one tree, each class with its stable code, its gRPC status and the text a peer may read.

    SecureInferError
    ├── UsageError                  the call itself was wrong (exit code 2)
    │   ├── SettingsError           settings file: unknown key, bad value, unsafe choice without its switch
    │   ├── LimitError              more than a party's `limits` allow: says how much fits
    │   └── InputError              a tensor of the wrong shape, dtype, count, or not finite
    │       └── RangeError          a value outside the range the program was compiled for
    ├── CompileError                the model cannot become a program
    │   └── UnsupportedModelError   lists every unsupported node at once
    ├── ProgramFileError            a .si file is missing, truncated, foreign, or private where it must be public
    ├── SessionError                a session could not start or go on
    │   ├── HandshakeError          the parties do not agree; names the difference
    │   ├── AuthenticationError     certificate, role, name or token
    │   ├── PeerError               a peer died, stalled or went away; names it
    │   └── WireError               a frame that is not what the protocol expects here
    ├── CorrelationError            dealt randomness that is missing, already used, or for another step
    └── UnsafeError                 an unsafe choice without its `unsafe_` switch

The text of an exception is for its own side. What a peer reads is `public_text`, which is constant for each class, and
`public_detail`, which holds names and shapes of public things only; never a value, a share, a key or a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class SecureInferError(Exception):
    """Base of all errors of this package.

    code: stable, snake case. status: name of a gRPC status code. public_text: what a peer reads.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[str] = "INTERNAL"
    public_text: ClassVar[str] = "an internal error ended the session"

    def __init__(self, message: str, *, public_detail: str = "") -> None:
        super().__init__(message)
        self.public_detail = public_detail

    @property
    def for_peer(self) -> str:
        """The text that may leave this process."""
        return f"{self.public_text}: {self.public_detail}" if self.public_detail else self.public_text


class UsageError(SecureInferError):
    code = "usage"
    status = "INVALID_ARGUMENT"
    public_text = "the request was malformed"


class SettingsError(UsageError):
    code = "settings"
    status = "FAILED_PRECONDITION"
    public_text = "the peer's settings are not valid"


class LimitError(UsageError):
    code = "limit"
    status = "RESOURCE_EXHAUSTED"
    public_text = "more was asked for than a party's limits allow"


class InputError(UsageError):
    code = "input"
    public_text = "an input was refused before it was shared"


class RangeError(InputError):
    code = "range"
    status = "OUT_OF_RANGE"
    public_text = "an input was refused before it was shared"


class CompileError(SecureInferError):
    code = "compile"
    status = "FAILED_PRECONDITION"
    public_text = "the model could not be compiled"


@dataclass(frozen=True)
class UnsupportedNode:
    """One reason why a model cannot be compiled: node name, operator, module path and why."""

    node: str
    operator: str
    path: str
    reason: str


class UnsupportedModelError(CompileError):
    """The model has nodes that no kernel takes; `nodes` lists all of them."""

    code = "unsupported_model"
    status = "UNIMPLEMENTED"
    public_text = "the model has operators that are not supported"

    def __init__(self, nodes: Sequence[UnsupportedNode]) -> None:
        self.nodes = tuple(nodes)
        rows = "\n".join(
            f"  {n.path or '(top level)'}: {n.operator} (node {n.node}): {n.reason}" for n in self.nodes
        )
        super().__init__(f"{len(self.nodes)} node(s) of this model are not supported:\n{rows}")


class ProgramFileError(SecureInferError):
    code = "program_file"
    status = "FAILED_PRECONDITION"
    public_text = "the program file could not be used"


class SessionError(SecureInferError):
    code = "session"
    status = "ABORTED"
    public_text = "the session ended"


class HandshakeError(SessionError):
    code = "handshake"
    status = "FAILED_PRECONDITION"
    public_text = "the parties do not agree"


class AuthenticationError(SessionError):
    code = "authentication"
    status = "UNAUTHENTICATED"
    public_text = "the peer is not who the settings name"


class PeerError(SessionError):
    """A peer died, stalled past its deadline or closed; `peer` names it."""

    code = "peer"
    status = "UNAVAILABLE"
    public_text = "a peer is gone"

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(f"{peer}: {message}", public_detail=peer)
        self.peer = peer


class WireError(SessionError):
    code = "wire"
    status = "DATA_LOSS"
    public_text = "a frame was not what the protocol expects here"


class CorrelationError(SecureInferError):
    code = "correlation"
    status = "FAILED_PRECONDITION"
    public_text = "correlated randomness is missing or was already used"


class UnsafeError(SecureInferError):
    code = "unsafe"
    status = "PERMISSION_DENIED"
    public_text = "an unsafe choice was refused"


def catalogue() -> dict[str, type[SecureInferError]]:
    """code -> class, for every class of the tree."""
    found: dict[str, type[SecureInferError]] = {}
    todo: list[type[SecureInferError]] = [SecureInferError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return found
