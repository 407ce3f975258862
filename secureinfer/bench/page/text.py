"""How wide a text is before any browser has drawn it: enough to keep labels apart, whatever the system's font."""

from __future__ import annotations

# Widths in em of DejaVu Sans, the widest of the fonts that systems take for sans-serif: room kept by it suits the others.
_WIDTHS = {
    **dict.fromkeys("ijl|", 0.34),
    **dict.fromkeys(" .,:;'!/\\·", 0.34),
    **dict.fromkeys("ftr()[]-", 0.41),
    **dict.fromkeys("csxzvkyJ*_–", 0.6),
    **dict.fromkeys("mwMW%@…—", 1.0),
    **dict.fromkeys("ABCDEGHKNOPQRUVX&+=<>×~≈", 0.84),
}
_LETTER, _OTHER = 0.64, 1.05
_BOLD = 1.12

SMALL, BODY = 12.0, 13.0
"""Pixels of text in plots: no text is smaller than SMALL."""


def width(text: str, size: float = SMALL, *, bold: bool = False) -> float:
    """Pixels that the text takes at most."""
    return sum(map(_em, text)) * size * (_BOLD if bold else 1.0)


def _em(character: str) -> float:
    return _WIDTHS.get(character, _LETTER if character.isascii() else _OTHER)


def fitted(text: str, room: float, size: float = SMALL, *, bold: bool = False, keep: str = "start") -> str:
    """The text, or as much of it as has room, with an ellipsis. keep: start, or end where the tail tells more."""
    ems = room / (size * (_BOLD if bold else 1.0))
    if sum(map(_em, text)) <= ems:
        return text
    kept, taken = 0, _em("…")
    for character in text if keep == "start" else reversed(text):
        taken += _em(character)
        if taken > ems:
            break
        kept += 1
    if not kept:
        return "…"
    return f"{text[:kept].rstrip()}…" if keep == "start" else f"…{text[-kept:].lstrip()}"


def wrapped(text: str, room: float, size: float = SMALL, *, most: int = 3) -> list[str]:
    """Lines of the text; the last ends with an ellipsis where there would be more than `most`."""
    words, lines = text.replace("\n", " ").split(" "), [""]
    for position, word in enumerate(words):
        longer = f"{lines[-1]} {word}".strip()
        if width(longer, size) <= room:
            lines[-1] = longer
        elif len(lines) < most:
            lines.append(word) if lines[-1] else lines.__setitem__(-1, word)
        else:
            rest = " ".join([lines[-1], *words[position:]])
            lines[-1] = fitted(rest, room, size)
            break
    return [fitted(line, room, size) for line in lines]
