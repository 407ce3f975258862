"""What compression did: one row a layer, and nothing left out in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "secureinfer-compression/1"


@dataclass(frozen=True)
class LayerReport:
    """One module with parameters of its own.

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


@dataclass(frozen=True)
class TransformReport:
    """One transform: its settings and its layers in the order of the model.

    bytes_before, bytes_after: all parameters and buffers of the model, shared ones once.
    """

    name: str
    settings: Mapping[str, Any]
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int

    @property
    def changed(self) -> tuple[LayerReport, ...]:
        return tuple(row for row in self.layers if row.changed)

    @property
    def kept(self) -> tuple[LayerReport, ...]:
        return tuple(row for row in self.layers if not row.changed)

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in self.settings.items())
        head = [
            f"{self.name}({settings}): {len(self.changed)} of {len(self.layers)} layers with parameters changed, "
            f"{self.bytes_before:,} to {self.bytes_after:,} bytes"
        ]
        rows = [("layer", "type", "changed", "bytes before", "bytes after", "weight error", "remark")]
        for r in self.layers:
            error = "" if r.relative_error is None else f"{r.relative_error:.2e}"
            sizes = (f"{r.bytes_before:,}", f"{r.bytes_after:,}")
            rows.append(
                (r.path or "(the model)", r.type, "yes" if r.changed else "no", *sizes, error, r.reason)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        right = (3, 4, 5)
        for row in rows:
            cells = [
                c.rjust(w) if i in right else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ]
            head.append("  ".join(cells).rstrip())
        return "\n".join(head)


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
