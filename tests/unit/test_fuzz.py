"""Whatever comes from outside is read right or refused with one typed error, in bounded time and memory.

Each target is a parser and a strategy of hostile inputs: valid ones whose fields, lengths and bytes were changed, and
noise. `make test` runs COUNT inputs over all targets, `make test-all` MANY; SECUREINFER_FUZZ=count takes the place of
both. Inputs differ from run to run; SECUREINFER_FUZZ_SEED=number repeats one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import struct
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import secureinfer as si
from secureinfer.backends.mpc import live
from secureinfer.config import load_settings, make_settings
from secureinfer.errors import (
    PeerError,
    ProgramFileError,
    SecureInferError,
    SettingsError,
    WireError,
    catalogue,
)
from secureinfer.measure.stats import parse_worker
from secureinfer.plan.program import Program
from secureinfer.session import faults, session, tensors
from secureinfer.session.handshake import Hello, hello_from_json, make_hello
from secureinfer.session.manifest import read_manifest
from secureinfer.session.servicer import Daemon
from secureinfer.transport.base import MAX_FRAME_BYTES, PHASES, Address, Clock
from secureinfer.transport.framing import ALIVE, ERROR
from secureinfer.transport.grpc_link import open_channel
from secureinfer.transport.memory import Channel, MemoryLink
from secureinfer.transport.preface import (
    ACCEPTED,
    ANSWER_BYTES,
    PREFACE_BYTES,
    REFUSED,
    TAKEN,
    Preface,
    pack_answer,
    pack_preface,
    unpack_answer,
    unpack_preface,
)
from secureinfer.transport.tls import Identity, load_credentials, make_certificates
from secureinfer.transport.wire import DirectReader, Pipe, pack_header, unpack_header
from secureinfer.v1 import control_pb2

COUNT = int(os.environ.get("SECUREINFER_FUZZ", "20000"))
MANY = int(os.environ.get("SECUREINFER_FUZZ", "1000000"))
SEED = int(os.environ.get("SECUREINFER_FUZZ_SEED") or secrets.randbits(32))

ROUND = 1000
"""Inputs of one Hypothesis run: it remembers all that it tried, so that a million at once would fill the memory."""

MAX_MEMORY_BYTES = 80 << 20
"""The reserve that a link takes on a peer's word, 64 MiB, and some more."""

MAX_CPU_SECONDS = 2.0
"""Of one input, at the thread that reads it."""

SESSION = bytes(range(16))
AT = Address("online", 3, 2, 1)


@dataclass(frozen=True)
class Target:
    """A parser under test. share: of all inputs. check: reads one, and may raise SecureInferError alone."""

    share: float
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    traced: bool = True


@contextlib.contextmanager
def bounded(*, traced: bool = True) -> Iterator[None]:
    """Fail where the block takes more memory or time than an input may."""
    # Only around the parser: what draws the inputs would be slow under it.
    if traced:
        tracemalloc.start()
    start = time.thread_time()
    try:
        yield
        assert time.thread_time() - start < MAX_CPU_SECONDS, "an input took too long"
        if traced:
            assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES, "an input took too much memory"
    finally:
        if traced:
            tracemalloc.stop()


def fuzz(target: Target, count: int, start: int) -> int:
    """Give `count` inputs to a target; returns how many were refused."""
    seen = refused = 0

    def one(value: Any) -> None:
        nonlocal seen, refused
        seen += 1
        with bounded(traced=target.traced):
            try:
                target.check(value)
            except SecureInferError as error:
                refused += 1
                text = f"{error}{error.for_peer}"
                assert str(error) and "Traceback" not in text and 'File "' not in text

    while seen < count:
        run = settings(
            max_examples=min(ROUND, count - seen),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        try:
            seed(start + seen)(run(given(target.inputs)(one)))()
        except BaseException as error:
            error.add_note(f"repeat with SECUREINFER_FUZZ_SEED={start}")
            raise
    return refused


# --- hostile inputs ---

EDGES = [0, 1, 2, 15, 16, 63, 64, 65, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
LONG_EDGES = [*EDGES, 2**32, MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 2**63, 2**64 - 1]
NUMBERS = st.sampled_from(LONG_EDGES) | st.integers(0, 2**64 - 1)
SHORT = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=6)
ODD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "a",
    "\0",
    [],
    {},
    [[]],
    [{}],
]

