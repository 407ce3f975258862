"""Timers, memory and the counting proxy measure what they say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secureinfer.measure.latency import percentile, summarise, time_calls
from secureinfer.measure.load import OtherLoad
from secureinfer.measure.memory import peak_memory_bytes
from secureinfer.measure.proxy import CountingProxy


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.sampled_from([50, 90, 99]))
def test_a_percentile_has_its_share_of_the_values_at_or_below_it(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    if found is None:
        assert len(values) < 100 / (100 - percent)
    else:
        assert sum(v <= found for v in values) * 100 >= percent * len(values)
        assert sum(v < found for v in values) * 100 < percent * len(values)


def test_percentiles_that_the_sample_cannot_support_are_none() -> None:
    few = summarise([1.0, 2.0, 3.0])
    assert (few.latency_ms, few.latency_ms_p50, few.latency_ms_p90, few.latency_ms_p99) == (
        2.0,
        2.0,
        None,
        None,
    )
    assert summarise([]).latency_ms is None


def test_time_calls_runs_warm_and_long_enough() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.01)

    values_ms = time_calls(call, warmup=2, least_runs=3, least_seconds=0.1)
    assert len(values_ms) == len(calls) - 2 >= 3
    assert min(values_ms) >= 10 and sum(values_ms) >= 100


def test_peak_memory_is_of_this_program_and_not_of_its_parent() -> None:
    ballast = bytearray(200_000_000)  # the parent is large ...
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert peak_memory_bytes() > 200_000_000
    code = """
from secureinfer.measure.load import OtherLoad
from secureinfer.measure.memory import peak_memory_bytes
print(peak_memory_bytes())
ballast = bytearray(50_000_000)
print(peak_memory_bytes())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    assert before < 100_000_000  # ... and its child is not
    assert after - before > 40_000_000


def _echo(listener: socket.socket, extra: int) -> None:
    client, _ = listener.accept()
    with client:
        while data := client.recv(65536):
            client.sendall(data + b"!" * extra)


@pytest.mark.parametrize("extra", [0, 1])
def test_the_proxy_counts_socket_bytes_each_way(extra: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener, extra), daemon=True).start()
        with CountingProxy(listener.getsockname()) as proxy:
            with socket.create_connection(proxy.address) as client:
                client.settimeout(10)
                for _ in range(5):
                    client.sendall(b"x" * 1000)
                    got = b""
                    while len(got) < 1000 + extra:
                        got += client.recv(65536)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""
            passed = proxy.passed()
    assert (passed.to_target, passed.to_client) == (5000, 5000 + 5 * extra)
    assert passed.total == 10_000 + 5 * extra


def test_the_proxy_hides_no_absent_peer_and_ends_with_its_block() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = unused.getsockname()
    with CountingProxy(nobody) as proxy, socket.create_connection(proxy.address) as client:
        client.settimeout(10)
        assert client.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection(proxy.address, timeout=1)


BURN = "import time\nend = time.monotonic() + 5\nwhile time.monotonic() < end: pass"


def test_other_load_sees_another_process_and_not_this_one() -> None:
    def burn(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    with OtherLoad() as alone:
        burn(1.0)
    other = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        with OtherLoad() as beside:
            time.sleep(1.0)
    finally:
        other.kill()
        other.wait()
    if alone.cores is None or beside.cores is None:
        pytest.skip("this system does not tell")
    assert beside.cores > 0.4  # on a loaded machine the other process gets less than its core
    assert beside.disturbs(os.cpu_count() or 1)


def test_a_block_too_short_for_the_kernels_ticks_says_nothing() -> None:
    with OtherLoad() as load:
        pass
    assert load.cores is None and not load.disturbs(1)
