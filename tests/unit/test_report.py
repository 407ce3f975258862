"""A Report says what the parties counted: per inference, cold runs apart, unknown as null, faults named."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from secureinfer.errors import WireError
from secureinfer.measure.environment import network_between
from secureinfer.measure.figures import CallerTimings, Plaintext, PlannedStep, ProgramInfo
from secureinfer.measure.latency import summarise
from secureinfer.measure.report import Report, build_report

HEADER = 64
STEPS = (
    PlannedStep(0, "", "begin", "begin", rounds=1, bytes=HEADER, dealt_bytes=4 * HEADER),
    PlannedStep(1, "encoder.fc", "linear", "beaver", rounds=1, bytes=2000, dealt_bytes=800),
    PlannedStep(2, "encoder.fc", "add", "local", rounds=0, bytes=0, dealt_bytes=0),
    PlannedStep(3, "", "reveal", "reveal", rounds=1, bytes=500, dealt_bytes=0),
)
PROGRAM = ProgramInfo("ab" * 32, "cd" * 32, "mpc", "crypten", steps=STEPS, rounds=3, setup_bytes=384)


def link(sent: int, received: int) -> dict[str, int]:
    return {"bytes_sent": sent, "bytes_received": received, "frames_sent": 1, "frames_received": 1}


def run(
    i: int, rounds: int, links: dict[str, Any], ms: float = 10.0, steps: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "inference": i,
        "latency_ms": ms,
        "rounds": rounds,
        "cpu_seconds": 0.5,
        "links": links,
        "steps": steps or {},
    }


def step(ms: float, sent: int) -> dict[str, Any]:
    return {"latency_ms": ms, "bytes_sent": sent, "bytes_received": 0, "rounds": None}


def workers(inferences: int = 3) -> list[dict[str, Any]]:
    """Three parties' statistics that agree with STEPS: 2564 bytes online, 1056 offline."""
    n = range(inferences)
    data_steps = {"1": step(7, 1000), "2": step(1, 0)}
    model_steps = {"1": step(9, 1000), "2": step(1, 0)}
    data = {
        "setup": [run(0, 1, {"model": link(64, 64), "dealer": link(64, 64)})],
        "offline": [run(i, 2, {"model": link(64, 64), "dealer": link(64, 0)}) for i in n],
        "online": [run(i, 3, {"model": link(1064, 1500)}, ms=400, steps=data_steps) for i in n],
    }
    model = {
        "setup": [run(0, 1, {"data": link(64, 64), "dealer": link(64, 64)})],
        "offline": [run(i, 2, {"data": link(64, 64), "dealer": link(64, 800)}) for i in n],
        "online": [run(i, 2, {"data": link(1500, 1064)}, ms=380, steps=model_steps) for i in n],
    }
    dealer = {
        "setup": [run(0, 1, {"data": link(64, 64), "model": link(64, 64)})],
        "offline": [run(i, 2, {"data": link(0, 64), "model": link(800, 64)}) for i in n],
    }
    # a worker's JSON has strings for step numbers
    return json.loads(
        json.dumps(
            [
                {"party": "data", "role": "data_owner", "phases": data, "peak_memory_bytes": 300_000_000},
                {"party": "model", "role": "model_owner", "phases": model, "peak_memory_bytes": 400_000_000},
                {"party": "dealer", "role": "dealer", "phases": dealer, "peak_memory_bytes": 200_000_000},
            ]
        )
    )


CALLER = CallerTimings(setup_ms=900, offline={0: 90, 1: 50, 2: 70}, online={0: 2000, 1: 600, 2: 800})


def report(**change: Any) -> Report:
    return build_report(PROGRAM, change.pop("stats", workers()), change.pop("caller", CALLER), **change)


def test_bytes_are_counted_once_and_the_parties_add_up_to_the_phase() -> None:
    online = report().online
    assert online.figures.bytes == 2564 == PROGRAM.planned["bytes"]
    assert sum(p.bytes or 0 for p in online.parties.values()) == 2564
    assert online.parties["model"].bytes_received == 1064
    assert report().offline.figures.bytes == 1056 == PROGRAM.planned["dealt_bytes"]


def test_rounds_are_the_longest_chain_of_any_party() -> None:
    assert report().online.figures.rounds == 2 + 1  # the data owner's count; the model owner's ends at 2
    assert report().online.parties["model"].rounds == 2


def test_the_first_inference_is_cold_and_stays_out_of_the_mean() -> None:
    online = report().online
    assert online.figures.latency.latency_ms == 700
    assert online.figures.latency.count == 2
    assert online.cold_latency_ms == 2000
    assert report().setup.figures.latency.latency_ms == 900  # once a session: nothing to set apart


