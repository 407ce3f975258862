"""A Link, in memory, over TLS and over gRPC: order, checks, counts, back-pressure, and every end is typed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from secureinfer.errors import AuthenticationError, PeerError, SecureInferError, SessionError, WireError
from secureinfer.transport import grpc_listener
from secureinfer.transport.base import HEADER_BYTES, Address, Clock, Counter
from secureinfer.transport.data import DIALLERS, LISTENERS, DataListener, dialler
from secureinfer.transport.framing import ERROR, FramedLink
from secureinfer.transport.limits import Limits
from secureinfer.transport.memory import memory_links
from secureinfer.transport.tls import Credentials, Identity, make_certificates
from secureinfer.transport.wire import pack_header

from .links import AT, MODEL, OWNER, SESSION, TOKEN, Pair, between

Opener = Callable[..., "Iterator[Pair]"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[Identity, Credentials]:
    return make_certificates(
        tmp_path_factory.mktemp("certs"),
        {"data_owner": ["data_owner", "other"], "model_owner": ["model_owner"], "dealer": ["dealer"]},
    )


@contextmanager
def in_memory(_: object, *, deadline: float = 20.0, queued: int = 1 << 30) -> Iterator[Pair]:
    links = memory_links(["data_owner", "model_owner"], SESSION, deadline=deadline, limit=queued)
    yield links["data_owner"]["model_owner"], links["model_owner"]["data_owner"]
    links["data_owner"]["model_owner"].close()


@pytest.fixture(params=["tls", "grpc"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["memory", "tls", "grpc"])
def opener(
    request: pytest.FixtureRequest, certificates: dict[Identity, Credentials]
) -> Callable[..., object]:
    if request.param == "memory":
        return lambda **kw: in_memory(certificates, **kw)
    return lambda **kw: between(request.param, certificates, **kw)


def test_frames_arrive_in_order_and_are_counted_on_both_sides(opener: Opener) -> None:
    with opener() as (a, b):
        for size in (0, 1, 100_000, (1 << 20) - HEADER_BYTES, 1 << 20, 3_000_001):
            a.send(AT, bytes([size % 251]) * size)
        a.send(Address("offline", 9), b"x")
        for size in (0, 1, 100_000, (1 << 20) - HEADER_BYTES, 1 << 20, 3_000_001):
            assert bytes(b.receive(AT, size)) == bytes([size % 251]) * size
        assert b.receive_any() == (Address("offline", 9), b"x")
        total = sum((0, 1, 100_000, (1 << 20) - HEADER_BYTES, 1 << 20, 3_000_001))
        assert a.counters()["online", 3, 2] == Counter(bytes_sent=total + 6 * HEADER_BYTES, frames_sent=6)
        assert b.counters()["online", 3, 2] == Counter(
            bytes_received=total + 6 * HEADER_BYTES, frames_received=6
        )
        assert b.total().frames_received == 7
        assert b.settle("online", 3).keys() == {2} and ("online", 3, 2) not in b.counters()
        assert b.total().frames_received == 7


# --- what a thread waited ---

LATE = 0.3


def waited(link: FramedLink, phase: str = "online") -> float:
    """Seconds in all frames of a phase."""
    return sum(c.waiting_seconds for key, c in link.counters().items() if key[0] == phase)


def after(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_a_receiver_that_is_blocked_has_waited_and_one_whose_frame_is_there_has_not(opener: Opener) -> None:
    with opener() as (a, b):
        a.send(AT, b"there")
        time.sleep(LATE)  # which is no wait in the link
        b.receive(AT)
        assert waited(b) < LATE / 2
        late = after(LATE, lambda: a.send(AT, b"late"))
        b.receive(AT)
        late.join()
        assert 0.9 * LATE < waited(b) < 3 * LATE
        assert waited(a) < LATE / 2  # whoever sends a little waits for nobody


def test_a_sender_whose_frames_are_not_taken_has_waited_and_one_with_room_has_not(opener: Opener) -> None:
    frames, size = 40, 1 << 20
    with opener(queued=1 << 20) as (a, b):

        def read() -> None:
            for _ in range(frames):
                b.receive(AT, size)

        slow = after(LATE, read)
        for _ in range(frames):  # more than the kernel's buffers take besides
            a.send(AT, bytes(size))
        slow.join()
        assert waited(a) > LATE / 2
    with opener() as (a, b):
        a.send(AT, bytes(1000))
        assert waited(a) < LATE / 2


def test_waiting_for_a_command_is_no_part_of_the_run_that_it_begins(opener: Opener) -> None:
    with opener() as (a, b):
        late = after(LATE, lambda: a.send(AT))
        assert b.receive_any(None)[0] == AT
        late.join()
        assert waited(b) < LATE / 2


def test_an_idle_wait_that_ended_in_nothing_is_not_counted_to_the_next_frame(opener: Opener) -> None:
    with opener() as (a, b):
        after(LATE, lambda: a.send(Address("control", 0, 0, 0))).join()
        b.receive_any(None)
        a.send(AT, b"x")
        time.sleep(0.05)
        b.receive(AT)
        assert waited(b) < LATE / 2


def test_two_threads_of_a_party_wait_each_for_itself() -> None:
    """As dealing beside inferring: one waits for the dealer, the other for a peer, each in its own phase."""
    links = memory_links(["data_owner", "model_owner", "dealer"], SESSION)
    me, offline = links["data_owner"], Address("offline", 4)
    dealing = threading.Thread(target=me["dealer"].receive, args=(offline,))
    dealing.start()
    for _ in range(20):
        links["model_owner"]["data_owner"].send(AT, b"x")
        me["model_owner"].receive(AT)
        time.sleep(LATE / 20)
    links["dealer"]["data_owner"].send(offline)
    dealing.join()
    assert waited(me["dealer"], "offline") > 0.9 * LATE
    assert waited(me["model_owner"]) + waited(me["dealer"]) < LATE / 2
    assert waited(me["model_owner"], "offline") == 0


def test_a_frame_over_the_receivers_limit_is_refused_before_it_is_read(opener: Opener) -> None:
    """Where a command of a kilobyte is due, a peer cannot make this side take gigabytes first."""
    for receive in (lambda b: b.receive(AT, limit=1000), lambda b: b.receive_any(5.0, limit=1000)):
        with opener() as (a, b):
            a.send(AT, bytes(1000))
            assert len(b.receive_any(5.0, limit=1000)[1]) == 1000
            a.send(AT, bytes(1001))
            with pytest.raises(WireError, match="1001 bytes, at most 1000"):
                receive(b)
            assert b.total().frames_received == 1


def test_what_is_sent_may_be_reused_and_what_is_received_may_be_written(opener: Opener) -> None:
    with opener() as (a, b):
        data = bytearray(b"before")
        a.send(AT, data)
        data[:] = b"after!"
        got = b.receive(AT)
        assert bytes(got) == b"before"
        got[:] = b"change"


def test_the_clock_counts_the_longest_chain_of_dependent_messages(opener: Opener) -> None:
    with opener() as (a, b):
        for _ in range(2):  # both send at once, then receive: one round each time
            a.send(AT, b"1")
            b.send(AT, b"2")
            a.receive(AT)
            b.receive(AT)
        a.send(AT, b"3")  # two frames one way, sent in a row: one round
        a.send(AT, b"4")
        b.receive(AT)
        b.receive(AT)
        assert (a.clock.rounds("online", 3), b.clock.rounds("online", 3)) == (2, 3)
        assert b.clock.rounds("online", 4) == b.clock.rounds("offline", 3) == 0


@pytest.mark.parametrize(
    ("expected", "size"),
    [
        (Address("offline", 3, 2, 1), 4),
        (Address("online", 4, 2, 1), 4),
        (Address("online", 3, 1, 1), 4),
        (Address("online", 3, 2, 0), 4),
        (AT, 5),
        (AT, 0),
    ],
)
def test_a_frame_for_another_place_or_of_another_size_is_refused(
    opener: Opener, expected: Address, size: int
) -> None:
    with opener() as (a, b):
        a.send(AT, b"abcd")
        with pytest.raises(WireError, match="data_owner"):
            b.receive(expected, size)
        with pytest.raises(WireError):  # and the link stays refused
            b.receive(AT, 4)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (pack_header(b"o" * 16, AT, 0, 0, 1), "another session"),
        (pack_header(SESSION, AT, 1, 0, 1), "expected frame number 0"),
        (b"\0" * HEADER_BYTES, "magic"),
        (b"SIFR" + b"\xff" * 60, "version"),
    ],
    ids=["session", "sequence", "random", "version"],
)
def test_a_planted_frame_is_refused(opener: Opener, header: bytes, says: str) -> None:
    with opener() as (a, b):
        a._put(header, memoryview(b""))
        with pytest.raises(WireError, match=says):
            b.receive(AT)


def test_the_planted_frame_would_pass_if_it_were_right(opener: Opener) -> None:
    with opener() as (a, b):
        a._put(pack_header(SESSION, AT, 0, 2, 1), memoryview(b"ok"))
        assert bytes(b.receive(AT, 2)) == b"ok"


def test_a_repeated_frame_is_refused(opener: Opener) -> None:
    with opener() as (a, b):
        a.send(AT, b"1")
        a._put(pack_header(SESSION, AT, 0, 1, 1), memoryview(b"1"))
        b.receive(AT)
        with pytest.raises(WireError, match="expected frame number 1, got 0"):
            b.receive(AT)


def test_a_frame_that_stops_half_way_is_a_peer_error_within_the_deadline(opener: Opener) -> None:
    with opener(deadline=0.3) as (a, b):
        a._put(pack_header(SESSION, AT, 0, 100, 1), memoryview(b"half"))
        start = time.monotonic()
        with pytest.raises(PeerError, match="data_owner: sent nothing within the deadline"):
            b.receive(AT)
        assert time.monotonic() - start < 3


def test_a_silent_peer_is_named_at_the_deadline_and_not_before(opener: Opener) -> None:
    with opener(deadline=0.5) as (a, b):
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            b.receive(AT)
        assert caught.value.peer == "data_owner" and 0.4 < time.monotonic() - start < 3
        with pytest.raises(PeerError):
            b.receive(AT)


def test_a_peer_that_closes_is_named_after_its_last_frame(opener: Opener) -> None:
    with opener() as (a, b):
        a.send(AT, b"last")
        closing = threading.Thread(target=a.close)
        closing.start()
        assert bytes(b.receive(AT)) == b"last"
        with pytest.raises(PeerError, match="data_owner"):
            b.receive(AT)
        closing.join()
        with pytest.raises(PeerError):
            a.send(AT, b"late")


def test_an_error_reaches_the_peer_with_its_public_text_alone(opener: Opener) -> None:
    with opener() as (a, b):
        a.send_error(SessionError("secret detail 42", public_detail="step 7"))
        with pytest.raises(PeerError) as caught:
            b.receive(AT)
        assert str(caught.value) == "data_owner: ended the session: the session ended: step 7"


def test_a_link_that_another_thread_ends_raises_its_reason_in_who_waits_and_tells_the_peer(
    opener: Opener,
) -> None:
    with opener() as (a, b):
        reason = PeerError("dealer", "is gone")
        threading.Timer(0.3, b.interrupt, (reason,)).start()
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            b.receive_any(None)
        assert caught.value is reason and time.monotonic() - start < 5
        with pytest.raises(PeerError) as caught:
            a.receive_any(5.0)
        assert caught.value.peer == "dealer"
        with pytest.raises(PeerError):
            b.send(AT, b"")


def test_an_error_about_a_third_party_names_it(opener: Opener) -> None:
    with opener() as (a, b):
        b.send_error(PeerError("dealer", "silent"))
        with pytest.raises(PeerError) as caught:
            a.receive_any()
        assert caught.value.peer == "dealer" and "model_owner" in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"code": 1}', b"[" * 50_000, bytes(1 << 17)])
def test_an_error_frame_that_is_malformed_is_a_wire_error(opener: Opener, body: bytes) -> None:
    with opener() as (a, b):
        a.send(ERROR, body)
        with pytest.raises(WireError):
            b.receive(AT)


def test_two_sides_that_both_send_200_megabytes_before_they_receive_do_not_deadlock(opener: Opener) -> None:
    size = 200_000_000
    with opener(deadline=60) as (a, b):
        got: dict[str, int] = {}

        def exchange(name: str, link: FramedLink) -> None:
            link.send(AT, bytes(size))
            got[name] = len(link.receive(AT, size))

        threads = [threading.Thread(target=exchange, args=pair) for pair in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == {"a": size, "b": size}


def test_a_reader_that_stalls_holds_the_sender_back(opener: Opener) -> None:
    with opener(deadline=1.0, queued=8 << 20) as (a, b):
        sent = 0
        with pytest.raises(PeerError, match="model_owner: took no data for 1 s"):
            for _ in range(200):
                a.send(AT, bytes(1 << 20))
                sent += 1
        # The queue's 8 MiB, what gRPC holds in its window and in the sockets, and not more.
        assert sent < 64


SILENCE_SECONDS = 4.0
"""Forty keep-alive periods of the two tests below; gRPC's unmatched settings end a link after 3.1 to 3.4 s."""


