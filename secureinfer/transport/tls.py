"""Mutual TLS: who a certificate names, certificates for development, credentials, and why a handshake failed.

A party's certificate carries one URI, `secureinfer://<role>/<name>`, which the listening side reads from the
authenticated connection, and one DNS name, `<name>.<role>.secureinfer`, which the dialling side checks. Both
sides present a certificate of one authority; nothing is sent to anybody else.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import AuthenticationError, SettingsError
from .base import NAME_PATTERN

ROLES = ("data_owner", "model_owner", "dealer")
_NAME = re.compile(NAME_PATTERN)
_URI = re.compile(rf"secureinfer://({'|'.join(ROLES)})/({NAME_PATTERN})")

_DAMAGED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What `cryptography` raises for a certificate or key that is damaged or of an unknown kind."""

DATA_PROTOCOL = "secureinfer/1"
"""What a data connection is for, in TLS's own negotiation (ALPN)."""

DEVELOPMENT_DAYS = 365
_MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True)
class Identity:
    """Role and unique name of a party, as a certificate states them."""

    role: str
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise SettingsError(f"{self.role!r} is not a role; the roles are {', '.join(ROLES)}")
        if _NAME.fullmatch(self.name) is None:
            raise SettingsError(
                f"{self.name!r} is not a party name: use lower-case letters, digits, '-' and '_', at most 63"
            )

    @property
    def uri(self) -> str:
        return f"secureinfer://{self.role}/{self.name}"

    @property
    def hostname(self) -> str:
        return f"{self.name}.{self.role}.secureinfer"

    def __str__(self) -> str:
        return f"{self.name} ({self.role})"


def identity_from_uris(uris: Sequence[bytes | str]) -> Identity:
    """The one identity among a certificate's URIs. Raises AuthenticationError unless there is exactly one
    URI.
    """
    texts = [u.decode("ascii", "replace") if isinstance(u, bytes) else u for u in uris]
    if len(texts) != 1:
        raise AuthenticationError(f"the peer's certificate has {len(texts)} URIs, one is needed")
    match = _URI.fullmatch(texts[0])
    if match is None:
        raise AuthenticationError("the peer's certificate names no party of this protocol")
    return Identity(match.group(1), match.group(2))


def peer_identity(context: grpc.ServicerContext) -> Identity:
    """Who is at the other end of an authenticated connection. Raises AuthenticationError."""
    auth: Mapping[str, Any] = context.auth_context()  # name -> values; typed wrongly upstream
    if list(auth.get("transport_security_type", ())) != [b"ssl"]:
        raise AuthenticationError("the connection is not TLS")
    return identity_from_uris(list(auth.get("peer_uri", ())))


def identity_from_certificate(der: bytes | None) -> Identity:
    """Whom a certificate that TLS has verified names. Raises AuthenticationError."""
    if not der:
        raise AuthenticationError("the peer showed no certificate")
    try:
        return identity_from_uris(_uris(x509.load_der_x509_certificate(der)))
    except _DAMAGED:
        raise AuthenticationError("the peer's certificate cannot be read") from None


@dataclass(frozen=True)
class Credentials:
    """Paths of a party's certificate, its key and the authority that it trusts, in PEM."""

    identity: Identity
    ca: Path
    certificate: Path
    key: Path

    def for_server(self) -> grpc.ServerCredentials:
        """Demands a certificate of the peer."""
        return grpc.ssl_server_credentials(
            [(_read(self.key), _read(self.certificate))], _read(self.ca), require_client_auth=True
        )

    def for_client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def context(self, *, server: bool) -> ssl.SSLContext:
        """For a data connection: TLS 1.3 alone, this authority alone, both certificates, no resumption."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
        if server:
            context.num_tickets = 0
        try:
            context.load_verify_locations(cadata=_read(self.ca).decode("ascii"))
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SettingsError(f"the TLS files of {self.identity} cannot be used: {error}") from None
        context.set_alpn_protocols([DATA_PROTOCOL])
        return context


def load_credentials(identity: Identity, ca: Path, certificate: Path, key: Path) -> Credentials:
    """Check that the files belong together and to `identity`. Raises SettingsError that says what to do."""
    try:
        cert = x509.load_pem_x509_certificate(_read(certificate))
        private = serialization.load_pem_private_key(_read(key), None)
        x509.load_pem_x509_certificates(_read(ca))
        # Parts of a certificate are read when they are asked for, so that damage shows late.
        same = _public_der(private.public_key()) == _public_der(cert.public_key())
        names = _uris(cert)
    except _DAMAGED as error:
        raise SettingsError(f"the TLS files of {identity} cannot be read: {error}") from None
    if not same:
        raise SettingsError(f"{key.name} is not the key of {certificate.name}")
    now = datetime.datetime.now(datetime.UTC)
    if not cert.not_valid_before_utc <= now <= cert.not_valid_after_utc:
        raise SettingsError(
            f"{certificate.name} is valid from {cert.not_valid_before_utc:%Y-%m-%d} to "
            f"{cert.not_valid_after_utc:%Y-%m-%d}, which is not now; make a new one (secureinfer certs)"
        )
    try:
        found = identity_from_uris(names)
    except AuthenticationError:
        raise SettingsError(f"{certificate.name} names no party; make one with `secureinfer certs`") from None
    if found != identity:
        raise SettingsError(f"{certificate.name} belongs to {found}, the settings say {identity}")
    return Credentials(identity, ca, certificate, key)


def _public_der(key: Any) -> bytes:
    public: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return public


def _uris(cert: x509.Certificate) -> list[str]:
    """The URIs that a certificate names; none where it has no such extension."""
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def who_answers(host: str, port: int, credentials: Credentials, timeout: float) -> str | None:
    """Which party of this authority answers at an address, whoever was expected there; None where that cannot be told."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(credentials.ca))
    context.load_cert_chain(str(credentials.certificate), str(credentials.key))
    context.check_hostname = False
    try:
        with (
            socket.create_connection((host.strip("[]"), port), timeout) as raw,
            context.wrap_socket(raw, server_hostname=host.strip("[]")) as tls,
        ):
            names = _uris(x509.load_der_x509_certificate(tls.getpeercert(True) or b""))
            return str(identity_from_uris(names))
    except ssl.SSLError as error:
        return "something without TLS" if error.reason == "WRONG_VERSION_NUMBER" else None
    except (OSError, AuthenticationError, *_DAMAGED):
        return None


