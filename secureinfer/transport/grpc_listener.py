"""A worker's data port: one gRPC server that takes the streams of one session's peers, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from ..errors import AuthenticationError
from .base import Clock
from .data_port import DataPort, no_free_port
from .grpc_link import ACCEPTED_KEY, METHOD, SESSION_KEY, TOKEN_KEY, GrpcLink, options
from .limits import FLUSH_SECONDS, Limits
from .send_queue import SendQueue
from .tls import Credentials, Identity, peer_identity


class Listener(DataPort[GrpcLink]):
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
        super().__init__(session_id, expected)
        self._clock = clock
        self._limits = limits
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
        self._check(identity, sent.get(SESSION_KEY), sent.get(TOKEN_KEY))
        return identity

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
    raise no_free_port(bind, ports)