JSON = st.recursive(
    st.sampled_from(ODD) | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def damaged(data: bytes, script: list[tuple[int, int, bytes]]) -> bytes:
    """Bytes after a few changes: (kind, place, what)."""
    raw = bytearray(data)
    for kind, place, what in script:
        at = place % (len(raw) + 1)
        if kind == 0:  # overwrite
            raw[at : at + len(what)] = what
        elif kind == 1:  # insert
            raw[at:at] = what
        elif kind == 2:  # delete
            del raw[at : at + len(what) + 1]
        elif kind == 3:  # cut
            del raw[at:]
        else:  # repeat
            raw[at:at] = raw[max(0, at - 64) : at]
    return bytes(raw)


CHANGES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 1 << 16), st.binary(max_size=8)), min_size=1, max_size=3
)


def near(*valid: bytes) -> st.SearchStrategy[bytes]:
    """Damaged valid inputs, and noise."""
    return st.builds(damaged, st.sampled_from(valid), CHANGES) | st.binary(max_size=120)


def planted(valid: Any, junk: st.SearchStrategy[Any] = JSON) -> st.SearchStrategy[Any]:
    """Copies of a JSON value in which one place holds something else."""
    text = json.dumps(valid)

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, inner in items:
            yield (*path, key)
            yield from places(inner, (*path, key))

    def plant(path: tuple[Any, ...], value: Any, drop: bool) -> Any:
        made = json.loads(text)
        place = made
        for key in path[:-1]:
            place = place[key]
        if drop:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return made

    return st.builds(
        plant, st.sampled_from(list(places(valid))), junk, st.integers(0, 4).map(lambda n: n == 0)
    )


# --- frames ---

HEADERS = st.builds(
    struct.Struct("<4sBBH16sQIIQQQ").pack,
    st.sampled_from([b"SIFR", b"SIPM", b"\0\0\0\0"]),
    st.sampled_from([1, 0, 2, 255]),
    st.sampled_from([3, 0, 1, 2, 4, 255]),
    st.sampled_from([0, 0, 1, 65535]),
    st.sampled_from([SESSION, bytes(16)]),
    NUMBERS,
    SHORT,
    SHORT,
    NUMBERS,
    NUMBERS,
    NUMBERS,
)


def check_header(data: bytes) -> None:
    header = unpack_header(data)
    assert header.length <= MAX_FRAME_BYTES and header.address.phase in PHASES
    again = pack_header(header.session_id, header.address, header.sequence, header.length, header.lamport)
    assert again == data


FRAMES = st.lists(
    st.tuples(
        st.sampled_from([AT, AT, AT, ERROR, ALIVE, Address("online", 3, 2, 2), Address("control", 0, 0, 0)]),
        st.sampled_from([-1, -1, -1, 0, 1, 2**64 - 1]),  # the sequence number; -1 is the right one
        st.sampled_from(
            [None, None, None, 0, 5, 1 << 20, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1]
        ),  # the length
        st.sampled_from(
            [b"", b"payload", bytes(200), b'{"code": "peer", "text": "x", "detail": "dealer"}', b"["]
        ),
        st.sampled_from([1, 1, 1, 2, 0]),  # how often
    ),
    min_size=1,
    max_size=4,
)
STREAMS = st.tuples(
    FRAMES, st.one_of(st.just([]), CHANGES), st.integers(1, 300), st.sampled_from([None, 7, 1 << 20])
)


