"""What is TLS's own about a link over it: strangers at the port, the preface, the two ways to send, and ends."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from secureinfer.errors import AuthenticationError, PeerError, SecureInferError, SettingsError, WireError
from secureinfer.transport import data_port, tls_listener
from secureinfer.transport.base import Clock
from secureinfer.transport.framing import ALIVE
from secureinfer.transport.limits import Limits
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
from secureinfer.transport.tls import Credentials, make_certificates
from secureinfer.transport.tls_dial import dial_tls
from secureinfer.transport.tls_link import PIECE_BYTES, TlsLink
from secureinfer.transport.tls_listener import MAX_STRANGERS, TlsListener
from secureinfer.transport.wire import DirectReader, pack_header

from .links import AT, DEALER, MODEL, OWNER, SESSION, TOKEN, Certificates, between

RIGHT = pack_preface(Preface(SESSION, TOKEN))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certs")
    return make_certificates(folder, {i.role: [i.name] for i in (OWNER, MODEL, DEALER)})


@pytest.fixture
def listener(certificates: Certificates) -> Iterator[TlsListener]:
    made = listen(certificates)
    yield made
    made.close()


def listen(certificates: Certificates, limits: Limits | None = None, admission: float = 0.5) -> TlsListener:
    return TlsListener(
        certificates[MODEL],
        "127.0.0.1",
        (0,),
        SESSION,
        {OWNER: TOKEN},
        Clock(),
        limits or Limits(5.0),
        admission=admission,
    )


def dial(
    listener: TlsListener, certificates: Certificates, limits: Limits | None = None, token: bytes = TOKEN
) -> TlsLink:
    return dial_tls(
        "127.0.0.1",
        listener.port,
        certificates[OWNER],
        MODEL,
        SESSION,
        token,
        Clock(),
        limits or Limits(5.0),
        timeout=4,
    )


@contextlib.contextmanager
def pair(
    certificates: Certificates, *, deadline: float = 20.0, keepalive: float = 20.0, queued: int = 1 << 30
) -> Iterator[tuple[TlsLink, TlsLink]]:
    with between("tls", certificates, deadline=deadline, keepalive=keepalive, queued=queued) as (here, there):
        if not (isinstance(here, TlsLink) and isinstance(there, TlsLink)):
            raise TypeError("these are no TLS links")
        yield here, there


def raw(listener: TlsListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), 5)


def handshake(
    listener: TlsListener, credentials: Credentials, change: Callable[[ssl.SSLContext], object] | None = None
) -> ssl.SSLSocket:
    context = credentials.context(server=False)
    if change is not None:
        change(context)
    return context.wrap_socket(raw(listener), server_hostname=MODEL.hostname)


def everything(sock: socket.socket) -> bytes:
    """What the other side says until it ends the connection, in whatever way."""
    data = b""
    with contextlib.suppress(OSError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return data


def lets_in(listener: TlsListener, certificates: Certificates) -> None:
    """The right peer, at once."""
    start = time.monotonic()
    link = dial(listener, certificates)
    there = listener.accept("data_owner", 5)
    assert time.monotonic() - start < 2
    link.send(AT, b"hello")
    assert bytes(there.receive(AT, 5)) == b"hello"
    link.close()


# --- sending ---


def test_a_small_frame_behind_a_large_one_that_waits_comes_after_it(certificates: Certificates) -> None:
    sizes = [10, 30_000_000, 1, 5, PIECE_BYTES + 1, 0, 70_000, PIECE_BYTES, 3]
    with pair(certificates) as (a, b):
        for number, size in enumerate(sizes):
            a.send(AT, bytes([number]) * size)
        assert a._queued, "the socket took 30 MB: nothing waited"
        for number, size in enumerate(sizes):
            assert b.receive(AT, size) == bytes([number]) * size
        a.send(AT, b"and at once again")
        assert not a._queued and bytes(b.receive(AT)) == b"and at once again"


def test_two_sides_that_both_send_64_megabytes_at_once_both_receive(certificates: Certificates) -> None:
    size, got = 64_000_000, {}
    with pair(certificates, deadline=60) as links:

        def exchange(name: int, link: TlsLink) -> None:
            for number in range(2):
                link.send(AT, bytes([name + number]) * size)
                got[name, number] = link.receive(AT, size)[:: 1 << 20]

        threads = [threading.Thread(target=exchange, args=one) for one in enumerate(links)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert {key: set(value) for key, value in got.items()} == {
        (0, 0): {1},
        (0, 1): {2},
        (1, 0): {0},
        (1, 1): {1},
    }


def test_a_link_that_never_waits_has_no_thread_of_its_own(certificates: Certificates) -> None:
    with pair(certificates) as (a, b):
        for _ in range(50):
            a.send(AT, bytes(1000))
            b.receive(AT, 1000)
        assert a._sender is None and b._sender is None


def test_a_reader_that_stalls_takes_bounded_memory_and_is_named(certificates: Certificates) -> None:
    with pair(certificates, deadline=0.5, queued=4 << 20) as (a, _):
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"model_owner: took no data for 0\.5 s"):
            for _ in range(100):
                a.send(AT, bytes(1 << 20))
                assert sum(len(item) for item in a._queue) <= 5 << 20
        assert time.monotonic() - start < 5
        with pytest.raises(PeerError, match="took no data"):
            a.send(AT, b"")


def test_a_size_that_only_the_peer_names_takes_no_memory_before_it_comes() -> None:
    asked: list[int] = []

    def fill(view: memoryview, _: float | None) -> None:
        asked.append(len(view))
        if len(asked) == 3:
            raise PeerError("peer", "ended")

    with pytest.raises(PeerError):
        DirectReader(fill).read(1 << 33, None)
    assert asked == [1 << 20, 1 << 20, 2 << 20]
    asked[:] = [0] * 3
    assert len(DirectReader(fill).read(3 << 20, None)) == 3 << 20


# --- strangers ---


def no_certificate(context: ssl.SSLContext) -> ssl.SSLContext:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    bare.set_alpn_protocols(["secureinfer/1"])
    return bare


STRANGERS: dict[str, Callable[[TlsListener, Certificates], bytes]] = {}


def stranger(
    function: Callable[[TlsListener, Certificates], bytes],
) -> Callable[[TlsListener, Certificates], bytes]:
    STRANGERS[function.__name__.replace("_", " ")] = function
    return function


@stranger
def garbage(listener: TlsListener, _: Certificates) -> bytes:
    with raw(listener) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(2000))
        return everything(sock)


@stranger
def silence(listener: TlsListener, _: Certificates) -> bytes:
    with raw(listener) as sock:
        start = time.monotonic()
        data = everything(sock)
        assert 0.3 < time.monotonic() - start < 3, "nobody bounds how long a stranger is silent"
        return data


@stranger
def silence_after_the_handshake(listener: TlsListener, certificates: Certificates) -> bytes:
    with handshake(listener, certificates[OWNER]) as sock:
        start = time.monotonic()
        data = everything(sock)
        assert 0.2 < time.monotonic() - start < 3
        return data


@stranger
def no_certificate_at_all(listener: TlsListener, certificates: Certificates) -> bytes:
    context = no_certificate(certificates[OWNER].context(server=False))
    with context.wrap_socket(raw(listener), server_hostname=MODEL.hostname) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(RIGHT)
        return everything(sock)


@stranger
def tls_1_2(listener: TlsListener, certificates: Certificates) -> bytes:
    def older(context: ssl.SSLContext) -> None:
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2

    with pytest.raises(ssl.SSLError, match="(?i)protocol.version"):
        handshake(listener, certificates[OWNER], older)
    return b""


@stranger
def another_protocol(listener: TlsListener, certificates: Certificates) -> bytes:
    with handshake(listener, certificates[OWNER], lambda c: c.set_alpn_protocols(["h2"])) as sock:
        sock.sendall(RIGHT)
        return everything(sock)


@stranger
def no_protocol(listener: TlsListener, certificates: Certificates) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    own = certificates[OWNER]
    context.load_verify_locations(own.ca)
    context.load_cert_chain(own.certificate, own.key)
    with context.wrap_socket(raw(listener), server_hostname=MODEL.hostname) as sock:
        sock.sendall(RIGHT)
        return everything(sock)


@stranger
def a_truncated_preface(listener: TlsListener, certificates: Certificates) -> bytes:
    with handshake(listener, certificates[OWNER]) as sock:
        sock.sendall(RIGHT[:-1])
        return everything(sock)


@stranger
def a_preface_and_then_the_end(listener: TlsListener, certificates: Certificates) -> bytes:
    with handshake(listener, certificates[OWNER]) as sock:
        sock.sendall(RIGHT[:20])
        socket.socket.shutdown(sock, socket.SHUT_WR)
        return everything(sock)


def refused(listener: TlsListener, credentials: Credentials, preface: bytes, says: str) -> bytes:
    with handshake(listener, credentials) as sock:
        sock.sendall(preface)
        status, text = unpack_answer(everything(sock))
        assert status == REFUSED and says in text, text
        return b""


@stranger
def a_wrong_token(listener: TlsListener, certificates: Certificates) -> bytes:
    preface = pack_preface(Preface(SESSION, b"x" * 32))
    return refused(listener, certificates[OWNER], preface, "session token")


@stranger
def another_session(listener: TlsListener, certificates: Certificates) -> bytes:
    preface = pack_preface(Preface(b"z" * 16, TOKEN))
    return refused(listener, certificates[OWNER], preface, "session token")


@stranger
def another_party(listener: TlsListener, certificates: Certificates) -> bytes:
    return refused(listener, certificates[DEALER], RIGHT, "not a party of it")


@stranger
def another_version(listener: TlsListener, certificates: Certificates) -> bytes:
    preface = RIGHT[:4] + b"\x02" + RIGHT[5:]
    return refused(listener, certificates[OWNER], preface, "version 1 is spoken here")


@stranger
def no_preface(listener: TlsListener, certificates: Certificates) -> bytes:
    return refused(listener, certificates[OWNER], b"G" * 4096, "preface")


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_kept_out_told_nothing_and_keeps_nobody_out(
    listener: TlsListener, certificates: Certificates, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "secureinfer.transport"):
        said = STRANGERS[name](listener, certificates)
        # TLS's own alerts alone; inside TLS, nothing.
        assert len(said) < 16 and b"Traceback" not in said and b".py" not in said
        with pytest.raises(PeerError, match="did not connect"):
            listener.accept("data_owner", 0.05)
        lets_in(listener, certificates)
    assert "Traceback" not in caplog.text and "unexpected" not in caplog.text
    assert TOKEN.decode() not in caplog.text


def test_idle_strangers_however_many_keep_the_right_peer_not_out(certificates: Certificates) -> None:
    listener = listen(certificates, admission=30.0)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        for _ in range(50):
            stack.enter_context(raw(listener))
        lets_in(listener, certificates)
        assert len(listener._strangers) <= MAX_STRANGERS
        names = [t.name for t in threading.enumerate()]
        assert names.count("stranger") <= MAX_STRANGERS + 4
    stop = time.monotonic() + 3
    while any(t.name in ("stranger", "data-port") for t in threading.enumerate()):
        assert time.monotonic() < stop, "a closed port left a thread"
        time.sleep(0.02)


def test_idle_strangers_without_a_bound_would_each_hold_a_thread(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: what the test above looks at is there to be seen."""
    monkeypatch.setattr(tls_listener, "MAX_STRANGERS", 1000)
    listener = listen(certificates, admission=30.0)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        for _ in range(30):
            stack.enter_context(raw(listener))
        stop = time.monotonic() + 3
        while len(listener._strangers) < 30 and time.monotonic() < stop:
            time.sleep(0.01)
        assert len(listener._strangers) == 30 > MAX_STRANGERS


