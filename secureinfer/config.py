"""Settings of a party: frozen, validated, read from TOML; and every unsafe_* switch.

Paths in a file are relative to it. Unknown keys are errors, and all faults of a file are told at once.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .errors import SettingsError

Role = Literal["data_owner", "model_owner", "dealer"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]

_MAX_FILE_BYTES = 1 << 20
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Tls(_Checked):
    """Files in PEM: the authority that all parties share, this party's certificate, and its key."""

    ca: Path
    certificate: Path
    key: Path

    @field_validator("ca", "certificate", "key")
    @classmethod
    def _resolve(cls, path: Path, info: ValidationInfo) -> Path:
        return _relative(path, info)


class Peer(_Checked):
    """A party that is dialled. name: as its certificate says. address: host:port of its control port."""

    name: Name
    address: str

    @field_validator("address")
    @classmethod
    def _check(cls, address: str) -> str:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError("must be host:port, such as dealer.example.org:7402")
        return address

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


class Peers(_Checked):
    """Whom this party dials: a data owner both, a model owner the dealer, a dealer nobody. Programs without a dealer take no
    notice of that one.
    """

    model_owner: Peer | None = None
    dealer: Peer | None = None


class Listen(_Checked):
    """Where a model owner or dealer listens.

    bind: an address of this machine; 0.0.0.0 for all. port: control port. session_ports: "first-last", one
    for each session at once; "0-0" lets the system choose. sessions: how many may run at once (each holds
    about 300 MB). data_link: what the session ports take: "tls", plain TLS 1.3, or "grpc", several times slower, for
    networks through which only HTTP/2 passes. Who dials follows it.
    """

    bind: str = "127.0.0.1"
    port: Port
    session_ports: str = "0-0"
    sessions: Annotated[int, Field(ge=1, le=1024)] = 4
    data_link: Literal["tls", "grpc"] = "tls"

    @field_validator("session_ports")
    @classmethod
    def _check(cls, text: str) -> str:
        match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
        if (
            match is None
            or not int(match[1]) <= int(match[2]) <= 65535
            or (int(match[1]) == 0) != (text == "0-0")
        ):
            raise ValueError('must be "first-last", such as "7410-7419"')
        return text

    @property
    def ports(self) -> range:
        first, last = self.session_ports.split("-")
        return range(int(first), int(last) + 1)


class Accept(_Checked):
    """Whose sessions a listening party takes, by the names in their certificates."""

    data_owners: tuple[Name, ...] = ("data_owner",)
    model_owners: tuple[Name, ...] = ("model_owner",)


