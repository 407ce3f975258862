"""Networks between parties on one machine: a network namespace for each, joined under a condition that can change.

A figure measured over one is labelled `emulated`. The namespaces are joined by pairs of veth devices under netem
where the kernel has it (`sch_netem`), else by TUN devices and a relay process in user space (relay.py).
Nothing leaves: a namespace has a loopback, its way to the others, and no route to anywhere else. Needs root, Linux
and `ip`.

    with Network(["owner", "model"], WAN) as network:
        server = network.start("model", ["python", "-m", "http.server"])
        network.run("owner", ["curl", f"http://{network.address('model')}:8000/"], timeout=10)
        network.cut("owner", "model")

What a killed process left behind is removed when the next network is made.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import PeerError, SessionError, UsageError
from .namespaces import (
    COMMAND_SECONDS,
    attempt,
    has_netem,
    inside,
    ip,
    make,
    new_names,
    remove,
    run,
    sweep,
    told,
    unavailable,
)

LABEL = "emulated"
"""The source of a figure that was measured over such a network, as reports name it."""

Mechanism = Literal["netem", "relay"]

_RELAY = Path(__file__).with_name("relay.py")
_MTU = 1500
# The kernel's own queue to a device. It must hold a whole TCP window, of 4 MB, or it is the kernel that loses.
_QUEUE_PACKETS = 10_000
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Condition:
    """One direction of a connection between two parties; the other is the same.

    delay_ms: one way, half of a round trip. bytes_per_second: None for as fast as the machine can. loss: the
    part of packets that never arrive.
    """

    delay_ms: float = 0.0
    bytes_per_second: float | None = None
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms <= 60_000:
            raise UsageError(f"delay_ms is {self.delay_ms}; it must be from 0 to 60000")
        if self.bytes_per_second is not None and not 1e3 <= self.bytes_per_second <= 1e11:
            raise UsageError(f"bytes_per_second is {self.bytes_per_second}; it must be from 1e3 to 1e11")
        if not 0 <= self.loss <= 1:
            raise UsageError(f"loss is {self.loss}; it must be from 0 to 1")

    @property
    def round_trip_ms(self) -> float:
        return 2 * self.delay_ms


PLAIN = Condition()
LAN = Condition(delay_ms=0.25, bytes_per_second=1e9)
WAN = Condition(delay_ms=20, bytes_per_second=100e6 / 8)
PROFILES = {"plain": PLAIN, "lan": LAN, "wan": WAN}


class Network:
    """One namespace for each name, at 10.77.0.1 and up, every pair joined under `condition`.

    Raises UsageError for names that are not two to 200 different ones, or a mechanism that the kernel does not
    have; SessionError where this machine cannot make namespaces or devices.
    """

    def __init__(
        self, names: Sequence[str], condition: Condition = PLAIN, *, mechanism: Mechanism | None = None
    ) -> None:
        if len(set(names)) != len(names) or not 2 <= len(names) <= 200:
            raise UsageError(f"a network joins two to 200 parties of different names, not {list(names)}")
        if (why := unavailable()) is not None:
            raise SessionError(f"this machine cannot make networks: {why}")
        if mechanism == "netem" and not has_netem():
            raise UsageError("this kernel has no sch_netem; leave the mechanism out, or say 'relay'")
        sweep()
        self.names = tuple(names)
        self.mechanism: Mechanism = mechanism or ("netem" if has_netem() else "relay")
        self.conditions = dict.fromkeys(map(frozenset, itertools.combinations(names, 2)), condition)
        self.cuts: set[frozenset[str]] = set()
        self._hub, *others = new_names(1 + len(names))
        self._spaces = dict(zip(names, others, strict=True))
        self._processes: list[subprocess.Popen[Any]] = []
        self._owner = os.getpid()
        self._joint: _Joint | None = None
        atexit.register(self.close)
        try:
            for space in (self._hub, *self._spaces.values()):
                make(space)
            places = [(self._spaces[name], self.address(name)) for name in names]
            self._joint = _Netem(places) if self.mechanism == "netem" else _Relay(self._hub, places)
            self.set(condition)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, name: str) -> str:
        """The IPv4 address of a party, which only the others of this network can reach."""
        return f"10.77.0.{self._index(name) + 1}"

    def namespace(self, name: str) -> str:
        """As `ip netns` knows it."""
        return self._spaces[self.names[self._index(name)]]

    # --- what runs in it ---

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a party's namespace. options: of subprocess.Popen; the streams are pipes of text.

        The process that is returned is the command itself, and it ends with the network at the latest.
        """
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        process = subprocess.Popen(inside(self.namespace(name), command), **{**pipes, **options})
        self._processes.append(process)
        return process

    def run(
        self, name: str, command: Sequence[str], *, timeout: float, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises PeerError, which names the party, after `timeout` seconds."""
        process = self.start(name, command, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            _, err = process.communicate()
            raise PeerError(name, f"{command[0]} did not end within {timeout} s{told(err)}") from None
        finally:
            self._processes.remove(process)
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    # --- what is between them, while they run ---

    def set(self, condition: Condition, *pair: str) -> None:
        """Change the condition between two parties, or between all."""
        for each in [self._pair(*pair)] if pair else list(self.conditions):
            self.conditions[each] = condition
            self._apply(each)

    def cut(self, a: str, b: str) -> None:
        """Lose every packet between two parties, what is under way included. Neither is told."""
        self.cuts.add(self._pair(a, b))
        self._apply(self._pair(a, b))

    def heal(self, a: str, b: str) -> None:
        """End a cut; the condition is as it was."""
        self.cuts.discard(self._pair(a, b))
        self._apply(self._pair(a, b))

    def close(self) -> None:
        """End every process in the namespaces, and remove them. Again, it does nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return
        for process in self._processes:
            process.terminate()
        stop = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, stop - time.monotonic()))
        # Each is tried, whatever happens to those before it; the last named here comes first.
        with contextlib.ExitStack() as stack:
            stack.callback(remove, self._hub)
            if self._joint is not None:
                stack.callback(self._joint.close)
                self._joint = None
            for process in self._processes:
                stack.callback(_reap, process)
            self._processes = []
            for space in self._spaces.values():
                stack.callback(remove, space)

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise UsageError(f"{name!r} is not in this network; it joins {', '.join(self.names)}")
        return self.names.index(name)

    def _pair(self, *names: str) -> frozenset[str]:
        pair = frozenset(self.names[self._index(name)] for name in names)
        if len(names) != 2 or len(pair) != 2:
            raise UsageError(f"{names} are not two parties of this network")
        return pair

    def _apply(self, pair: frozenset[str]) -> None:
        if self._joint is None:
            raise SessionError("this network is closed")
        a, b = (self._index(name) for name in pair)
        for here, there in ((a, b), (b, a)):
            self._joint.apply(here, there, self.conditions[pair], pair in self.cuts)


