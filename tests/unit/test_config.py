"""Settings: every fault of a file is told at once, by its place, and nothing unknown is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from secureinfer.config import load_settings, make_settings, parse_network
from secureinfer.errors import SettingsError

PARTIES = Path(__file__).parents[2] / "parties"

GOOD = """
role = "dealer"
name = "dealer"
program = "p.si"
[tls]
ca = "certs/ca.pem"
certificate = "certs/dealer.pem"
key = "/abs/dealer.key"
[listen]
port = 7402
session_ports = "7420-7429"
"""


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "party.toml"
    file.write_text(text)
    return load_settings(file)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "party.toml"
    file.write_text(GOOD)
    settings = load_settings(file)
    assert settings.program == tmp_path / "p.si"
    assert settings.tls.ca == tmp_path / "certs/ca.pem"
    assert settings.tls.key == Path("/abs/dealer.key")
    assert settings.listen is not None and list(settings.listen.ports) == list(range(7420, 7430))
    assert settings.unsafe == () and settings.worker_threads >= 1


@pytest.mark.parametrize("role", ["data_owner", "model_owner", "dealer"])
def test_the_settings_in_parties_are_valid(role: str) -> None:
    settings = load_settings(PARTIES / role / f"{role}.toml")
    assert settings.role == settings.name == role


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    text = refused(
        tmp_path,
        GOOD.replace('name = "dealer"', 'name = "The Dealer"\ncolour = "red"').replace("7402", "70000")
        + "[deadlines]\nstep = 0\nsteps = 3\n",
    )
    assert text.startswith("5 fault(s) in ")
    for place in (
        "name:",
        "colour: there is no such setting",
        "listen.port:",
        "deadlines.step:",
        "deadlines.steps:",
    ):
        assert place in text


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('role = "dealer"', 'role = "coordinator"', "role"),
        ('"7420-7429"', '"7429-7420"', "listen.session_ports"),
        ('"7420-7429"', '"0-7429"', "listen.session_ports"),
        ('"7420-7429"', '"7420"', "listen.session_ports"),
        ("port = 7402", 'port = "no"', "listen.port"),
        ("[listen]", "[listen]\nsessions = 0", "listen.sessions"),
        ("[listen]", '[listen]\ndata_link = "quic"', "listen.data_link"),
        ("[tls]", "[deadlines]\nstep = inf\n[tls]", "deadlines.step"),
        ("[tls]", "[tls]\npassword = 'x'", "tls.password"),
        ("[tls]", "unsafe_no_tls = true\n[tls]", "unsafe_no_tls"),
        ("[tls]", "[peers.dealer]\nname='d'\naddress='h:1'\n[tls]", "peers.dealer"),
        ("[tls]", "engine = 'tests.toy:make'\n[tls]", "engine"),
        ("[listen]", "[heard]", "listen"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_place(tmp_path: Path, old: str, new: str, place: str) -> None:
    assert old in GOOD
    assert place in refused(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    "address", ["nohost", "host:", "host:0", "host:65536", "ho st:1", "http://host:1", ":7401"]
)
def test_an_address_is_a_host_and_a_port(tmp_path: Path, address: str) -> None:
    with pytest.raises(SettingsError, match="host:port"):
        make_settings(data_owner(address))
    assert make_settings(data_owner("[::1]:7401")).peers.model_owner is not None


def data_owner(address: str) -> dict[str, object]:
    return {
        "role": "data_owner",
        "name": "data_owner",
        "program": "p.si",
        "tls": {"ca": "a", "certificate": "b", "key": "c"},
        "peers": {"model_owner": {"name": "model_owner", "address": address}},
    }


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("lan", "lan", "measured"),
        ("measured:lan", "lan", "measured"),
        ("emulated:wan-40ms", "wan-40ms", "emulated"),
    ],
)
def test_a_network_has_a_name_and_a_source(text: str, name: str, source: str) -> None:
    network = parse_network(text)
    assert (network.name, network.source) == (name, source)
    stated = {"name": name, "source": source}
    assert make_settings({**data_owner("h:1"), "network": stated}).network == network
    assert make_settings(data_owner("h:1")).network is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "lan:",
        "projected:wan",
        ":lan",
        "a b",
        "LAN",
        "lan\n",
        "x" * 64,
        "loopback",
        "emulated:loopback",
        "a:b:c",
    ],
)
def test_a_network_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is no network; write a name"):
        parse_network(text)
    source, colon, name = text.rpartition(":")
    with pytest.raises(SettingsError, match="network"):
        make_settings(
            {**data_owner("h:1"), "network": {"name": name, **({"source": source} if colon else {})}}
        )


@pytest.mark.parametrize("role", ["model_owner", "dealer"])
def test_only_a_data_owner_states_a_network(role: str) -> None:
    listens = {k: v for k, v in data_owner("h:1").items() if k != "peers"} | {
        "role": role,
        "listen": {"port": 1},
    }
    assert make_settings(listens).network is None
    with pytest.raises(SettingsError, match="network: only a data owner's reports state it"):
        make_settings({**listens, "network": {"name": "lan"}})


def test_only_owners_keep_material(tmp_path: Path) -> None:
    text = refused(tmp_path, GOOD + "[limits]\nprepared_inferences = 2\n")
    assert "limits: a dealer takes no part in an inference" in text
    disk = 'material = "disk"\nmaterial_folder = "spool"\n'
    text = refused(tmp_path, GOOD.replace("[tls]", disk + "[tls]"))
    assert "material: a dealer takes" in text and "material_folder: a dealer takes" in text
    dealer = load_settings(PARTIES / "dealer" / "dealer.toml")
    assert make_settings(dealer.model_dump(mode="json")) == dealer  # as its worker gets them


def test_material_on_disk_needs_a_folder_which_is_relative_to_the_file(tmp_path: Path) -> None:
    owner = data_owner("h:1")
    with pytest.raises(SettingsError, match='material_folder: material = "disk" needs a folder'):
        make_settings({**owner, "material": "disk"})
    settings = make_settings({**owner, "material": "disk", "material_folder": "spool"}, folder=tmp_path)
    assert settings.material_folder == tmp_path / "spool"
    assert make_settings(owner).limits.prepared_inferences == 64


@pytest.mark.parametrize(
    "limits", [{"prepared_inferences": 0}, {"prepared_inferences": 2.5}, {"material_bytes": -1}, {"bytes": 1}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="limits"):
        make_settings({**data_owner("h:1"), "limits": limits})


def test_a_data_owner_does_not_listen() -> None:
    with pytest.raises(SettingsError, match="only dials"):
        make_settings({**data_owner("h:1"), "listen": {"port": 1}})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"role = ", b"a = 1\na = 2", b"[" * 5000])
def test_a_file_that_is_no_toml_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "party.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(file)


def test_a_missing_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings(tmp_path / "none.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(SettingsError, match="too large"):
        load_settings(tmp_path / "huge.toml")


def test_what_a_setting_held_is_not_in_the_error(tmp_path: Path) -> None:
    assert "hunter2" not in refused(tmp_path, GOOD.replace("[tls]", "[tls]\npassword = 'hunter2'"))
