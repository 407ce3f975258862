"""The page of a benchmark as a browser shows it: on a desk and on a telephone, light and dark."""

from __future__ import annotations

import pytest

from secureinfer.bench.page import page
from tests.unit.bench_example import example, hostile

from . import chromium
from .chromium import Seen

pytestmark = pytest.mark.needs("chromium")

WIDE, TELEPHONE = 1280, 390


@pytest.fixture(scope="module")
def text() -> str:
    return page(example())


def planted(text: str) -> str:
    """The page with one fault of each kind that is looked for."""
    moved = '<text x="0" y="66">a label that was moved onto another</text></svg>'
    faults = (
        '<p style="max-width:none;width:3000px">wide</p><p style="color:#999;background:#fff">faint</p>'
        '<p style="font-size:9px">tiny</p><img src="http://127.0.0.1:9/missing.png" alt="">'
    )
    assert "</svg></div>" in text
    return text.replace("</svg></div>", f"{moved}</div>", 1).replace("</main>", f"{faults}</main>")


@pytest.fixture(scope="module")
def light(text: str) -> dict[str, Seen]:
    pages = {"wide": (text, WIDE), "telephone": (text, TELEPHONE), "planted": (planted(text), WIDE)}
    some = example().model_copy(update={"cases": example().cases[-5:]})
    pages["hostile, wide"] = page(hostile(some)), WIDE
    pages["hostile"] = page(hostile(some)), TELEPHONE
    return chromium.look(pages, scheme="light")


@pytest.fixture(scope="module")
def dark(text: str) -> dict[str, Seen]:
    return chromium.look({"wide": (text, WIDE), "telephone": (text, TELEPHONE)}, scheme="dark")


def test_it_is_laid_out_for_both_widths(light: dict[str, Seen]) -> None:
    assert (light["wide"].width, light["telephone"].width) == (WIDE, TELEPHONE)
    assert light["wide"].plots > 30 and light["telephone"].plots > 30
    assert light["wide"].texts > 1000


@pytest.mark.parametrize("where", ["wide", "telephone", "hostile, wide", "hostile"])
def test_no_label_of_a_plot_lies_on_another_or_is_cut(light: dict[str, Seen], where: str) -> None:
    assert light[where].overlaps == []
    assert any("moved onto another" in pair for pair in light["planted"].overlaps)


@pytest.mark.parametrize("where", ["wide", "telephone", "hostile, wide", "hostile"])
def test_the_page_does_not_scroll_sideways(light: dict[str, Seen], where: str) -> None:
    assert light[where].overflow <= 0
    assert light[where].cramped == 0
    assert light["planted"].overflow > 1000


@pytest.mark.parametrize("where", ["wide", "telephone"])
def test_all_text_can_be_read_in_both_schemes(
    light: dict[str, Seen], dark: dict[str, Seen], where: str
) -> None:
    for seen in (light[where], dark[where]):
        assert seen.faint == []
        assert seen.small == []
    assert len(light["planted"].faint) == 1 and "faint" in light["planted"].faint[0]
    assert light["planted"].small == ["tiny"]


def test_the_schemes_differ(light: dict[str, Seen], dark: dict[str, Seen]) -> None:
    assert light["wide"].background == light["telephone"].background != dark["wide"].background
    assert dark["wide"].background == dark["telephone"].background


@pytest.mark.parametrize("where", ["wide", "telephone"])
def test_nothing_is_asked_for_from_anywhere(light: dict[str, Seen], where: str) -> None:
    assert light[where].requests == []
    assert [name.rsplit("/", 1)[-1] for name in light["planted"].requests] == ["missing.png"]
