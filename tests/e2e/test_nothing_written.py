"""Nothing that is written holds a share, a mask, a seed, a key, a token, an input or an output.

Real parties run with every logger at DEBUG. Their session answers, refuses inputs, and ends with a party that dies in the
middle of an inference. Then all that any process wrote is searched: standard output and error, logs, reports, texts of
errors, every file under their home, working and temporary folders, dealt material in files without a name too; and the
command lines and environments of all processes. The secrets come from inside the processes (recording_engine.py). A second
session plants some of them, and breaks with an error that quotes others: the same search must find the ones, and not the
others.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROWS, COLUMNS = 2, 16

# Runs at the start of every Python process of the session, before anything of ours does.
START = r"""
import logging, os, pathlib, secrets

pid = os.getpid()
written, records = pathlib.Path(os.environ["WRITTEN"]), pathlib.Path(os.environ["RECORDS"])
handlers = [logging.StreamHandler(), logging.FileHandler(written / f"{pid}.log")]
logging.basicConfig(level=logging.DEBUG, handlers=handlers, format="%(asctime)s %(name)s %(levelname)s %(message)s")
for name in ("cmdline", "environ"):
    (written / f"{pid}.{name}").write_bytes(pathlib.Path(f"/proc/self/{name}").read_bytes())
inner = secrets.token_bytes

def token_bytes(count=None):
    made = inner(count)
    if count == 32 and b"session.daemon" in pathlib.Path("/proc/self/cmdline").read_bytes():
        with (records / str(pid)).open("a") as file:
            file.write(f"token {made.hex()}\n")
    return made

secrets.token_bytes = token_bytes
"""

CALLER = r"""
import base64, contextlib, os, pathlib, sys, traceback
import numpy as np, torch
import secureinfer as si
from secureinfer.session.client import Session
from secureinfer.session.local import LocalParties

rows, columns = int(sys.argv[1]), int(sys.argv[2])
fault = pathlib.Path(os.environ["RECORDING_FAULT"])

def given():
    raw = sys.stdin.buffer.read(4 * rows * columns)
    return torch.from_numpy(np.frombuffer(raw, np.float32).reshape(rows, columns).copy())

def told(call):
    try:
        call()
        print("no error")
    except Exception as error:
        print(repr(error), str(error), error.args, vars(error), flush=True)
        traceback.print_exc(file=sys.stdout)

def keep_nameless_files():
    # What lies on disk without a name, as dealt material does, for as long as a process has it open.
    mark = f"RECORDS={os.environ['RECORDS']}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                for fd in (process / "fd").iterdir():
                    if os.readlink(fd).endswith(" (deleted)") and fd.is_file():
                        copy = pathlib.Path(os.environ["WRITTEN"]) / f"{process.name}-{fd.name}.nameless"
                        copy.write_bytes(fd.read_bytes())

def opened():
    return Session(parties.program, parties.settings, engine="recording_engine:make")

