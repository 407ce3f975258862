"""What every benchmark's command line does: `--quick`, `--json`, progress on a terminal, one table or one document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch

Row = TypeVar("Row")


def run(
    arguments: Sequence[str],
    measure: Callable[..., list[Row]],
    table: Callable[[Sequence[Row]], str],
    as_json: Callable[[Sequence[Row]], dict[str, Any]],
) -> None:
    """Measure and print. measure: takes quick (bool) and progress, which is called with a text."""

    def progress(text: str) -> None:
        sys.stderr.write(f"\r{text:<70}" if sys.stderr.isatty() else "")

    rows = measure(quick="--quick" in arguments, progress=progress)
    sys.stderr.write("\n" if sys.stderr.isatty() else "")
    sys.stdout.write((json.dumps(as_json(rows)) if "--json" in arguments else table(rows)) + "\n")


def document(schema: str, rows: Sequence[Any], ratios: Sequence[str] = ()) -> dict[str, Any]:
    """ratios: properties of a row that belong into it."""
    shown = [{**asdict(row), **{name: getattr(row, name) for name in ratios}} for row in rows]
    return {"schema": schema, "torch": torch.__version__, "rows": shown}
