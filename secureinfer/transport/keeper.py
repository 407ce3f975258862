"""Keeper: one thread of a process that says for each of its links that this side is alive, and finds peers that say
nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Kept(Protocol):
    """What the keeper calls, again and again."""

    period: float

    def tick(self) -> None:
        """Speak if nothing was said for long; end the link if nothing was heard for long. Never blocks or raises."""


class Keeper:
    """The thread runs while there is a link. A link's `tick` is called every `period` seconds or sooner."""

    def __init__(self) -> None:
        self._links: set[Kept] = set()
        self._lock = threading.Lock()
        self._running = False

    def add(self, link: Kept) -> None:
        with self._lock:
            self._links.add(link)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="link-keeper", daemon=True).start()

    def remove(self, link: Kept) -> None:
        with self._lock:
            self._links.discard(link)

    def _run(self) -> None:
        due: dict[Kept, float] = {}
        while True:
            with self._lock:
                links = list(self._links)
                if not links:
                    self._running = False
                    return
            now = time.monotonic()
            due = {link: due.get(link, now) for link in links}
            for link in links:
                if now >= due[link]:
                    link.tick()
                    due[link] = now + link.period
            time.sleep(min(link.period for link in links) / 2)