def check_stream(value: Any) -> None:
    """A link whose peer sends these bytes and closes. What it gives out was sent so."""
    frames, script, chunk, size = value
    data, payloads = b"", []
    for number, (address, sequence, length, payload, times) in enumerate(frames):
        sequence = number if sequence < 0 else sequence
        declared = len(payload) if length is None else length
        head = bytearray(pack_header(SESSION, address, sequence, min(declared, MAX_FRAME_BYTES), 1))
        head[48:56] = struct.pack("<Q", declared)
        data += (bytes(head) + payload) * times
        payloads.append(payload)
    data = damaged(data, script)
    into = Channel(1 << 30)
    into.put([data[i : i + chunk] for i in range(0, len(data), chunk)], time.monotonic() + 5)
    into.close()
    link = MemoryLink("peer", SESSION, Clock(), Channel(1 << 30), into, 5.0)
    if chunk % 2:  # as a link over TLS reads
        link._reader = DirectReader(filling(data))
    for _ in range(len(frames) + 2):
        if size is None:
            _, got = link.receive_any(5.0)
        else:
            got = link.receive(AT, size)
            assert len(got) == size
        assert len(got) <= len(data)
    raise AssertionError("a stream gave more frames than it had")


def filling(data: bytes) -> Callable[[memoryview, float | None], None]:
    left = memoryview(data)

    def fill(view: memoryview, _: float | None) -> None:
        nonlocal left
        if len(left) < len(view):
            raise PeerError("peer", "closed the link")
        view[:], left = left[: len(view)], left[len(view) :]

    return fill


def check_preface(data: bytes) -> None:
    """What a listener reads of a stranger, and what a dialler reads of whoever answers."""
    if len(data) == ANSWER_BYTES:
        status, text = unpack_answer(data)
        assert status in (ACCEPTED, REFUSED, TAKEN) and (text.isprintable() or not text) and len(text) <= 248
        return
    preface = unpack_preface(data)
    assert pack_preface(preface) == data
    assert str(preface.token) not in repr(preface)


# --- what a caller and its worker, or a worker and its daemon, tell each other ---


def message(head: Any, *blobs: bytes) -> bytes:
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<4sI", b"SIPM", len(raw)) + raw + b"".join(blobs)


CALL = {"body": {"op": "infer", "inputs": [["x", "float32", [2, 4]]]}, "blobs": [32]}
FAILURE = {"body": {"error": {"code": "peer", "message": "m", "detail": "d", "peer": "dealer"}}, "blobs": []}


def check_pipe(data: bytes) -> None:
    """As a worker reads a call and a caller its answer."""
    ours, theirs = socket.socketpair()
    pipe = Pipe(ours, "worker")
    try:
        theirs.sendall(data[: 1 << 16])
        theirs.close()
        body, blobs = pipe.receive(timeout=5)
        if isinstance(body.get("error"), dict):
            raise faults.from_json(body["error"])
        for tensor in tensors.unpack(body.get("inputs"), blobs).values():
            assert isinstance(tensor, torch.Tensor)
    finally:
        pipe.close()


def check_tensors(value: Any) -> None:
    heads, size = value
    found = tensors.unpack(heads, [bytearray(n) for n in size])
    assert sum(t.nbytes for t in found.values()) <= sum(size)


# --- what peers tell each other in control frames ---

RUN = {
    "inference": 0,
    "latency_ms": 1.5,
    "waiting_ms": 0.5,
    "rounds": 2,
    "cpu_seconds": 0.1,
    "peak_memory_bytes": 5,
    "peak_gpu_memory_bytes": None,
    "links": {"dealer": {"bytes_sent": 1, "bytes_received": 2, "frames_sent": 3, "frames_received": 4}},
    "steps": {
        "0": {"latency_ms": None, "waiting_ms": 0.5, "bytes_sent": 1, "bytes_received": 1, "rounds": None}
    },
}
STATISTICS = {
    "party": "dealer",
    "role": "dealer",
    "threads": 1,
    "phases": {"setup": [RUN], "offline": [RUN], "online": []},
    "peak_memory_bytes": 7,
}