@pytest.mark.parametrize("what", ["token", "session", "party", "protocol"])
def test_each_check_of_a_stranger_is_what_keeps_it_out(
    certificates: Certificates, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted faults: without the check, the same stranger is let in."""
    listener = listen(certificates)
    preface, own = RIGHT, certificates[OWNER]
    if what in ("token", "session"):
        blind = SimpleNamespace(compare_digest=lambda a, b: len(a) == len(b))
        monkeypatch.setattr(data_port, "hmac", blind)
        shown = Preface(SESSION, b"x" * 32) if what == "token" else Preface(b"z" * 16, TOKEN)
        preface = pack_preface(shown)
    elif what == "party":
        own = certificates[DEALER]
        monkeypatch.setattr(tls_listener, "identity_from_certificate", lambda der: OWNER)
    else:
        monkeypatch.setattr(tls_listener, "DATA_PROTOCOL", "h2")
        listener.close()
        listener = listen(certificates)
        listener._context.set_alpn_protocols(["h2"])
    try:
        change = (lambda c: c.set_alpn_protocols(["h2"])) if what == "protocol" else None
        with handshake(listener, own, change) as sock:
            sock.sendall(preface)
            assert unpack_answer(sock.recv(ANSWER_BYTES)) == (ACCEPTED, "")
    finally:
        listener.close()
    assert hmac.compare_digest(TOKEN, TOKEN)


def test_bytes_past_the_preface_are_frames_and_no_part_of_it(
    listener: TlsListener, certificates: Certificates
) -> None:
    with handshake(listener, certificates[OWNER]) as sock:
        sock.sendall(RIGHT + pack_header(SESSION, AT, 0, 4, 1) + b"good" + b"G" * 64)
        link = listener.accept("data_owner", 5)
        assert bytes(link.receive(AT, 4)) == b"good"
        with pytest.raises(WireError, match="magic"):
            link.receive(AT)


def test_a_party_comes_once(listener: TlsListener, certificates: Certificates) -> None:
    link = dial(listener, certificates)
    with pytest.raises(
        PeerError, match="model_owner: refused the connection: this party is connected already"
    ):
        dial(listener, certificates)
    link.close()


def test_a_refusal_is_told_at_once_and_without_the_token(
    listener: TlsListener, certificates: Certificates
) -> None:
    start = time.monotonic()
    with pytest.raises(AuthenticationError, match="session token") as caught:
        dial(listener, certificates, token=b"secret-" * 4)
    assert time.monotonic() - start < 1.5
    assert "secret" not in str(caught.value) and "secret" not in repr(Preface(SESSION, b"secret"))


def test_tokens_of_another_length_are_refused_before_anybody_listens(certificates: Certificates) -> None:
    with pytest.raises(SettingsError, match="32"):
        TlsListener(certificates[MODEL], "127.0.0.1", (0,), SESSION, {OWNER: b"short"}, Clock(), Limits())


def answering(certificates: Certificates, answer: bytes, alpn: str = "secureinfer/1") -> Iterator[int]:
    """A right party's port that answers a preface with these bytes."""
    context = certificates[MODEL].context(server=True)
    context.set_alpn_protocols([alpn])
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                conn, _ = server.accept()
                with context.wrap_socket(conn, server_side=True) as sock:
                    sock.recv(PREFACE_BYTES)
                    sock.sendall(answer)
                    everything(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(5)


@pytest.mark.parametrize(
    ("answer", "alpn", "kind", "says"),
    [
        (b"x" * ANSWER_BYTES, "secureinfer/1", WireError, "none of this version"),
        (pack_answer(REFUSED, "no\x1b[31m\x00red"), "secureinfer/1", AuthenticationError, r"no\[31mred"),
        (pack_answer(TAKEN, "busy"), "secureinfer/1", PeerError, "refused the connection: busy"),
        (pack_answer(ACCEPTED), "h2", WireError, "takes no data connections"),
    ],
    ids=["garbage", "control characters", "taken", "protocol"],
)
def test_what_a_listener_answers_becomes_one_typed_error_that_names_it(
    certificates: Certificates, answer: bytes, alpn: str, kind: type[SecureInferError], says: str
) -> None:
    with contextlib.contextmanager(answering)(certificates, answer, alpn) as port:
        with pytest.raises(kind, match=says) as caught:
            dial_tls(
                "127.0.0.1", port, certificates[OWNER], MODEL, SESSION, TOKEN, Clock(), Limits(), timeout=3
            )
    assert "model_owner" in str(caught.value) and "\x1b" not in str(caught.value)


def test_prefaces_and_answers_are_read_back() -> None:
    assert unpack_preface(RIGHT) == Preface(SESSION, TOKEN) and len(RIGHT) == PREFACE_BYTES
    assert unpack_answer(pack_answer(REFUSED, "x" * 999)) == (REFUSED, "x" * 248)
    for bad in (b"", RIGHT + b"x", b"x" + RIGHT[1:], RIGHT[:5] + b"\1" + RIGHT[6:]):
        with pytest.raises(WireError):
            unpack_preface(bad)
    with pytest.raises(WireError):
        pack_preface(Preface(SESSION, TOKEN + b"x"))


# --- ends ---


def reset(sock: socket.socket) -> None:
    """End a connection with a reset, in the middle of whatever was sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    socket.socket.close(sock)


def test_a_reset_inside_a_frame_is_a_peer_error(listener: TlsListener, certificates: Certificates) -> None:
    sock = handshake(listener, certificates[OWNER])
    sock.sendall(RIGHT + pack_header(SESSION, AT, 0, 100, 1) + b"half")
    link = listener.accept("data_owner", 5)
    timer = threading.Timer(0.2, reset, (sock,))
    timer.start()
    with pytest.raises(PeerError, match="data_owner: is gone"):
        link.receive(AT)
    timer.join()


def test_a_stream_that_is_cut_without_tlss_end_is_not_taken_for_closed(
    listener: TlsListener, certificates: Certificates
) -> None:
    sock = handshake(listener, certificates[OWNER])
    sock.sendall(RIGHT + pack_header(SESSION, AT, 0, 4, 1) + b"good")
    link = listener.accept("data_owner", 5)
    socket.socket.shutdown(sock, socket.SHUT_WR)  # as somebody on the way could
    assert bytes(link.receive(AT, 4)) == b"good"
    with pytest.raises(PeerError, match="is gone: its connection broke"):
        link.receive(AT)
    sock.close()


def test_frames_sent_before_a_close_arrive_though_the_peer_sent_what_nobody_read(
    certificates: Certificates,
) -> None:
    """Closing a socket with unread data is a reset, which would throw away what is on its way."""
    with pair(certificates) as (a, b):
        b.send(AT, bytes(100_000))  # a never reads it
        a.send(AT, bytes(3_000_000))
        a.send(AT, b"last")
        closing = threading.Thread(target=a.close)
        closing.start()
        assert len(b.receive(AT, 3_000_000)) == 3_000_000
        assert bytes(b.receive(AT)) == b"last"
        with pytest.raises(PeerError, match="data_owner: (closed the link|is gone)"):
            b.receive(AT)
        closing.join()


def test_what_had_arrived_can_be_read_after_the_end_is_known(certificates: Certificates) -> None:
    with pair(certificates) as (a, b):
        a.send(AT, bytes(50_000))
        a.close()
        stop = time.monotonic() + 3
        while b.failure is None and time.monotonic() < stop:
            time.sleep(0.01)
        assert isinstance(b.failure, PeerError)
        assert len(b.receive(AT, 50_000)) == 50_000
        with pytest.raises(PeerError, match="data_owner: closed the link"):
            b.receive(AT)


def test_closing_waits_for_no_peer_that_has_nothing_to_say(certificates: Certificates) -> None:
    with pair(certificates) as (a, b):
        a.send(AT, b"x")
        b.receive(AT)
        start = time.monotonic()
        a.close()
        assert time.monotonic() - start < 1.0


def test_a_receive_that_waits_ends_when_its_link_is_closed(certificates: Certificates) -> None:
    with pair(certificates) as (a, _):
        told: list[SecureInferError] = []

        def wait() -> None:
            try:
                a.receive_any()
            except SecureInferError as error:
                told.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        a.close()
        thread.join(3)
        assert not thread.is_alive() and "closed on this side" in str(told[0])


CHILD = """
import sys, time
from pathlib import Path
from secureinfer.transport.base import Address, Clock
from secureinfer.transport.limits import Limits
from secureinfer.transport.tls import Identity, load_credentials
from secureinfer.transport.tls_dial import dial_tls
folder, port = Path(sys.argv[1]), int(sys.argv[2])
me, peer = Identity("data_owner", "data_owner"), Identity("model_owner", "model_owner")
mine = load_credentials(me, folder / "ca.pem", folder / "data_owner.pem", folder / "data_owner.key")
limits = Limits(20.0, 0.2)
link = dial_tls("127.0.0.1", port, mine, peer, b"s" * 16, b"t" * 32, Clock(), limits, timeout=10)
link.send(Address("online", 3, 2, 1), b"before")
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_peer_that_ends_while_this_side_computes_shows_without_a_receive(
    certificates: Certificates, how: str
) -> None:
    listener = listen(certificates, Limits(20.0, 0.2))
    folder = certificates[OWNER].ca.parent
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), str(listener.port)])
    try:
        link = listener.accept("data_owner", 20)
        time.sleep(0.2)
        assert link.failure is None
        os.kill(child.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        start = time.monotonic()
        while link.failure is None:
            assert time.monotonic() - start < 4
            time.sleep(0.02)
        assert isinstance(link.failure, PeerError) and link.failure.peer == "data_owner"
        assert (time.monotonic() - start < 1) or how == "stopped"
        with pytest.raises(PeerError):
            link.send(AT, b"")
        assert bytes(link.receive(AT)) == b"before"
    finally:
        child.kill()
        child.wait()
        listener.close()


def test_a_peer_that_only_says_that_it_is_alive_is_still_past_a_deadline(certificates: Certificates) -> None:
    with pair(certificates, keepalive=0.1, deadline=1.0) as (a, b):
        start = time.monotonic()
        with pytest.raises(PeerError, match="data_owner: sent nothing within the deadline"):
            b.receive(AT)
        assert 0.9 < time.monotonic() - start < 3
        assert b._got > 100 and b.total().bytes_received == 0  # it heard something, and counts none of it
        del a


def test_signs_of_life_between_frames_change_no_count(certificates: Certificates) -> None:
    with pair(certificates) as (a, b):
        for _ in range(3):
            a.say_alive()
            a.send(AT, b"x")
            a.say_alive()
            assert bytes(b.receive(AT, 1)) == b"x"
        assert a.total().frames_sent == b.total().frames_received == 3
        assert b.clock.rounds("control") == 0
        a._put(pack_header(SESSION, ALIVE, 3, 1, 0), memoryview(b"x"))
        with pytest.raises(WireError, match="a sign of life with 1 bytes"):
            b.receive(AT)


def test_the_ports_files_are_pem_of_this_party(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    own = certificates[OWNER]
    with pytest.raises(SettingsError, match="the TLS files of data_owner"):
        Credentials(OWNER, tmp_path / "ca.pem", own.certificate, own.key).context(server=True)
