"""A daemon's control port: who may open and join a session, and every difference that a handshake finds."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import secureinfer as si
from secureinfer.config import make_settings
from secureinfer.errors import (
    AuthenticationError,
    HandshakeError,
    PeerError,
    SecureInferError,
    SessionError,
    SettingsError,
    WireError,
)
from secureinfer.session.control import ControlClient, Place
from secureinfer.session.handshake import Hello, from_message, make_hello
from secureinfer.session.manifest import read_manifest
from secureinfer.session.servicer import HANDLERS, Daemon
from secureinfer.transport.base import Clock
from secureinfer.transport.data import dialler
from secureinfer.transport.limits import Limits
from secureinfer.transport.tls import Credentials, Identity, make_certificates
from secureinfer.v1 import control_pb2

OWNER = Identity("data_owner", "data_owner")
OTHER = Identity("data_owner", "other")
MODEL = Identity("model_owner", "model_owner")
DEALER = Identity("dealer", "dealer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control")
    program = si.compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    program.public().save(folder / "public.si")
    si.compile(torch.nn.Linear(4, 5), (torch.ones(2, 4),)).public().save(folder / "other.si")
    return folder


@pytest.fixture(scope="module")
def certificates(folder: Path) -> dict[Identity, Credentials]:
    parties = {"data_owner": ["data_owner", "other"], "model_owner": ["model_owner"], "dealer": ["dealer"]}
    return make_certificates(folder / "certs", parties)


@pytest.fixture(scope="module")
def dealer(folder: Path, certificates: dict[Identity, Credentials]) -> Iterator[Daemon]:
    daemon = Daemon(make_settings(settings(folder, certificates)))
    yield daemon
    daemon.close()


def settings(folder: Path, certs: dict[Identity, Credentials], **changes: Any) -> dict[str, Any]:
    own = certs[DEALER]
    return {
        "role": "dealer",
        "name": "dealer",
        "program": str(folder / "public.si"),
        "tls": {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)},
        "listen": {"port": 0, "sessions": 2},
        "deadlines": {"connect": 1.0, "start": 20.0},
        **changes,
    }


@pytest.fixture
def hello(folder: Path) -> Hello:
    return make_hello(
        read_manifest(folder / "public.si", allow_private=False),
        session_id=secrets.token_bytes(16),
        model_owner="model_owner",
        data_owners=("data_owner",),
        dealer="dealer",
        unsafe=(),
    )


@pytest.fixture
def client(
    dealer: Daemon, certificates: dict[Identity, Credentials]
) -> Iterator[Callable[[Identity], ControlClient]]:
    made: list[ControlClient] = []

    def connect(identity: Identity) -> ControlClient:
        made.append(
            ControlClient(
                "127.0.0.1",
                dealer.port,
                certificates[identity],
                DEALER,
                connect=3.0,
                deadline=20.0,
                keepalive=20.0,
            )
        )
        return made[-1]

    yield connect
    for one in made:
        one.close()
    stop = time.monotonic() + 10
    while dealer._sessions and time.monotonic() < stop:
        time.sleep(0.05)
    assert not dealer._sessions


def test_a_session_is_opened_joined_once_and_closed_by_its_opener(
    dealer: Daemon, client: Callable[[Identity], ControlClient], hello: Hello
) -> None:
    place = client(OWNER).open(hello)
    assert place.port != dealer.port and repr(place) == f"Place(port={place.port}, data_link='tls')"
    with pytest.raises(AuthenticationError):  # the same id again
        client(OWNER).open(hello)
    with pytest.raises(HandshakeError, match="backend: mpc here, ckks at model_owner"):
        client(MODEL).join(dataclasses.replace(hello, backend="ckks"))
    joined = client(MODEL).join(hello)
    assert joined.port == place.port and joined.token != place.token
    with pytest.raises(AuthenticationError):  # a second model owner under the same name
        client(MODEL).join(hello)
    with pytest.raises(AuthenticationError):  # a data owner does not join
        client(OTHER).join(hello)
    client(OTHER).close_session(hello.session_id)  # not its session: nothing happens
    assert hello.session_id in dealer._sessions
    client(OWNER).close_session(hello.session_id)


def test_a_data_link_of_an_unknown_kind_is_refused_before_it_is_dialled(
    dealer: Daemon,
    client: Callable[[Identity], ControlClient],
    hello: Hello,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = dealer._listen.model_copy(update={"data_link": "quic"})
    monkeypatch.setattr(dealer, "_listen", later)
    with pytest.raises(WireError, match="dealer: its data link 'quic' is none of tls, grpc"):
        client(OWNER).open(hello)
    client(OWNER).close_session(hello.session_id)


def test_a_token_of_one_session_opens_no_other(
    dealer: Daemon,
    client: Callable[[Identity], ControlClient],
    hello: Hello,
    certificates: dict[Identity, Credentials],
) -> None:
    second = dataclasses.replace(hello, session_id=secrets.token_bytes(16))
    places = {h.session_id: client(OWNER).open(h) for h in (hello, second)}
    with pytest.raises(SessionError, match="all 2 sessions are in use"):
        client(OWNER).open(dataclasses.replace(hello, session_id=secrets.token_bytes(16)))

    def connect(session_id: bytes, place: Place, token: bytes, who: Identity = OWNER) -> None:
        dialler(place.data_link, "dealer")(
            "127.0.0.1",
            place.port,
            certificates[who],
            DEALER,
            session_id,
            token,
            Clock(),
            Limits(5.0),
            timeout=5.0,
        ).close()

    mine, other = places[hello.session_id], places[second.session_id]
    with pytest.raises(AuthenticationError):
        connect(hello.session_id, mine, other.token)
    with pytest.raises(AuthenticationError):
        connect(second.session_id, mine, mine.token)
    with pytest.raises(AuthenticationError):
        connect(hello.session_id, mine, mine.token, MODEL)
    connect(hello.session_id, mine, mine.token)  # the right one passes
    for one in (hello, second):
        client(OWNER).close_session(one.session_id)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("protocol_version", 2, "protocol version: 1 here, 2 at data_owner"),
        ("manifest_digest", "0" * 64, "program (manifest digest): "),
        ("backend", "ckks", "backend: mpc here, ckks at data_owner"),
        ("protocol", "crypten", "protocol: fast here, crypten at data_owner"),
        ("model_owner", "someone", "model owner: model_owner here, someone at data_owner"),
        ("dealer", "someone", "dealer: dealer here, someone at data_owner"),
        ("data_owners", ("other",), "data owners: data_owner here, other at data_owner"),
        (
            "unsafe",
            ("unsafe_trusted_first_party",),
            "unsafe switches: none here, unsafe_trusted_first_party at",
        ),
    ],
)
def test_a_difference_is_named_on_both_sides(
    client: Callable[[Identity], ControlClient],
    hello: Hello,
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: Any,
    says: str,
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(HandshakeError) as caught:
        client(OWNER).open(dataclasses.replace(hello, **{field: value}))
    assert says in str(caught.value) and "dealer" in str(caught.value)
    assert says in caplog.text


def test_who_is_not_accepted_or_has_the_wrong_role_is_refused(
    client: Callable[[Identity], ControlClient], hello: Hello
) -> None:
    for identity in (OTHER, MODEL, DEALER):
        theirs = dataclasses.replace(hello, data_owners=(identity.name,)) if identity == OTHER else hello
        with pytest.raises(AuthenticationError, match="not accepted here"):
            client(identity).open(theirs)


def test_joining_what_nobody_opened_ends_within_the_deadline(
    client: Callable[[Identity], ControlClient], hello: Hello
) -> None:
    start = time.monotonic()
    with pytest.raises(SessionError, match="no such session"):
        client(MODEL).join(hello)
    assert time.monotonic() - start < 5


def test_who_may_not_join_is_told_at_once_and_holds_no_handler(
    client: Callable[[Identity], ControlClient], hello: Hello
) -> None:
    """A wait for a session that nobody opens takes one of the daemon's handlers for the whole deadline."""
    for identity in (OWNER, OTHER, DEALER):
        start = time.monotonic()
        with pytest.raises(AuthenticationError, match="not accepted here"):
            client(identity).join(hello)
        assert time.monotonic() - start < 0.8  # the deadline for a session to appear is 1 s


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": b"short"},
        {"session_id": b""},
        {"data_owners": []},
        {"data_owners": ["a"] * 70},
        {"data_owners": ["model_owner"]},
        {"model_owner": ""},
        {"dealer": "../x"},
        {"backend": "b" * 100},
        {"protocol": "line\nbreak"},
    ],
)
def test_a_malformed_handshake_is_refused(
    client: Callable[[Identity], ControlClient], hello: Hello, change: dict[str, Any]
) -> None:
    message = hello.to_message()
    for field, value in change.items():
        if isinstance(value, list):
            message.ClearField(field)
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    with pytest.raises(WireError):
        from_message(message)
    stub = client(OWNER)
    with pytest.raises(WireError, match="malformed"):
        stub._call(stub._stub.OpenSession, control_pb2.OpenSessionRequest(hello=message))