def make_certificates(
    folder: Path,
    parties: Mapping[str, Sequence[str]],
    *,
    days: int = DEVELOPMENT_DAYS,
    keep_authority: bool = True,
) -> dict[Identity, Credentials]:
    """A development authority and a certificate for each party (EC P-256) in `folder`.

    parties: role -> names. Writes ca.pem, <name>.pem and <name>.key (mode 0600); ca.key too where
    keep_authority, and then a later call with the same folder adds parties to the same authority. Existing
    party files are replaced. Raises SettingsError for a name that occurs twice, or an authority without its
    key.
    """
    identities = [Identity(role, name) for role, names in parties.items() for name in names]
    if len({i.name for i in identities}) != len(identities) or any(i.name == "ca" for i in identities):
        raise SettingsError("party names must be unique, and none may be 'ca'")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca_path, ca_key_path = folder / "ca.pem", folder / "ca.key"
    if ca_path.exists() != ca_key_path.exists():
        raise SettingsError(f"{folder} has only one of ca.pem and ca.key; use an empty folder")
    if ca_path.exists():
        ca = x509.load_pem_x509_certificate(_read(ca_path))
        loaded = serialization.load_pem_private_key(_read(ca_key_path), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise SettingsError(f"{ca_key_path} is not an elliptic-curve key")
        ca_key = loaded
    else:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("secureinfer development authority", ca_key, None, ca_key, days, None)
        _write(ca_path, ca.public_bytes(serialization.Encoding.PEM), 0o644)
        if keep_authority:
            _write(ca_key_path, _private_pem(ca_key), 0o600)
    made = {}
    for identity in identities:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _certificate(identity.name, key, ca, ca_key, days, identity)
        pem, key_path = folder / f"{identity.name}.pem", folder / f"{identity.name}.key"
        _write(pem, cert.public_bytes(serialization.Encoding.PEM), 0o644)
        _write(key_path, _private_pem(key), 0o600)
        made[identity] = Credentials(identity, ca_path, pem, key_path)
    return made


def diagnose(host: str, port: int, credentials: Credentials, peer: Identity, timeout: float) -> str | None:
    """Why a TLS connection to `peer` cannot be made, in words, or None if the cause is not TLS.

    gRPC reports a refused certificate as a connection that never became ready; this asks once more, plainly.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(credentials.ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(str(credentials.certificate), str(credentials.key))
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), port), timeout) as raw:
            raw.settimeout(timeout)
            with context.wrap_socket(raw, server_hostname=peer.hostname) as tls:
                # Under TLS 1.3 a server judges our certificate after our side of the handshake: one that
                # takes it begins HTTP/2, one that does not sends an alert or closes.
                try:
                    taken = tls.recv(1) != b""
                except (ConnectionError, ssl.SSLEOFError):
                    taken = False
                if not taken:
                    return "it does not accept this party's certificate"
    except ssl.SSLError as error:
        return refusal(error)
    except OSError:
        return None
    return None


def refusal(error: ssl.SSLError) -> str:
    """Why a TLS connection failed, in the dialler's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted here ({error.verify_message})"
    reason = (error.reason or "TLS failed").replace("_", " ").lower()
    return f"it does not accept this party's certificate ({reason})"


def _certificate(
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
    identity: Identity | None,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    # Clocks of two machines may differ by some minutes.
    start = now - datetime.timedelta(minutes=10)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=issuer is None,
                crl_sign=issuer is None,
                encipher_only=False,
                decipher_only=False,
            ),
            True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False)
    )
    if identity is not None:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False).add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.hostname)]
            ),
            False,
        )
    return builder.sign(issuer_key, hashes.SHA256())


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file so that it never exists with wider rights than `mode`."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_PEM_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > _MAX_PEM_BYTES:
        raise SettingsError(f"{path} is too large for a PEM file")
    return data
