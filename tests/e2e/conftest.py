"""Fixtures of tests whose parties run the toy engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fault() -> Iterator[Callable[[str], None]]:
    """Say "role:phase:kind", and that party does it from then on, until the test ends."""
    file = Path(os.environ["TOY_FAULT"])
    yield lambda text: file.write_text(text) and None
    file.unlink(missing_ok=True)