class Network(_Checked):
    """What lies between the parties, as a data owner's reports state it: addresses tell a loopback and no more.

    name: such as "lan" or "wan-40ms". source: "measured" on a network that is what it is called; "emulated" where delay
    and rate are made, as between network namespaces.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?$")]
    source: Literal["measured", "emulated"] = "measured"

    @field_validator("name")
    @classmethod
    def _check(cls, name: str) -> str:
        if name == "loopback":
            raise ValueError("a loopback is known by the addresses; it is not to be stated")
        return name


class Deadlines(_Checked):
    """Seconds. Every wait has one, and the error past it names the peer.

    connect: until a peer answers. start: for a session to stand, with every party's process loaded. step: for
    one message of a running inference, the peer's computing included. idle: a session without a call.
    keepalive: silence of a connection before it is tested, and again before it counts as dead; equal at all
    parties.
    """

    connect: Seconds = 20.0
    start: Seconds = 180.0
    step: Seconds = 120.0
    idle: Seconds = 3600.0
    keepalive: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] = 20.0


class Limits(_Checked):
    """Of an owner, on material that was dealt and not yet used.

    prepared_inferences: how many may wait. material_bytes: in memory, or on disk where `material` says so. One inference's
    material is always taken, whatever its size: nothing runs without it.
    """

    prepared_inferences: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    material_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 2 << 30


class Settings(_Checked):
    """One party's settings.

    name: unique among the parties, as the certificate says. program: a .si file; only a model owner's may
    hold weights. network: a data owner's word for its reports. threads: for computing, default half of the
    cores. torch_compile: local steps on many values are compiled in the background, where there is a C++
    compiler, into a folder of this user's cache. queue_bytes: to send to one peer, before a send waits. limits, material,
    material_folder: an owner's, on what was dealt and not yet used; "disk" keeps it, encrypted under keys that stay in
    memory, in files without a name there.
    reveal_to_model_owner: a data owner's consent to programs that show their outputs, which may be its inputs, to the model
    owner too.
    """

    role: Role
    name: Name
    program: Path
    tls: Tls
    peers: Peers = Peers()
    listen: Listen | None = None
    accept: Accept = Accept()
    deadlines: Deadlines = Deadlines()
    network: Network | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    torch_compile: bool = False
    queue_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 1 << 30
    limits: Limits = Limits()
    material: Literal["memory", "disk"] = "memory"
    material_folder: Path | None = None
    reveal_to_model_owner: bool = False
    unsafe_trusted_first_party: bool = False

    @field_validator("program", "material_folder")
    @classmethod
    def _resolve(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return None if path is None else _relative(path, info)

    @model_validator(mode="after")
    def _fits_role(self) -> Settings:
        present = {name for name in ("model_owner", "dealer") if getattr(self.peers, name) is not None}
        states = {name for name in ("listen", "network") if getattr(self, name) is not None}
        fields = type(self).model_fields  # a worker gets all of them, those that nobody set too
        states |= {name for name in _OF_OWNERS if getattr(self, name) != fields[name].default}
        faults = _role_faults(self.role, states, present)
        if self.material == "disk" and self.material_folder is None:
            faults.append('material_folder: material = "disk" needs a folder to write to')
        if faults:
            raise ValueError("\n  ".join(faults))
        return self

    @property
    def worker_threads(self) -> int:
        """Threads for one worker's computing."""
        return self.threads or max(1, cores() // 2)

    @property
    def unsafe(self) -> tuple[str, ...]:
        """Names of the unsafe switches that are on."""
        return ("unsafe_trusted_first_party",) if self.unsafe_trusted_first_party else ()


_OF_OWNERS = {"limits", "material", "material_folder"}


def cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def load_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a party's TOML file. Raises SettingsError that lists every fault."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise SettingsError(f"{file} is too large for a settings file")
        data = tomllib.loads(raw.decode())
    except OSError as error:
        raise SettingsError(f"cannot read the settings {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{file} is not valid TOML: {error}") from None
    return make_settings(data, folder=file.absolute().parent, source=str(file))


def make_settings(
    data: Mapping[str, Any], *, folder: Path | None = None, source: str = "settings"
) -> Settings:
    """Validate settings. folder: what relative paths start from. Raises SettingsError that lists every
    fault.
    """
    try:
        return Settings.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        rows = [row for fault in found for row in _describe(fault).split("\n  ")]
        if any(fault["loc"] for fault in found):
            # Faults between fields are looked for only where each field is right: look here too.
            peers = data.get("peers")
            present = set(peers) if isinstance(peers, Mapping) else set()
            rows += _role_faults(
                data.get("role"),
                {t for t in ("listen", "network", *_OF_OWNERS) if data.get(t) is not None},
                present,
            )
        text = "\n".join(f"  {row}" for row in rows)
        raise SettingsError(f"{len(rows)} fault(s) in {source}:\n{text}") from None


def _describe(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    text = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        text = "there is no such setting"
    return f"{where}: {text}" if where else text


def parse_network(text: str) -> Network:
    """NAME or SOURCE:NAME, such as emulated:wan-40ms, as a command line states it. Raises SettingsError."""
    source, colon, name = text.rpartition(":")
    try:
        return Network.model_validate({"name": name, **({"source": source} if colon else {})})
    except ValidationError as error:
        faults = "; ".join(_describe(fault) for fault in error.errors(include_url=False, include_input=False))
        raise SettingsError(
            f"{text!r} is no network; write a name in small letters, such as lan, or emulated:wan-40ms ({faults})"
        ) from None


def _role_faults(role: object, states: set[str], peers: set[str]) -> list[str]:
    """What does not go with a role. states: those of listen, network and the settings of owners alone that are there."""
    faults = []
    if role == "data_owner":
        if "listen" in states:
            faults.append("listen: a data owner only dials; remove this table")
        if "model_owner" not in peers:
            faults.append("peers.model_owner: a data owner needs the model owner's name and address")
    elif role in ("model_owner", "dealer"):
        if "network" in states:
            faults.append("network: only a data owner's reports state it; remove this table")
        if "listen" not in states:
            faults.append(f"listen: a {role} needs a port to listen on")
        if "model_owner" in peers:
            faults.append(f"peers.model_owner: a {role} does not dial it; remove this table")
        if role == "dealer":
            if "dealer" in peers:
                faults.append("peers.dealer: a dealer dials nobody; remove this table")
            faults += [
                f"{name}: a dealer takes no part in an inference; remove this"
                for name in sorted(states & _OF_OWNERS)
            ]
    return faults


def _relative(path: Path, info: ValidationInfo) -> Path:
    folder = (info.context or {}).get("folder")
    path = path.expanduser()
    return path if folder is None else Path(folder) / path
