"""Session: the caller's side. It holds no protocol state; its own party runs in a worker process too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..backends import has_dealer, has_exact_bytes
from ..config import Settings, load_settings, parse_network
from ..errors import LimitError, PeerError, SecureInferError, SessionError, SettingsError, UsageError
from ..graph.ir import MODEL_OWNER
from ..graph.structure import flatten_inputs, unflatten_output
from ..measure.figures import CallerTimings, PlannedStep, ProgramInfo
from ..plan.program import Program
from .inputs import check_inputs
from .launch import Child
from .room import Room, least
from .tensors import pack, unpack

if TYPE_CHECKING:
    from ..measure.report import Report

WORKER_MODULE = "secureinfer.session.worker"
SIGN_OF_LIFE_SECONDS = 30.0
CLOSE_SECONDS = 5.0
FAILED_CLOSE_SECONDS = 1.0


class Session:
    """Private inference on one program, with parties that are connected. Made by `local_session` and
    `connect`.

    Not for use by several threads at once. A refused input leaves it usable; after any other error it is
    closed. command: what starts this party's worker where its peers can be reached, as in `spawn`.
    """

    def __init__(
        self,
        program: Program,
        settings: Settings,
        *,
        engine: str | None = None,
        cleanup: Callable[[], None] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.program = program
        self._settings = settings
        self._dealt = has_dealer(program.backend)
        self._ready = 0  # prepared, at least so many
        self._outstanding = 0  # prepared or ordered, and not yet used
        self._online_ms: dict[int, float] = {}
        self._failed: SecureInferError | None = None
        start = time.perf_counter()
        self._worker = Child(
            WORKER_MODULE,
            settings.name,
            {"settings": settings.model_dump(mode="json"), "engine": engine},
            {"OMP_NUM_THREADS": str(settings.worker_threads)},
            command,
        )
        # Runs once: at close, when this object is collected, or when the interpreter ends.
        self._polite = [True]
        self._finish = weakref.finalize(self, _finish, self._worker, cleanup, self._polite)
        try:
            body, _ = self._worker.receive(SIGN_OF_LIFE_SECONDS)
        except BaseException:
            self._polite[0] = False
            self._finish()
            raise
        self._setup_ms = 1000 * (time.perf_counter() - start)
        self._fewest, self._room = least({name: Room(**room) for name, room in body["rooms"].items()})

    def prepare(self, n: int = 1, wait: bool = True) -> None:
        """Make the correlated randomness of `n` inferences ahead of their inputs (the offline phase).

        wait: return when all is there. Raises LimitError, and does nothing, where that is more than every party keeps.
        wait=False returns at once: dealing goes on while inferences run, and what does not fit waits until they have used
        some. A fault meanwhile is raised by the next call. Without a dealer (CKKS) there is nothing to prepare: it sends
        nothing, and infer is the same.
        """
        self._check_open()
        if type(n) is not int or n < 0:
            raise UsageError(f"prepare takes how many inferences to prepare, got {n!r}")
        if not self._dealt:
            return
        room = self._room.inferences
        if wait and n and self._outstanding + n > room:
            raise LimitError(
                f"{self._outstanding} inferences are prepared or ordered, and {n} more do not fit: {self._fewest} keeps "
                f"material of {room} at most ({self._room}). Prepare at most {max(0, room - self._outstanding)}, use "
                "prepare(n, wait=False), which deals on as inferences make room, or raise the limit there"
            )
        if n:
            self._take(self._request({"op": "prepare", "n": n, "wait": wait})[0])
            self._outstanding += n

    def prepared(self, *, refresh: bool = True) -> int:
        """How many inferences are prepared and not yet used; 0 where nothing is to be (CKKS).

        refresh=False asks nobody: so many at least, as the last call left it.
        """
        self._check_open()
        if refresh and self._dealt:
            self._take(self._request({"op": "prepare", "n": 0, "wait": False})[0])
        return self._ready

    @property
    def room(self) -> int | None:
        """Of how many inferences every party keeps material, that of a running one included; None without a dealer."""
        return self._room.inferences if self._dealt else None

    def infer(self, *inputs: Any, **named: Any) -> Any:
        """The model's answer, in the model's own output structure.

        Inputs as the model's forward takes them. Raises InputError or RangeError before anything is sent, and
        then the session stays usable. Takes what was prepared first, waits for it if it is being dealt, and prepares if
        nothing was.
        """
        self._check_open()
        tensors = check_inputs(
            self.program.graph, flatten_inputs(self.program.graph.input_spec, inputs, named)
        )
        if self._dealt:
            self._take_prepared()
        start = time.perf_counter()
        heads, blobs = pack(tensors)
        body, answer = self._request({"op": "infer", "inputs": heads}, list(blobs))
        self._take(body)
        outputs = unpack(body["outputs"], answer)
        missing = [name for name in self.program.graph.outputs if name not in outputs]
        if missing:
            raise SessionError(f"this party is not among those that get the outputs ({', '.join(missing)})")
        result = unflatten_output(self.program.graph.output_spec, outputs)
        self._online_ms[int(body["index"])] = 1000 * (time.perf_counter() - start)
        return result

    def report(self) -> Report:
        """What the session has cost so far, at every party."""
        from ..measure.environment import network_between
        from ..measure.report import build_report

        body, _ = self._request({"op": "report"})
        # Dealing may go on without a call, so that the workers' clocks are those of the offline phase.
        timings = CallerTimings(self._setup_ms, online=dict(self._online_ms))
        dialled = self._settings.peers
        peers = (dialled.model_owner, dialled.dealer if self._dealt else None)
        stated = self._settings.network
        network = network_between(
            [peer.host for peer in peers if peer is not None], None if stated is None else stated.model_dump()
        )
        info = _program_info(self.program, self._settings)
        return build_report(info, body["parties"], timings, network=network)

    def close(self) -> None:
        """End the session at every party. May be called twice."""
        if self._failed is None:
            self._failed = SessionError("the session is closed; open a new one")
        self._finish()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session of {self._settings.name} {'open' if self._failed is None else 'closed'}>"

    def _take_prepared(self) -> None:
        """Wait until an inference is prepared, which is as good as used then."""
        if not self._outstanding:
            self.prepare()
        elif not self._ready:
            self._take(self._request({"op": "await"})[0])
        self._outstanding -= 1

    def _take(self, body: dict[str, Any]) -> None:
        self._ready = int(body["ready"])

    def _check_open(self) -> None:
        if self._failed is not None:
            raise SessionError(f"the session has ended: {self._failed}")

    def _request(
        self, body: dict[str, Any], blobs: list[Any] | None = None
    ) -> tuple[dict[str, Any], list[bytearray]]:
        self._check_open()
        try:
            return self._worker.request(body, blobs, timeout=SIGN_OF_LIFE_SECONDS)
        except BaseException as error:
            # Also an interrupt: the answer that is still to come would be taken for the next call's.
            self._failed = (
                error if isinstance(error, SecureInferError) else SessionError("a call was interrupted")
            )
            self._polite[0] = False
            self._finish()
            raise


def connect(config: str | os.PathLike[str], *, network: str | None = None) -> Session:
    """Open a session with remote parties, as the data owner of a settings file.

    network: what reports say lies between the parties, in place of the settings' word: "lan", "emulated:wan-40ms".
    Raises SettingsError, ProgramFileError, HandshakeError, AuthenticationError, or PeerError that names who
    is missing.
    """
    settings = load_settings(Path(config))
    if settings.role != "data_owner":
        raise UsageError(f"{config} is a {settings.role}'s settings; only a data owner opens sessions")
    if network is not None:
        settings = settings.model_copy(update={"network": parse_network(network)})
    program = Program.load(settings.program, allow_private=False)
    if MODEL_OWNER in program.graph.reveal_to and not settings.reveal_to_model_owner:
        # The file usually comes from the model owner, and an output can be an input that went through nothing.
        raise SettingsError(
            f"{settings.program.name} shows its outputs to the model owner; if you agree to that, set "
            "reveal_to_model_owner = true"
        )
    return Session(program, settings)


def _finish(worker: Child, cleanup: Callable[[], None] | None, polite: list[bool]) -> None:
    """End the worker; politely, unless it or its session failed. Then whatever else belongs to the
    session.
    """
    try:
        if polite[0]:
            with contextlib.suppress(PeerError, OSError, subprocess.TimeoutExpired):
                worker.pipe.send({"op": "close"}, timeout=1.0)
                worker.process.wait(CLOSE_SECONDS)
        worker.stop(FAILED_CLOSE_SECONDS)
    finally:
        if cleanup is not None:
            cleanup()


def _program_info(program: Program, settings: Settings) -> ProgramInfo:
    totals = program.plan.totals
    options = [k for k, v in program.options.items() if k.startswith("unsafe_") and v]
    steps = tuple(
        PlannedStep(
            step.index,
            step.node.path,
            step.node.op,
            step.kernel,
            step.cost.rounds,
            step.cost.bytes,
            step.cost.dealt_bytes,
        )
        for step in program.plan.steps
    )
    return ProgramInfo(
        manifest_digest=program.manifest_digest,
        weights_digest=program.weights_digest,
        backend=program.backend,
        protocol=program.protocol,
        unsafe=tuple(sorted({*options, *settings.unsafe})),
        steps=steps,
        rounds=totals.rounds,
        setup_bytes=totals.setup_bytes,
        dealer=has_dealer(program.backend),
        exact_bytes=has_exact_bytes(program.backend),
    )
