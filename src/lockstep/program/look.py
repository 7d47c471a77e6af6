"""A place that is looked at before every step.

Numbers are compared by value and everything else by identity.  In nearly every step a place holds the very same objects
as in the step before, which costs one comparison of their identities; only where these differ are values read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from lockstep.program.batch import exact

PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_EXACT = frozenset((int, str, bytes, type(None)))  # those that equal the same value only


class Look:
    """Reads one place, and remembers what it found there the last time."""

    __slots__ = ("_found_in", "_identities", "_plain", "_value", "objects")

    def __init__(self, objects: Callable[[], list[Any]], found_in: Callable[[], Iterable[Any]] | None = None) -> None:
        self.objects = objects  # what counts
        self._found_in = objects if found_in is None else found_in  # all of them, maybe with others, if that is faster
        self._identities: list[int] | None = None
        self._plain: list[Any] = []  # alive, so that no other number is taken for one of them
        self._value: tuple[Hashable, ...] = ()

    def value(self) -> tuple[Hashable, ...]:
        """What is there now, as something that is equal to the same only."""
        found = self._found_in()
        identities = list(map(id, found))
        if identities != self._identities:
            self._plain = [v for v in found if type(v) in PLAIN]
            self._identities = identities
            self._value = tuple([v if type(v) in _EXACT else _known_by(v) for v in self.objects()])
        return self._value


def _known_by(value: Any) -> Hashable:
    """A number exactly as it is, anything else by identity."""
    return exact(value) if type(value) in PLAIN else id(value)