def test_a_sound_report_is_valid_and_each_ratio_names_its_parts() -> None:
    plain = Plaintext("torch eager", "float32", 2, summarise([6.0, 8.0]))
    data = report().with_plaintext(plain).to_dict()
    assert data["valid"] is True and data["invalid_reason"] is None
    assert data["overhead"]["online"] == {
        "ratio": 100.0,
        "numerator": "online latency_ms",
        "numerator_ms": 700,
        "denominator": "plaintext latency_ms, torch eager",
        "denominator_ms": 7.0,
    }
    assert data["overhead"]["total"]["ratio"] == (700 + 60) / 7


def test_to_dict_is_versioned_and_json_and_has_every_field_of_the_design() -> None:
    data = json.loads(json.dumps(report().to_dict()))
    assert data["schema"] == "secureinfer.report/1"
    assert {
        "schema",
        "program",
        "environment",
        "network",
        "valid",
        "invalid_reason",
        "setup",
        "offline",
        "online",
        "plaintext",
        "overhead",
        "accuracy",
    } == set(data)
    phase_fields = {
        "count",
        "latency_ms",
        "latency_ms_p50",
        "latency_ms_p90",
        "latency_ms_p99",
        "bytes",
        "socket_bytes",
        "rounds",
        "peak_memory_bytes",
        "peak_gpu_memory_bytes",
        "waiting_ms",
        "bytes_one_way",
        "energy_joules",
        "energy_source",
        "parties",
        "layers",
    }
    for phase in ("setup", "offline", "online"):
        assert phase_fields <= set(data[phase])
        for party in data[phase]["parties"].values():
            assert phase_fields - {"parties", "layers"} <= set(party)


def test_unknown_is_null_and_never_zero() -> None:
    data = report().to_dict()
    assert data["online"]["energy_joules"] is None and data["online"]["energy_source"] is None
    assert data["online"]["socket_bytes"] is None
    assert data["online"]["latency_ms_p99"] is None  # two warm runs have no 99th percentile
    assert data["plaintext"] is None and data["overhead"]["online"]["ratio"] is None
    nothing = build_report(ProgramInfo("ab", None, "mpc", "crypten"), [], CallerTimings()).to_dict()
    assert nothing["online"]["bytes"] is None and nothing["online"]["rounds"] is None
    assert nothing["online"]["latency_ms"] is None and nothing["valid"] is False


def test_memory_and_cpu_time_are_sums_over_the_parties_that_took_part() -> None:
    online = report().online
    assert online.parties["data"].peak_memory_bytes == 300_000_000
    assert online.figures.peak_memory_bytes == 700_000_000  # the dealer takes no part online
    assert online.figures.cpu_seconds == 1.0
    stats = workers()
    stats[1]["phases"]["online"][1]["cpu_seconds"] = None
    assert report(stats=stats).online.figures.cpu_seconds == 1.0  # another run tells
    for each in stats[1]["phases"]["online"]:
        each["cpu_seconds"] = None
    assert report(stats=stats).online.figures.cpu_seconds is None


def test_peak_memory_of_each_phase_is_taken_where_workers_tell_it() -> None:
    stats = workers()
    assert (
        report(stats=stats).offline.parties["data"].peak_memory_bytes is None
    )  # read after the online phase
    for worker in stats:
        for runs in worker["phases"].values():
            for each in runs:
                each["peak_memory_bytes"] = 5
    assert report(stats=stats).offline.figures.peak_memory_bytes == 15


def test_memory_of_gpus_is_the_sum_over_the_parties_that_used_one_and_null_where_nobody_did() -> None:
    assert report().online.figures.peak_gpu_memory_bytes is None
    stats = workers()
    for worker, used in zip(stats, (7, 5, None), strict=True):
        for runs in worker["phases"].values():
            for each in runs:
                each["peak_gpu_memory_bytes"] = used
    found = report(stats=stats).offline
    assert found.figures.peak_gpu_memory_bytes == 12  # the dealer has none, and that is known
    assert found.parties["dealer"].peak_gpu_memory_bytes is None


def waiting(stats: list[dict[str, Any]], **milliseconds: float) -> list[dict[str, Any]]:
    """Each run of a party online waited so long, the first ten times as long; and its step 1 for half of that."""
    for worker in stats:
        for each in worker["phases"].get("online", []):
            ms = milliseconds[worker["party"]] * (10 if each["inference"] == 0 else 1)
            each["waiting_ms"] = ms
            each["steps"]["1"]["waiting_ms"] = ms / 2
    return stats


