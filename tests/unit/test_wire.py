"""Bytes from outside: headers, chunks and pipe messages are read right or refused, and never trusted."""

from __future__ import annotations

import json
import socket
import struct
import threading
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from secureinfer.errors import PeerError, WireError
from secureinfer.transport.base import HEADER_BYTES, MAX_FRAME_BYTES, PHASES, Address
from secureinfer.transport.wire import ChunkReader, Pipe, flat, pack_header, unpack_header

SESSION = bytes(range(16))

addresses = st.builds(
    Address,
    st.sampled_from(PHASES),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@given(addresses, st.integers(0, 2**64 - 1), st.integers(0, MAX_FRAME_BYTES), st.integers(0, 2**64 - 1))
def test_a_header_has_64_bytes_and_comes_back(
    address: Address, sequence: int, length: int, lamport: int
) -> None:
    packed = pack_header(SESSION, address, sequence, length, lamport)
    assert len(packed) == HEADER_BYTES
    header = unpack_header(packed)
    assert (header.session_id, header.address, header.sequence, header.length, header.lamport) == (
        SESSION,
        address,
        sequence,
        length,
        lamport,
    )


@pytest.mark.parametrize(
    "address",
    [Address("chat"), Address("online", -1), Address("online", 0, 2**32), Address("online", 0, 0, -1)],
)
def test_an_address_that_no_frame_can_carry_is_refused(address: Address) -> None:
    with pytest.raises(WireError):
        pack_header(SESSION, address, 0, 0, 0)


@settings(max_examples=3000)
@given(st.binary(max_size=80))
@example(pack_header(SESSION, Address("online"), 0, 0, 0)[:-1])
def test_random_bytes_are_a_wire_error_or_a_header(data: bytes) -> None:
    try:
        header = unpack_header(data)
    except WireError:
        return
    assert data[:4] == b"SIFR" and header.length <= MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"X"),
        (4, b"\x02"),
        (5, b"\x04"),
        (6, b"\x01"),
        (7, b"\x80"),
        (48, struct.pack("<Q", MAX_FRAME_BYTES + 1)),
    ],
)
def test_each_field_that_this_version_does_not_define_is_refused(offset: int, value: bytes) -> None:
    good = bytearray(pack_header(SESSION, Address("online"), 1, 2, 3))
    unpack_header(good)
    good[offset : offset + len(value)] = value
    with pytest.raises(WireError):
        unpack_header(good)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20), st.data())
def test_a_reader_gives_the_stream_whatever_its_chunks(chunks: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(chunks)
    rest = iter(chunks)
    reader = ChunkReader(lambda deadline: next(rest))
    out = b""
    while len(out) < len(stream):
        size = data.draw(st.integers(0, len(stream) - len(out)))
        got = reader.read(size, None, trusted=data.draw(st.booleans()))
        assert len(got) == size
        out += got
        if size == 0:
            got = reader.read(1, None)
            out += got
    assert out == stream


def test_a_declared_size_takes_no_memory_before_its_bytes_come() -> None:
    def nothing(deadline: float | None) -> bytes:
        raise PeerError("peer", "gone")

    tracemalloc.start()
    try:
        with pytest.raises(PeerError):
            ChunkReader(nothing).read(MAX_FRAME_BYTES, None)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_payloads_are_taken_without_a_copy_and_only_contiguous() -> None:
    data = bytearray(range(12))
    assert flat(memoryview(data).cast("i")).obj is data
    assert flat(memoryview(b"")).nbytes == 0
    with pytest.raises(WireError):
        flat(memoryview(data)[::2])


# --- the pipe between a caller and its worker ---


def pipes() -> tuple[Pipe, Pipe]:
    a, b = socket.socketpair()
    return Pipe(a, "worker"), Pipe(b, "caller")


def raw(data: bytes, *, max_blob_bytes: int = 1 << 20) -> Pipe:
    a, b = socket.socketpair()
    a.sendall(data)
    a.close()
    return Pipe(b, "worker", max_blob_bytes=max_blob_bytes)


def test_a_message_comes_with_its_blobs() -> None:
    here, there = pipes()
    big = bytes(3_000_000)
    sender = threading.Thread(target=here.send, args=({"op": "x"}, [b"abc", b"", big]))
    sender.start()
    body, blobs = there.receive(timeout=10)
    sender.join()
    assert body == {"op": "x"} and [bytes(b) for b in blobs] == [b"abc", b"", big]


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_on_the_pipe_are_a_typed_error(data: bytes) -> None:
    with pytest.raises((WireError, PeerError)):
        raw(data).receive(timeout=5)


@settings(max_examples=500, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["body", "blobs", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_json_head_is_a_message_or_a_typed_error(value: object) -> None:
    head = json.dumps(value).encode()
    try:
        body, blobs = raw(struct.pack("<4sI", b"SIPM", len(head)) + head).receive(timeout=5)
    except (WireError, PeerError):
        return
    assert isinstance(body, dict) and all(b == b"" for b in blobs)


@pytest.mark.parametrize(
    "head",
    [
        b'{"body": {}, "blobs": [1048577]}',
        b'{"body": {}, "blobs": [-1]}',
        b'{"body": {}, "blobs": [true]}',
        b'{"body": {}, "blobs": [1.0]}',
        b'{"body": [], "blobs": []}',
        b'{"body": {}}',
        b"[" * 100_000,
        b'{"body": {}, "blobs": [' + b"0," * 5000 + b"0]}",
    ],
)
def test_sizes_and_depths_over_the_limit_are_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        raw(struct.pack("<4sI", b"SIPM", len(head)) + head).receive(timeout=5)
    with pytest.raises(WireError):
        raw(struct.pack("<4sI", b"SIPM", (16 << 20) + 1)).receive(timeout=5)


def test_a_dead_and_a_silent_process_are_named() -> None:
    here, there = pipes()
    with pytest.raises(PeerError, match="worker: gave no answer"):
        here.receive(timeout=0.05)
    there.close()
    with pytest.raises(PeerError, match="worker: its process ended"):
        here.receive(timeout=5)
    with pytest.raises(PeerError, match="worker: its process is gone"):
        here.send({}, [bytes(1 << 20)])
