"""Certificates name one party; whatever does not belong together is refused with what to do."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest
from cryptography import x509

from secureinfer.errors import AuthenticationError, SettingsError
from secureinfer.transport.tls import (
    Identity,
    identity_from_uris,
    load_credentials,
    make_certificates,
)

OWNER = Identity("model_owner", "model_owner")
DEALER = Identity("dealer", "dealer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, {"model_owner": ["model_owner"], "dealer": ["dealer"]})
    return folder


def test_a_certificate_names_its_party_in_one_uri_and_one_dns_name(folder: Path) -> None:
    cert = x509.load_pem_x509_certificate((folder / "dealer.pem").read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["secureinfer://dealer/dealer"]
    assert names.get_values_for_type(x509.DNSName) == ["dealer.dealer.secureinfer"]


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_credentials_hold_paths_and_no_key(folder: Path) -> None:
    credentials = load_credentials(DEALER, folder / "ca.pem", folder / "dealer.pem", folder / "dealer.key")
    secret = (folder / "dealer.key").read_text().splitlines()[1]
    assert secret not in repr(dataclasses.asdict(credentials))


def test_a_second_call_adds_to_the_same_authority(folder: Path, tmp_path: Path) -> None:
    first = make_certificates(tmp_path, {"dealer": ["one"]})
    authority = (tmp_path / "ca.pem").read_bytes()
    make_certificates(tmp_path, {"dealer": ["two"]})
    assert (tmp_path / "ca.pem").read_bytes() == authority and len(first) == 1
    load_credentials(
        Identity("dealer", "two"), tmp_path / "ca.pem", tmp_path / "two.pem", tmp_path / "two.key"
    )


def test_an_authority_can_be_thrown_away(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"dealer": ["dealer"]}, keep_authority=False)
    assert not (tmp_path / "ca.key").exists()
    with pytest.raises(SettingsError, match="only one of"):
        make_certificates(tmp_path, {"dealer": ["other"]})


@pytest.mark.parametrize(
    ("identity", "certificate", "key", "says"),
    [
        (DEALER, "model_owner", "model_owner", "belongs to model_owner"),
        (Identity("model_owner", "dealer"), "dealer", "dealer", "the settings say dealer \\(model_owner\\)"),
        (DEALER, "dealer", "model_owner", "is not the key of"),
        (DEALER, "ca", "ca", "names no party"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    folder: Path, identity: Identity, certificate: str, key: str, says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        load_credentials(identity, folder / "ca.pem", folder / f"{certificate}.pem", folder / f"{key}.key")


def test_an_expired_certificate_is_refused_before_anything_is_dialled(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"dealer": ["dealer"]}, days=0)
    with pytest.raises(SettingsError, match="make a new one"):
        load_credentials(DEALER, tmp_path / "ca.pem", tmp_path / "dealer.pem", tmp_path / "dealer.key")


@pytest.mark.parametrize(
    "content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"\0" * 99]
)
def test_a_file_that_is_no_certificate_is_refused(folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.pem").write_bytes(content)
    with pytest.raises(SettingsError):
        load_credentials(DEALER, folder / "ca.pem", tmp_path / "bad.pem", folder / "dealer.key")


@pytest.mark.parametrize(
    "uris",
    [
        [],
        [b"secureinfer://dealer/dealer", b"secureinfer://model_owner/model_owner"],
        [b"secureinfer://king/dealer"],
        [b"secureinfer://dealer/"],
        [b"secureinfer://dealer/../x"],
        [b"secureinfer://dealer/dealer\n"],
        [b"https://dealer/dealer"],
        [b"\xff\xfe"],
    ],
)
def test_a_certificate_that_names_no_party_or_two_is_refused(uris: list[bytes]) -> None:
    with pytest.raises(AuthenticationError):
        identity_from_uris(uris)
    assert identity_from_uris([b"secureinfer://dealer/dealer"]) == DEALER


@pytest.mark.parametrize("name", ["", "Dealer", "a b", "a" * 64, "-a", "a-", "ä", "a.b", "a/b"])
def test_party_names_are_plain(name: str) -> None:
    with pytest.raises(SettingsError):
        Identity("dealer", name)


def test_names_are_unique_across_roles(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unique"):
        make_certificates(tmp_path, {"dealer": ["x"], "model_owner": ["x"]})
