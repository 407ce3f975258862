"""What compression did: one row a layer, and nothing left out in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

SCHEMA = "secureinfer-compression/1"


@dataclass(frozen=True)
class LayerReport:
    """One module with parameters of its own; a transform of something else has rows of its own kind.

    path: its first place in the model. changed: whether the transform changed it. reason: why not, or what else to know.
    bytes_before, bytes_after: its parameters and buffers. relative_error: |W' - W| / |W| of its weight, where it changed.
    """

    path: str
    type: str
    changed: bool
    reason: str
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None

    NOUN: ClassVar[str] = "layers with parameters"
    HEAD: ClassVar[tuple[str, ...]] = (
        "layer", "type", "changed", "bytes before", "bytes after", "weight error", "remark"
    )  # fmt: skip
    RIGHT: ClassVar[tuple[int, ...]] = (3, 4, 5)

    def cells(self) -> tuple[str, ...]:
        """One row under HEAD."""
        return (
            *self._place(),
            f"{self.bytes_before:,}",
            f"{self.bytes_after:,}",
            _small(self.relative_error),
            self.reason,
        )

    def _place(self) -> tuple[str, str, str]:
        return self.path or "(the model)", self.type, "yes" if self.changed else "no"


@dataclass(frozen=True)
class ActivationReport(LayerReport):
    """One activation, or the calls of a function that no module holds (path and type are then where and what).

    kind, degree, levels, radius, error: of its polynomial; error is the greatest |p - f| for |x| <= radius. greatest: |x| on
    calibration in the model as it was. outside: how many values of `values` on calibration lie outside the range in the
    model as it is now; check_outside and check_values the same on the held-out inputs, None without any.
    """

    kind: str | None = None
    degree: int | None = None
    levels: int | None = None
    radius: float | None = None
    error: float | None = None
    greatest: float | None = None
    outside: int | None = None
    values: int | None = None
    check_outside: int | None = None
    check_values: int | None = None

    NOUN: ClassVar[str] = "activations"
    HEAD: ClassVar[tuple[str, ...]] = (
        "activation", "type", "changed", "degree", "levels", "range", "error", "outside", "held-out outside", "remark"
    )  # fmt: skip
    RIGHT: ClassVar[tuple[int, ...]] = (3, 4, 5, 6, 7, 8)

    def cells(self) -> tuple[str, ...]:
        figures = ["" if n is None else f"{n}" for n in (self.degree, self.levels)]
        span = "" if self.radius is None else f"±{self.radius:.3g}"
        counts = (_part(self.outside, self.values), _part(self.check_outside, self.check_values))
        return (*self._place(), *figures, span, _small(self.error), *counts, self.reason)


def _small(number: float | None) -> str:
    return "" if number is None else f"{number:.2e}"


def _part(count: int | None, total: int | None) -> str:
    return "" if count is None or total is None else f"{count:,} of {total:,}"


@dataclass(frozen=True)
class TransformReport:
    """One transform: its settings and its layers in the order of the model.

    bytes_before, bytes_after: all parameters and buffers of the model, shared ones once. of: what its rows are.
    """

    name: str
    settings: Mapping[str, Any]
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    of: type[LayerReport] = LayerReport

    @property
    def changed(self) -> tuple[LayerReport, ...]:
        return tuple(row for row in self.layers if row.changed)

    @property
    def kept(self) -> tuple[LayerReport, ...]:
        return tuple(row for row in self.layers if not row.changed)

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in self.settings.items())
        lines = [
            f"{self.name}({settings}): {len(self.changed)} of {len(self.layers)} {self.of.NOUN} changed, "
            f"{self.bytes_before:,} to {self.bytes_after:,} bytes"
        ]
        rows = [self.of.HEAD, *(r.cells() for r in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.of.HEAD))]
        for row in rows:
            cells = [
                c.rjust(w) if i in self.of.RIGHT else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class CompressionReport:
    """The transforms in the order in which they ran. print() shows a table for each; to_dict() is stable JSON."""

    transforms: tuple[TransformReport, ...]

    @property
    def bytes_before(self) -> int:
        return self.transforms[0].bytes_before if self.transforms else 0

    @property
    def bytes_after(self) -> int:
        return self.transforms[-1].bytes_after if self.transforms else 0

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.transforms)) or "no transform was given: the model is a copy"

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "transforms": [
                {
                    "name": t.name,
                    "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in t.settings.items()},
                    "bytes_before": t.bytes_before,
                    "bytes_after": t.bytes_after,
                    "layers": [asdict(row) for row in t.layers],
                }
                for t in self.transforms
            ],
        }
