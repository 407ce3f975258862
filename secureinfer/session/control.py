"""The client's side of a control port: open, join and close a session at a peer's daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc

from ..errors import AuthenticationError, PeerError, WireError
from ..transport.data import dialler
from ..transport.grpc_link import open_channel
from ..transport.preface import TOKEN_BYTES
from ..transport.tls import Credentials, Identity, who_answers
from ..v1 import control_pb2, control_pb2_grpc
from .faults import from_rpc
from .handshake import Hello

MAX_CONTROL_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a peer's worker waits for this party: its data port, the token that it takes, and the kind of data link.
    The token is not in the repr.
    """

    port: int
    token: bytes = field(repr=False)
    data_link: str = "tls"


class ControlClient:
    """One connection to a daemon's control port. deadline: seconds for each call, the connection included."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        peer: Identity,
        *,
        connect: float,
        deadline: float,
        keepalive: float,
    ) -> None:
        self._peer = peer
        self._deadline = deadline
        try:
            self._channel = open_channel(
                host, port, credentials, peer, keepalive, timeout=connect, max_message_bytes=MAX_CONTROL_BYTES
            )
        except PeerError as error:
            raise PeerError(
                error.peer,
                f"{str(error).removeprefix(f'{error.peer}: ')}; start it there with `secureinfer party --role "
                f"{peer.role.replace('_', '-')}`, or correct peers.{peer.role} in the settings; a firewall may also stand "
                f"before port {port}",
            ) from None
        except AuthenticationError as error:
            other = who_answers(host, port, credentials, min(2.0, connect))
            if other is None or other == str(peer):
                raise
            raise AuthenticationError(
                f"{other} answers at {host}:{port}, where the settings expect {peer}; check address and name in "
                f"peers.{peer.role}",
                public_detail=error.public_detail,
            ) from None
        self._stub: Any = control_pb2_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]

    def open(self, hello: Hello) -> Place:
        """Ask for a session, as its data owner. Raises what the peer refused it with, or PeerError."""
        request = control_pb2.OpenSessionRequest(hello=hello.to_message())
        return self._place(self._call(self._stub.OpenSession, request))

    def join(self, hello: Hello) -> Place:
        """Ask the dealer for the model owner's place in a session."""
        request = control_pb2.JoinSessionRequest(hello=hello.to_message())
        return self._place(self._call(self._stub.JoinSession, request))

    def close_session(self, session_id: bytes) -> None:
        self._call(self._stub.CloseSession, control_pb2.CloseSessionRequest(session_id=session_id))

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._deadline)
        except grpc.RpcError as error:
            raise from_rpc(error, self._peer.name, self._deadline) from None

    def _place(self, reply: control_pb2.SessionReply) -> Place:
        if not 0 < reply.port < 65536 or len(reply.token) != TOKEN_BYTES:
            raise WireError(f"{self._peer}: its answer names no place in the session")
        dialler(reply.data_link, self._peer.name)  # refused before anything is dialled
        return Place(reply.port, reply.token, reply.data_link)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