def test_waiting_is_of_warm_runs_and_the_phases_is_that_of_the_party_that_took_longest() -> None:
    online = report(stats=waiting(workers(), data=100, model=300)).online
    assert online.parties["data"].waiting_ms == 100 and online.parties["model"].waiting_ms == 300
    assert online.figures.waiting_ms == 100  # 400 ms at the data owner, 380 at the model owner
    assert report().online.figures.waiting_ms is None  # workers that do not tell it


def test_a_layer_waits_as_its_slowest_party_does() -> None:
    stats = waiting(workers(), data=4, model=6)
    layers = {layer.path: layer for layer in report(stats=stats).online.layers}
    assert layers["encoder.fc"].waiting_ms == 3  # the model owner's: 9 ms, against 7
    alone = dataclasses.replace(PROGRAM, dealer=False)  # the parties do not go through the steps together
    assert build_report(alone, stats, CALLER).online.layers[1].waiting_ms is None


def test_bytes_one_way_take_the_greater_direction_of_each_step_and_steps_one_after_the_other() -> None:
    stats = workers()
    for worker, to_model, to_data in (
        (stats[0], "bytes_sent", "bytes_received"),
        (stats[1], "bytes_received", "bytes_sent"),
    ):
        for each in worker["phases"]["online"]:
            each["steps"] = {
                "0": {to_model: 100, to_data: 0},
                "1": {to_model: 30, to_data: 50},
                "3": {to_data: 7},
            }
    online = report(stats=stats).online
    assert online.figures.bytes_one_way == 100 + 50 + 7
    assert [layer.bytes_one_way for layer in online.layers] == [107, 50]


def test_layers_group_steps_by_module_and_take_the_slowest_party() -> None:
    layers = {layer.path: layer for layer in report().online.layers}
    assert layers["encoder.fc"].steps == 2
    assert layers["encoder.fc"].latency_ms == 9 + 1
    assert layers["encoder.fc"].bytes == 2000
    assert layers["encoder.fc"].rounds == 1


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        (["127.0.0.1", "127.0.0.2"], "loopback"),
        (["localhost", "[::1]"], "loopback"),
        (["127.0.0.1", "dealer.example.org"], None),
        (["10.0.0.1"], None),
        ([], None),
    ],
)
def test_a_network_that_nobody_measured_has_no_name(hosts: list[str], name: str | None) -> None:
    assert network_between(hosts) == {"name": name, "source": "measured"}
    assert report().to_dict()["network"]["name"] is None


def test_a_network_is_what_the_settings_state_and_people_read_that_it_is_emulated() -> None:
    stated = {"name": "wan-40ms", "source": "emulated"}
    assert network_between(["10.0.0.1"], stated) == network_between(["127.0.0.1"], stated) == stated
    assert "network: unknown\n" in f"{report()}\n"
    assert "network: wan-40ms (emulated)\n" in f"{dataclasses.replace(report(), network=stated)}\n"


def test_socket_bytes_are_per_inference() -> None:
    assert report(socket_bytes={"online": 3 * 2600}).online.figures.socket_bytes == 2600


def test_one_inference_is_too_short_to_quote() -> None:
    short = report(stats=workers(1), caller=CallerTimings(900, {0: 90}, {0: 2000}))
    assert not short.valid and "too short" in (short.invalid_reason or "")
    assert short.online.figures.latency.latency_ms is None and short.online.cold_latency_ms == 2000
    assert short.online.figures.bytes == 2564  # bytes do not depend on warmth


@pytest.mark.parametrize(
    ("party", "phase", "peer", "field", "says"),
    [
        (0, "online", "model", "bytes_received", "counted differently"),
        (1, "online", "data", "frames_sent", "counted differently"),
        (2, "offline", "model", "bytes_sent", "counted differently"),
    ],
)
def test_a_counter_that_drops_a_frame_makes_the_report_invalid(
    party: int, phase: str, peer: str, field: str, says: str
) -> None:
    stats = workers()
    stats[party]["phases"][phase][1]["links"][peer][field] -= 1
    broken = report(stats=stats)
    assert not broken.valid and says in (broken.invalid_reason or "")


