"""Parts of a worker's process: the pipe to whoever started it, and the loading of its program."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..config import Settings
from ..errors import SecureInferError, SessionError
from ..transport.wire import Pipe

if TYPE_CHECKING:
    from ..plan.program import Program

HEARTBEAT_SECONDS = 1.0
GRACE_SECONDS = 2.0

Message = tuple[dict[str, Any], list[bytearray]]


class Parent:
    """The starter's end of the pipe: its messages in a queue, and the end of this process when it goes
    away.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def watch(self) -> None:
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._pipe.receive())
        except (SecureInferError, OSError):
            self._messages.put(None)
            time.sleep(GRACE_SECONDS)
            # The main thread is inside a computation or a wait that nobody needs any more. The system closes
            # the sockets, which the peers see at once, and frees the memory that held shares and seeds.
            os._exit(0)

    def next(self, timeout: float | None = None) -> Message | None:
        """The next message; None when the starter is gone. Raises queue.Empty after `timeout` seconds."""
        return self._messages.get(timeout=timeout)

    def send(self, body: dict[str, Any], blobs: list[Any] | None = None) -> None:
        with self._lock:
            self._pipe.send(body, blobs or [])

    def _beat(self) -> None:
        with self._lock:
            # A starter that is stopped reads nothing: beats must leave room for the word that ends the session.
            if select.select([], [self._pipe.sock], [], 0)[1]:
                self._pipe.send({"alive": True})

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Tell the starter now and then that this process is alive, during a call or a listening party's whole life."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT_SECONDS):
                with contextlib.suppress(SecureInferError, OSError, ValueError):
                    self._beat()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class Loading:
    """A program and its engine's code, loaded in a thread of its own while the links come up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._program: Program | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._load, name="loading", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        try:
            import torch

            from .. import backends  # noqa: F401
            from ..plan.program import Program

            torch.set_num_threads(self._settings.worker_threads)
            private = self._settings.role == "model_owner"
            self._program = Program.load(self._settings.program, allow_private=private)
        except BaseException as error:
            self._error = error

    def result(self) -> Program:
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._program is None:
            raise SessionError("the program was not loaded")
        return self._program
