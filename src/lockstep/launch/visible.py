"""What ranks say, in a form that a terminal and a page only show: no control characters, no half of a character."""

from __future__ import annotations

_LAYOUT = "\n\t"


def visible(text: str) -> str:
    """Put an escape in the place of every character that is not to be seen."""
    if all(char.isprintable() or char in _LAYOUT for char in text):
        return text
    return "".join(char if char.isprintable() or char in _LAYOUT else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")
