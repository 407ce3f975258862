"""What a command shows: answers on stdout, progress and errors on stderr, or one JSON document."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType

from .errors import SecureInferError, UnsupportedModelError

PIPE_WIDTH = 200


class Terminal:
    """One command's output. as_json: one JSON document on stdout and no progress."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        # A pipe has no width: take one that holds every table, and break no line of text.
        self.out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
        self.err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE_WIDTH)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that `what` goes on: a spinner on a terminal, else a line at its start and one at its end."""
        if self.as_json:
            yield
            return
        start = time.perf_counter()
        if self.err.is_terminal:
            with self.err.status(what):
                yield
        else:
            self.err.print(f"{what} ...", markup=False)
            yield
        self.err.print(f"{what}: {time.perf_counter() - start:.1f} s", markup=False)

    def answer(self, data: Any, *shown: RenderableType) -> None:
        """Print the command's answer: `data` as JSON, or what is shown to people."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
            return
        for part in shown:
            self.out.print(part, markup=False, soft_wrap=isinstance(part, str))

    def error(self, error: SecureInferError) -> None:
        if self.as_json:
            body: dict[str, Any] = {"code": error.code, "message": str(error)}
            if isinstance(error, UnsupportedModelError):
                body["nodes"] = [vars(node) for node in error.nodes]
            sys.stdout.write(json.dumps({"error": body}, indent=2) + "\n")
        self.err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)

    def note(self, text: str) -> None:
        """A line for people that is no part of the answer."""
        if not self.as_json:
            self.err.print(text, markup=False, soft_wrap=True)
