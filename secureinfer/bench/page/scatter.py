"""Plots of one mark a case on two scales, whose labels go where nothing else stands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import text
from .axis import Axis
from .html import Markup
from .marks import RADIUS, drawing, label, line, mark

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_HEIGHT = 14.0
_SHORTENED = 110.0


@dataclass(frozen=True)
class Point:
    """number: of its case on the page, which labels it where its name has no room. low, high: an interval along y."""

    x: float
    y: float
    shape: str
    series: str
    name: str
    number: int
    filled: bool = True
    low: float | None = None
    high: float | None = None
    words: str | None = None


@dataclass(frozen=True)
class Across:
    """A line at one value. along: "x" lies across the plot at a y, "y" stands at an x."""

    value: float
    words: str
    kind: str = "aim"
    text_kind: str = "aimed"


class Places:
    """What of a plot is taken, and where a text beside a mark still fits."""

    def __init__(self, area: Box) -> None:
        self._area = area
        self._taken: list[Box] = []
        self._marks: list[tuple[float, float]] = []

    def take(self, box: Box) -> None:
        self._taken.append(box)

    def take_mark(self, x: float, y: float) -> None:
        self._marks.append((x, y))
        self.take((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS))

    def take_line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        count = int(math.dist(start, end) // 4) + 1
        for i in range(count + 1):
            x, y = (a + (b - a) * i / count for a, b in zip(start, end, strict=True))
            self.take((x - 2, y - 2, x + 2, y + 2))

    def free(self, box: Box) -> bool:
        left, top, right, bottom = self._area
        inside = box[0] >= left and box[1] >= top and box[2] <= right and box[3] <= bottom
        return inside and not any(_overlap(box, other) for other in self._taken)

    def _nearest(self, box: Box, x: float, y: float) -> bool:
        """Whether no other mark is as near to a label: it would seem to be that mark's."""
        own = _away(box, x, y)
        return all(_away(box, *other) > own + 2 for other in self._marks if math.dist(other, (x, y)) > 1)

    def beside(self, x: float, y: float, width: float) -> tuple[Box, bool] | None:
        """Where a label of that width fits near x, y, and whether it stands so far that a line must lead to it."""
        for distance in (RADIUS + 3, 22.0, 36.0, 52.0, 70.0):
            for turn in (0, 180, 270, 90, 315, 45, 225, 135, 337, 23, 203, 157):
                box = _box(x, y, distance, math.radians(turn), width)
                far = distance > RADIUS + 3
                if self.free(box) and (far or self._nearest(box, x, y)):
                    self.take(box)
                    return box, far
        return None


def draw(
    points: Sequence[Point], x: Axis, y: Axis, name: str, *, width: float, height: float,
    across: Sequence[Across] = (), joined: Iterable[Sequence[Point]] = (), named: bool = True,
) -> tuple[Markup, list[Point]]:  # fmt: skip
    """The plot, and the points that found no room even for their number.

    joined: points that a thin line joins, in order. named: False labels all marks by number, where there is little room.
    """
    upright = y.ticks(height - 60, upright=True)
    left = max(text.width(told) for _, told in upright) + 12
    # Labels of the scale across are centred on their ticks, so that the last one stands out by half.
    right, top, bottom = width - 22, 26.0, height - 44
    spans = ((left, right), (bottom, top))

    def at(value_x: float, value_y: float) -> tuple[float, float]:
        return left + (right - left) * x.at(value_x), bottom - (bottom - top) * y.at(value_y)

    places = Places((left + 3, top - 4, width, bottom - 3))
    parts = [*_frame(x, y, upright, spans, width, height)]
    for crossing in across:
        _, height_at = at(x.low, crossing.value)
        parts.append(line(left, height_at, right, height_at, crossing.kind))
        under = height_at + 15 <= bottom - 3
        parts.append(
            label(
                left + 6,
                height_at + 14 if under else height_at - 6,
                crossing.words,
                kind=crossing.text_kind,
                room=right - left,
            )
        )
        base = height_at + 2 if under else height_at - 18
        places.take((left, base, left + 8 + text.width(crossing.words), base + 16))
        places.take((left, height_at - 1, right, height_at + 1))
    for chain in joined:
        ends = [at(p.x, p.y) for p in chain]
        for a, b in zip(ends, ends[1:], strict=False):
            parts.append(line(*a, *b, "between"))
            places.take_line(a, b)
    middles = [at(p.x, p.y) for p in points]
    for px, py in middles:
        places.take_mark(px, py)
    for point, (px, py) in zip(points, middles, strict=True):
        if point.low is not None and point.high is not None:
            parts.append(line(px, at(point.x, point.low)[1], px, at(point.x, point.high)[1], "interval"))
        parts.append(
            mark(point.shape, px, py, point.series, filled=point.filled, words=point.words or point.name)
        )
    unlabelled = []
    for point, (px, py) in zip(points, middles, strict=True):
        if (placed := _labelled(places, point, px, py, named)) is None:
            unlabelled.append(point)
        else:
            parts.extend(placed)
    return drawing(width, height, name, *parts), unlabelled


