"""Networks between namespaces do what they say: late, slow, lossy, cut and healed; and nothing of them is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from secureinfer.bench import network as networks
from secureinfer.bench.namespaces import has_netem, spaces, sweep, unavailable
from secureinfer.bench.network import LAN, PLAIN, WAN, Condition, Network
from secureinfer.errors import PeerError, SessionError, UsageError

pytestmark = pytest.mark.needs("netns")

MECHANISMS = ["relay", *(["netem"] if has_netem() else [])]

ENDS = r"""
import json, select, socket, sys, time

role, address, argument = sys.argv[1:]
if role == "echo":
    with socket.create_server((address, 7000)) as server:
        print("up", flush=True)
        while True:
            end, _ = server.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := end.recv(65536):
                end.sendall(data)
elif role == "sink":
    with socket.create_server((address, 7000)) as server:
        print("up", flush=True)
        end, _ = server.accept()
        size = len(end.recv(1 << 20))
        first, start = size, time.monotonic()
        while data := end.recv(1 << 20):
            size += len(data)
        print(json.dumps({"bytes": size, "timed": size - first, "seconds": time.monotonic() - start}))
elif role == "datagrams":
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        server.bind((address, 7000))
        print("up", flush=True)
        seen, patience = set(), float(argument)
        while select.select([server], (), (), patience)[0]:
            seen.add(server.recv(100))
            patience = 1
        print(json.dumps(len(seen)))
elif role == "ping":
    with socket.create_connection((address, 7000)) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(int(argument)):
            start = time.monotonic()
            end.sendall(b"x")
            end.recv(1)
            times.append(1e3 * (time.monotonic() - start))
        print(json.dumps(min(times)))
elif role == "blast":
    with socket.create_connection((address, 7000)) as end:
        end.sendall(bytes(int(argument)))
elif role == "spray":
    with socket.socket(type=socket.SOCK_DGRAM) as end:
        for i in range(int(argument)):
            end.sendto(str(i).encode(), (address, 7000))
elif role == "ticks":  # a line in is a line to the other end; a line out is what came back
    with socket.create_connection((address, 7000)) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print("up", flush=True)
        while True:
            for ready in select.select([sys.stdin, end], (), ())[0]:
                if ready is end:
                    print(end.recv(65536).decode(), end="", flush=True)
                elif line := sys.stdin.readline():
                    end.sendall(line.encode())
                else:
                    sys.exit()
"""


def end(role: str, network: Network, to: str, argument: object = "") -> list[str]:
    """A command: one end of a connection, at or to a party's address."""
    return [sys.executable, "-I", "-S", "-c", ENDS, role, network.address(to), str(argument)]


def serve(network: Network, role: str, at: str, argument: object = "") -> subprocess.Popen[str]:
    process = network.start(at, end(role, network, at, argument))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n", process.communicate()
    return process


