"""A link, over TLS and over gRPC, whose other end is hostile or broken: bytes that are no frames, certificates that are
none, starvation.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from secureinfer.errors import AuthenticationError, PeerError, SecureInferError, WireError
from secureinfer.transport import grpc_listener
from secureinfer.transport.base import HEADER_BYTES, MAX_FRAME_BYTES, Clock
from secureinfer.transport.data import DIALLERS, LISTENERS, DataListener
from secureinfer.transport.framing import ERROR, FramedLink
from secureinfer.transport.grpc_link import (
    METHOD,
    SESSION_KEY,
    TOKEN_KEY,
    open_channel,
    options,
)
from secureinfer.transport.limits import Limits
from secureinfer.transport.preface import ACCEPTED, ANSWER_BYTES, Preface, pack_preface, unpack_answer
from secureinfer.transport.tls import Credentials, Identity, make_certificates
from secureinfer.transport.wire import pack_header, unpack_header

from .links import AT, DEALER, MODEL, OWNER, SESSION, TOKEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> dict[Identity, Credentials]:
    return make_certificates(folder, {i.role: [i.name] for i in (OWNER, MODEL, DEALER)})


@pytest.fixture(scope="module")
def expired(certificates: dict[Identity, Credentials], folder: Path) -> dict[Identity, Credentials]:
    """Of the same authority, and over."""
    made = {}
    for identity in (OWNER, MODEL):
        kept = {p: p.read_bytes() for p in (certificates[identity].certificate, certificates[identity].key)}
        old = make_certificates(folder, {identity.role: [identity.name]}, days=0)[identity]
        moved = [p.rename(p.with_name(f"expired-{p.name}")) for p in (old.certificate, old.key)]
        for path, data in kept.items():
            path.write_bytes(data)
        made[identity] = Credentials(identity, old.ca, *moved)
    return made


def listen(
    kind: str,
    credentials: Credentials,
    expected: dict[Identity, bytes] | None = None,
    limits: Limits | None = None,
) -> DataListener:
    wanted = {OWNER: TOKEN} if expected is None else expected
    return LISTENERS[kind](credentials, "127.0.0.1", (0,), SESSION, wanted, Clock(), limits or Limits(5.0))


def connect(
    kind: str, listener: DataListener, mine: Credentials, token: bytes = TOKEN, limits: Limits | None = None
) -> FramedLink:
    return DIALLERS[kind](
        "127.0.0.1", listener.port, mine, MODEL, SESSION, token, Clock(), limits or Limits(5.0), timeout=4
    )  # fmt: skip


@pytest.fixture(params=["tls", "grpc"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def listener(kind: str, certificates: dict[Identity, Credentials]) -> Iterator[DataListener]:
    made = listen(kind, certificates[MODEL])
    yield made
    made.close()


class TlsHostile:
    """An authenticated peer that sends these bytes as they are and then waits or ends."""

    def __init__(self, listener: DataListener, mine: Credentials, chunks: list[bytes], *, wait: bool) -> None:
        raw = socket.create_connection(("127.0.0.1", listener.port), 5)
        self.sock = mine.context(server=False).wrap_socket(raw, server_hostname=MODEL.hostname)
        self.sock.sendall(pack_preface(Preface(SESSION, TOKEN)))
        assert unpack_answer(self.sock.recv(ANSWER_BYTES)) == (ACCEPTED, "")
        for chunk in chunks:
            self.sock.sendall(chunk)
        self.link = listener.accept("data_owner", 5)
        if not wait:
            self.sock.close()

    def next_frame(self) -> bytes:
        """The link's next frame, which fits one record."""
        return self.sock.recv(1 << 14)

    def close(self) -> None:
        self.sock.close()


class GrpcHostile:
    """The same, each chunk as one gRPC message."""

    def __init__(self, listener: DataListener, mine: Credentials, chunks: list[bytes], *, wait: bool) -> None:
        self._over = threading.Event()
        self._channel = open_channel(
            "127.0.0.1", listener.port, mine, MODEL, 20.0, timeout=5, max_message_bytes=1 << 22
        )

        def stream() -> Iterator[bytes]:
            yield from chunks
            if wait:
                self._over.wait(20)

        call: Any = self._channel.stream_stream(METHOD)
        self.call = call(stream(), metadata=((SESSION_KEY, SESSION), (TOKEN_KEY, TOKEN)))
        self.link = listener.accept("data_owner", 5)

    def next_frame(self) -> bytes:
        return bytes(next(self.call))

    def close(self) -> None:
        self._over.set()
        self.call.cancel()
        self._channel.close()


Hostile = TlsHostile | GrpcHostile


