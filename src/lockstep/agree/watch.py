"""Waiting for a collective without going blind: slices, Ctrl-C, who is late, who failed.

gloo cannot abort a collective, but its waits can time out and be tried again.  So a wait is a row of short waits;
between two of them Python can be interrupted, a peer's last words can be read, and ranks that have not arrived, or are
gone, are named (``vigil.py``).  Nothing is posted or read in a wait of less than a second.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import torch

from lockstep import settings
from lockstep.agree import last_words
from lockstep.agree.beat import Words, read_words, words_of
from lockstep.agree.board import Board
from lockstep.agree.deadline import silence_limit
from lockstep.agree.leaving import abandon_groups
from lockstep.agree.pulse import Pulse
from lockstep.agree.vigil import Vigil
from lockstep.errors import Disagreement, LockstepError, PeerFailed, PeerLate, PeerLost, rank_table

logger = logging.getLogger("lockstep")

T = TypeVar("T")
_SLICE = timedelta(seconds=1)
# After a connection breaks, how long to look for the failing peer's own words, and then for the one that is gone.
_LAST_WORDS_SECONDS = 1.0
_SEARCH_SECONDS = 3.0
_HEARING_SECONDS = 3.0
_ANSWER_SECONDS = 0.5
_BROKEN = ("connection", "closed", "reset", "pipe", "timed out", "timeout", "socket", "gloo", "nccl")
_SLICE_OVER = "not done within the slice"

last_words.prepare()


@dataclass(frozen=True)
class Gone:
    """Why a process counts as gone; ``ended``: it has come to its end by itself."""

    text: str
    ended: bool


class Watch:
    """Waits for collectives of one wrapper and tells peers why this rank stopped, if it did."""

    def __init__(
        self, board: Board | None, rank: int, late_seconds: float | None = None, group_seconds: float = 0.0
    ) -> None:
        self.board = board
        self.rank = rank
        self.stall_seconds = settings.stall_seconds()
        self.heartbeat_seconds = silence_limit()
        limit = settings.late_timeout() if late_seconds is None else late_seconds
        self.limit_seconds = limit or group_seconds
        self._group_seconds = group_seconds
        self._met: set[str] = set()  # meetings that this rank has come to
        self._has_posted_failure = False
        self._last_window = monotonic()
        self.verdict: LockstepError | None = None  # of the watchdog, for the next who asks
        # What this rank is doing, in words for others; set by the step that this watch waits for.
        self.progress: Callable[[], str] | None = None
        self.is_in_window: Callable[[], bool] | None = None
        # Whether a meeting is only for others of these ranks.
        self.is_foreign: Callable[[str], bool] | None = None
        # Those of other models whose collectives are in one row with this one's: who waits there is missed here too.
        self.companions: Callable[[], Iterable[Watch]] = tuple
        if board is not None:
            me = weakref.ref(self)
            board.on_slice = lambda: None if (watch := me()) is None else watch.require_peers()
            if board.pulse is not None:
                board.pulse.listen_to(self)

    @property
    def pulse(self) -> Pulse | None:
        return self.board.pulse if self.board is not None else None

    @property
    def name(self) -> str:
        return self.board.name if self.board is not None else ""

    @property
    def world(self) -> int:
        return self.board.world if self.board is not None else 1

    @property
    def others(self) -> list[int]:
        """The global ranks of the others."""
        return [member for _, member in self.peers()]

    def peers(self) -> list[tuple[int, int]]:
        """The others: their rank in the group, and their global one."""
        if self.board is None:
            return []
        return [(rank, member) for rank, member in enumerate(self.board.members) if rank != self.rank]

    def shown(self, rank: int) -> int:
        """A rank of the group as messages and errors name it: by its global number, as the launcher does."""
        return rank if self.board is None else self.board.members[rank]

    def by_global(self, values: Mapping[int, T]) -> dict[int, T]:
        """Values of ranks of the group, as messages and errors name them."""
        return dict(values) if self.board is None else self.board.by_global(values)

    def doing(self) -> str:
        """What this rank is doing, for its signs of life."""
        return self.progress() if self.progress is not None else ""

    def is_amid(self) -> bool:
        """Whether a window of this rank is open."""
        return self.is_in_window is not None and self.is_in_window()

    # ---------------------------------------------------------------- waiting

    def wait_work(self, work: Any, moment: Callable[[], str], *, meeting: tuple[str, str] | None = None) -> None:
        """Wait for ``work`` (a collective whose wait blocks the host); ``moment`` names it in messages.

        ``meeting`` (key and subject, see ``meet``): others who wait elsewhere meanwhile are missed here.
        """
        try:
            self._wait(lambda: work.wait(_SLICE), work.is_completed, moment, meeting)
        finally:
            if meeting is not None and meeting[0] in self._met:
                for watch in (self, *self.companions()):
                    watch._met.discard(meeting[0])
                    watch._leave_meeting()

    def wait_future(self, future: torch.futures.Future[Any], moment: Callable[[], str]) -> Any:
        """Wait for what a communication hook returned, and return its value."""
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())

            def wait_slice() -> None:  # a future has no wait with a time limit
                if not done.wait(_SLICE.total_seconds()):
                    raise RuntimeError(_SLICE_OVER)

            self._wait(wait_slice, done.is_set, moment)
        try:
            return future.wait()
        except LockstepError:
            raise
        except RuntimeError as error:
            # A broken connection inside a hook has a peer behind it; anything else is the hook's own.
            if any(word in str(error).lower() for word in _BROKEN):
                self.explain_broken(error, moment)
            raise

    def gather(self, key: str, mine: str, timeout_seconds: float, *, patience_seconds: float = 0.0) -> dict[int, str]:
        """As the board's, but a peer that failed in the meantime is quoted, and who is late is named in the log.

        ``patience_seconds``: how long a failure may stand there before it counts, where it is being handled.
        """
        assert self.board is not None
        impatient = monotonic() + patience_seconds

        def moment() -> str:
            return f"the exchange of each rank's {key}"

        vigil = Vigil(self, moment, 0.0, waited=0.0)

        def look_around() -> None:
            if monotonic() >= impatient:
                self.raise_failed_peer(moment)
            vigil.look()

        before, self.board.on_slice = self.board.on_slice, None
        try:
            return self.board.gather(key, mine, timeout_seconds, look_around)
        except LockstepError:
            raise
        except RuntimeError as error:
            self.explain_broken(error, moment)
            raise
        finally:
            self.board.on_slice = before
            vigil.close()

    def meet(
        self,
        key: str,
        subject: str,
        mine: str,
        timeout_seconds: float,
        *,
        patience_seconds: float = 0.0,
        follows: str = "",
    ) -> dict[int, str]:
        """Gather every rank's value at a place that ranks reach only if they all did the same before.

        ``key`` names the meeting, the same on all ranks; ``subject`` says what this rank is at.  A rank that waits
        elsewhere meanwhile sees that it is missed here, and both get an error that says so.  What was posted for the
        meeting that it ``follows``, which all ranks have left by now, is taken off the store.
        """
        assert self.board is not None
        self._come_to_meeting(key, subject)
        try:
            told = self.gather(f"meeting: {key}", mine, timeout_seconds, patience_seconds=patience_seconds)
        finally:
            self._leave_meeting()
        if follows:
            self.board.remove(f"meeting: {follows}/{self.board.rank}")
            self._met.discard(follows)
        return told

    def _come_to_meeting(self, key: str, subject: str) -> None:
        self._met.add(key)
        if self.pulse is not None:
            self.pulse.come_to(self.name, key, subject)

    def _leave_meeting(self) -> None:
        if self.pulse is not None:
            self.pulse.leave(self.name)

    def _look_for_meetings(self, missed: dict[int, int], moment: Callable[[], str]) -> None:
        """While waiting: raise if a peer has been at a meeting that this rank does not come to, for two slices."""
        if self.pulse is None:
            return
        for rank, member in self.peers():
            beat = self.pulse.last_seen(member)
            key, subject = beat.meets.get(self.name, ("", "")) if beat is not None else ("", "")
            if not key or key in self._met or (self.is_foreign is not None and self.is_foreign(key)):
                missed.pop(rank, None)
                continue
            missed[rank] = missed.get(rank, 0) + 1
            if missed[rank] > 2:
                values = self.by_global({rank: subject, self.rank: f"waits in {moment()}"})
                error = Disagreement(
                    f"Ranks do different things at the same time:\n{rank_table(values)}\n"
                    "Fix: do it on all ranks, before the same step.",
                    values,
                )
                for watch in (self, *self.companions()):
                    watch.post_failure(error)
                raise error

    def _wait(
        self,
        wait_slice: Callable[[], object],
        is_completed: Callable[[], bool],
        moment: Callable[[], str],
        meeting: tuple[str, str] | None = None,
    ) -> None:
        vigil: Vigil | None = None
        missed: dict[int, int] = {}
        try:
            while True:
                try:
                    wait_slice()
                    return
                except RuntimeError:
                    if is_completed():  # it ended, perhaps only just now: the next wait says how
                        try:
                            wait_slice()
                            return
                        except RuntimeError as error:
                            self._raise_broken(error, moment, vigil)
                if vigil is None:
                    vigil = Vigil(self, moment, self.limit_seconds)
                self.raise_failed_peer(moment)
                if meeting is not None and meeting[0] not in self._met:
                    for watch in (self, *self.companions()):
                        watch._come_to_meeting(*meeting)
                vigil.look()
                self._look_for_meetings(missed, moment)
        except BaseException as error:
            last_words.notice(error)
            if self.pulse is not None:
                abandon_groups()  # what was waited for may never come
            raise
        finally:
            if vigil is not None:
                vigil.close()

    # ---------------------------------------------------------------- what peers have said

    def post_failure(self, error: BaseException) -> None:
        """Leave this rank's first error on the board, for peers that will otherwise only see a silence."""
        last_words.notice(error)
        if self.board is None:
            return
        self._has_posted_failure = True
        try:
            mine = words_of(error, self.rank).to_json()
            stands = self.board.post_first("failure", mine, _LAST_WORDS_SECONDS)
            if read_words(stands, self.world) is None:  # what is not words of a rank is in nobody's way
                self.board.post("failure", mine)
        except RuntimeError:
            logger.debug("the store is silent or gone; peers may see a closed connection instead of our error")

    def clear_failure(self) -> None:
        """Forget an error that was handled, so that it is not quoted for a later one."""
        self._has_posted_failure = False
        self.verdict = None
        last_words.forget()
        if self.board is not None:
            self.board.forget("failure")

    def forget_handled_failure(self) -> None:
        """A later window has ended well: an error of this rank that stands on the board was handled."""
        last_words.forget()
        if self._has_posted_failure:
            try:
                self.clear_failure()
            except RuntimeError:
                logger.debug("the store is gone")

    def _failure(self) -> Words | None:
        """What a peer has left on the board, or at its end; in ranks of the group."""
        if self.board is None:
            return None
        try:
            words = read_words(self.board.read("failure", _ANSWER_SECONDS), self.world)
        except RuntimeError:
            words = None
        if words is not None and words.rank != self.rank:
            return words
        final = self.pulse.final if self.pulse is not None else None
        if final is None or final.ended or final.rank not in self.others:
            return None
        return Words(self.board.members.index(final.rank), final.type, final.text, ranks=final.ranks)

    def raise_failed_peer(self, moment: Callable[[], str]) -> None:
        """Raise if a peer has said that it failed, with its words."""
        words = self._failure()
        if words is None:
            return
        if words.type == Disagreement.__name__:
            raise Disagreement(words.text)
        if words.type in ("PeerLate", "StoreSilent"):
            raise PeerLate(
                f"{words.text}\n(Rank {self.shown(words.rank)} has said so; rank {self.shown(self.rank)} stops too.)",
                words.ranks,
            )
        origin = words.ranks[0] if words.ranks else self.shown(self.rank)
        if words.type in ("PeerFailed", "PeerLost") and origin not in (self.shown(self.rank), self.shown(words.rank)):
            raise self._lost_too(words, origin, moment)
        raise PeerFailed(
            f"Rank {self.shown(words.rank)} failed while rank {self.shown(self.rank)} waited for it in {moment()}. It "
            f"said:\n{words.type}: {words.text}",
            self.shown(words.rank),
        )

    def _lost_too(self, words: Words, origin: int, moment: Callable[[], str]) -> PeerFailed:
        """The error for a peer that another one has lost too: that other one is not the cause."""
        assert self.board is not None
        if words.type == PeerLost.__name__ and origin in self.others:
            rank = self.board.members.index(origin)
            reason = self.why_gone(rank)
            if reason is not None:
                return self._lost(rank, moment(), reason)
        text = f"{words.text}\n(Rank {self.shown(words.rank)} has said so; rank {self.shown(self.rank)} stops too.)"
        if words.type != PeerLost.__name__:
            return PeerFailed(text, origin)
        process = self.pulse.process_of(origin) if self.pulse is not None else None
        return PeerLost(text, origin, host=process.host if process else "", pid=process.pid if process else None)

    def require_wanted(self, moment: Callable[[], str]) -> None:
        """At the end of a window: raise if the others have given this rank up, in case it has taken long.

        What they had sent before they raised is still delivered, so nothing else would tell.
        """
        self.raise_verdict()
        now = monotonic()
        was_long, self._last_window = now - self._last_window > _SLICE.total_seconds(), now
        if not was_long:
            return
        # One that gave no sign of life for so long was given up; the others' word for it may still be on its way.
        gap = self.pulse.take_longest_gap() if self.pulse is not None else 0.0
        deadline = now + (_HEARING_SECONDS if self.heartbeat_seconds and gap > 0.8 * self.heartbeat_seconds else 0.0)
        self.raise_failed_peer(moment)
        while monotonic() < deadline:
            sleep(0.05)
            self.raise_failed_peer(moment)

    def raise_verdict(self) -> None:
        """Raise what the watchdog of collectives on a device has found."""
        if self.verdict is not None:
            raise self.verdict

    def require_peers(self) -> None:
        """While a board waits: raise if a peer has failed or is gone."""

        def moment() -> str:
            return "an exchange over the store"

        self.raise_failed_peer(moment)
        for rank, _ in self.peers():
            reason = self.why_gone(rank)
            if reason is not None:
                raise self.lost(rank, moment(), reason)

    # ---------------------------------------------------------------- peers that are gone

    def why_gone(self, rank: int) -> Gone | None:
        """Say why a rank cannot come any more; None where it can, as far as is known."""
        if self.pulse is None or self.board is None:
            return None
        member = self.board.members[rank]
        final, beat = self.pulse.final, self.pulse.last_seen(member)
        if final is not None and final.ended and final.rank == member:
            return Gone(final.text, ended=True)
        if beat is not None and beat.ended:
            return Gone(beat.how or f"ended its program {beat.doing}.", ended=True)
        if beat is not None and self.name in beat.left:
            return Gone(f"has destroyed its process group {beat.doing}.", ended=True)
        process = self.pulse.process_of(member)
        if process is not None and process.is_dead:
            seen = f" It was last seen {beat.words}." if beat is not None else ""
            return Gone(
                "was killed (a signal, out of memory) or left by os._exit: it left no word behind. The launcher's "
                f"summary has its exit code.{seen}",
                ended=False,
            )
        return None

    def condition(self, rank: int) -> str:
        """What can be seen of a rank's process from here; empty where there is nothing special."""
        if self.pulse is None or self.board is None:
            return ""
        process = self.pulse.process_of(self.board.members[rank])
        if process is not None and process.is_dead:
            return f"has ended ({process})"
        return f"is stopped, by SIGSTOP or a debugger ({process})" if process is not None and process.is_stopped else ""

    def lost(self, rank: int, place: str, reason: Gone) -> PeerLost:
        """The error for a peer that is gone; one that has spoken is quoted instead."""
        self.raise_failed_peer(lambda: place)
        return self._lost(rank, place, reason)

    def _lost(self, rank: int, place: str, reason: Gone) -> PeerLost:
        assert self.board is not None
        process = self.pulse.process_of(self.board.members[rank]) if self.pulse is not None else None
        number = self.shown(rank)
        who = f"Rank {number} ({process})" if process is not None else f"Rank {number}"
        return PeerLost(
            f"{who} is gone, and rank {self.shown(self.rank)} waited for it in {place}. It {reason.text}",
            number,
            host=process.host if process is not None else "",
            pid=process.pid if process is not None else None,
        )

    def _raise_broken(self, error: RuntimeError, moment: Callable[[], str], vigil: Vigil | None) -> None:
        if vigil is not None and self._group_seconds and vigil.waited + 2.0 >= self._group_seconds:
            raise vigil.too_late(f"did not arrive within the process group's {self._group_seconds:g} s") from error
        self.explain_broken(error, moment)
        raise PeerLost(
            f"Rank {self.shown(self.rank)} lost a peer in {moment()}: {error}\nThat peer left no error behind, and"
            " which one it is could not be seen from here: look at the first rank that ended, and at the launcher's"
            " summary."
        ) from error

    def explain_broken(self, error: RuntimeError, moment: Callable[[], str]) -> None:
        """A connection broke: raise what the peer said, or which one is gone; return where nothing is found."""
        if self.board is None:
            return
        begin = monotonic()
        numbers: dict[int, set[int]] = {}
        while monotonic() < begin + _SEARCH_SECONDS:
            self.raise_failed_peer(moment)
            beats = self.pulse.look(self.others) if self.pulse is not None else None
            for rank, member in self.peers():
                reason = self.why_gone(rank)
                # Others may only be losing connections because of the first one: words come before guesses.
                if reason is not None and (reason.ended or monotonic() > begin + _LAST_WORDS_SECONDS / 2):
                    raise self.lost(rank, moment(), reason) from error
                if beats is not None and member in beats:
                    numbers.setdefault(rank, set()).add(beats[member].number)
            sleep(0.05)
        self._blame_silence(numbers, error, moment)

    def _blame_silence(self, numbers: dict[int, set[int]], error: RuntimeError, moment: Callable[[], str]) -> None:
        """On other hosts: the one that gives no sign of life any more, where the others do."""
        silent = [rank for rank, _ in self.peers() if len(numbers.get(rank, ())) == 1]
        if len(silent) == 1 and self.pulse is not None and self.pulse.period <= 1.0:
            reason = Gone(f"gives no sign of life since the connection broke ({error}).", ended=False)
            raise self.lost(silent[0], moment(), reason) from error