def check_statistics(raw: Any) -> None:
    payload = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    found = parse_worker(session._json(memoryview(payload), "dealer"))
    assert all(run.inference >= 0 for run in found.runs("setup"))


class _Silent:
    """A link that takes an answer."""

    peer = "data_owner"

    def send(self, address: Address, payload: bytes) -> None:
        assert address == session.ANSWER

    def to_json(self) -> dict[str, Any]:
        return {}


def check_command(payload: bytes) -> None:
    silent: Any = _Silent()
    session._command(silent, memoryview(payload), silent)


# --- settings and certificates ---

SETTINGS = """
role = "model_owner"
name = "model_owner"
program = "p.si"
threads = 2
[tls]
ca = "certs/ca.pem"
certificate = "certs/m.pem"
key = "/abs/m.key"
[listen]
port = 7402
session_ports = "7420-7429"
[peers.dealer]
name = "dealer"
address = "dealer.example.org:7402"
[deadlines]
step = 5.5
"""
TREE = {
    "role": "data_owner",
    "name": "data_owner",
    "program": "p.si",
    "tls": {"ca": "a", "certificate": "b", "key": "c"},
    "peers": {
        "model_owner": {"name": "model_owner", "address": "h:1"},
        "dealer": {"name": "d", "address": "h:2"},
    },
    "accept": {"data_owners": ["a"]},
    "deadlines": {"step": 5, "keepalive": 1.0},
    "threads": 2,
    "queue_bytes": 1 << 20,
    "unsafe_trusted_first_party": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def settings_target(folder: Path) -> Target:
    file = folder / "party.toml"

    def check(value: Any) -> None:
        if isinstance(value, bytes):
            file.write_bytes(value)
            made = load_settings(file)
        else:
            made = make_settings(value, folder=folder)
        assert made.worker_threads >= 1 and made.deadlines.step > 0

    return Target(0.06, near(SETTINGS.encode()) | planted(TREE), check)


def certificate_target(folder: Path) -> Target:
    dealer = Identity("dealer", "dealer")
    made = make_certificates(folder / "certs", {"dealer": ["dealer"]})[dealer]
    pem = made.certificate.read_bytes()
    body = base64.b64decode(b"".join(pem.splitlines()[1:-1]))
    target = folder / "fuzzed.pem"

    def check(value: tuple[bool, bytes]) -> None:
        inner, data = value
        if inner:
            lines = base64.encodebytes(data)
            data = b"-----BEGIN CERTIFICATE-----\n" + lines + b"-----END CERTIFICATE-----\n"
        target.write_bytes(data)
        with warnings.catch_warnings(action="ignore"):  # of certificates that are odd, and yet read
            load_credentials(dealer, made.ca, target, made.key)

    inputs = st.tuples(st.just(True), near(body)) | st.tuples(st.just(False), near(pem))
    return Target(0.04, inputs, check)


# --- program files ---


def program_target(folder: Path) -> Target:
    source = folder / "program.si"
    si.compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),)).save(source)
    raw = source.read_bytes()
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    head = json.loads(members["manifest.json"])
    target = folder / "fuzzed.si"

    def check(value: Any) -> None:
        if isinstance(value, bytes):
            target.write_bytes(value)
        else:
            name, content = value
            with zipfile.ZipFile(target, "w") as archive:
                for member, data in {**members, name: content}.items():
                    archive.writestr(member, data)
        with contextlib.suppress(SecureInferError):
            read_manifest(target, allow_private=True)
        Program.load(target)

    inputs = (
        near(raw)
        | st.tuples(st.just("manifest.json"), planted(head).map(lambda v: json.dumps(v).encode()))
        | st.tuples(st.sampled_from(["public.safetensors", "weights.safetensors"]), near(*members.values()))
    )
    return Target(0.05, inputs, check)


# --- a dealer's requests ---

