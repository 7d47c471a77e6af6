"""Being level again after an error: ranks that have started fewer gathers than others start those that they missed.

A gather is paired with the others' by its place in the row of all gathers.  A rank that raised in its forward has
started fewer than those who were waiting for it; the next one that it starts would be paired with one of theirs, of
other parameters.  So ranks tell each other how many they have started, and of what, and those behind start the rest;
what comes of it is dropped.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.agree.watch import Watch
from lockstep.engine.casts import MEETING_SECONDS
from lockstep.errors import Disagreement, rank_table

if TYPE_CHECKING:
    from lockstep.shard.unit import Unit

# More than two ranks can be apart, which wait for each other at the end of every step: every unit twice, and some.
_SPARE = 64


class GatherLog:
    """The gathers of one team that this rank has started."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._num_started = self._num_level = 0
        self._digest = 0
        self._last: deque[tuple[int, int]] = deque(maxlen=4 * sum(len(unit.stores) for unit in units) + _SPARE)

    def note(self, unit: Unit, store: int) -> None:
        """A gather of one of a unit's stores starts."""
        number = self._numbers[unit]
        self._num_started += 1
        self._digest = (1000003 * self._digest + 64 * number + store + 1) & 0xFFFFFFFF
        self._last.append((number, store))

    def said(self) -> str:
        """What ranks compare in every window: how many there were since they were level, and of what."""
        if not self._last:
            return ""
        last = self._units[self._last[-1][0]].name
        return f"{self._num_started - self._num_level}, the last of {last} ({self._digest:08x})"

    def level(self, watch: Watch, key: str) -> None:
        """Start what others have started and this rank has not; all ranks come here."""
        if watch.board is None or watch.world == 1:
            return
        mine = json.dumps([self._num_started, list(self._last)])
        told = watch.gather(f"gathers, {key}", mine, MEETING_SECONDS)
        everyones = {rank: _read(rank, text) for rank, text in told.items()}
        most, last = max(everyones.values(), key=lambda said: said[0])
        if most - min(number for number, _ in everyones.values()) > len(last):
            counts = watch.by_global({rank: str(number) for rank, (number, _) in everyones.items()})
            raise Disagreement(
                "Ranks have started too different numbers of gathers to catch up with each other:\n"
                f"{rank_table(counts)}\nFix: start the ranks again from a checkpoint.",
                counts,
            )
        num_missed = most - self._num_started
        flights = []
        for number, store in last[len(last) - num_missed :]:
            unit = self._units[number]
            self.note(unit, store)
            flights.append((unit, unit.stores[store].take_part(unit.links.gather, unit.gather_comm, key)))
        self._num_level, self._digest = self._num_started, 0
        for unit in self._units:
            unit.reshard()  # waits for what is under way
        for unit, flight in flights:
            flight.land(watch, unit.moment)


def _read(rank: int, text: str) -> tuple[int, list[Any]]:
    try:
        number, last = json.loads(text)
        return int(number), [(int(unit), int(store)) for unit, store in last]
    except (ValueError, TypeError):
        raise Disagreement(f"What rank {rank} has told of its gathers cannot be read: {text[:200]!r}.") from None
