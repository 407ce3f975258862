"""A projection adds to a loopback's report what its rounds and bytes take on a slower network, and says that it did."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from secureinfer.bench.network import LAN, WAN, Condition
from secureinfer.bench.places import condition_of
from secureinfer.bench.projection import CONNECTING_DELAYS, added_ms, project, projected_report
from secureinfer.errors import InputError, UsageError
from secureinfer.measure.figures import CallerTimings, Plaintext, PlannedStep, ProgramInfo
from secureinfer.measure.latency import summarise
from secureinfer.measure.report import build_report

STEPS = (
    PlannedStep(0, "", "begin", "begin", rounds=1, bytes=100, dealt_bytes=0),
    PlannedStep(1, "fc", "linear", "masked", rounds=3, bytes=2500, dealt_bytes=0),
)
PROGRAM = ProgramInfo("ab" * 32, None, "mpc", "fast", steps=STEPS, rounds=3)
RUNS = 12


def runs(rounds: int, ms: float, waiting_ms: float, steps: dict[str, Any], peer: str) -> list[dict[str, Any]]:
    sent, received = (sum(s[k] for s in steps.values()) for k in ("bytes_sent", "bytes_received"))
    link = {"bytes_sent": sent, "bytes_received": received, "frames_sent": 1, "frames_received": 1}
    one = {
        "latency_ms": ms,
        "waiting_ms": waiting_ms,
        "rounds": rounds,
        "links": {peer: link},
        "steps": steps,
    }
    return [{"inference": i, **one} for i in range(RUNS)]


def step(sent: int, received: int) -> dict[str, Any]:
    return {"latency_ms": 4.0, "waiting_ms": 1.0, "bytes_sent": sent, "bytes_received": received}


def report(dealer: bool = True, network: str | None = "loopback") -> dict[str, Any]:
    """Of 12 runs: online 3 rounds and 100 + 1250 bytes one way, offline 4 rounds and 125000 of them, setup 2 and 12500."""
    owner = {
        "online": runs(3, 10, 2, {"0": step(100, 0), "1": step(1250, 1250)}, "model"),
        "setup": runs(2, 20, 5, {"0": step(0, 12_500)}, "model")[:1],
    }
    model = {
        "online": runs(2, 9, 6, {"0": step(0, 100), "1": step(1250, 1250)}, "owner"),
        "setup": runs(1, 20, 5, {"0": step(12_500, 0)}, "owner")[:1],
    }
    stats = [
        {"party": "owner", "role": "data_owner", "phases": owner},
        {"party": "model", "role": "model_owner", "phases": model},
    ]
    if dealer:
        model["offline"] = runs(2, 5, 3, {"1": step(0, 125_000)}, "dealer")
        phases = {"offline": runs(4, 5, 3, {"1": step(125_000, 0)}, "model")}
        stats.append({"party": "dealer", "role": "dealer", "phases": phases})
    caller = CallerTimings(setup_ms=5000, online={i: 12.0 + i % 3 for i in range(RUNS)})
    program = dataclasses.replace(PROGRAM, dealer=dealer)
    made = build_report(program, stats, caller, network={"name": network, "source": "measured"})
    plain = Plaintext("torch eager", "float32", 2, summarise([1.0, 1.0]))
    found: dict[str, Any] = json.loads(json.dumps(made.with_plaintext(plain).to_dict()))
    return found


def test_each_round_takes_the_delay_once_and_bytes_one_way_their_time() -> None:
    added = added_ms(report(), WAN)
    assert added["online"] == pytest.approx(3 * 20 + 1350 / 12_500)
    assert added["offline"] == pytest.approx(4 * 20 + 125_000 / 12_500)
    assert added["setup"] == pytest.approx((2 + CONNECTING_DELAYS) * 20 + 12_500 / 12_500)
    assert added_ms(report(), LAN)["online"] == pytest.approx(3 * 0.25 + 1350 / 1e6)
    assert added_ms(report(), Condition(20))["offline"] == pytest.approx(4 * 20)  # as fast as the machine


def test_the_mean_of_each_phase_is_the_loopbacks_and_what_was_added() -> None:
    found = report()
    assert project(found, WAN) == {
        phase: pytest.approx(found[phase]["latency_ms"] + more)
        for phase, more in added_ms(found, WAN).items()
    }


def test_a_projected_report_says_so_and_why_and_leaves_the_measured_one_alone() -> None:
    found = report()
    before = copy.deepcopy(found)
    projected, added = projected_report(found, "wan", "only root may make network namespaces")
    assert found == before
    assert projected["network"] == {
        "name": "wan",
        "source": "projected",
        "why": "only root may make network namespaces",
    }
    assert projected_report(found, "lan")[0]["network"] == {"name": "lan", "source": "projected"}
    assert added == added_ms(found, WAN)
    assert projected.keys() == found.keys() and projected["online"].keys() == found["online"].keys()


def test_every_latency_of_a_phase_moves_by_the_same_and_what_was_counted_stays() -> None:
    found = report()
    projected, added = projected_report(found, "wan")
    for name in ("latency_ms", "latency_ms_p50", "latency_ms_p90", "cold_latency_ms", "waiting_ms"):
        assert projected["online"][name] == pytest.approx(found["online"][name] + added["online"])
    low = projected["online"]["latency_ms_interval"]["low"]
    assert low == pytest.approx(found["online"]["latency_ms_interval"]["low"] + added["online"])
    assert projected["online"]["latency_ms_p99"] is None  # 11 warm runs have none
    for name in ("count", "bytes", "bytes_one_way", "rounds", "peak_memory_bytes"):
        assert projected["online"][name] == found["online"][name]


def test_latencies_of_single_parties_are_not_known_and_their_bytes_are() -> None:
    party = projected_report(report(), "wan")[0]["online"]["parties"]["owner"]
    assert (
        party["latency_ms"] is None and party["waiting_ms"] is None and party["latency_ms_interval"] is None
    )
    assert party["bytes"] == 1350


def test_layers_share_the_delays_by_their_planned_rounds() -> None:
    projected = projected_report(report(), "wan")[0]
    begin, fc = projected["online"]["layers"]
    # 3 rounds were measured where the plan's steps have 4.
    assert begin["latency_ms"] == pytest.approx(4 + 15 + 100 / 12_500)
    assert fc["latency_ms"] == pytest.approx(4 + 45 + 1250 / 12_500)
    assert fc["waiting_ms"] == pytest.approx(fc["latency_ms"] - 3)  # it computes no longer


def test_the_overhead_is_of_the_projected_latencies() -> None:
    projected, added = projected_report(report(), "wan")
    for name, phases in (("online", ["online"]), ("total", ["online", "offline"])):
        ratio = projected["overhead"][name]
        assert ratio["numerator_ms"] == pytest.approx(sum(projected[phase]["latency_ms"] for phase in phases))
        assert ratio["ratio"] == pytest.approx(ratio["numerator_ms"] / ratio["denominator_ms"])
    assert added["offline"] > 0


def test_without_a_dealer_nothing_is_added_offline() -> None:
    projected, added = projected_report(report(dealer=False), "wan")
    assert added["offline"] == 0 and projected["offline"]["latency_ms"] is None
    assert projected["overhead"]["total"]["numerator_ms"] == projected["overhead"]["online"]["numerator_ms"]
    # One computes and the other waits: a layer's time is that of its computing alone, and stays.
    assert projected["online"]["layers"][1]["latency_ms"] == 4


def test_only_a_loopback_is_projected() -> None:
    with pytest.raises(InputError, match="only a loopback's figures"):
        projected_report(report(network="wan"), "wan")
    with pytest.raises(InputError, match="only a loopback's figures"):
        projected_report(projected_report(report(), "wan")[0], "wan")


def test_a_report_without_rounds_or_bytes_one_way_is_refused_and_not_taken_for_none() -> None:
    for name in ("rounds", "bytes_one_way"):
        found = report()
        found["online"][name] = None
        with pytest.raises(InputError, match="rounds and the bytes one way of online"):
            added_ms(found, WAN)
    old = report()
    del old["online"]["bytes_one_way"]
    with pytest.raises(InputError, match="make it anew"):
        added_ms(old, WAN)


def test_a_network_that_has_no_name_here_is_refused() -> None:
    with pytest.raises(UsageError, match="choose lan or wan"):
        projected_report(report(), "moon")
    assert condition_of("wan") is WAN
