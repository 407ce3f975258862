"""Who may see an edge: public stays public, one owner's data stays with that owner, everything else is
shared."""

from __future__ import annotations

from collections.abc import Iterable

from .ir import MODEL_OWNER, Visibility

Seen = tuple[Visibility, str | None]

PUBLIC: Seen = (Visibility.PUBLIC, None)
WEIGHT: Seen = (Visibility.PRIVATE, MODEL_OWNER)
SHARED: Seen = (Visibility.SHARED, None)


def result_visibility(operands: Iterable[Seen]) -> Seen:
    """The output of an operator. What one owner can compute alone from its own and public values stays
    PRIVATE to it."""
    private: set[Seen] = set()
    for seen in operands:
        if seen[0] is Visibility.PRIVATE:
            private.add(seen)
        elif seen[0] is not Visibility.PUBLIC:
            return SHARED
    if not private:
        return PUBLIC
    return private.pop() if len(private) == 1 else SHARED
