"""The report's bytes against an independent count of what crossed the sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import torch

import secureinfer as si
from secureinfer.measure.proxy import CountingProxy
from secureinfer.session.local import LocalParties

SHARE = 0.02
CONSTANT_BYTES = {"setup": 60_000, "offline": 5_000, "online": 5_000}
"""TLS records cost less than 2 % of large frames. The constant, for one inference, is
what small frames and signs of life add; in setup also the handshakes of four connections each way."""

WITNESS = "127.0.0.2"  # the proxies listen here, on the ports that the parties have on 127.0.0.1


def agrees(phase: str, counted: float, on_sockets: float) -> bool:
    """Whether a count of frames explains what an independent witness saw."""
    return counted <= on_sockets <= counted * (1 + SHARE) + CONSTANT_BYTES[phase]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((WITNESS, 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in held]


class Witness:
    """Every connection between the parties passes one of its proxies."""

    def __init__(self, proxies: list[CountingProxy]) -> None:
        self._proxies = proxies
        self._seen = 0

    def since_last(self) -> int:
        time.sleep(0.3)  # a proxy's count lags its forwarding by a chunk
        total = sum(p.passed().total for p in self._proxies)
        new, self._seen = total - self._seen, total
        return new


@contextlib.contextmanager
def witnessed(program: si.Program) -> Iterator[tuple[si.Session, Witness]]:
    control, data = {}, {}
    control["model_owner"], data["model_owner"], control["dealer"], data["dealer"] = free_ports(4)
    peers = {role: {"name": role, "address": f"{WITNESS}:{port}"} for role, port in control.items()}
    overrides = {
        role: {
            "listen": {
                "bind": "127.0.0.1",
                "port": control[role],
                "session_ports": f"{data[role]}-{data[role]}",
            }
        }
        for role in control
    }
    overrides["model_owner"]["peers"] = {"dealer": peers["dealer"]}
    overrides["data_owner"] = {"peers": peers}
    with contextlib.ExitStack() as stack:
        ports = [*control.values(), *data.values()]
        proxies = [CountingProxy(("127.0.0.1", port), host=WITNESS, port=port) for port in ports]
        for proxy in proxies:
            stack.enter_context(proxy)
        parties = LocalParties(program, threads=1, overrides=overrides)
        yield stack.enter_context(parties.session()), Witness(proxies)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[float, float]]:
    """phase -> (bytes of the report, bytes on the sockets), for a session with two inferences."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).eval()
    x = torch.randn(64, 256)
    program = si.compile(model, (x,), backend="mpc")
    sockets = {}
    with witnessed(program) as (session, witness):
        sockets["setup"] = witness.since_last()
        session.prepare(2)
        sockets["offline"] = witness.since_last() / 2
        for _ in range(2):
            torch.testing.assert_close(session.infer(x), model(x), atol=5e-3, rtol=0)
        sockets["online"] = witness.since_last() / 2
        report = session.report()
    counted = {phase: report.phases[phase].figures.bytes for phase in sockets}  # type: ignore[index]
    return {phase: (counted[phase] or 0.0, sockets[phase]) for phase in sockets}


@pytest.mark.parametrize("phase", ["setup", "offline", "online"])
def test_bytes_of_the_report_lie_within_two_percent_of_the_sockets(
    measured: dict[str, tuple[float, float]], phase: str
) -> None:
    counted, on_sockets = measured[phase]
    assert counted > 0
    assert agrees(phase, counted, on_sockets), f"{phase}: report {counted}, sockets {on_sockets}"


@pytest.mark.parametrize("phase", ["offline", "online"])
def test_a_counter_that_forgets_a_party_or_counts_twice_is_seen(
    measured: dict[str, tuple[float, float]], phase: str
) -> None:
    counted, on_sockets = measured[phase]
    assert not agrees(phase, counted / 2, on_sockets)
    assert not agrees(phase, counted * 2, on_sockets)
    assert not agrees(phase, counted * 0.95 - CONSTANT_BYTES[phase], on_sockets)
