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
from lockstep.shard.foresight import Foresight, Meeting, foresight_on

if TYPE_CHECKING:
    from lockstep.shard.unit import Unit

# More than two ranks can be apart, which wait for each other at the end of every step: every unit twice, and some.
_SPARE = 64
_ALL_STORES = 64  # more than a unit has, each gathered in two ways
_ALL_GATHERS = 1 << 32  # more than a model has

Entry = tuple[int, int, bool]  # number of the unit, of its store, and whether it is gathered from those who kept a part


def _settings(unit: Unit) -> tuple[bool, ...]:
    """What decides which collectives follow: part of what ranks foresee, so that one with another setting is found."""
    frees = (unit.frees_after_forward, unit.gathers_in_backward, unit.reshard_after_backward)
    return *frees, unit.syncs, unit.all_reduces, unit.links.has_own_scatter_group


def _shown(unit: Unit) -> str:
    """The settings that are not the usual ones, in words."""
    words = (
        "which stays whole after its forward",
        "which backwards do not gather",
        "which stays whole after backwards",
        "which does not synchronise",
        "which replicas do not reduce",
        "which is scattered on the group that gathers",
    )
    said = [word for word, is_on in zip(words, _settings(unit), strict=True) if not is_on]
    return f" ({', '.join(said)})" if said else ""


class GatherLog:
    """The gathers of one team that this rank has started."""

    def __init__(self, units: Sequence[Unit], place: str) -> None:
        self._units = list(units)
        self._place = place  # names the ranks that gather together: replicas of them gather for themselves
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._num_started = self._num_level = 0
        self._digest = 0
        self._last: deque[Entry] = deque(maxlen=4 * sum(len(unit.stores) for unit in units) + _SPARE)
        self._foresight, self._model = Foresight(), 0
        self.meeting: Meeting | None = None  # None where nobody gathers with this rank
        self.is_silent = False  # in a step that ranks have compared before it began

    def gather_on(self, process_group: Any, watch: Watch) -> None:
        """Foresee gathers as part of all that there are on a process group; on all ranks at the same place."""
        self._foresight = foresight_on(process_group)
        self._model = self._foresight.enter(watch)

    def compare(self, unit: Unit, store: int, *, trains: bool, among_keepers: bool = False) -> None:
        """A gather of one of a unit's stores is about to start; raise on all ranks if theirs is another one.

        ``trains`` in a forward whose backward is to come, whether or not it is compiled.
        """
        if self.meeting is None or self.is_silent:
            return
        gather = self._gather(unit, store, among_keepers)
        if not self._foresight.foresees(gather, trains=trains):
            name = f"{unit.name}{_shown(unit)}"
            self.meeting.compare(self._num_started, name, self.said() or "none", unit.moment)

    def _gather(self, unit: Unit, store: int, among_keepers: bool) -> int:
        gather = _ALL_STORES * self._numbers[unit] + 2 * store + among_keepers + 1
        for setting in _settings(unit):
            gather = 2 * gather + setting
        return _ALL_GATHERS * self._model + gather

    def note(self, unit: Unit, store: int, *, among_keepers: bool = False) -> None:
        """It has started."""
        if self.is_silent:
            return
        number = self._numbers[unit]
        gather = self._gather(unit, store, among_keepers)
        if self.meeting is not None:
            self._foresight.note(gather)
        self._num_started += 1
        self._digest = (1000003 * self._digest + gather) & 0xFFFFFFFF
        self._last.append((number, store, among_keepers))

    def end_window(self) -> None:
        """Gradients were reduced."""
        self._foresight.end_window()

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
        mine = json.dumps([self._place, self._num_started, list(self._last)])
        told = watch.gather(f"gathers, {key}", mine, MEETING_SECONDS)
        everyones = {rank: _read(rank, text) for rank, text in told.items()}
        for place in sorted({place for place, _, _ in everyones.values()}):
            rows = {rank: (number, last) for rank, (where, number, last) in everyones.items() if where == place}
            most, last = max(rows.values(), key=lambda row: row[0])
            if most - min(number for number, _ in rows.values()) > len(last):
                counts = watch.by_global({rank: str(number) for rank, (number, _) in rows.items()})
                raise Disagreement(
                    "Ranks have started too different numbers of gathers to catch up with each other:\n"
                    f"{rank_table(counts)}\nFix: start the ranks again from a checkpoint.",
                    counts,
                )
            if place == self._place:
                self._catch_up(most, last, key)
        self._digest = 0
        self._last.clear()
        self._foresight.forget()
        if self.meeting is not None:
            self.meeting.renew()

    def _catch_up(self, most: int, last: Sequence[Entry], key: str) -> None:
        num_missed = most - self._num_started
        flights = []
        for number, store, among_keepers in last[len(last) - num_missed :] if num_missed else ():
            flights.append((self._units[number], _take_part(self._units[number], store, among_keepers, key)))
        self._num_started = self._num_level = most
        for unit in self._units:
            unit.reshard()  # waits for what is under way
            for own in unit.stores:  # and of a unit of which only some were started
                own.finish(unit.links.gather, unit.moment)
                if not unit.keeps_storage:
                    own.free()
        for unit, flight in flights:
            flight.land(unit.links.gather.watch, unit.moment)


def _take_part(unit: Unit, number: int, among_keepers: bool, name: str) -> Any:
    """Start a gather whose result nobody wants here."""
    store = unit.stores[number]
    if among_keepers:
        return store.take_part_among_keepers(unit.links.keepers(unit.num_keepers), name)
    return store.take_part(unit.links.gather, unit.gather_comm, name)


def _read(rank: int, text: str) -> tuple[str, int, list[Entry]]:
    try:
        place, number, last = json.loads(text)
        return str(place), int(number), [(int(unit), int(store), bool(kept)) for unit, store, kept in last]
    except (ValueError, TypeError):
        raise Disagreement(f"What rank {rank} has told of its gathers cannot be read: {text[:200]!r}.") from None