def _reap(process: subprocess.Popen[Any]) -> None:
    process.wait(COMMAND_SECONDS)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


# --- how they are joined ---


class _Joint(Protocol):
    def apply(self, here: int, there: int, condition: Condition, cut: bool) -> None: ...

    def close(self) -> None: ...


class _Relay:
    """A TUN device in each namespace, all held by one process in the hub."""

    def __init__(self, hub: str, places: Sequence[tuple[str, str]]) -> None:
        self._devices = [f"tun{i}" for i in range(len(places))]
        ends = [f"{device}={address}" for device, (_, address) in zip(self._devices, places, strict=True)]
        self._process = subprocess.Popen(
            inside(hub, [sys.executable, "-I", str(_RELAY), *ends]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C goes to whoever made the network, and its end of the pipe ends the relay.
            start_new_session=True,
        )
        try:
            self._answer()
            for device, (space, address) in zip(self._devices, places, strict=True):
                ip("-n", hub, "link", "set", device, "netns", space)
                ip("-n", space, "address", "add", f"{address}/24", "dev", device)
                ip(
                    "-n", space, "link", "set", device, "mtu", str(_MTU),
                    "txqueuelen", str(_QUEUE_PACKETS), "up",
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def apply(self, here: int, there: int, condition: Condition, cut: bool) -> None:
        order = {
            "from": self._devices[here],
            "to": self._devices[there],
            "delay_seconds": condition.delay_ms / 1e3,
            "bytes_per_second": condition.bytes_per_second or 0.0,
            "loss": condition.loss,
            "cut": cut,
        }
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        except OSError:
            pass  # It is gone, and has said why.
        self._answer()

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _answer(self) -> None:
        if self._process.stdout is None:
            raise SessionError("the relay has no output")
        ready, _, _ = select.select([self._process.stdout], (), (), COMMAND_SECONDS)
        if not ready:
            raise PeerError("the relay between the namespaces", f"no answer for {COMMAND_SECONDS} s")
        if os.read(self._process.stdout.fileno(), 16) != b"ok\n":
            err = self._process.stderr.read() if self._process.stderr is not None else b""
            raise PeerError(
                "the relay between the namespaces", f"it ended{told(err.decode(errors='replace'))}"
            )


class _Netem:
    """A veth pair for each pair of namespaces, so that each direction has a queue of its own to shape."""

    def __init__(self, places: Sequence[tuple[str, str]]) -> None:
        self._spaces = [space for space, _ in places]
        for space, address in places:
            ip("-n", space, "address", "add", f"{address}/32", "dev", "lo")
        for i, j in itertools.combinations(range(len(places)), 2):
            (a, address_a), (b, address_b) = places[i], places[j]
            ip("link", "add", f"to{j}", "netns", a, "type", "veth", "peer", "name", f"to{i}", "netns", b)
            for space, own, to, other in ((a, address_a, j, address_b), (b, address_b, i, address_a)):
                ip("-n", space, "link", "set", f"to{to}", "mtu", str(_MTU), "up")
                ip("-n", space, "route", "add", f"{other}/32", "dev", f"to{to}", "src", own)

    def apply(self, here: int, there: int, condition: Condition, cut: bool) -> None:
        if not cut and condition == PLAIN:
            # Without a queue there is nothing to delete, and that is as well.
            attempt("tc", "-n", self._spaces[here], "qdisc", "delete", "dev", f"to{there}", "root")
            return
        words = ["limit", str(_QUEUE_PACKETS), "delay", f"{condition.delay_ms * 1e3:.0f}us"]
        words += ["loss", f"{100 * (1.0 if cut else condition.loss):.6f}%"]
        if condition.bytes_per_second is not None:
            words += ["rate", f"{8 * condition.bytes_per_second:.0f}bit"]
        # Replacing drops what the queue held, as a cut must.
        attempt("tc", "-n", self._spaces[here], "qdisc", "delete", "dev", f"to{there}", "root")
        run("tc", "-n", self._spaces[here], "qdisc", "add", "dev", f"to{there}", "root", "netem", *words)

    def close(self) -> None:
        """The devices went with their namespaces."""
