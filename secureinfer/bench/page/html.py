"""HTML that cannot be broken by what it holds: every text is escaped where an element is made, and only there."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What no document may hold or what would show a text in another order than it has: control characters, halves of
# surrogate pairs (which cannot be written as UTF-8 at all), marks of direction.
_UNFIT = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ufdd0-\\ufdef\\ufffe\\uffff]"
)
_VOID = frozenset({"meta", "br", "hr", "wbr"})


class Markup(str):
    """A text that is HTML already. Only this module makes it of anything else than a literal."""

    __slots__ = ()


Part = Markup | str | int | float | None | Iterable["Part"]
Attribute = str | int | float | bool | None


def clean(text: str) -> str:
    """The text without what no page can show: colours of terminals go, other unfit characters become U+FFFD."""
    return _UNFIT.sub("\ufffd", _TERMINAL.sub("", text).replace("\r\n", "\n"))


def escape(text: str) -> Markup:
    return Markup(html.escape(clean(text), quote=True))


def join(parts: Iterable[Part], between: str = "") -> Markup:
    """Parts one after another; None is nothing, and what is not Markup is escaped."""
    return Markup(escape(between).join(_part(p) for p in parts if p is not None))


def tag(name: str, /, *parts: Part, **attributes: Attribute) -> Markup:
    """An element. class_ is class, other underscores are hyphens; None and False leave an attribute out."""
    opened = name + "".join(
        f" {_named(k)}{_value(v)}" for k, v in attributes.items() if v is not None and v is not False
    )
    if name in _VOID:
        return Markup(f"<{opened}>")
    return Markup(f"<{opened}>{join(parts)}</{name}>")


def number(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def table(
    head: Sequence[Part], rows: Iterable[Sequence[Part]], *, name: str, text_columns: Iterable[int] = (0,)
) -> Markup:
    """A table in a box of its own, which scrolls where the page is narrower. A row's first cell is its heading."""
    left = frozenset(text_columns)

    def cell(kind: str, column: int, part: Part) -> Markup:
        scope = {"col": "col", "row": "row"}.get(kind)
        return tag("th" if scope else "td", part, class_="text" if column in left else None, scope=scope)

    top = tag("thead", tag("tr", *(cell("col", i, p) for i, p in enumerate(head))))
    body = tag(
        "tbody",
        *(tag("tr", *(cell("row" if not i else "cell", i, p) for i, p in enumerate(row))) for row in rows),
    )
    return tag("div", tag("table", top, body), class_="scroll", tabindex=0, role="region", aria_label=name)


def _part(part: Part) -> Markup:
    if part is None:
        return Markup("")
    if isinstance(part, Markup):
        return part
    if isinstance(part, str):
        return escape(part)
    if isinstance(part, int | float):
        return Markup(number(part))
    return join(part)


def _named(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: Attribute) -> str:
    if value is True:
        return ""
    text = number(value) if isinstance(value, int | float) else str(value)
    return f'="{escape(text)}"'
