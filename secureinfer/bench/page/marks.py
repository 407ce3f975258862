"""What plots are drawn with: marks that differ in shape, fills that differ in pattern, texts that say when they were cut."""

from __future__ import annotations

from collections.abc import Iterable

from . import text
from .html import Markup, join, number, tag

SHAPES = {
    "circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "square": "M-4.5 -4.5h9v9h-9z",
    "triangle": "M0 -6L5.8 4.4H-5.8z",
    "diamond": "M0 -6.4L6.4 0L0 6.4L-6.4 0z",
    "down": "M0 6L5.8 -4.4H-5.8z",
    "bar": "M-2 -6.5h4v13h-4z",
    "plus": "M-1.8 -6h3.6v4.2h4.2v3.6h-4.2v4.2h-3.6v-4.2h-4.2v-3.6h4.2z",
}
RADIUS = 7.0
"""Pixels around a mark's middle that are its own."""

BOLD = ("title", "aimed")
"""Kinds of text that style.py draws bold."""

FILLS = ("setup", "offline", "online", "waiting", "other", "rounds", "plain")
"""Series; style.py gives each a colour, and PATTERNS below tell them apart without it."""


def definitions() -> Markup:
    """Patterns of fills, once a page. It is not `display: none`, for then no browser would draw them."""

    def pattern(name: str, size: float, *parts: Markup, turn: int = 0) -> Markup:
        ground = tag("rect", width=size, height=size, class_=f"ground {name}")
        turned = f"rotate({turn})" if turn else None
        # Names of SVG attributes keep their capitals; tag() takes them as they are.
        return tag(
            "pattern", ground, *parts, id=f"fill-{name}", width=size, height=size,
            patternUnits="userSpaceOnUse", patternTransform=turned,
        )  # fmt: skip

    def line(name: str, size: float) -> Markup:
        return tag("path", d=f"M{number(size / 2)} 0V{number(size)}", class_=f"line {name}")

    dot = tag("circle", cx=3, cy=3, r=1.1, class_="dot setup")
    cross = tag("path", d="M0 3.5H7", class_="line other")
    return tag(
        "svg",
        tag(
            "defs",
            pattern("setup", 6, dot),
            pattern("offline", 6, line("offline", 6), turn=45),
            pattern("waiting", 5, line("waiting", 5), turn=-45),
            pattern("other", 7, line("other", 7), cross, turn=45),
        ),
        class_="definitions", aria_hidden="true", width=0, height=0,
    )  # fmt: skip


def title(words: str | None) -> Markup | None:
    """What a browser shows beside the pointer."""
    return tag("title", words) if words else None


def mark(
    shape: str, x: float, y: float, series: str, *, filled: bool = True, words: str | None = None
) -> Markup:
    """A mark of about ten pixels. filled: hollow ones stand for what is not to be quoted."""
    return tag(
        "path", title(words), d=SHAPES[shape], transform=f"translate({number(x)} {number(y)})",
        class_=f"mark {series}{'' if filled else ' hollow'}",
    )  # fmt: skip


def rectangle(
    x: float, y: float, width: float, height: float, series: str, words: str | None = None
) -> Markup:
    return tag("rect", title(words), x=x, y=y, width=max(width, 0.5), height=height, class_=f"bar {series}")


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("path", d=f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", class_=kind)


def uprights(lines: Iterable[tuple[float, float, float]], kind: str) -> Markup:
    """Upright lines, each (x, top, bottom), as one element."""
    return tag("path", d="".join(f"M{number(x)} {number(a)}V{number(b)}" for x, a, b in lines), class_=kind)


def label(
    x: float, y: float, words: str, *, room: float | None = None, kind: str = "", anchor: str = "start",
    keep: str = "start", body: bool = False, full: str | None = None,
) -> Markup:  # fmt: skip
    """A text whose baseline begins (or ends, or has its middle) at x, y; cut to its room, with the whole as a title.

    body: of the larger size, bold. full: the whole, where it is not `words`.
    """
    shown = words
    if room is not None:
        bold = body or kind in BOLD
        shown = text.fitted(words, room, text.BODY if body else text.SMALL, bold=bold, keep=keep)
    whole = full if full is not None else words if shown != words else None
    classes = " ".join(filter(None, (kind, "strong" if body else "")))
    return tag(
        "text", title(whole), shown, x=x, y=y, class_=classes or None,
        text_anchor=None if anchor == "start" else anchor,
    )  # fmt: skip


def drawing(width: float, height: float, name: str, *parts: Markup | None) -> Markup:
    return tag(
        "svg", join(parts), viewBox=f"0 0 {number(width)} {number(height)}", width=width, height=height,
        role="img", aria_label=name,
    )  # fmt: skip


def legend(*entries: tuple[str, str]) -> Markup:
    """(what is drawn, what it stands for): a fill's name, or "shape", "shape/series" or "shape/series/hollow"."""
    return tag(
        "ul", *(tag("li", _sample(what), tag("span", words)) for what, words in entries), class_="legend"
    )


def _sample(what: str) -> Markup:
    if what in FILLS:
        drawn = rectangle(0.5, 1.5, 25, 11, what)
    elif what == "aim":
        drawn = line(0, 7, 26, 7, "aim")
    elif what == "interval":
        drawn = join([line(3, 7, 23, 7, "interval"), mark("circle", 13, 7, "online")])
    else:
        shape, _, rest = what.partition("/")
        series, _, hollow = rest.partition("/")
        drawn = mark(shape, 13, 7, series or "ink", filled=not hollow)
    return tag("svg", drawn, width=26, height=14, viewBox="0 0 26 14", aria_hidden="true")
