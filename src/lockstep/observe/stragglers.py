"""Stragglers: which rank makes the others wait, and how much.

Ranks tell each other at the end of each window how long they stood still in the one before.  Whoever is last waits
least: what the others waited more than that is its share.  All ranks have the same numbers, so all say the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from statistics import median
from time import monotonic

logger = logging.getLogger("lockstep")

_LOG_EVERY_SECONDS = 600.0
_FIRST_LOG_SECONDS = 60.0
_SHARE_TO_LOG = 0.2
_LEAST_SECONDS = 0.002  # what a busy machine does to any rank now and then


class Stragglers:
    """Adds up what ranks have made others wait."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by rank
        self._period: dict[int, float] = {}
        self._since = self._started = monotonic()

    def note(self, waits_us: Mapping[int, int], rank: int, shown: Callable[[int], int] = int) -> None:
        """Take what each rank that has data waited in one window; ``shown`` makes global ranks of those of a group."""
        if len(waits_us) < 2:
            return
        last = min(waits_us, key=waits_us.__getitem__)
        others = [wait for other, wait in waits_us.items() if other != last]
        lost = (median(others) - waits_us[last]) / 1e6
        if lost < _LEAST_SECONDS:
            return
        late = shown(last)
        self.seconds[late] = self.seconds.get(late, 0.0) + lost
        self._period[late] = self._period.get(late, 0.0) + lost
        self._log(speaks=rank == min(waits_us))

    def _log(self, *, speaks: bool) -> None:
        now = monotonic()
        passed = now - self._since
        if passed < (_FIRST_LOG_SECONDS if self._since == self._started else _LOG_EVERY_SECONDS):
            return
        worst = max(self._period, key=self._period.__getitem__)
        lost = self._period[worst]
        self._since, self._period = now, {}
        if speaks and lost >= _SHARE_TO_LOG * passed:
            logger.warning(
                "Rank %d made the others wait %.0f s of the last %.0f s (%.0f %%): it comes last to the end of steps. "
                "Look at its data loading, its host, or the work that only it does.",
                worst,
                lost,
                passed,
                100 * lost / passed,
            )
