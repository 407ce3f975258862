"""The page of a benchmark's report: whole without a script, nothing from outside, and no text of a report becomes markup."""

from __future__ import annotations

import html
import itertools
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import ValidationError

from secureinfer.bench.page import html as page_html
from secureinfer.bench.page import page
from secureinfer.bench.page import text as page_text
from secureinfer.bench.page.axis import Axis, around, decades, from_zero, share
from secureinfer.bench.page.scatter import Places
from secureinfer.bench.page.style import DARK, LIGHT, TEXT_COLOURS
from secureinfer.bench.page.time import layers_of
from secureinfer.bench.report import BenchReport, CaseKey, Energy, Meter

from .bench_example import HOSTILE, case, cases, example, failed, hostile
from .bench_reports import load, report


class Elements(HTMLParser):
    """Elements and attributes of a page, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def faults(text: str) -> set[str]:
    """What a page must not hold: scripts, handlers, anything that is fetched, unfit characters."""
    found = set()
    for tag, attributes in Elements(text).found:
        if tag in ("script", "img", "iframe", "link", "object", "embed", "image", "use", "base", "form"):
            found.add(tag)
        found |= {
            name
            for name in attributes
            if name.startswith("on") or name in ("src", "srcset", "action", "style")
        }
        found |= {
            f"{n}={v}" for n, v in attributes.items() if n.endswith("href") and not (v or "").startswith("#")
        }
    found |= set(re.findall(r"url\((?!#)|@import", text))
    found |= set(re.findall("[\x00-\x08\x0e-\x1f\ud800-\udfff\u202a-\u202e]", text))
    return found


@pytest.fixture(scope="module")
def text() -> str:
    return page(example())


def test_the_page_holds_no_script_and_nothing_from_outside(text: str) -> None:
    assert faults(text) == set()
    assert "http:" not in text and "https:" not in text
    assert "default-src 'none'" in html.unescape(text)


def test_no_text_of_a_report_becomes_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    some = (cases()[0], *cases()[8:11:2], cases()[12], cases()[13])
    report = hostile(example().model_copy(update={"cases": some}))
    # What cannot be in a model's key at all would make this test say nothing.
    assert report.cases[0].key.model.endswith(HOSTILE)
    text = page(report)
    assert faults(text) == set()
    text.encode("utf-8")
    assert "<script>alert(1)</script>" in Elements(text).text
    monkeypatch.setattr(page_html, "escape", page_html.Markup)
    assert {"script", "img", "onerror"} <= faults(page(report))


def test_every_element_is_closed(text: str) -> None:
    open_: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag != "meta":
                open_.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_.pop() == tag

    Balance().feed(text)
    assert open_ == []


def test_names_of_elements_are_given_once_and_links_lead_to_them(text: str) -> None:
    found = Elements(text).found
    names = [a["id"] for _, a in found if "id" in a]
    assert len(names) == len(set(names))
    assert {a["href"] for _, a in found if "href" in a} <= {f"#{name}" for name in names}
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) <= set(names)


def test_the_headline_is_of_what_may_be_quoted_and_names_both_sides() -> None:
    cost = Elements(section(page(example()), "cost")).text
    assert "8.46× to 1,123×" in cost and "13.4× to 2,900×" in cost
    assert (
        "resnet18, int8, mpc, loopback, batch\N{NO-BREAK SPACE}1: 419.0 ms / 49.5 ms (torch eager fp32)"
        in cost
    )
    # The projected case has the greatest ratio, and the shortest run the second: neither is in the range, and both say why.
    assert "computed from a loopback run, not measured over that network" in cost
    assert cost.count("too short for a latency: 1 warm inference(s); it takes 2 and 1 s") >= 2
    assert "failed with UnsupportedModelError" in cost


def test_one_case_is_a_headline_with_its_interval() -> None:
    cost = Elements(section(page(BenchReport(created="now", environment={}, cases=cases()[:1])), "cost")).text
    assert "61.2×online, over torch eager fp32 (59.4–63.7×)" in cost
    assert "the quickest plaintext, onnxruntime int8" in cost


def test_a_report_that_may_not_be_quoted_says_so_first() -> None:
    doubtful = cases()[0].model_copy(update={"valid": False, "invalid_reason": "counters disagree"})
    cost = Elements(section(page(BenchReport(created="now", environment={}, cases=(doubtful,))), "cost")).text
    assert "No case of this report may be quoted." in cost and "61.2× to" not in cost
    assert cost.count("counters disagree") >= 2


def test_a_sweep_that_was_stopped_says_so() -> None:
    assert "The sweep was stopped." in page(example().model_copy(update={"complete": False}))
    assert "The sweep was stopped." not in page(example())


def test_energy_says_where_it_comes_from_and_unknown_is_no_zero() -> None:
    energy = Elements(section(page(example()), "energy")).text
    assert "estimated from CPU time and a stated power model, not measured" in energy
    assert "unknown" in energy and "The idle machine takes 3.2 W" in energy
    assert not re.search(r"\b0(\.0+)? (m|k|µ)?J\b", energy)
    without = example().model_copy(update={"meter": Meter(), "cases": cases()[8:9]})
    assert "unknown: nothing could be read" in Elements(section(page(without), "energy")).text


def test_a_measured_energy_is_not_called_estimated() -> None:
    known = Energy(joules=3.0, joules_per_sample=1.0, source="rapl")
    found = cases()[8].model_copy(update={"online_energy": known})
    report = example().model_copy(update={"meter": Meter(source="rapl"), "cases": (found,), "loads": ()})
    energy = Elements(section(page(report), "energy")).text
    assert "measured: RAPL's counter of the processor" in energy and "estimated" not in energy


def test_failures_are_there_in_full() -> None:
    message = "first line\n" + "\n".join(f"  step {i}: no kernel for <op {i}>" for i in range(400))
    report = BenchReport(
        created="now", environment={}, cases=(failed(CaseKey(model="m"), "PlanError", message),)
    )
    assert message in Elements(section(page(report), "failures")).text
    peer = "the peer dealer stopped: it gave no answer within 30 s"
    assert peer in Elements(section(page(example()), "failures")).text


def test_unavailable_baselines_say_why() -> None:
    plain = Elements(section(page(example()), "plaintext")).text
    assert (
        "no CUDA device" in plain
        and "NOT_IMPLEMENTED : Could not find an implementation for LayerNorm" in plain
    )


def test_the_load_that_holds_is_said_in_words() -> None:
    told = Elements(section(page(example()), "loads")).text
    assert "holds 54.5 queries a second with 99 % of answers within 50.0 ms" in told
    assert "the pool held 12 at the end, and 64 at the start" in told
    assert "64 → 0 → 12 of 64" in told and "310 waited" in told


def test_where_no_rate_held_the_page_says_so_and_why() -> None:
    none = load(qps=0.0, valid=False, invalid_reasons=("the least latency alone is 70 ms",))
    told = Elements(section(page(report(loads=(none,))), "loads")).text
    assert "no rate held the bound" in told and "the least latency alone is 70 ms" in told
    assert "holds" not in told


@pytest.mark.parametrize(
    "session",
    [
        None,
        {},
        {"online": None, "setup": 3, "program": []},
        {
            "online": {
                "layers": [1, {"path": 3}, {"path": "a", "latency_ms": "x"}, {"path": "b", "rounds": True}]
            }
        },
        {"online": {"layers": {"path": "a"}, "parties": ["data_owner"]}},
        {"online": {"parties": {"a": None, "b": {"latency_ms": float("nan")}, "c": {"latency_ms": 10**400}}}},
        {
            "online": {
                "parties": {"a": {"latency_ms": 2.0, "waiting_ms": 1e9}},
                "bytes": -5,
                "rounds": float("inf"),
            }
        },
    ],
)
def test_what_a_session_does_not_tell_is_left_out(session: dict[str, Any] | None) -> None:
    found = [c.model_copy(update={"session": session, "online": None, "offline": None}) for c in cases()[:2]]
    text = page(BenchReport(created="now", environment={}, cases=tuple(found)))
    assert not re.search(r"\b(nan|inf)\b", Elements(text).text) and "NaN" not in text


def test_an_empty_report_has_a_page() -> None:
    text = page(BenchReport(created="now", environment={}))
    assert faults(text) == set() and "Nothing failed." in text


def test_a_name_of_any_length_and_script_has_a_place() -> None:
    odd = CaseKey(
        model="модель-" * 60 + "模型" * 40, compression="c" * 300, backend="b" * 300, network="n" * 300
    )
    text = page(
        BenchReport(created="now", environment={}, cases=(cases()[0].model_copy(update={"key": odd}),))
    )
    assert faults(text) == set()
    assert (
        max(len(words) for words in re.findall(r"<text[^>]*>(?:<title>.*?</title>)?([^<]*)</text>", text))
        < 120
    )


def test_repeated_layers_are_one_row_and_none_is_lost() -> None:
    minilm, mlp = cases()[0].session, cases()[8].session
    assert minilm is not None and mlp is not None
    folded = layers_of(minilm)
    assert {x.count for x in folded if "*" in x.path} == {6} and len(folded) == 9
    assert sum(x.count for x in folded) == len(minilm["online"]["layers"])
    assert sum(x.bytes or 0 for x in folded) == pytest.approx(
        sum(x["bytes"] for x in minilm["online"]["layers"])
    )
    # Members of a Sequential are told apart by their last index alone: those are other layers.
    assert [x.path for x in layers_of(mlp)] == ["0", "1", "2", "3", "4"]


def test_a_part_of_a_sum_that_is_unknown_makes_it_unknown() -> None:
    layers = [
        {"path": f"block.{i}.linear", "latency_ms": 1.0, "bytes": None if i == 3 else 5, "rounds": 1}
        for i in range(20)
    ]
    (found,) = layers_of({"online": {"layers": layers}})
    assert (found.count, found.ms, found.bytes, found.rounds) == (20, 20.0, None, 20.0)


# Scales, texts and places.

AXES = [
    decades([3.0, 2974.0], "", lambda v: f"{v:,.0f}×"),
    decades([1.0], "", str),
    decades([], "", str),
    decades([1e-9, 1e12], "", lambda v: f"{v:g} bytes"),
    from_zero([27.8], "", lambda v: f"{v:g} ms"),
    from_zero([], "", str),
    share(""),
    around([-3.6, 0.0], "", str, least=1.0),
    around([0.0], "", str, least=1.0),
]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("pixels", [60.0, 250.0, 700.0])
def test_ticks_lie_on_their_scale_in_order_and_apart(axis: Axis, pixels: float) -> None:
    ticks = axis.ticks(pixels)
    values = [v for v, _ in ticks]
    assert len(ticks) >= 2 and values == sorted(values)
    assert all(axis.low - abs(axis.low) * 1e-9 <= v <= axis.high + abs(axis.high) * 1e-9 for v in values)
    if len(ticks) > 2:
        ends = [(axis.at(v) * pixels, page_text.width(told) / 2) for v, told in ticks]
        assert all(b - n >= a + m for (a, m), (b, n) in itertools.pairwise(ends))


def test_bars_start_at_zero() -> None:
    assert from_zero([300.0, 400.0], "", str).low == 0.0
    assert from_zero([300.0, 400.0], "", str).at(0.0) == 0.0


def test_a_text_is_cut_to_its_room() -> None:
    generator = random.Random(0)
    for _ in range(300):
        words = "".join(generator.choices("abcWMil .·×模", k=generator.randint(1, 80)))
        room = generator.uniform(20, 300)
        for keep in ("start", "end"):
            cut = page_text.fitted(words, room, keep=keep)
            assert page_text.width(cut) <= room and (cut == words or "…" in cut)
        lines = page_text.wrapped(words, room)
        assert len(lines) <= 3 and all(page_text.width(line) <= room for line in lines)


def _overlap(boxes: list[tuple[float, float, float, float]]) -> bool:
    return any(
        a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
        for a, b in itertools.combinations(boxes, 2)
    )


def _placed(generator: random.Random) -> list[tuple[float, float, float, float]]:
    places = Places((0, 0, 600, 400))
    marks = [(generator.uniform(0, 600), generator.uniform(0, 400)) for _ in range(60)]
    for x, y in marks:
        places.take_mark(x, y)
    found = [places.beside(x, y, generator.uniform(10, 120)) for x, y in marks]
    return [place[0] for place in found if place is not None]


@pytest.mark.parametrize("seed", range(5))
def test_labels_never_overlap(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = _placed(random.Random(seed))
    assert len(placed) > 20 and not _overlap(placed)
    monkeypatch.setattr(Places, "free", lambda self, box: True)
    assert _overlap(_placed(random.Random(seed)))


def _contrast(a: str, b: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_stand_out(scheme: dict[str, str]) -> None:
    grounds = ("page", "surface", "bad-soft", "note-soft")
    assert min(_contrast(scheme[t], scheme[g]) for t in TEXT_COLOURS for g in grounds) >= 4.5
    marks = ("setup", "offline", "online", "other", "plain", "aim")
    assert min(_contrast(scheme[m], scheme["surface"]) for m in marks) >= 3.0
    assert min(_contrast(scheme[m], scheme[f"{m}-soft"]) for m in ("setup", "offline", "other")) >= 2.5
    assert LIGHT.keys() == DARK.keys()


def test_a_colour_too_faint_is_found() -> None:
    assert _contrast("#999999", "#ffffff") < 4.5 < _contrast("#767676", "#ffffff")


def test_the_example_is_a_report() -> None:
    report = example()
    assert BenchReport.model_validate_json(report.to_json()) == report
    with pytest.raises(ValidationError):
        case("minilm", setup_ms=-1, offline_ms=1, online_ms=-1, fp32_ms=1, best_ms=1, online_bytes=1, offline_bytes=1,
             rounds=1, accuracy=(1, 1, 1))  # fmt: skip


def section(text: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">(.*?)</section>', text, re.DOTALL)
    assert found is not None, f"no section {name}"
    return found[1]