@pytest.fixture
def hostile(
    kind: str, listener: DataListener, certificates: dict[Identity, Credentials]
) -> Iterator[Callable[..., Hostile]]:
    made: list[Hostile] = []

    def make(chunks: list[bytes], *, wait: bool = True) -> Hostile:
        made.append(
            {"tls": TlsHostile, "grpc": GrpcHostile}[kind](listener, certificates[OWNER], chunks, wait=wait)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def ends(
    call: Callable[[], object], kind: type[SecureInferError] | tuple[type[SecureInferError], ...]
) -> str:
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - start < 7
    return str(caught.value)


# --- bytes that are no frames ---


def declared(length: int, payload: bytes = b"") -> bytes:
    head = bytearray(pack_header(SESSION, AT, 0, 0, 1))
    head[48:56] = struct.pack("<Q", length)
    return bytes(head) + payload


GOOD = pack_header(SESSION, AT, 0, 4, 1) + b"good"
STREAMS: dict[str, tuple[list[bytes], type[SecureInferError], str]] = {
    "oversized": ([declared(MAX_FRAME_BYTES + 1)], WireError, "the limit is"),
    "random": ([secrets.token_bytes(1 << 16)], WireError, "magic"),
    "out of order": ([pack_header(SESSION, AT, 1, 0, 1)], WireError, "expected frame number 0"),
    "repeated": ([GOOD, GOOD], WireError, "expected frame number 1, got 0"),
    "of another session": ([pack_header(b"o" * 16, AT, 0, 0, 1)], WireError, "another session"),
    "of another version": ([GOOD[:4] + b"\x09" + GOOD[5:]], WireError, "version 9"),
    "truncated header": ([GOOD[: HEADER_BYTES - 1], b""], PeerError, "closed the link|is gone"),
    "truncated payload": ([declared(100, b"half")], PeerError, "closed the link|is gone"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_no_frames_ends_both_sides_with_one_error(
    hostile: Callable[..., Hostile], name: str
) -> None:
    chunks, kind, says = STREAMS[name]
    peer = hostile(chunks, wait="truncated" not in name)
    link = peer.link

    def read() -> None:
        for _ in range(3):
            link.receive_any(5.0)

    text = ends(read, kind)
    assert "data_owner" in text and re.search(says, text), text
    assert ends(lambda: link.receive(AT), kind) == text  # one error, however often it is asked
    if kind is WireError:
        link.send_error(WireError("inside 31415"))
        frame = peer.next_frame()
        assert unpack_header(frame[:HEADER_BYTES]).address == ERROR
        told = json.loads(frame[HEADER_BYTES:])
        assert told["code"] == "wire" and "31415" not in str(told)


@pytest.mark.parametrize("kind", ["grpc"], indirect=True)
def test_a_message_over_grpcs_limit_is_refused(hostile: Callable[..., Hostile]) -> None:
    link = hostile([bytes(2 << 20)]).link
    assert re.search("closed the link|connection broke", ends(lambda: link.receive_any(5.0), PeerError))


def test_the_same_stream_passes_where_its_frames_are_right(hostile: Callable[..., Hostile]) -> None:
    second = pack_header(SESSION, AT, 1, 4, 1) + b"good"
    link = hostile([GOOD[:10], GOOD[10:] + second[:70], second[70:]]).link
    assert [bytes(link.receive(AT, 4)) for _ in range(2)] == [b"good", b"good"]


def test_a_frame_that_stops_half_way_is_told_at_the_deadline(hostile: Callable[..., Hostile]) -> None:
    link = hostile([declared(100, b"half")]).link
    link.deadline = 0.5
    assert "data_owner: sent nothing within the deadline" in ends(lambda: link.receive(AT), PeerError)


# --- certificates ---


def test_an_expired_certificate_is_refused_by_the_other_side(
    kind: str,
    certificates: dict[Identity, Credentials],
    expired: dict[Identity, Credentials],
    listener: DataListener,
) -> None:
    text = ends(lambda: connect(kind, listener, expired[OWNER]), AuthenticationError)
    assert "model_owner" in text and "does not accept this party's certificate" in text
    over = listen(kind, expired[MODEL])
    try:
        text = ends(lambda: connect(kind, over, certificates[OWNER]), AuthenticationError)
        assert "model_owner" in text and "expired" in text
    finally:
        over.close()
    link = connect(kind, listener, certificates[OWNER])  # the twin: the same with one that is valid
    threading.Thread(target=listener.close).start()
    link.close()


@pytest.mark.parametrize("kind", ["grpc"], indirect=True)
@pytest.mark.parametrize("how", ["no certificate", "no TLS"])
def test_whoever_shows_no_certificate_is_kept_out(
    certificates: dict[Identity, Credentials], kind: str, listener: DataListener, how: str
) -> None:
    """Over TLS: test_tls_link.py."""
    at = f"127.0.0.1:{listener.port}"
    ca = certificates[OWNER].ca.read_bytes()
    channel = (
        grpc.insecure_channel(at)
        if how == "no TLS"
        else grpc.secure_channel(
            at,
            grpc.ssl_channel_credentials(ca),
            [("grpc.ssl_target_name_override", MODEL.hostname)],
        )
    )
    with channel:
        call = channel.stream_stream(METHOD)(
            iter([GOOD]), metadata=((SESSION_KEY, SESSION), (TOKEN_KEY, TOKEN)), timeout=2
        )
        with pytest.raises(grpc.RpcError):
            next(call)
    ends(lambda: listener.accept("data_owner", 0.1), PeerError)
    link = connect(kind, listener, certificates[OWNER])  # and it did not keep the right one out
    assert listener.accept("data_owner", 5).peer == "data_owner"
    threading.Thread(target=listener.close).start()
    link.close()


# --- silence ---


def quiet(certificates: dict[Identity, Credentials]) -> SecureInferError | None:
    """gRPC's links: keep-alive periods without a frame; then why the link ended, if it did."""
    limits = Limits(5.0, 0.1)
    listener = listen("grpc", certificates[MODEL], limits=limits)
    here = connect("grpc", listener, certificates[OWNER], limits=limits)
    try:
        there = listener.accept("data_owner", 5)
        stop = time.monotonic() + 4.5  # unmatched ends come to it within three
        while time.monotonic() < stop and here.failure is None and there.failure is None:
            time.sleep(0.05)
        return here.failure or there.failure
    finally:
        threading.Thread(target=listener.close).start()
        here.close()
        listener.close()


def test_silence_longer_than_keep_alive_ends_a_link_only_where_the_ends_do_not_match(
    certificates: dict[Identity, Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quiet(certificates) is None

    def unmatched(keepalive: float) -> list[tuple[str, int]]:
        """A server with gRPC's own settings: a ping every five minutes, two strikes."""
        return [o for o in options(keepalive) if "ping" not in o[0] and "keepalive" not in o[0]]

    monkeypatch.setattr(grpc_listener, "options", unmatched)
    assert isinstance(quiet(certificates), PeerError)


# --- starvation (field report 54) ---


def test_callers_that_are_refused_keep_no_expected_peer_out(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    """gRPC's port has a thread for each peer and one more: six callers with wrong tokens, again and again, while the
    two peers connect and talk.
    """
    listener = listen(kind, certificates[MODEL], {OWNER: TOKEN, DEALER: TOKEN})
    wrong: list[str] = []
    going = threading.Event()
    going.set()

    def knock() -> None:
        while going.is_set():
            try:
                connect(kind, listener, certificates[OWNER], b"x" * 32).close()
            except AuthenticationError:
                wrong.append("refused")
            except SecureInferError as error:
                wrong.append(str(error))

    pool = ThreadPoolExecutor(6)
    for _ in range(6):
        pool.submit(knock)
    try:
        links = {i.name: connect(kind, listener, certificates[i]) for i in (OWNER, DEALER)}
        for name, link in links.items():
            there = listener.accept(name, 5)
            for _ in range(20):
                link.send(AT, b"x" * 1000)
                assert len(there.receive(AT, 1000)) == 1000
                there.send(AT, b"y")
                assert bytes(link.receive(AT, 1)) == b"y"
    finally:
        going.clear()
        pool.shutdown()
    assert wrong and set(wrong) == {"refused"}
    threading.Thread(target=listener.close).start()
    for link in links.values():
        link.close()
    listener.close()


def test_over_ipv6_a_foreign_certificate_is_named_as_well(
    kind: str, certificates: dict[Identity, Credentials], tmp_path: Path
) -> None:
    foreign = make_certificates(tmp_path, {"data_owner": ["data_owner"]})[OWNER]
    stranger = Credentials(OWNER, certificates[OWNER].ca, foreign.certificate, foreign.key)
    listener = LISTENERS[kind](
        certificates[MODEL], "[::1]", (0,), SESSION, {OWNER: TOKEN}, Clock(), Limits(5.0)
    )
    try:
        place = ("[::1]", listener.port)
        with pytest.raises(AuthenticationError, match=r"does not accept this party's certificate"):
            DIALLERS[kind](*place, stranger, MODEL, SESSION, TOKEN, Clock(), Limits(5.0), timeout=4)
        DIALLERS[kind](
            *place, certificates[OWNER], MODEL, SESSION, TOKEN, Clock(), Limits(5.0), timeout=4
        ).close()
    finally:
        listener.close()
