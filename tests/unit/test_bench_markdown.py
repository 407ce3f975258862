"""The Markdown of a report: every figure with its unit, unknown as a dash, failures in full, tables that stay tables."""

from __future__ import annotations

import re
from typing import Any

import pytest

from secureinfer.bench.markdown import HEADLINE, markdown
from secureinfer.bench.report import CaseKey, CaseResult, Energy, Meter
from secureinfer.bench.text import amount, joules, number, share

from .bench_reports import ENVIRONMENT, case, failed, load, report


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its rule."""
    block = text.split(f"{heading}\n\n", 1)[1].split("\n\n")[0]
    found = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in block.split("\n")]
    return [found[0], *found[2:]]


def headline(found: CaseResult) -> dict[str, str]:
    head, row = rows(markdown(report(found)), "## Secure beside plaintext")
    assert tuple(head) == HEADLINE
    return dict(zip(head, row, strict=True))


def test_the_headline_names_both_sides_with_intervals() -> None:
    found = headline(case(1))
    assert re.fullmatch(r"\d+\.\d ms \[\d+\.\d ms to \d+\.\d ms\]", found["secure online, mean"])
    assert re.fullmatch(r"\d+\.\d ms, torch eager fp32", found["fp32 plaintext"])
    assert re.fullmatch(r"\d+\.\d ms, onnxruntime int8", found["best plaintext"])
    for column in ("online / fp32", "online / best", "total / fp32", "total / best"):
        assert re.fullmatch(r"\*\*[\d.]+x\*\* \[[\d.]+x to [\d.]+x\]", found[column]), column
    assert (found["bytes"], found["rounds"], found["valid"]) == ("5.00 kB", "12", "yes")
    assert found["energy a sample"] == "12 J (rapl)"
    assert found["accuracy: float / compressed / secure"] == "97.00 % / 96.50 % / 96.30 %"


def test_what_is_unknown_is_a_dash_and_never_nought() -> None:
    bare: dict[str, Any] = {
        "online": None, "offline": None, "overheads": (), "baselines": (), "session": None, "model": None,
        "accuracy": None, "online_energy": Energy(),
    }  # fmt: skip
    found = case(1).model_copy(update=bare)
    told = headline(found)
    assert set(list(told.values())[2:]) == {"–"}
    text = markdown(report(found, meter=Meter(), environment={}))
    assert "none: energy is unknown" in text and "None" not in text.replace("threads=None", "")
    assert not re.search(r"\b0(\.0+)? (ms|B|J|µs)\b", text)


def test_a_case_that_is_not_valid_says_why_beside_its_figures_and_above_them() -> None:
    text = markdown(report(case(1, valid=False, invalid_reason="too short for a latency")))
    assert "no: too short for a latency" in text
    assert "**Not to be quoted: too short for a latency.**" in text


def test_failures_stand_in_the_headline_and_in_full() -> None:
    key = CaseKey(model="resnet18", backend="ckks")
    text = markdown(report(case(1), failed(key=key)))
    assert "failed: PeerError; in full below" in text
    assert text.endswith(f"### {key}\n\n```text\nPeerError: dealer: it is gone\nwith | a second line\n```\n")


def test_phases_parties_and_plaintext_are_told_for_each_case() -> None:
    text = markdown(report(case(1)))
    phases = {row[0]: row for row in rows(text, "#### Phases")[1:]}
    assert phases["setup, once a session"][1:3] == ["1", "900.0 ms"]
    assert phases["online, each"][6] == "900.0 ms" and phases["online, each"][9] == "800.00 MB"
    assert phases["online, each"][-1] == "12 J, 6 J above idle (rapl)"
    parties = rows(text, "#### Parties")
    assert [row[:2] for row in parties[1:]] == [
        ["data (data_owner)", "online"],
        ["model (model_owner)", "online"],
    ]
    assert parties[1][6] == "80.0 ms" and parties[2][6] == "–"
    plain = {row[0]: row for row in rows(text, "#### Plaintext")[1:]}
    assert plain["torch.compile fp32"][1] == "unavailable"
    assert plain["torch.compile fp32"][-1] == "no C++ compiler was found"


def test_the_ten_layers_that_took_longest_are_shown_longest_first() -> None:
    found = rows(markdown(report(case(1))), "#### Layers, online: the 10 that took longest of 14")
    assert [row[0] for row in found[1:]] == [f"layer.{i}" for i in range(13, 3, -1)]


def test_without_a_dealer_there_is_no_offline_row() -> None:
    found = case(1).model_copy(update={"offline": None})
    assert [row[0] for row in rows(markdown(report(found)), "#### Phases")[1:]] == [
        "setup, once a session",
        "online, each",
    ]


def test_loads_say_their_bound_their_trials_and_what_loadgen_said() -> None:
    text = markdown(
        report(loads=(load(), load(scenario="Offline", valid=False, invalid_reasons=("too short",))))
    )
    first, second = rows(text, "## Loads, by MLPerf LoadGen")[1:]
    assert first[1:6] == ["Server", "yes", "20", "20", "–"] and first[10] == "50.0 ms at p99"
    assert first[12] == "8 / 8 / 2 of 8" and second[2] == "no: too short"
    assert (
        "- prepared while it ran, 1,000 dealt, 1,000 used, 3 waited for one; dealing one alone takes 30.0 ms"
        in text
    )
    assert "- tried 40 queries/s: not held, p99 above the bound; p99 –" in text
    assert "```text\nMLPerf Results Summary\nScenario : Server\n```" in text


def test_an_estimate_says_so_wherever_energy_stands() -> None:
    estimated = Energy(joules=4, joules_per_sample=1, source="estimated")
    meter = Meter(source="estimated", model="CPU seconds x 12 W", unavailable=("rapl: no folder",))
    text = markdown(report(case(1, online_energy=estimated), meter=meter))
    assert "1 J (estimated)" in text and "4 J, – above idle (estimated)" in text
    assert "- model: CPU seconds x 12 W" in text and "the idle machine takes –" in text
    assert "- not read: rapl: no folder" in text


def test_idle_is_shown() -> None:
    assert "the idle machine takes 31.5 W, over 3 s" in markdown(report(case(1)))


def test_a_sweep_that_was_stopped_says_so() -> None:
    assert "The sweep was stopped" in markdown(report(case(1), complete=False))
    assert "The sweep was stopped" not in markdown(report(case(1)))


def test_no_text_of_a_report_breaks_a_table_a_fence_or_becomes_markup() -> None:
    nasty = "a | b\n\n# heading <script>alert(1)</script>"
    facts = case(1).model
    assert facts is not None
    found = case(1, valid=False, invalid_reason=nasty, model=facts.model_copy(update={"title": nasty}))
    broken = failed(
        key=CaseKey(model="x|y`z"), fault={"type": "E", "message": "a ``` fence\n````\n# no heading"}
    )
    text = markdown(
        report(found, broken, environment=ENVIRONMENT | {"processor": nasty}, command="a `b` | c")
    )
    assert "<script>" not in text
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    assert all(
        line.startswith(("# secureinfer", "## ", "### ", "#### "))
        for line in outside.split("\n")
        if line[:1] == "#"
    )
    head, first, second = rows(text, "## Secure beside plaintext")
    assert len(head) == len(first) == len(second) == len(HEADLINE)
    assert "`````text\nE: a ``` fence\n````\n# no heading\n`````" in text


@pytest.mark.parametrize(
    "nasty",
    [
        "![x](http://example.org/x.png)",
        "\\![x](http://example.org/x.png)",
        "!\\[x](http://example.org/x.png)",
        "[x](http://example.org)",
        "[x]: http://example.org",
        "![x][x]",
        "a\\|b",
    ],
)
def test_no_text_of_a_report_becomes_an_image_or_a_link(nasty: str) -> None:
    """A reader's program would load an image at once."""
    facts = case(1).model
    assert facts is not None
    found = case(
        1,
        key=CaseKey(model=nasty),
        valid=False,
        invalid_reason=nasty,
        started=nasty,
        model=facts.model_copy(update={"title": nasty}),
    )
    made = report(found, environment=ENVIRONMENT | {"processor": nasty, nasty: nasty}, created=nasty)
    left = re.sub(r"\\.", "-", markdown(made))  # without what is escaped
    assert not re.search(r"!\[|\][\[(:]", left)
    head, first = rows(markdown(made), "## Secure beside plaintext")
    assert len(head) == len(first)


