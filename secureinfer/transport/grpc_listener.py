"""A worker's data port: one gRPC server that takes the streams of one session's peers, and nothing else."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from ..errors import AuthenticationError, PeerError, SessionError
from .base import Clock
from .grpc_link import ACCEPTED_KEY, METHOD, SESSION_KEY, TOKEN_KEY, GrpcLink, options
from .limits import FLUSH_SECONDS, Limits
from .send_queue import SendQueue
from .tls import Credentials, Identity, peer_identity


class Listener:
    """A worker's data port: takes one stream from each expected peer of one session, and refuses all else.

    expected: who may connect, each with its token. ports: tried in order; 0 lets the system choose.
    Raises SessionError if no port is free.
    """

    def __init__(
        self,
        credentials: Credentials,
        bind: str,
        ports: range | tuple[int, ...],
        session_id: bytes,
        expected: Mapping[Identity, bytes],
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._expected = dict(expected)
        self._session_id = session_id
        self._clock = clock
        self._limits = limits
        self._links: dict[str, GrpcLink] = {}
        self._arrived = threading.Condition()
        # A handler's thread feeds its stream's sending side for the whole session, so each peer needs one;
        # one more answers those that are refused.
        workers = len(self._expected) + 1
        self._server = grpc.server(
            ThreadPoolExecutor(workers, thread_name_prefix="link"), options=options(limits.keepalive)
        )
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._stream)
        service, method = METHOD[1:].split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.port = bind_first(self._server, bind, ports, credentials.for_server())
        self._server.start()

    def _stream(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            identity = self._admit(context)
        except AuthenticationError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, error.for_peer)
        outgoing = SendQueue(self._limits.queued_bytes)
        with self._arrived:
            if identity.name in self._links:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, "this party is connected already")
            self._links[identity.name] = GrpcLink(
                identity.name, self._session_id, self._clock, self._limits, incoming, outgoing, context, None
            )
            context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
            self._arrived.notify_all()
        return outgoing

    def _admit(self, context: grpc.ServicerContext) -> Identity:
        identity = peer_identity(context)
        sent = dict(context.invocation_metadata() or ())
        token = self._expected.get(identity)
        if token is None:
            raise AuthenticationError(
                f"{identity} has no part in this session", public_detail="not a party of it"
            )
        if not _equal(sent.get(SESSION_KEY), self._session_id) or not _equal(sent.get(TOKEN_KEY), token):
            raise AuthenticationError(
                f"{identity} came with another session's token", public_detail="session token"
            )
        return identity

    def accept(self, peer: str, timeout: float) -> GrpcLink:
        """The link of a peer that dialled, waiting for it.

        Raises PeerError naming it after `timeout` seconds, and at once the reason for which another link
        ended.
        """
        stop = time.monotonic() + timeout
        with self._arrived:
            while peer not in self._links:
                ended = next((f for link in self._links.values() if (f := link.failure)), None)
                if ended is not None:
                    raise ended
                left = stop - time.monotonic()
                if left <= 0:
                    raise PeerError(peer, f"did not connect within {timeout:g} s")
                self._arrived.wait(min(left, 0.5))
            return self._links[peer]

    def close(self) -> None:
        """Close all links and the port."""
        links = list(self._links.values())
        patience = max((link.patience for link in links), default=0.0)
        for link in links:
            link.close()
        self._server.stop(patience).wait(FLUSH_SECONDS + 1)


def bind_first(
    server: grpc.Server, bind: str, ports: range | tuple[int, ...], credentials: grpc.ServerCredentials
) -> int:
    """Bind the first free port. Raises SessionError naming the range if none is."""
    for port in ports:
        try:
            bound = server.add_secure_port(f"{bind}:{port}", credentials)
        except RuntimeError:
            continue
        if bound:
            return int(bound)
    shown = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise SessionError(
        f"no free port among {shown} on {bind}; end what listens there or change the settings",
        public_detail="no free port",
    )


def _equal(a: object, b: bytes) -> bool:
    return isinstance(a, bytes) and hmac.compare_digest(a, b)
