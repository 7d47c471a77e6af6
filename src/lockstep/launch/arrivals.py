"""Who has come to the process group: ranks that never do, and processes that say they are the same rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from lockstep.launch.cause import Cause
from lockstep.launch.page import Place
from lockstep.observe.moments import StepMoment

_JOINING = StepMoment.JOINING.value
_TELL_AFTER_SECONDS = 60.0
_LONGEST_LOOK = 2.0  # what the time between two looks may count for, at most
# A rank that has ended does not come any more. One that had been here may have ended well, and the others, which wait
# no longer, have only not said so yet.
_ENDED_SECONDS, _ENDED_AFTER_JOINING_SECONDS = 2.0, 30.0


class Arrivals:
    """Looks at where ranks are while some wait in ``init_process_group``."""

    def __init__(self, limit_seconds: float, tell: Callable[[str], None] = lambda text: None) -> None:
        self._limit = limit_seconds
        self._tell = tell
        self._last_look: float | None = None  # while some wait
        self._waited = 0.0
        self._has_told = False

    def look(self, places: Mapping[int, Place], running: Mapping[int, int]) -> Cause | None:
        """A cause to end the attempt: at once for two that claim the same rank, soon for one that has ended, at the
        limit for one that is missing.

        ``places`` is by the rank that the launcher gave, ``running`` has the process id of those that have not ended.
        """
        waiting = {rank: place for rank, place in places.items() if rank in running and place.moment == _JOINING}
        if not waiting:
            self._last_look = None
            return None
        twice = self._claimed_twice(waiting, running)
        if twice is not None:
            return twice
        waited = self._count()
        ended = self._ended(waiting, places, running, waited)
        if ended is not None or not self._limit:
            return ended
        limit = max(self._limit, *(place.patience for place in waiting.values()))
        if waited >= limit:
            return self._missing(waiting, places, running, limit)
        if waited >= _TELL_AFTER_SECONDS and not self._has_told:
            self._has_told = True
            cause = self._missing(waiting, places, running, waited)
            if cause is not None:
                self._tell(cause.text)
        return None

    def _count(self) -> float:
        """For how many seconds some have been waiting; time in which this process stood still does not count."""
        now = time.monotonic()
        if self._last_look is None:
            self._last_look, self._waited, self._has_told = now, 0.0, False
        self._waited += min(now - self._last_look, _LONGEST_LOOK)
        self._last_look = now
        return self._waited

    def _claimed_twice(self, waiting: Mapping[int, Place], running: Mapping[int, int]) -> Cause | None:
        claims = defaultdict(list)
        for given, place in waiting.items():
            if place.rank >= 0:
                claims[place.rank].append(given)
        for claimed, by in claims.items():
            if len(by) > 1:
                those = " and ".join(f"pid {running[given]} (started as rank {given})" for given in by)
                wrong = [given for given in by if given != claimed]
                text = f"duplicate rank: {those} both say they are rank {claimed}; is RANK changed in the program?"
                return Cause(wrong[0] if wrong else claimed, text)
        return None

    def _ended(
        self, waiting: Mapping[int, Place], places: Mapping[int, Place], running: Mapping[int, int], waited: float
    ) -> Cause | None:
        """Whether ranks wait for one that has ended, with a good status: another status is a failure of its own."""
        world = max(place.world for place in waiting.values())
        claimed = {place.rank for given, place in places.items() if given in running}
        for rank, place in places.items():
            if rank in running or rank in claimed or rank >= world:
                continue
            if waited >= (_ENDED_SECONDS if place.rank < 0 else _ENDED_AFTER_JOINING_SECONDS):
                ranks = ", ".join(map(str, sorted(waiting)))
                where = "without ever coming there" if place.rank < 0 else f"last seen {place.seen}"
                text = f"rank(s) {ranks} wait in init_process_group for rank {rank}, which has ended, {where}"
                return Cause(rank, text)
        return None

    def _missing(
        self, waiting: Mapping[int, Place], places: Mapping[int, Place], running: Mapping[int, int], seconds: float
    ) -> Cause | None:
        world = max(place.world for place in waiting.values())
        here = {place.rank for place in places.values() if place.rank >= 0}
        missing = [rank for rank in range(world) if rank not in here]
        if not missing:
            return None
        told = []
        for rank in missing:
            if rank not in places:
                told.append(f"rank {rank}, which was not started here (WORLD_SIZE says {world})")
            elif rank in running:
                told.append(f"rank {rank} (pid {running[rank]}), which is {places[rank]}")
            else:
                told.append(f"rank {rank}, which has ended")
        ranks = ", ".join(map(str, sorted(waiting)))
        return Cause(missing[0], f"rank(s) {ranks} waited {seconds:.0f} s in init_process_group for {'; '.join(told)}")