def test_compression_is_one_line_a_transform_and_what_it_left_alone() -> None:
    facts = case(1).model
    assert facts is not None
    layers = [{"path": f"l{i}", "changed": i > 4, "reason": "" if i > 4 else "no Linear"} for i in range(9)]
    compression = {
        "transforms": [
            {
                "name": "Quantize",
                "settings": {"bits": 8},
                "layers": layers,
                "bytes_before": 4000,
                "bytes_after": 1000,
            }
        ]
    }
    text = markdown(report(case(1, model=facts.model_copy(update={"compression": compression}))))
    assert "- Quantize with `bits=8`: 4 of 9 changed, 4.00 kB to 1.00 kB" in text
    assert "- not changed, 5 (l0, l1, l2, …): no Linear" in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (number(None), "–"),
        (number(12), "12"),
        (number(1234567.0), "1,234,567"),
        (number(0.012345), "0.0123"),
        (number(12345.6), "12,346"),
        (joules(None), "–"),
        (joules(0), "0 J"),
        (joules(0.0301), "30.1 mJ"),
        (joules(1234), "1.23 kJ"),
        (joules(2e-6), "2 µJ"),
        (share(0.98765), "98.77 %"),
        (share(None), "–"),
        (amount(3, "W"), "3 W"),
        (amount(1500, "ms"), "1.50 s"),
        (amount(2000, "bytes"), "2.00 kB"),
        (amount(None, "J"), "–"),
    ],
)
def test_numbers_are_readable(text: str, wanted: str) -> None:
    assert text == wanted
