"""Protocols as generators, so that independent ones share their messages.

A protocol yields the words that it wants opened, and is sent what they are. `together` runs several side by side: what they
ask for at the same time travels in one frame, in one round.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import torch

from ..party import Party, Word

T = TypeVar("T")
Talk = Generator[list[Word], list[torch.Tensor], T]


def run(p: Party, talk: Talk[T]) -> T:
    """The protocol's result."""
    try:
        words = next(talk)
        while True:
            words = talk.send(p.open_together(words))
    except StopIteration as end:
        result: T = end.value
        return result


def together(*talks: Talk[Any]) -> Talk[tuple[Any, ...]]:
    """Several protocols side by side: as many rounds as the longest takes."""
    results: list[Any] = [None] * len(talks)
    asked: dict[int, list[Word]] = {}

    def go_on(i: int, opened: list[torch.Tensor] | None) -> None:
        try:
            asked[i] = next(talks[i]) if opened is None else talks[i].send(opened)
        except StopIteration as end:
            asked.pop(i, None)
            results[i] = end.value

    for i in range(len(talks)):
        go_on(i, None)
    while asked:
        waiting = list(asked.items())
        opened = yield [word for _, words in waiting for word in words]
        at = 0
        for i, words in waiting:
            count = sum(len(word.items) for word in words)
            go_on(i, opened[at : at + count])
            at += count
    return tuple(results)
