"""An independent witness of bytes: a TCP proxy that counts what passes, and knows nothing of our frames."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from types import TracebackType

CHUNK_BYTES = 1 << 18


@dataclass
class Passed:
    """Payload bytes of TCP in each direction."""

    to_target: int = 0
    to_client: int = 0

    @property
    def total(self) -> int:
        return self.to_target + self.to_client


class CountingProxy:
    """Listens on a loopback port and forwards every connection to `target`, counting socket bytes both ways.

    It ends with the `with` block. A count lags what it handed on by one chunk at most.
    """

    def __init__(self, target: tuple[str, int], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        self._listener = socket.create_server((host, port))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._passed = Passed()
        self._open: list[socket.socket] = []
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="counting-proxy", daemon=True)

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closing = True
            sockets = [self._listener, *self._open]
        for sock in sockets:
            _hang_up(sock)
        self._thread.join(timeout=5)

    def passed(self) -> Passed:
        """A snapshot of the counts."""
        with self._lock:
            return Passed(self._passed.to_target, self._passed.to_client)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed
            try:
                server = socket.create_connection(self.target, timeout=10)
            except OSError:
                client.close()  # the client sees what it would see without the proxy: nobody there
                continue
            server.settimeout(None)
            with self._lock:
                self._open += [client, server]
                closing = self._closing
            for source, sink, field in ((client, server, "to_target"), (server, client, "to_client")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(source, sink, field), daemon=True).start()
            if closing:
                _hang_up(client)
                _hang_up(server)

    def _pump(self, source: socket.socket, sink: socket.socket, field: str) -> None:
        try:
            while data := source.recv(CHUNK_BYTES):
                sink.sendall(data)
                with self._lock:
                    setattr(self._passed, field, getattr(self._passed, field) + len(data))
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            _hang_up(sink)  # one side went away: let the other see it
            _hang_up(source)


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was never connected, or is already down
    sock.close()
