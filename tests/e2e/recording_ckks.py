"""The CKKS backend, with a record of its secrets: each process appends "kind hex" lines to its own file in RECORDS.

Secrets are the first residues of the data owner's key, and what it decrypts. Beside RECORDS, in a file "<pid>.open", a
process notes all that it has open for writing, as often as it looks while the engine works.
The file that RECORDING_FAULT names may hold "role:kind": the model owner dies within an inference (die), or the data owner
logs its key, keeps it in a file for a moment, and raises what it decrypted (plant).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from secureinfer import backends
from secureinfer.backends.base import Engine

NAME = "recording_ckks:make"
WATCH_SECONDS = 0.0005
RESIDUES = 64


def record(kind: str, raw: bytes) -> None:
    with (Path(os.environ["RECORDS"]) / str(os.getpid())).open("a") as file:
        file.write(f"{kind} {raw.hex()}\n")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Note what this process has open for writing on any disk, until the block ends."""
    done = threading.Event()
    seen: set[str] = set()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/self/fd/{fd}")
                    (flags,) = (
                        line.split()[1]
                        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                        if line.startswith("flags:")
                    )
                    if target.startswith("/") and int(flags, 8) & 3:
                        seen.add(target)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with (Path(os.environ["RECORDS"]).parent / f"{os.getpid()}.open").open("a") as file:
            file.writelines(f"{target}\n" for target in sorted(seen))


def _fault(role: str) -> str:
    file = Path(os.environ["RECORDING_FAULT"])
    at, _, kind = file.read_text().partition(":") if file.exists() else ("", "", "")
    return kind if at == role else ""


def _residues(client: Any) -> bytes:
    key = client._generator.secret_key()
    return struct.pack(f"<{RESIDUES}Q", *(key.data().data(i) for i in range(RESIDUES)))


def _plant(engine: Any) -> None:
    from secureinfer.backends.ckks.sealed import dump

    client = engine._client
    logging.getLogger("secureinfer.backends").debug("the key begins with %s", _residues(client)[:16].hex())
    with tempfile.NamedTemporaryFile() as file:  # gone again before anybody lists the folder
        file.write(dump(client._generator.secret_key()))
        file.flush()
        time.sleep(0.05)
    (Path(tempfile.gettempdir()) / "forgotten.bin").write_bytes(_residues(client))
    decrypt = client.decrypt

    def telling(*args: Any) -> Any:
        raise ValueError(f"it decrypted {decrypt(*args)[:4].tolist()}")  # and nobody may read that

    client.decrypt = telling


def make(role: str, program: Any, **kwargs: Any) -> Engine:
    engine: Any = backends.make_engine(role, program, **kwargs)
    setup, run = engine.setup, engine.run

    def recorded_setup() -> None:
        with watched():
            setup()
            if role == "data_owner":
                record("secret key", _residues(engine._client))
                decrypt = engine._client.decrypt

                def decrypted(*args: Any) -> Any:
                    found = decrypt(*args)
                    record("decrypted", found[:32].tobytes())
                    return found

                engine._client.decrypt = decrypted

    def recorded_run(index: int, inputs: Mapping[str, Any] | None) -> Any:
        if _fault(role) == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        with watched():
            if _fault(role) == "plant":
                _plant(engine)
            return run(index, inputs)

    engine.setup, engine.run = recorded_setup, recorded_run
    return engine  # type: ignore[no-any-return]