def call(network: Network, role: str, to: str, argument: object = "", *, by: str = "a") -> str:
    done = network.run(by, end(role, network, to, argument), timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def result(process: subprocess.Popen[str]) -> Any:
    return json.loads(process.communicate(timeout=60)[0])


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (why := unavailable()) is not None:
        pytest.skip(why)


@pytest.fixture(params=MECHANISMS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with Network(["a", "b", "c"], mechanism=request.param) as made:
        yield made


# --- conditions, each beside a network that lacks it ---


def check_round_trip(network: Network, at_least_ms: float) -> None:
    """The best of some, so that a busy machine does not make it longer than the network does."""
    serve(network, "echo", "b")
    best = float(call(network, "ping", "b", 10))
    assert at_least_ms <= best < at_least_ms + 15


def test_a_delay_is_seen_in_every_round_trip(network: Network) -> None:
    network.set(Condition(delay_ms=20))
    check_round_trip(network, 40)


def test_without_a_delay_the_same_check_fails(network: Network) -> None:
    with pytest.raises(AssertionError):
        check_round_trip(network, 40)


def check_rate(network: Network, bytes_per_second: float) -> None:
    """A connection comes near the rate and never above it."""
    sink = serve(network, "sink", "b")
    call(network, "blast", "b", size := 3_000_000)
    seen = result(sink)
    assert seen["bytes"] == size
    assert 0.3 * bytes_per_second < seen["timed"] / seen["seconds"] < 1.02 * bytes_per_second


def test_a_rate_limits_a_connection(network: Network) -> None:
    network.set(Condition(bytes_per_second=3e6))
    check_rate(network, 3e6)


def test_without_a_rate_the_same_check_fails(network: Network) -> None:
    with pytest.raises(AssertionError):
        check_rate(network, 3e6)


def arrived(network: Network, sent: int) -> int:
    sink = serve(network, "datagrams", "b", 10)
    call(network, "spray", "b", sent)
    return int(result(sink))


def test_loss_takes_its_part_of_the_packets(network: Network) -> None:
    network.set(Condition(loss=0.25))
    assert abs(arrived(network, 4000) - 3000) < 200  # seven standard deviations


def test_without_loss_every_packet_arrives(network: Network) -> None:
    assert arrived(network, 4000) == 4000


def test_a_connection_under_loss_delivers_all(network: Network) -> None:
    network.set(Condition(delay_ms=1, loss=0.02))
    sink = serve(network, "sink", "b")
    call(network, "blast", "b", 1_000_000)
    assert result(sink)["bytes"] == 1_000_000


def test_the_profiles_are_what_the_design_says() -> None:
    assert (LAN.round_trip_ms, LAN.bytes_per_second) == (0.5, 1e9)
    assert (WAN.round_trip_ms, WAN.bytes_per_second) == (40, 12.5e6)
    assert networks.PROFILES == {"plain": PLAIN, "lan": LAN, "wan": WAN}
    assert networks.LABEL == "emulated"


# --- cut and heal ---


class Ticks:
    """A connection from one party to another that sends a line when told, and shows what came back."""

    def __init__(self, network: Network, by: str, to: str) -> None:
        self.process = network.start(by, end("ticks", network, to), stdin=subprocess.PIPE)
        assert self.process.stdout is not None
        self.out = self.process.stdout.fileno()
        assert self.heard(3, 20) == "up\n"

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def heard(self, size: int, seconds: float) -> str:
        """Up to so many characters, as they come, within so many seconds."""
        got, stop = b"", time.monotonic() + seconds
        os.set_blocking(self.out, False)
        while len(got) < size and time.monotonic() < stop:
            try:
                got += os.read(self.out, size - len(got))
            except BlockingIOError:
                time.sleep(0.005)
        return got.decode()


def test_a_connection_lives_through_a_cut_and_hears_nothing_meanwhile(network: Network) -> None:
    for server in "b", "c":
        serve(network, "echo", server)
    to_b, to_c = Ticks(network, "a", "b"), Ticks(network, "a", "c")
    to_b.say("one")
    assert to_b.heard(4, 20) == "one\n"  # the twin: without a cut it is heard
    network.cut("a", "b")
    to_b.say("two")
    to_c.say("other")
    assert to_c.heard(6, 20) == "other\n"  # only that pair is cut
    assert to_b.heard(4, 0.7) == ""
    assert to_b.process.poll() is None
    network.heal("b", "a")
    to_b.say("six")
    assert to_b.heard(8, 30) == "two\nsix\n"


def test_a_cut_loses_what_is_under_way(network: Network) -> None:
    network.set(Condition(delay_ms=1000), "a", "b")
    sink = serve(network, "datagrams", "b", 3)
    call(network, "spray", "b", 100)
    network.cut("a", "b")
    time.sleep(1.1)
    network.heal("a", "b")
    assert result(sink) == 0
    network.set(Condition(delay_ms=100))
    assert arrived(network, 100) == 100  # the twin: under way, and not cut


def test_a_healed_network_has_the_condition_that_it_had(network: Network) -> None:
    network.set(Condition(delay_ms=20), "a", "b")
    network.cut("a", "b")
    network.heal("a", "b")
    check_round_trip(network, 40)


# --- what it is made of ---


def test_there_is_no_way_out_of_a_namespace(network: Network) -> None:
    routes = network.run("a", ["ip", "route", "show", "table", "main"], timeout=20).stdout.splitlines()
    assert routes and all(line.startswith("10.77.0.") for line in routes), routes


def test_veth_pairs_join_every_two_where_the_kernel_has_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wired here too, where the kernel cannot shape them: what it would be told is looked at."""
    told: list[str] = []
    if not has_netem():
        monkeypatch.setattr(networks, "has_netem", lambda: True)
    with Network(["a", "b", "c"], mechanism="netem") as network:
        serve(network, "echo", "b")
        for other in "a", "c":
            call(network, "ping", "b", 1, by=other)
        monkeypatch.setattr(networks, "run", lambda *words: told.append(" ".join(words)))
        network.set(Condition(delay_ms=20, bytes_per_second=12.5e6, loss=0.01), "a", "b")
        network.cut("a", "b")
        spaces_of = sorted(network.namespace(name) for name in "ab")
    shaped = [line.split("netem ")[1] for line in told]
    assert sorted(line.split()[2] for line in told[:2]) == spaces_of  # both directions
    assert set(shaped[:2]) == {"limit 10000 delay 20000us loss 1.000000% rate 100000000bit"}
    assert set(shaped[2:]) == {"limit 10000 delay 20000us loss 100.000000% rate 100000000bit"}


# --- what goes wrong ---


@pytest.mark.parametrize("bad", [{"delay_ms": -1}, {"bytes_per_second": 0}, {"loss": 1.5}, {"delay_ms": 1e9}])
def test_a_condition_that_no_network_has_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Condition(**bad)


def test_a_stranger_is_refused_by_name(network: Network) -> None:
    with pytest.raises(UsageError, match="'d' is not in this network"):
        network.address("d")
    with pytest.raises(UsageError, match="not two parties"):
        network.cut("a", "a")


def test_a_command_that_does_not_end_is_ended_and_its_party_named(network: Network) -> None:
    with pytest.raises(PeerError, match=r"b: sleep did not end within 0\.2 s"):
        network.run("b", ["sleep", "60"], timeout=0.2)


def test_a_relay_that_died_is_an_error_and_not_a_hang() -> None:
    with Network(["a", "b"], mechanism="relay") as network:
        (relay,) = members(network.namespace("a").rpartition("-")[0] + "-0")
        os.kill(relay, signal.SIGKILL)
        with pytest.raises(PeerError, match="the relay"):
            network.set(WAN)
    assert not any(space.startswith(f"si-{os.getpid()}-") for space in spaces())


def test_a_closed_network_says_so() -> None:
    with Network(["a", "b"]) as network:
        pass
    with pytest.raises(SessionError):
        network.set(WAN)
    network.close()


# --- nothing is left ---


def members(space: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def of(pid: int) -> list[str]:
    """The namespaces that a process made."""
    return [space for space in spaces() if space.startswith(f"si-{pid}-")]


STUBBORN = "trap '' TERM; sleep 600 & while true; do sleep 0.1; done"


def test_closing_leaves_no_namespace_and_no_process() -> None:
    with Network(["a", "b"]) as network:
        network.start("a", ["sh", "-c", STUBBORN])
        network.start("b", ["sleep", "600"])
        made = of(os.getpid())
        assert len(made) == 3
        deadline = time.monotonic() + 20
        while len(members(network.namespace("a"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        running = [pid for space in made for pid in members(space)]
        assert len(running) >= 4  # the shell and what it started, the sleeper, and the relay if there is one
    assert of(os.getpid()) == []
    assert not any(alive(pid) for pid in running)


HOLDER = """
import signal, sys
from secureinfer.bench.network import Network
network = Network(["a", "b"])
network.start("a", ["sleep", "600"])
print("up", flush=True)
signal.pause() if sys.argv[1] == "wait" else None
"""


def holder(what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, what], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not() -> None:
    dead, living = holder("wait"), holder("wait")
    try:
        dead.kill()
        dead.wait(20)
        left, kept = of(dead.pid), of(living.pid)
        assert len(left) == len(kept) == 3
        orphans = [pid for space in left for pid in members(space)]
        assert any(alive(pid) for pid in orphans)  # the twin: without a sweep they stay
        assert set(left) <= set(sweep())
        assert of(dead.pid) == [] and of(living.pid) == kept
        assert not any(alive(pid) for pid in orphans)
    finally:
        for process in dead, living:
            process.kill()
            process.communicate(timeout=20)
    sweep()
    assert of(living.pid) == []


def test_a_process_that_just_ends_leaves_nothing() -> None:
    process = holder("end")
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert of(process.pid) == []