REQUESTS: list[dict[str, Any]] = [
    {"kind": "product", "op": "matmul", "left": [2, 3], "right": [3, 4], "result": [2, 4], "options": []},
    {
        "kind": "product",
        "op": "conv2d",
        "left": [1, 2, 8, 8],
        "right": [3, 2, 3, 3],
        "result": [1, 3, 6, 6],
        "options": [["stride", [1, 1]], ["padding", 0], ["dilation", 1], ["groups", 1]],
    },
    {"kind": "and", "left": [2, 3], "right": [3], "result": [2, 3], "dtype": "int64"},
    {"kind": "square", "shape": [2, 2]},
    {"kind": "wraps", "shape": [5]},
    {"kind": "bits", "shape": [5], "dtype": "uint8"},
    {"kind": "truncation", "shape": [4], "bits": 16},
]
SIZES = JSON | st.integers(1, 1 << 41) | st.lists(st.integers(1, 1 << 40), max_size=5)


def check_request(value: Any) -> None:
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    kind = live.unpack(payload)
    assert kind.correction_bytes() <= live.MAX_CORRECTION_BYTES


# --- the control port ---

OWNER, MODEL, DEALER = (Identity(role, role) for role in ("data_owner", "model_owner", "dealer"))


@pytest.fixture(scope="module")
def control(folder: Path) -> Iterator[Target]:
    """Raw bytes to a dealer's control port over mutual TLS. The daemon is real up to the start of a worker."""
    certs = make_certificates(folder / "control", {i.role: [i.name] for i in (OWNER, MODEL, DEALER)})
    program = folder / "public.si"
    si.compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),)).public().save(program)
    own = certs[DEALER]
    daemon = Daemon(
        make_settings(
            {
                "role": "dealer",
                "name": "dealer",
                "program": str(program),
                "tls": {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)},
                "listen": {"port": 0},
                "deadlines": {"connect": 0.02},
            }
        )
    )
    started: list[Hello] = []

    def start(record: Any) -> None:
        started.append(record.hello)
        raise RuntimeError("/secret/path and a value 31415")

    daemon._start_worker = start  # type: ignore[method-assign]
    channels = {
        who: open_channel("127.0.0.1", daemon.port, certs[who], DEALER, 20.0, timeout=10)
        for who in (OWNER, MODEL)
    }
    head = read_manifest(program, allow_private=False)
    hello = make_hello(
        head,
        session_id=SESSION,
        model_owner="model_owner",
        data_owners=("data_owner",),
        dealer="dealer",
        unsafe=(),
    ).to_message()
    opening = control_pb2.OpenSessionRequest(hello=hello).SerializeToString()
    closing = control_pb2.CloseSessionRequest(session_id=SESSION).SerializeToString()
    methods = ["OpenSession", "JoinSession", "CloseSession"]

    def check(value: tuple[Identity, str, bytes]) -> None:
        who, method, data = value
        call = channels[who].unary_unary(f"/secureinfer.v1.Control/{method}")  # the bytes as they are
        try:
            call(data, timeout=10)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            details = error.details() or ""
            assert not any(word in details for word in ("Traceback", 'File "', "31415", "/secret", ".py"))
            known = {cls.status for cls in catalogue().values()} | {"INTERNAL"}
            assert error.code().name in known - {"UNAVAILABLE"}, (error.code(), details)
            raise faults.from_rpc(error, "dealer", 10) from None

    inputs = st.tuples(
        st.sampled_from([OWNER, MODEL]), st.sampled_from(methods), near(opening, closing) | st.just(opening)
    )
    yield Target(0.06, inputs, check, traced=False)
    assert started, "no input came as far as the start of a worker"
    channel_ok = channels[OWNER].unary_unary("/secureinfer.v1.Control/CloseSession")
    channel_ok(closing, timeout=10)  # and it goes on serving
    for channel in channels.values():
        channel.close()
    daemon.close()


HELLO = {
    "session_id": SESSION.hex(),
    "manifest_digest": "0" * 64,
    "backend": "mpc",
    "protocol": "fast",
    "model_owner": "m",
    "data_owners": ["d"],
    "dealer": "dealer",
    "unsafe": [],
    "protocol_version": 1,
}

