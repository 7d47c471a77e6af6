"""A wait that has become long: who has arrived, who is late, who is gone, and when it is enough.

    gone      its process has ended: an error at once
    silent    no sign of life (stopped, frozen, cut off, holding the interpreter's lock): an error after a minute
    late      alive, but not here (an evaluation, a checkpoint, a long compile): a warning that says where it is, and an
              error only at the limit the user has set, or the process group's

Time in which this process itself stood still does not count, so that a job that is suspended and resumed as a whole
goes on.  Ranks that have all arrived are waiting for bytes, which is no fault of anyone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from lockstep.agree.beat import Beat, Place
from lockstep.errors import PeerLate, StoreSilent, rank_table

if TYPE_CHECKING:
    from lockstep.agree.watch import Watch

logger = logging.getLogger("lockstep")

_LONGEST_SLICE = 2.0  # what one look may count for, at most
_LATE_AFTER = 1.5  # seconds in which a rank was seen to be missing, before it is called late
_DEAD_AFTER = 1.0  # what a process sent before it ended may still be on its way
_ENDED_AFTER = 3.0


class Vigil:
    """One long wait of one rank."""

    def __init__(self, watch: Watch, moment: Callable[[], str], limit_seconds: float, waited: float = 1.0) -> None:
        self._watch = watch
        self._moment = moment
        self._limit = limit_seconds
        self._place = Place("")
        self._last = monotonic()
        self._next_survey = 0.0
        self._unsurveyed = 0.0
        self.waited = waited  # time that counts
        self._store_silent = 0.0
        self._late_for = 0.0
        self._missing: dict[int, float] = {}  # rank: for how long it was seen not to be here
        self._numbers: dict[int, int] = {}
        self._silent: dict[int, float] = {}  # rank: for how long its last sign of life is the same
        self._gone: dict[int, float] = {}
        self._pause = watch.stall_seconds
        self._next_report = max(waited, watch.stall_seconds)
        self._asked: set[int] = set()
        self._shown: set[int] = set()

    # ---------------------------------------------------------------- once a second

    def look(self) -> None:
        """Look around; raise where waiting is in vain, warn where it takes long."""
        now = monotonic()
        passed, self._last = min(now - self._last, _LONGEST_SLICE), now
        self.waited += passed
        self._arrive()
        pulse = self._watch.pulse
        self._unsurveyed += passed
        is_fresh = pulse is None
        if pulse is not None and now >= self._next_survey:
            self._next_survey = now + 0.8 * pulse.period
            beats = pulse.look(self._watch.others)
            if beats is None:
                self._store_silent += self._unsurveyed
            else:
                self._store_silent = 0.0
                self._compare(self._by_rank(beats), self._unsurveyed)
                is_fresh = True
            self._unsurveyed = 0.0
        self._look_for_the_gone(passed)
        self._look_at_deadlines(passed, is_fresh)
        # Nobody is named by what was seen before: a rank may have come since.
        if self.waited >= self._next_report and (is_fresh or self._store_silent):
            self._report()
            self._pause *= 2
            self._next_report = self.waited + self._pause
        self._show_stacks()

    def close(self) -> None:
        """The wait is over."""
        if self._watch.pulse is not None and self._place:
            self._watch.pulse.wait_at(self._watch.name, None)

    def _arrive(self) -> None:
        """Say where this rank waits, which others compare with where they wait."""
        here = self._moment()
        place = here if isinstance(here, Place) else Place(here)
        if place != self._place:
            self._place = place
            self._missing.clear()
            if self._watch.pulse is not None:
                self._watch.pulse.wait_at(self._watch.name, place)

    def _by_rank(self, beats: dict[int, Beat]) -> dict[int, Beat]:
        return {rank: beats[member] for rank, member in self._watch.peers() if member in beats}

    def _compare(self, beats: dict[int, Beat], passed: float) -> None:
        for rank, _ in self._watch.peers():
            beat = beats.get(rank)
            if beat is None or beat.number == self._numbers.get(rank):
                self._silent[rank] = self._silent.get(rank, 0.0) + passed
            else:
                self._silent[rank] = 0.0
                self._numbers[rank] = beat.number
            there = beat.waits.get(self._watch.name) if beat is not None else None
            if there is not None and self._place.is_reached_by(there):
                self._missing.pop(rank, None)
            else:
                self._missing[rank] = self._missing.get(rank, 0.0) + passed

    # ---------------------------------------------------------------- who is what

    @property
    def late(self) -> list[int]:
        """The ranks that were seen not to be here, for long enough to say so."""
        return sorted(rank for rank, seconds in self._missing.items() if seconds >= _LATE_AFTER)

    def _look_for_the_gone(self, passed: float) -> None:
        """Raise if a process that is waited for has ended, and what it had sent has had time to come."""
        for rank, _ in self._watch.peers():
            reason = self._watch.why_gone(rank)
            if reason is None:
                continue
            self._gone[rank] = self._gone.get(rank, 0.0) + passed
            if self._gone[rank] >= (_ENDED_AFTER if reason.ended else _DEAD_AFTER):
                raise self._watch.lost(rank, self._place, reason)

    def _look_at_deadlines(self, passed: float, is_fresh: bool) -> None:
        watch = self._watch
        heartbeat = watch.heartbeat_seconds
        if heartbeat and self._store_silent >= heartbeat:
            raise self._told(self._store_is_silent())
        silent = sorted(rank for rank in self.late if self._silent.get(rank, 0.0) >= heartbeat) if heartbeat else []
        if silent and is_fresh:
            raise self._told(self._too_late(silent, f"gave no sign of life for {heartbeat:g} s"))
        waits_for_someone = bool(self.late) or bool(self._store_silent) or watch.pulse is None
        self._late_for = self._late_for + passed if waits_for_someone else 0.0
        if self._limit and self._late_for + 1.0 >= self._limit and (is_fresh or self._store_silent):
            if self._store_silent:
                raise self._told(self._store_is_silent())
            raise self._told(self._too_late(self.late, f"did not arrive within {self._limit:g} s"))

    def _told(self, error: PeerLate) -> PeerLate:
        self._watch.post_failure(error)
        return error

    def too_late(self, what: str) -> PeerLate:
        """The error for a wait that the backend itself has given up."""
        return self._told(self._store_is_silent() if self._store_silent else self._too_late(self.late, what))

    @property
    def _me(self) -> int:
        return self._watch.shown(self._watch.rank)

    def _too_late(self, late: list[int], what: str) -> PeerLate:
        ranks = list(map(self._watch.shown, late))
        who = f"Rank(s) {ranks}" if ranks else "Ranks that are not known to be late (all arrived; the link is silent)"
        return PeerLate(
            f"{who} {what}, while rank {self._me} waited in {self._place}.\nLast seen:\n{self._table()}\n"
            "Likely causes: a rank that is stopped, frozen or cut off; that does something long of its own "
            "(evaluation, a checkpoint, compiling); or that has fewer batches than the others.\n"
            "Fix: look at that rank; wrap the loop in model.join() if inputs are uneven; raise late_timeout= (or the "
            "process group's timeout) if it only takes long.",
            ranks,
        )

    def _store_is_silent(self) -> StoreSilent:
        pulse = self._watch.pulse
        assert pulse is not None
        hosts = [rank for rank, member in self._watch.peers() if member in pulse.hosts()]
        host = (
            f"the process of rank {self._watch.shown(hosts[0])}, which hosts it,"
            if hosts
            else "the process that hosts it"
        )
        state = "".join(
            f" Rank {self._watch.shown(rank)} {why}." for rank in hosts if (why := self._watch.condition(rank))
        )
        return StoreSilent(
            f"The store is silent: it has not answered rank {self._me} for {self._store_silent:.0f} s, which "
            f"waits in {self._place}. So {host} is stopped, frozen or gone, or this rank is cut off.{state}\n"
            f"Last seen:\n{self._table()}",
            list(map(self._watch.shown, hosts)),
        )

    def _table(self) -> str:
        """What each rank was last seen doing."""
        words = {self._watch.shown(self._watch.rank): f"waits in {self._place}"}
        for rank, member in self._watch.peers():
            pulse = self._watch.pulse
            beat = pulse.last_seen(member) if pulse is not None else None
            seen = beat.words if beat is not None else "no sign of life was ever read"
            words[member] = "; ".join([*([c] if (c := self._condition(rank)) else []), seen])
        return rank_table(words)

    def _condition(self, rank: int) -> str:
        known = self._watch.condition(rank)
        if known:
            return known
        silent = self._silent.get(rank, 0.0)
        return f"no sign of life for {silent:.0f} s" if silent >= 5.0 else ""

    # ---------------------------------------------------------------- warnings

    def _report(self) -> None:
        watch = self._watch
        late = [] if self._store_silent else self.late
        rows = []
        for rank, member in watch.peers():
            beat = watch.pulse.last_seen(member) if watch.pulse is not None else None
            if rank in late:
                condition = self._condition(rank)  # where it is one, what was heard last is old
                told = f"{condition}, last seen" if condition else "alive,"
                rows.append(f"; rank {member}: {told} {beat.words if beat is not None else 'never'}")
            elif self._store_silent and (seen := watch.condition(rank)):
                rows.append(f"; rank {member} {seen}")
        unknown = "none is known to be late (a slow link, or all ranks arrived just now)"
        if self._store_silent:
            unknown = f"not known, the store is silent for {self._store_silent:.0f} s"
        logger.warning(
            "Rank %d is still waiting in %s, for %.0f s. Ranks that have not arrived there: %s%s.",
            watch.shown(watch.rank),
            self._place,
            self.waited,
            list(map(watch.shown, late)) or unknown,
            "".join(rows),
        )
        if watch.pulse is not None and late and watch.rank == min(r for r in range(watch.world) if r not in late):
            self._asked |= set(late)
            watch.pulse.ask_for_stacks([member for rank, member in watch.peers() if rank in late])

    def _show_stacks(self) -> None:
        """Log the stacks of late ranks that have answered; one rank does it for all."""
        pulse = self._watch.pulse
        for rank, member in self._watch.peers():
            if pulse is None or rank not in self._asked - self._shown or rank not in self.late:
                continue
            stack = pulse.stack_of(member)
            if stack:
                self._shown.add(rank)
                logger.warning("Rank %d, which others wait for, is here:\n%s", member, stack.rstrip())
