"""What a loopback run would have taken over a slower network, computed from its rounds and bytes, and labelled so.

    projected = measured on loopback + rounds · delay + bytes one way / bytes per second

A round is one message that waits for another: it takes the one-way delay once. Bytes one way are, of each step, those of
the greater direction: peers send at once there, and steps follow each other. Setup pays for its connections too.

It leaves out what TCP and the machine do:
- A connection starts slowly, with about 14 kB a round trip, twice as much in each further one, until it fills the network:
  in a first run over a WAN, and again after some hundred milliseconds of silence. Measured, it cost an upload of 200 kB one
  round trip more. Where much is sent at once and seldom, the projection is short of that.
- Headers of TCP, IP and TLS, 4 % of bytes. What is sent back at the same time, such as acknowledgements.
- Sending that goes on while a party computes, which makes the projection long; and lost packets, which are none here.
- A lasting queue: what setup sends and nobody waits for (the keys of CKKS) is counted in setup, and in an emulated run the
  first inference pays for it, and is the cold one.
An emulated network also takes time of the machine's own processor, which shows where rounds are quick, as in a LAN.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from ..measure.stats import PHASES
from .network import Condition
from .places import condition_of

LABEL = "projected"
"""The source of such figures, as reports name it."""

CONNECTING_DELAYS = 9
"""One-way delays of a session's opening that nothing hides: to the model owner a connection of TCP (2), TLS (2) and HTTP/2
(2), the call that opens the session (2), and the word that all is loaded (1). Other connections come up meanwhile, while the
processes load.
"""

_LATENCIES = ("latency_ms", "latency_ms_p50", "latency_ms_p90", "latency_ms_p99", "cold_latency_ms")
_TIMES = (*_LATENCIES, "waiting_ms")


def added_ms(report: Mapping[str, Any], condition: Condition) -> dict[str, float]:
    """Milliseconds that a network adds to each run of each phase. 0 for a phase that the session did not have.

    report: of a session over loopback, as `Report.to_dict` says it. Raises InputError where it lacks rounds or bytes.
    """
    return {phase: _added(phase, report[phase], condition) for phase in PHASES}


def project(report: Mapping[str, Any], condition: Condition) -> dict[str, float | None]:
    """Mean latency of each phase over a network, milliseconds; None where loopback's is unknown. Raises as `added_ms`."""
    added = added_ms(report, condition)
    return {phase: _plus(report[phase]["latency_ms"], added[phase]) for phase in PHASES}


def projected_report(
    report: Mapping[str, Any], network: str, why: str | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """A session's report as it would be over "lan" or "wan", labelled so, and what each run of each phase takes more, ms.

    why: the reason for which it was not measured there, if the report should say it. Latencies of single parties are None:
    they depend on who waits for whom. Layers that say what they wait share the delays as the plan gives them rounds. Energy
    is loopback's. Raises UsageError for another network, InputError for a report that was not made over loopback.
    """
    if report["network"].get("name") != "loopback":
        raise InputError(f"only a loopback's figures can be projected, and these are of {report['network']}")
    condition = condition_of(network)
    added = added_ms(report, condition)
    projected = copy.deepcopy(dict(report))
    projected["network"] = {"name": network, "source": LABEL, **({} if why is None else {"why": why})}
    for phase in PHASES:
        found = projected[phase]
        _shift(found, added[phase])
        for party in found["parties"].values():
            party.update({name: None for name in party if name.startswith(_TIMES)})
        _shift_layers(found, condition)
    _overheads(projected, added)
    return projected, added


def _added(phase: str, found: Mapping[str, Any], condition: Condition) -> float:
    rounds, size = found["rounds"], found.get("bytes_one_way")
    if rounds is None and size is None and found["bytes"] is None:
        return 0.0
    if rounds is None or size is None:
        raise InputError(
            f"this report does not say the rounds and the bytes one way of {phase}, so that its time over another network "
            "cannot be computed; make it anew"
        )
    delays = rounds + (CONNECTING_DELAYS if phase == "setup" else 0)
    return float(delays * condition.delay_ms + _sending_ms(size, condition))


def _sending_ms(size: float | None, condition: Condition) -> float:
    if not size or condition.bytes_per_second is None:
        return 0.0
    return 1000 * size / condition.bytes_per_second


def _shift(found: dict[str, Any], more_ms: float) -> None:
    for name in _TIMES:
        found[name] = _plus(found.get(name), more_ms)
    for name in _LATENCIES:
        interval = found.get(f"{name}_interval")
        if interval is not None:
            found[f"{name}_interval"] = {
                **interval,
                "low": interval["low"] + more_ms,
                "high": interval["high"] + more_ms,
            }


def _shift_layers(found: dict[str, Any], condition: Condition) -> None:
    planned = sum(layer["rounds"] for layer in found["layers"])
    # Fewer than planned: messages of two steps overlap.
    each_ms = condition.delay_ms * found["rounds"] / planned if planned and found["rounds"] else 0.0
    for layer in found["layers"]:
        if layer["waiting_ms"] is None:
            continue  # the time of its computing alone
        more_ms = layer["rounds"] * each_ms + _sending_ms(layer["bytes_one_way"], condition)
        layer["latency_ms"] = _plus(layer["latency_ms"], more_ms)
        layer["waiting_ms"] += more_ms


def _overheads(report: dict[str, Any], added: Mapping[str, float]) -> None:
    for name, more_ms in (("online", added["online"]), ("total", added["online"] + added["offline"])):
        ratio = report["overhead"][name]
        ratio["numerator_ms"] = _plus(ratio["numerator_ms"], more_ms)
        if ratio["ratio"] is not None:
            ratio["ratio"] = ratio["numerator_ms"] / ratio["denominator_ms"]


def _plus(value: float | None, more: float) -> float | None:
    return None if value is None else value + more