def _labelled(places: Places, point: Point, x: float, y: float, named: bool) -> list[Markup] | None:
    told = f"{point.number}"
    names = [point.name, text.fitted(point.name, _SHORTENED)] if named else []
    for words in dict.fromkeys([*names, told]):
        if (found := places.beside(x, y, text.width(words))) is not None:
            box, far = found
            parts = [_leader(x, y, box)] if far else []
            full = point.name if words != point.name else None
            return [*parts, label(box[0], box[3] - 3, words, kind="beside", full=full)]
    return None


def _leader(x: float, y: float, box: Box) -> Markup:
    near_x, near_y = min(max(x, box[0]), box[2]), min(max(y, box[1] + 3), box[3] - 3)
    away = math.hypot(near_x - x, near_y - y) or 1.0
    part = min(1.0, RADIUS / away)
    return line(x + (near_x - x) * part, y + (near_y - y) * part, near_x, near_y, "leader")


def _frame(
    x: Axis, y: Axis, upright: list[tuple[float, str]], spans: tuple[tuple[float, float], tuple[float, float]],
    width: float, height: float,
) -> Iterable[Markup]:  # fmt: skip
    (left, right), (bottom, top) = spans
    yield label(0, 12, y.title, kind="title", room=width)
    for value, told in upright:
        place = bottom - (bottom - top) * y.at(value)
        yield line(left, place, right, place, "grid")
        yield label(left - 7, place + 4, told, kind="tick", anchor="end")
    for value, told in x.ticks(right - left):
        place = left + (right - left) * x.at(value)
        yield line(place, top, place, bottom + 4, "grid")
        yield label(place, bottom + 17, told, kind="tick", anchor="middle")
    yield line(left, bottom, right, bottom, "base")
    yield label(right, height - 6, x.title, kind="title", anchor="end", room=width - 10)


def _box(x: float, y: float, distance: float, angle: float, width: float) -> Box:
    """A box whose nearest edge is so far from x, y in that direction."""
    across, down = math.cos(angle), math.sin(angle)
    middle_x = x + across * distance + _side(across) * width / 2
    middle_y = y + down * (distance + (_HEIGHT / 2 if abs(across) < 0.5 else 0))
    return middle_x - width / 2, middle_y - _HEIGHT / 2, middle_x + width / 2, middle_y + _HEIGHT / 2


def _away(box: Box, x: float, y: float) -> float:
    return math.hypot(max(box[0] - x, 0.0, x - box[2]), max(box[1] - y, 0.0, y - box[3]))


def _side(across: float) -> float:
    return 0.0 if abs(across) < 0.2 else math.copysign(1.0, across)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