TARGETS: dict[str, Target] = {
    "frame headers": Target(
        0.20,
        HEADERS | near(pack_header(SESSION, AT, 1, 2, 3)) | st.binary(min_size=64, max_size=64),
        check_header,
    ),
    "frame streams": Target(0.16, STREAMS, check_stream),
    "prefaces": Target(
        0.05,
        near(
            pack_preface(Preface(SESSION, b"t" * 32)),
            pack_answer(ACCEPTED),
            pack_answer(REFUSED, "the peer is not who the settings name: session token"),
        )
        | st.binary(min_size=ANSWER_BYTES, max_size=ANSWER_BYTES)
        | st.binary(max_size=PREFACE_BYTES),
        check_preface,
    ),
    "pipe messages": Target(
        0.12,
        near(message(CALL, bytes(32)), message(FAILURE))
        | planted(CALL).map(lambda head: message(head, bytes(32)))
        | planted(FAILURE).map(message),
        check_pipe,
    ),
    "tensors on a pipe": Target(
        0.08,
        st.tuples(
            planted([["x", "float32", [2, 4]], ["y", "bool", []]]) | JSON,
            st.lists(st.sampled_from([0, 1, 4, 32]), max_size=3),
        ),
        check_tensors,
    ),
    "statistics": Target(0.07, planted(STATISTICS) | near(json.dumps(STATISTICS).encode()), check_statistics),
    "commands": Target(0.05, near(b'{"command": "report"}', b'{"command": "close"}'), check_command),
    "dealer requests": Target(
        0.06,
        st.sampled_from(REQUESTS).flatmap(lambda request: planted(request, SIZES))
        | near(*(json.dumps(r).encode() for r in REQUESTS)),
        check_request,
    ),
}
NAMES = [*TARGETS, "settings", "certificates", "program files", "control port"]


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    name = request.param
    if name == "control port":
        made: Target = request.getfixturevalue("control")
        return made
    if name == "dealer requests":
        for valid in REQUESTS:  # the first convolution of a process loads a good part of torch
            check_request(valid)
    folder = request.getfixturevalue("folder")
    build = {"settings": settings_target, "certificates": certificate_target, "program files": program_target}
    return build[name](folder) if name in build else TARGETS[name]


def run(target: Target, count: int) -> None:
    wanted = max(1, round(count * target.share))
    refused = fuzz(target, wanted, SEED)
    if wanted >= 100:
        assert refused > wanted // 10, "the inputs are not hostile"