def test_long_silence_between_frames_does_not_end_a_link(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    with between(kind, certificates, keepalive=0.1) as (a, b):
        time.sleep(SILENCE_SECONDS)
        a.send(AT, b"still here")
        assert bytes(b.receive(AT)) == b"still here"
        assert a.failure is None and b.failure is None


def test_long_silence_ends_a_link_whose_ends_do_not_agree_on_pings(
    certificates: dict[Identity, Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = grpc_listener.options
    apart = ("grpc.http2.max_ping_strikes", "grpc.http2.min_ping_interval_without_data_ms")
    monkeypatch.setattr(
        grpc_listener, "options", lambda *a, **k: [o for o in matched(*a, **k) if o[0] not in apart]
    )
    with between("grpc", certificates, keepalive=0.1) as (a, b):
        stop = time.monotonic() + SILENCE_SECONDS
        while a.failure is None and b.failure is None and time.monotonic() < stop:
            time.sleep(0.05)
        assert isinstance(a.failure or b.failure, PeerError)


def test_the_environments_proxy_is_not_used(
    certificates: dict[Identity, Credentials], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with between(kind, certificates) as (a, b):
        a.send(AT, b"direct")
        assert bytes(b.receive(AT)) == b"direct"


# --- who may connect ---


@contextmanager
def listening(kind: str, certs: dict[Identity, Credentials]) -> Iterator[DataListener]:
    listener = LISTENERS[kind](certs[MODEL], "127.0.0.1", (0,), SESSION, {OWNER: TOKEN}, Clock(), Limits(5.0))
    try:
        yield listener
    finally:
        listener.close()


def connect(
    kind: str,
    listener: DataListener,
    credentials: Credentials,
    peer: Identity = MODEL,
    session: bytes = SESSION,
    token: bytes = TOKEN,
    timeout: float = 4.0,
) -> FramedLink:
    return DIALLERS[kind](
        "127.0.0.1", listener.port, credentials, peer, session, token, Clock(), Limits(5.0), timeout=timeout
    )


def refused(call: Callable[[], FramedLink], kind: type[SecureInferError]) -> str:
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call().close()
    assert time.monotonic() - start < 6
    return str(caught.value)


def test_the_right_party_with_the_right_token_is_let_in(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    with listening(kind, certificates) as listener:
        link = connect(kind, listener, certificates[OWNER])
        assert listener.accept("data_owner", 5).peer == "data_owner"
        threading.Thread(target=listener.close).start()
        link.close()


def test_wrong_tokens_sessions_and_parties_are_refused(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    other, dealer = certificates[Identity("data_owner", "other")], certificates[Identity("dealer", "dealer")]
    with listening(kind, certificates) as listener:
        mine = certificates[OWNER]
        assert "session token" in refused(
            lambda: connect(kind, listener, mine, token=b"x" * 32), AuthenticationError
        )
        assert "session token" in refused(
            lambda: connect(kind, listener, mine, token=b""), AuthenticationError
        )
        assert "session token" in refused(
            lambda: connect(kind, listener, mine, session=b"z" * 16), AuthenticationError
        )
        assert "not a party" in refused(lambda: connect(kind, listener, other), AuthenticationError)
        assert "not a party" in refused(lambda: connect(kind, listener, dealer), AuthenticationError)
        # None of them kept the right one out.
        link = connect(kind, listener, mine)
        assert refused(lambda: connect(kind, listener, mine), SecureInferError)  # and it cannot come twice
        threading.Thread(target=listener.close).start()
        link.close()


def test_a_listener_under_another_name_or_role_is_refused(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    with listening(kind, certificates) as listener:
        for peer in (Identity("model_owner", "another"), Identity("dealer", "model_owner")):
            text = refused(
                lambda peer=peer: connect(kind, listener, certificates[OWNER], peer=peer), AuthenticationError
            )
            assert peer.name in text and "certificate is not accepted here" in text


def test_certificates_of_another_authority_are_refused_by_both_sides(
    certificates: dict[Identity, Credentials], kind: str, tmp_path: Path
) -> None:
    foreign = make_certificates(tmp_path, {"data_owner": ["data_owner"], "model_owner": ["model_owner"]})
    with listening(kind, certificates) as listener:
        text = refused(lambda: connect(kind, listener, foreign[OWNER]), AuthenticationError)
        assert "model_owner" in text and "certificate is not accepted here" in text
        trusting = Credentials(OWNER, certificates[OWNER].ca, foreign[OWNER].certificate, foreign[OWNER].key)
        text = refused(lambda: connect(kind, listener, trusting), AuthenticationError)
        assert "does not accept this party's certificate" in text


def test_nobody_at_the_address_is_a_peer_error_that_names_it(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    with listening(kind, certificates) as listener:
        port = listener.port
    start = time.monotonic()
    with pytest.raises(PeerError, match="model_owner: nobody answers as model_owner") as caught:
        DIALLERS[kind](
            "127.0.0.1", port, certificates[OWNER], MODEL, SESSION, TOKEN, Clock(), Limits(), timeout=0.6
        )
    assert caught.value.peer == "model_owner" and time.monotonic() - start < 4


def test_a_listener_that_comes_late_is_waited_for(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    with listening(kind, certificates) as first:
        port = first.port
    late: list[DataListener] = []

    def listen() -> None:
        late.append(
            LISTENERS[kind](
                certificates[MODEL], "127.0.0.1", (port,), SESSION, {OWNER: TOKEN}, Clock(), Limits(5.0)
            )
        )

    timer = threading.Timer(0.4, listen)
    timer.start()
    link = DIALLERS[kind](
        "127.0.0.1", port, certificates[OWNER], MODEL, SESSION, TOKEN, Clock(), Limits(), timeout=10
    )
    timer.join()
    threading.Thread(target=late[0].close).start()
    link.close()


def test_a_kind_of_link_that_is_unknown_here_is_told_and_not_dialled() -> None:
    with pytest.raises(WireError, match="model_owner: its data link 'quic' is none of tls, grpc"):
        dialler("quic", "model_owner")
    assert dialler("tls", "model_owner") is DIALLERS["tls"]


def test_a_port_in_use_is_told_and_the_next_one_is_taken(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    with listening(kind, certificates) as first:
        with pytest.raises(SessionError, match=f"no free port among {first.port} on 127.0.0.1"):
            LISTENERS[kind](certificates[MODEL], "127.0.0.1", (first.port,), SESSION, {}, Clock(), Limits())
        second = LISTENERS[kind](
            certificates[MODEL], "127.0.0.1", (first.port, 0), SESSION, {}, Clock(), Limits()
        )
        assert second.port != first.port
        second.close()


def test_a_peer_that_never_connects_is_named(certificates: dict[Identity, Credentials], kind: str) -> None:
    with listening(kind, certificates) as listener:
        with pytest.raises(PeerError, match="data_owner: did not connect within 0.2 s"):
            listener.accept("data_owner", 0.2)


STOPPED = """
import sys, time
from pathlib import Path
from secureinfer.transport.base import Clock
from secureinfer.transport.data import DIALLERS
from secureinfer.transport.limits import Limits
from secureinfer.transport.tls import Identity, load_credentials
folder, port = Path(sys.argv[1]), int(sys.argv[2])
me, peer = Identity("data_owner", "data_owner"), Identity("model_owner", "model_owner")
mine = load_credentials(me, folder / "ca.pem", folder / "data_owner.pem", folder / "data_owner.key")
dial, limits = DIALLERS[sys.argv[3]], Limits(20.0, 0.3)
link = dial("127.0.0.1", port, mine, peer, b"s" * 16, b"t" * 32, Clock(), limits, timeout=10)
print("up", flush=True)
time.sleep(60)
"""


def test_a_stopped_peer_is_noticed_by_keep_alive_where_no_deadline_runs(
    certificates: dict[Identity, Credentials], kind: str
) -> None:
    listener = LISTENERS[kind](
        certificates[MODEL], "127.0.0.1", (0,), SESSION, {OWNER: TOKEN}, Clock(), Limits(20.0, 0.3)
    )
    folder = certificates[OWNER].ca.parent
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(folder), str(listener.port), kind],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        link = listener.accept("data_owner", 10)
        child.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(PeerError, match="data_owner"):
            link.receive_any()
        assert time.monotonic() - start < 5
    finally:
        child.kill()
        child.wait()
        listener.close()
