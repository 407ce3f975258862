"""A relay between TUN devices: moves IP packets between them in user space, late, at a rate, with loss, or not at all.

Run as `python -I relay.py DEVICE=ADDRESS…` in a network namespace; it makes the devices there, and its parent
(network.py) moves each into the namespace of a party. It reads one JSON object a line on standard input, the
condition of one path, and answers each with a line; it ends when standard input does. It imports nothing but
the standard library, so that it starts in some hundredths of a second.

A path is one direction between two devices: a line that sends one packet after another at its rate, then a
delay. Packets on their way when a path is cut are lost, as they are on a real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
# With these, TCP hands over up to 64 KiB as one packet, segmented as its MTU asks only in name, and leaves out
# the checksum: measured 0.8 to 1.3 GB/s, and without it 0.1. Its header goes along to the other device as it is.
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
HEADER = 10  # struct virtio_net_hdr, before the IP packet
MAX_PACKET = HEADER + 65536
# Packets that are read from one device before what is due is sent and the others have their turn.
BATCH = 32
# A path holds what is under way and this much that waits for its turn; more is dropped, as a router does.
QUEUE_SECONDS = 0.1
MIN_QUEUE_BYTES = 4 * MAX_PACKET
# Without a rate nothing waits for its turn, and what is under way is bounded by this alone.
MAX_QUEUE_BYTES = 1 << 28


@dataclass
class Path:
    """Where packets from one device to another go, and under which condition."""

    device: int
    delay: float = 0.0
    rate: float = 0.0
    loss: float = 0.0
    cut: bool = False
    free_at: float = 0.0
    held: int = 0

    @property
    def immediate(self) -> bool:
        return not (self.delay or self.rate or self.loss or self.cut or self.held)

    @property
    def capacity(self) -> float:
        if not self.rate:
            return MAX_QUEUE_BYTES
        return max(MIN_QUEUE_BYTES, self.rate * (self.delay + QUEUE_SECONDS))


class Relay:
    """devices: name -> IPv4 address of whoever will hold it."""

    def __init__(self, devices: dict[str, str]) -> None:
        self.devices = {name: _open(name) for name in devices}
        ends = [(self.devices[name], socket.inet_aton(address)) for name, address in devices.items()]
        # source device -> destination address -> path
        self.paths = {a: {address: Path(b) for b, address in ends if b != a} for a, _ in ends}
        self.under_way: list[tuple[float, int, Path, bytes]] = []
        self.count = 0

    def condition(self, order: dict[str, object]) -> None:
        """One line of the parent: from and to name devices; the rest is a Path's condition."""
        source = self.devices[str(order["from"])]
        device = self.devices[str(order["to"])]
        path = next(p for p in self.paths[source].values() if p.device == device)
        path.delay = float(str(order["delay_seconds"]))
        path.rate = float(str(order["bytes_per_second"]))
        path.loss = float(str(order["loss"]))
        path.cut = bool(order["cut"])
        path.free_at = 0.0
        # A lost packet must be one packet of the MTU's size, not forty joined ones.
        lossy = any(p.loss for p in self.paths[source].values())
        fcntl.ioctl(source, TUNSETOFFLOAD, 0 if lossy else TUN_F_CSUM | TUN_F_TSO4)

    def serve(self, orders: int) -> None:
        pending = b""
        waiting = [orders, *self.paths]
        while True:
            timeout = max(0.0, self.under_way[0][0] - time.monotonic()) if self.under_way else None
            # select, not epoll: epoll counts its timeout in whole milliseconds.
            ready, _, _ = select.select(waiting, (), (), timeout)
            self.deliver()
            for source in ready:
                if source != orders:
                    self.read(source)
                    continue
                data = os.read(orders, 65536)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self.condition(json.loads(line))
                    os.write(1, b"ok\n")

    def read(self, source: int) -> None:
        paths = self.paths[source]
        for _ in range(BATCH):
            try:
                packet = os.read(source, MAX_PACKET)
            except BlockingIOError:
                return
            # IPv6 and strangers have no path: they end here.
            path = paths.get(packet[HEADER + 16 : HEADER + 20])
            if path is None or packet[HEADER] >> 4 != 4:
                continue
            if path.immediate:
                _send(path.device, packet)
            else:
                self.admit(path, packet)

    def admit(self, path: Path, packet: bytes) -> None:
        size = len(packet) - HEADER
        if path.cut or path.held + size > path.capacity or random.random() < path.loss:
            return
        now = time.monotonic()
        sent = max(now, path.free_at)
        if path.rate:
            sent += size / path.rate
            path.free_at = sent
        path.held += size
        self.count += 1
        # The count keeps packets of one moment in their order.
        heapq.heappush(self.under_way, (sent + path.delay, self.count, path, packet))

    def deliver(self) -> None:
        queue = self.under_way
        while queue and queue[0][0] <= time.monotonic():
            _, _, path, packet = heapq.heappop(queue)
            path.held -= len(packet) - HEADER
            if not path.cut:
                _send(path.device, packet)


def _open(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def _send(device: int, packet: bytes) -> None:
    # A device that is down, or not yet up, loses packets.
    with contextlib.suppress(OSError):
        os.write(device, packet)


def main(arguments: list[str]) -> int:
    # A timer is otherwise late by 50 microseconds, which a round trip of 500 would show.
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
    relay = Relay(dict(argument.split("=", 1) for argument in arguments))
    os.write(1, b"ok\n")
    relay.serve(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