@pytest.mark.parametrize("target", NAMES, indirect=True)
def test_hostile_inputs_are_refused_with_one_typed_error(target: Target) -> None:
    run(target, COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("target", NAMES, indirect=True)
def test_a_million_hostile_inputs_are_refused_with_one_typed_error(target: Target) -> None:
    run(target, MANY)


def test_the_shares_make_up_all_inputs(folder: Path) -> None:
    shares = [t.share for t in TARGETS.values()] + [
        settings_target(folder / "a").share, certificate_target(folder / "b").share, 0.05, 0.06
    ]  # fmt: skip
    assert sum(shares) == pytest.approx(1.0)


# --- the twins: what these checks would find ---


def trusting(data: bytes) -> bytes:
    """A parser that takes the memory that a header declares before the bytes are there."""
    header = unpack_header(data)
    return bytes(header.length)


def careless(data: bytes) -> object:
    """A parser that lets a foreign exception out."""
    return struct.unpack("<Q", data[:8])[0]


def slow(data: bytes) -> None:
    """A parser whose time grows with what a peer declares."""
    stop = time.thread_time() + MAX_CPU_SECONDS + 0.01
    while data and time.thread_time() < stop:
        pass


def telling(data: bytes) -> None:
    """A parser that shows its own source to whoever reads the error."""
    import traceback

    try:
        json.loads(data)
    except ValueError:
        raise WireError(traceback.format_exc()) from None


@pytest.mark.parametrize(
    ("parser", "inputs", "says"),
    [
        (
            trusting,
            st.sampled_from([pack_header(SESSION, AT, 0, n, 0) for n in (1, 1 << 20, 1 << 28)]),
            "too much memory",
        ),
        (careless, st.binary(max_size=20), "unpack requires"),
        (slow, st.just(b"x"), "took too long"),
        (telling, st.just(b"{"), "Traceback"),
    ],
    ids=["memory", "exception", "time", "text"],
)
def test_a_parser_with_a_planted_fault_fails(
    parser: Any, inputs: st.SearchStrategy[bytes], says: str
) -> None:
    with pytest.raises((AssertionError, ValueError, struct.error, MemoryError), match=says) as caught:
        fuzz(Target(1.0, inputs, parser), 200, 0)
    assert not isinstance(caught.value, SecureInferError)


# --- what fuzzing found ---


def test_a_worker_reads_its_own_hello_back() -> None:
    assert hello_from_json(HELLO).session_id == SESSION


@pytest.mark.parametrize(
    "heads",
    [
        [["x", "float32"]],
        [7],
        [["x", [], [8]]],
        [["x", "float32", None]],
        [["x", "float32", [-2, -4]]],
        [["x", "float32", [2.0, 4]]],
        [["x", "float32", ["a"]]],
        [["x", "float32", [1] * 100]],
        [["x", "bool", [True] * 3 + [32]]],
    ],
)
def test_a_tensors_head_that_is_no_head_is_a_wire_error(heads: Any) -> None:
    with pytest.raises(WireError):
        tensors.unpack(heads, [bytearray(32)])
    assert list(tensors.unpack([["x", "float32", [2, 4]]], [bytearray(32)])["x"].shape) == [2, 4]


def test_an_error_without_a_text_says_so() -> None:
    assert "did not say why" in str(faults.from_json({}))
    assert str(faults.from_json({"message": "because"})) == "because"


def test_a_certificate_with_a_damaged_key_is_refused(tmp_path: Path) -> None:
    dealer = Identity("dealer", "dealer")
    made = make_certificates(tmp_path, {"dealer": ["dealer"]})[dealer]
    load_credentials(dealer, made.ca, made.certificate, made.key)
    der = bytearray(base64.b64decode(b"".join(made.certificate.read_bytes().splitlines()[1:-1])))
    at = der.index(bytes.fromhex("2a8648ce3d0301"))  # the name of the curve
    der[at + 26] ^= 1  # and a bit of the point, which then lies beside it
    made.certificate.write_bytes(
        b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"
    )
    with pytest.raises(SettingsError, match="cannot be read"):
        load_credentials(dealer, made.ca, made.certificate, made.key)


@pytest.mark.parametrize(
    "option", [["stride", 0], ["stride", [0, 1]], ["dilation", 1 << 70], ["groups", 0], ["stride", [1.5, 1]]]
)
def test_options_that_no_convolution_has_are_a_wire_error(option: list[Any]) -> None:
    with pytest.raises(WireError):
        live.unpack(json.dumps({**REQUESTS[1], "options": [option]}).encode())


@pytest.mark.parametrize("fields", [(20,), (24,), (20, 24)], ids=["stored", "real", "both"])
@pytest.mark.parametrize("size", [0x03FF_FFFF, 0x7FFF_FFFF])
def test_a_member_that_claims_more_than_its_file_takes_no_memory(
    tmp_path: Path, fields: tuple[int, ...], size: int
) -> None:
    file = tmp_path / "claims.si"
    si.compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),)).save(file)
    assert read_manifest(file, allow_private=True).backend == "mpc"
    raw = bytearray(file.read_bytes())
    at = raw.index(b"PK\x01\x02")  # the manifest's entry in the list of members
    for field in fields:
        raw[at + field : at + field + 4] = struct.pack("<I", size)
    file.write_bytes(raw)
    for read in (lambda: read_manifest(file, allow_private=True), lambda: Program.load(file)):
        with bounded(), pytest.raises(ProgramFileError):
            read()