x, beyond = given(), given()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(columns, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
program = si.compile(model, torch.ones(rows, columns) * 1e6)
on_disk = {"material": "disk", "material_folder": os.environ["TMPDIR"]}
overrides = {"data_owner": on_disk, "model_owner": on_disk}
parties = LocalParties(program, engine="recording_engine:make", threads=1, overrides=overrides)
with opened() as session:
    session.prepare()
    keep_nameless_files()
    answer = session.infer(x)
    torch.testing.assert_close(answer, model(x), rtol=1e-3, atol=50)
    with (pathlib.Path(os.environ["RECORDS"]) / "caller").open("w") as file:
        file.write(f"output {answer.detach().numpy().tobytes().hex()}\n")
    report = session.report()
    print(report.to_dict(), report, repr(report), session, vars(session))
    told(lambda: session.infer(beyond))
    told(lambda: session.infer(x.double().half()))
    fault.write_text("model_owner:die")
    told(lambda: session.infer(x))
    told(lambda: session.infer(x))
print("clean", flush=True)
sys.stdin.buffer.read(1)
with opened() as session:
    fault.write_text("data_owner:plant")
    told(lambda: session.infer(x))
    told(lambda: (_ for _ in ()).throw(ValueError(base64.b64encode(x.numpy().tobytes()))))
parties.close()
print("planted", flush=True)
"""


# --- the search ---


def renderings(raw: bytes) -> Iterator[bytes]:
    """Some bytes as a program may write them, also within longer ones."""
    yield raw
    yield raw.hex().encode()
    yield raw.hex().upper().encode()
    yield repr(raw)[2:-1].encode()
    yield from (sign.join(str(b) for b in raw).encode() for sign in (", ", ",", " "))
    for shift in range(3):
        # What does not share a character with the neighbours: the same wherever the bytes lie in a longer text.
        part = base64.b64encode(bytes(shift) + raw)[-(-8 * shift // 6) : (8 * (shift + len(raw))) // 6]
        yield part
        yield part.translate(bytes.maketrans(b"+/", b"-_"))
    if len(raw) == 8:
        yield str(abs(int.from_bytes(raw, "little", signed=True))).encode()


@dataclass
class Secrets:
    """What must not be written: bytes as they lie in memory, and numbers. Each with its kind."""

    chunks: dict[bytes, str] = field(default_factory=dict)
    numbers: list[tuple[float, str]] = field(default_factory=list)

    def add(self, kind: str, raw: bytes, size: int = 8) -> None:
        """Chunks of so many bytes. One with few different bytes is no secret, and could stand anywhere."""
        for at in range(0, len(raw) - size + 1, size):
            chunk = raw[at : at + size]
            if len(set(chunk)) >= 5:
                self.chunks[chunk] = kind

    def add_values(self, kind: str, values: np.ndarray) -> None:
        flat = values.reshape(-1)
        self.add(kind, flat.astype(np.float32).tobytes())
        self.add(kind, flat.astype(np.float64).tobytes(), 16)
        fixed = np.rint(flat.astype(np.float64) * 2**16)
        self.add(kind, fixed.astype(np.int64).tobytes(), 16)
        self.numbers += [(abs(float(v)), kind) for v in (*flat, *fixed)]

    def found_in(self, data: bytes) -> set[str]:
        """The kinds of secrets that stand in the data."""
        kinds = {kind for raw, kind in self.chunks.items() if any(text in data for text in renderings(raw))}
        for token in set(re.findall(rb"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?", data)):
            # Eight digits of a value are no accident, however they were rounded.
            digits = len(re.sub(rb"[.]|[eE].*", b"", token).strip(b"0"))
            if digits >= 7:
                value = float(token)
                kinds |= {kind for number, kind in self.numbers if abs(value - number) <= 2e-7 * number}
        return kinds


# --- the world in which the parties run ---


@dataclass
class World:
    """Everything that the processes may write lies under `folder`, and what they recorded in `records`."""

    folder: Path
    records: Path
    caller: subprocess.Popen[bytes]
    secrets: Secrets
    keys: set[Path] = field(default_factory=set)

    def wait(self, word: bytes) -> None:
        """Until the caller has said a word; what it says goes to a file."""
        out = self.folder / "stdout"
        with out.open("ab") as file:
            while line := self.caller.stdout.readline():  # type: ignore[union-attr]
                file.write(line)
                if line.strip() == word:
                    return
        raise AssertionError(out.read_bytes() + (self.folder / "stderr").read_bytes())

    def planted(self) -> dict[str, set[str]]:
        """What is found once the caller has gone on, and planted some."""
        assert self.caller.stdin is not None
        self.caller.stdin.write(b".")
        self.caller.stdin.flush()
        self.wait(b"planted")
        self.gather()
        return self.search()

    def gather(self) -> None:
        """The secrets that were recorded so far, and the private keys of TLS, wherever else they may stand."""
        for file in self.records.iterdir():
            for line in file.read_text().splitlines():
                kind, _, raw = line.rpartition(" ")
                if kind == "output":
                    self.secrets.add_values(kind, np.frombuffer(bytes.fromhex(raw), np.float32))
                else:
                    self.secrets.add(kind, bytes.fromhex(raw))
        for file in self.folder.rglob("certs/*.key"):
            self.keys.add(file)
            key = serialization.load_pem_private_key(file.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self.secrets.add("private key", key.private_numbers().private_value.to_bytes(32, "big"))

    def search(self) -> dict[str, set[str]]:
        """Kind of secret -> files that hold one."""
        found: dict[str, set[str]] = defaultdict(set)
        for file in self.folder.rglob("*"):
            if file.is_file() and file not in self.keys:
                data = str(file.relative_to(self.folder)).encode() + b"\n" + file.read_bytes()
                for kind in self.secrets.found_in(data):
                    found[kind].add(file.name)
        return dict(found)


@contextlib.contextmanager
def watched(
    folders: pytest.TempPathFactory,
    code: str,
    sizes: Sequence[int],
    given: Sequence[np.ndarray],
    **environment: str,
) -> Iterator[World]:
    """A caller that has said "clean", and all that it and its parties write. code, sizes: what it runs, and its arguments.
    given: inputs that it reads, float32, which are secrets.
    """
    folder, hidden = folders.mktemp("written"), folders.mktemp("hidden")
    (hidden / "records").mkdir()
    (hidden / "start").mkdir()
    (hidden / "start" / "sitecustomize.py").write_text(START)
    for name in ("home", "work", "tmp", "processes"):
        (folder / name).mkdir()
    with (folder / "stderr").open("wb") as err:
        caller = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            cwd=folder / "work",
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "PYTEST"))},
                "PYTHONPATH": os.pathsep.join([str(hidden / "start"), str(HERE), str(ROOT)]),
                "HOME": str(folder / "home"),
                "TMPDIR": str(folder / "tmp"),
                "WRITTEN": str(folder / "processes"),
                "RECORDS": str(hidden / "records"),
                "RECORDING_FAULT": str(hidden / "fault"),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )
    secrets = Secrets()
    made = World(folder, hidden / "records", caller, secrets)
    assert caller.stdin is not None
    for values in given:
        secrets.add_values("input", values)
        caller.stdin.write(values.tobytes())
    caller.stdin.flush()
    try:
        made.wait(b"clean")
        yield made
    finally:
        caller.kill()  # its parties end with it
        caller.communicate()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    rng, shape = np.random.default_rng(), (ROWS, COLUMNS)
    x, beyond = rng.uniform(1e5, 1e6, shape), rng.uniform(1e12, 1e13, shape)
    given = [x.astype(np.float32), beyond.astype(np.float32)]
    with watched(tmp_path_factory, CALLER, shape, given, GRPC_VERBOSITY="DEBUG") as made:
        yield made


def test_nothing_that_is_written_holds_a_secret_and_what_is_planted_is_found(world: World) -> None:
    world.gather()
    kinds = {*world.secrets.chunks.values()}
    assert kinds == {
        "input", "output", "seed", "stream key", "nonce", "mask", "share", "token", "private key",
    }  # fmt: skip
    assert world.search() == {}

    # All of that was looked at: errors of each kind, reports, logs of every process, files of the session.
    out, err = (world.folder / "stdout").read_text(), (world.folder / "stderr").read_text()
    for said in ("RangeError", "InputError", "PeerError", "the session has ended", "'online'"):
        assert said in out, said
    assert "no error" not in out and " DEBUG " in err
    names = [file.name for file in world.folder.rglob("*") if file.is_file()]
    assert names.count("program.si") == 3 and len(world.keys) == 3
    assert len([name for name in names if name.endswith(".log")]) >= 1 + 2 + 3  # the caller, daemons, workers
    assert len([name for name in names if name.endswith(".environ")]) >= 6
    assert any(file.stat().st_size for file in world.folder.rglob("*.nameless"))  # dealt material

    found = world.planted()  # the twin
    assert found.keys() == {"seed", "stream key", "share", "input"}, found
    assert {"stderr"} < found["seed"] and {"stderr"} < found["stream key"]
    assert found["share"] == {"forgotten.bin"} and found["input"] == {"stdout"}
    assert "unexpected ValueError" in (world.folder / "stdout").read_text()


SECRET = bytes(range(100, 132))
VALUE = np.float32(523183.78)


@pytest.mark.parametrize(
    "written",
    [
        b"x" + SECRET + b"y",
        b"the first of it: " + SECRET[:16],
        SECRET.hex().encode(),
        SECRET.hex().upper().encode(),
        repr(SECRET).encode(),
        str(list(SECRET)).encode(),
        str(np.frombuffer(SECRET, np.int64)).encode(),
        *(base64.b64encode(bytes(n) + SECRET) for n in range(3)),
        base64.urlsafe_b64encode(b"a" + SECRET),
    ],
)
def test_bytes_are_found_however_they_are_written(written: bytes) -> None:
    secrets = Secrets()
    secrets.add("seed", SECRET)
    assert secrets.found_in(b"before " + written + b" after") == {"seed"}
    assert secrets.found_in(b"before " + written[::-1] + b" after") == set()


@pytest.mark.parametrize(
    "written",
    [
        repr(float(VALUE)),
        repr(VALUE),
        f"[{VALUE:.1f}, 1.0]",
        f"{VALUE:.7e}",
        f"{-VALUE:.3f}",
        f"{VALUE:.8g}",
        str(int(VALUE * np.float64(65536))),
        np.array([VALUE, 77.7], np.float32).tobytes().hex(),
        base64.b64encode(np.array([VALUE, np.float32(77.7)], np.float64).tobytes()).decode(),
    ],
)
def test_values_are_found_however_they_are_written(written: str) -> None:
    secrets = Secrets()
    secrets.add_values("input", np.array([VALUE, 77.7], np.float32))
    assert secrets.found_in(written.encode()) == {"input"}
    assert secrets.found_in(f"{VALUE + 1:.4f} {int(VALUE)}".encode()) == set()