def test_an_oversized_call_is_refused_and_the_daemon_goes_on(
    client: Callable[[Identity], ControlClient], hello: Hello
) -> None:
    stub = client(OWNER)
    huge = hello.to_message()
    huge.backend = "b" * (2 << 20)
    with pytest.raises(SecureInferError):
        stub._call(stub._stub.OpenSession, control_pb2.OpenSessionRequest(hello=huge))
    with pytest.raises(HandshakeError):
        client(OWNER).open(dataclasses.replace(hello, backend="ckks"))


def test_nobody_and_a_silent_peer_are_named(certificates: dict[Identity, Credentials]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")  # not TLS, and answers nothing
    server.start()
    own = certificates[OWNER]
    start = time.monotonic()
    with pytest.raises(AuthenticationError, match=r"something without TLS answers at .* expect dealer"):
        ControlClient("127.0.0.1", port, own, DEALER, connect=1.0, deadline=1.0, keepalive=20.0)
    assert time.monotonic() - start < 6
    server.stop(0).wait()
    with pytest.raises(PeerError, match="dealer: nobody answers .* `secureinfer party --role dealer`"):
        ControlClient("127.0.0.1", port, own, DEALER, connect=1.0, deadline=1.0, keepalive=20.0)


def test_swapped_addresses_say_who_answers_and_what_to_check(
    dealer: Daemon, certificates: dict[Identity, Credentials], tmp_path: Path
) -> None:
    with pytest.raises(AuthenticationError) as caught:
        ControlClient(
            "127.0.0.1", dealer.port, certificates[OWNER], MODEL, connect=1.0, deadline=1.0, keepalive=20.0
        )
    assert str(caught.value) == (
        f"dealer (dealer) answers at 127.0.0.1:{dealer.port}, where the settings expect model_owner (model_owner); "
        "check address and name in peers.model_owner"
    )
    # The twin: who belongs to another authority is not believed.
    stranger = make_certificates(tmp_path, {"data_owner": ["data_owner"]})[OWNER]
    with pytest.raises(AuthenticationError, match="certificate is not accepted here"):
        ControlClient("127.0.0.1", dealer.port, stranger, MODEL, connect=1.0, deadline=1.0, keepalive=20.0)


def test_a_control_port_in_use_and_a_data_owners_daemon_are_refused(
    folder: Path, certificates: dict[Identity, Credentials], dealer: Daemon
) -> None:
    taken = settings(folder, certificates, listen={"port": dealer.port})
    with pytest.raises(SessionError, match="no free port"):
        Daemon(make_settings(taken))
    dialling = {k: v for k, v in taken.items() if k != "listen"} | {
        "role": "data_owner",
        "name": "data_owner",
        "peers": {"model_owner": {"name": "model_owner", "address": "h:1"}},
    }
    with pytest.raises(SettingsError, match="only a model owner and a dealer listen"):
        Daemon(make_settings(dialling))


def test_another_partys_certificate_in_the_settings_is_refused(
    folder: Path, certificates: dict[Identity, Credentials]
) -> None:
    other = certificates[MODEL]
    tls = {"ca": str(other.ca), "certificate": str(other.certificate), "key": str(other.key)}
    with pytest.raises(SettingsError, match="belongs to model_owner"):
        Daemon(make_settings(settings(folder, certificates, tls=tls)))


def test_joins_that_wait_keep_no_opener_out(
    dealer: Daemon, client: Callable[[Identity], ControlClient], hello: Hello
) -> None:
    """Field report 54: more waiting calls than handlers, all for sessions that nobody opened; a session that is opened
    meanwhile is served once their time is over, and the joins all end with one error.
    """
    said: list[type[SecureInferError]] = []

    def join() -> None:
        try:
            client(MODEL).join(dataclasses.replace(hello, session_id=secrets.token_bytes(16)))
        except SecureInferError as error:
            said.append(type(error))

    with ThreadPoolExecutor(HANDLERS + 4) as pool:
        for _ in range(HANDLERS + 4):
            pool.submit(join)
        time.sleep(0.5)
        start = time.monotonic()
        place = client(OWNER).open(hello)
        assert place.port and time.monotonic() - start < 10
        assert client(MODEL).join(hello).port == place.port
    assert len(said) == HANDLERS + 4 and set(said) <= {SessionError}
    client(OWNER).close_session(hello.session_id)