def test_bytes_and_rounds_off_the_plan_make_the_report_invalid() -> None:
    stats = workers()
    stats[0]["phases"]["online"][2]["links"]["model"]["bytes_sent"] += 8
    stats[1]["phases"]["online"][2]["links"]["data"]["bytes_received"] += 8
    assert "online 2 took 2572 bytes where the plan says 2564" in (report(stats=stats).invalid_reason or "")
    stats = workers()
    stats[1]["phases"]["setup"][0]["links"]["data"]["bytes_sent"] += 64
    stats[0]["phases"]["setup"][0]["links"]["model"]["bytes_received"] += 64
    assert "setup 0 took 448 bytes where the plan says 384" in (report(stats=stats).invalid_reason or "")
    stats = workers()
    stats[0]["phases"]["online"][1]["rounds"] = 4
    assert "online 1 took 4 rounds where the plan says 2" not in (report(stats=stats).invalid_reason or "")
    assert "online 1 took 4 rounds where the plan says 3" in (report(stats=stats).invalid_reason or "")


def test_bytes_below_a_bound_are_no_fault_and_above_it_or_of_an_exact_plan_they_are() -> None:
    """Ciphertexts are compressed: a plan states what they take at most. Rounds it states exactly."""
    for phase, party, peer, other, back in (
        ("setup", 1, "data", 0, "model"),
        ("offline", 2, "model", 1, "dealer"),
        ("online", 0, "model", 1, "data"),
    ):
        for change, exact, fault in (
            (-8, False, False),
            (8, False, True),
            (-8, True, True),
            (0, False, False),
        ):
            stats = workers()
            stats[party]["phases"][phase][0]["links"][peer]["bytes_sent"] += change
            stats[other]["phases"][phase][0]["links"][back]["bytes_received"] += change
            program = dataclasses.replace(PROGRAM, exact_bytes=exact)
            said = build_report(program, stats, CALLER).invalid_reason or ""
            assert (f"{phase} 0 took" in said) is fault, (phase, change, exact, said)
            assert ("at most" in said) is (fault and not exact)
    stats = workers()
    for each in stats[0]["phases"]["online"]:
        each["rounds"] = 2
    for each in stats[1]["phases"]["online"]:
        each["rounds"] = 1
    bound = dataclasses.replace(PROGRAM, exact_bytes=False)
    assert "took 2 rounds where the plan says 3" in (build_report(bound, stats, CALLER).invalid_reason or "")


def test_without_a_dealer_nothing_is_offline_and_the_total_is_the_online_ratio() -> None:
    plain = Plaintext("torch eager", "float32", 2, summarise([6.0, 8.0]))
    stats = workers()[:2]
    for each in stats:
        del each["phases"]["offline"]
    steps = tuple(dataclasses.replace(s, dealt_bytes=0) for s in STEPS)
    program = dataclasses.replace(PROGRAM, steps=steps, dealer=False, exact_bytes=False)
    found = build_report(program, stats, CallerTimings(900, {}, CALLER.online), plain)
    data = found.to_dict()
    assert data["program"]["dealer"] is False
    assert data["offline"]["count"] == 0 and data["offline"]["bytes"] is None
    assert data["overhead"]["total"]["ratio"] == data["overhead"]["online"]["ratio"] == 100
    assert data["overhead"]["total"]["numerator"] == "online latency_ms, there is no offline phase"
    assert "offline, each" not in str(found) and "online, each" in str(found)
    # The twin: where there is a dealer and its figures are missing, the total is unknown.
    missing = build_report(
        dataclasses.replace(program, dealer=True), stats, CallerTimings(900, {}, CALLER.online), plain
    )
    assert missing.to_dict()["overhead"]["total"]["ratio"] is None and "offline, each" in str(missing)


@pytest.mark.parametrize("bad", [-1, 1.5, "many", None, float("nan")])
def test_malformed_statistics_of_a_peer_are_refused(bad: Any) -> None:
    stats = copy.deepcopy(workers())
    stats[1]["phases"]["online"][0]["links"]["data"]["bytes_sent"] = bad
    with pytest.raises(WireError, match=r"phases\.online\.0\.links\.data\.bytes_sent"):
        report(stats=stats)


def test_the_table_for_people_shows_parties_cost_ratio_and_faults() -> None:
    plain = Plaintext("torch eager", "float32", 2, summarise([6.0, 8.0]))
    text = str(report().with_plaintext(plain))
    for part in ("setup", "offline", "online", "data (data_owner)", "dealer", "700.0 ms", "2.56 kB", "100x"):
        assert part in text
    assert "not to be quoted" not in text
    unsafe = ProgramInfo("ab", None, "mpc", "crypten", unsafe=("unsafe_trusted_first_party",))
    text = str(build_report(unsafe, workers(), CALLER))
    assert "UNSAFE: unsafe_trusted_first_party" in text
