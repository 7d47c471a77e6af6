"""Waiting for a collective without going blind: slices, Ctrl-C, who is late, who failed.

gloo cannot abort a collective, but its waits can time out and be tried again.  So a wait is a row of short waits;
between two of them Python can be interrupted, a peer's last words can be read, and after a while the ranks that have
not arrived are named.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import torch

from lockstep import settings
from lockstep.agree.board import Board
from lockstep.errors import Disagreement, LockstepError, PeerFailed, rank_table

logger = logging.getLogger("lockstep")

_SLICE = timedelta(seconds=1)
# After a connection breaks, how long to look for the failing peer's own words before raising.
_LAST_WORDS_SECONDS = 1.0


class Watch:
    """Waits for collectives of one wrapper and tells peers why this rank stopped, if it did."""

    def __init__(self, board: Board | None, rank: int) -> None:
        self.board = board
        self._rank = rank
        self._stall_seconds = settings.stall_seconds()
        self._met: set[str] = set()  # meetings that this rank has come to
        if board is not None:
            _leave_last_words(self)

    def wait_work(self, work: Any, moment: Callable[[], str], *, meeting: tuple[str, str] | None = None) -> None:
        """Wait for ``work`` (a collective whose wait blocks the host); ``moment`` names it in messages.

        ``meeting`` (key and subject, see ``meet``): others who wait elsewhere meanwhile are missed here.
        """
        try:
            self._wait(lambda: work.wait(_SLICE), work.is_completed, moment, meeting)
        finally:
            if meeting is not None and meeting[0] in self._met:
                self._met.discard(meeting[0])
                self._leave_meeting()

    def wait_future(self, future: torch.futures.Future[Any], moment: Callable[[], str]) -> Any:
        """Wait for what a communication hook returned, and return its value."""
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())

            def wait_slice() -> None:  # a future has no wait with a time limit
                if not done.wait(_SLICE.total_seconds()):
                    raise RuntimeError("not done within the slice")

            self._wait(wait_slice, done.is_set, moment)
        try:
            return future.wait()
        except RuntimeError:
            self._look_for_last_words(moment)  # a broken connection inside a hook has a peer's error behind it
            raise

    def gather(self, key: str, mine: str, timeout_seconds: float, *, patience_seconds: float = 0.0) -> dict[int, str]:
        """As the board's, but a peer that failed in the meantime is quoted, and who is late is named in the log.

        ``patience_seconds``: how long a failure may stand there before it counts, where it is being handled.
        """
        assert self.board is not None
        next_report = monotonic() + self._stall_seconds
        impatient = monotonic() + patience_seconds

        def moment() -> str:
            return f"the exchange of each rank's {key}"

        def look_around() -> None:
            nonlocal next_report
            if monotonic() >= impatient:
                self._raise_failed_peer(moment)
            if monotonic() >= next_report:
                self._report_stall(moment)
                next_report = monotonic() + 2 * self._stall_seconds

        try:
            return self.board.gather(key, mine, timeout_seconds, look_around)
        except LockstepError:
            raise
        except RuntimeError as error:
            self._raise_lost_peer(error, moment)
            raise

    def meet(
        self, key: str, subject: str, mine: str, timeout_seconds: float, *, patience_seconds: float = 0.0
    ) -> dict[int, str]:
        """Gather every rank's value at a place that ranks reach only if they all did the same before.

        ``key`` names the meeting, the same on all ranks; ``subject`` says what this rank is at.  A rank that waits
        elsewhere meanwhile sees that it is missed here, and both get an error that says so.
        """
        assert self.board is not None
        self._come_to_meeting(key, subject)
        try:
            return self.gather(f"meeting: {key}", mine, timeout_seconds, patience_seconds=patience_seconds)
        finally:
            self._leave_meeting()

    def _come_to_meeting(self, key: str, subject: str) -> None:
        self._met.add(key)
        if self.board is not None:
            self.board.post(f"meeting/{self._rank}", json.dumps([key, subject]))

    def _leave_meeting(self) -> None:
        try:
            if self.board is not None:
                self.board.forget(f"meeting/{self._rank}")
        except RuntimeError:
            logger.debug("the store is gone")

    def _look_for_meetings(self, missed: dict[int, int], moment: Callable[[], str]) -> None:
        """While waiting: raise if a peer has been at a meeting that this rank does not come to, for two slices."""
        if self.board is None:
            return
        for rank in range(self.board.world):
            try:
                text = self.board.read(f"meeting/{rank}") if rank != self._rank else None
            except RuntimeError:
                return
            key, subject = json.loads(text) if text else ("", "")
            if not key or key in self._met:
                missed.pop(rank, None)
                continue
            missed[rank] = missed.get(rank, 0) + 1
            if missed[rank] > 2:
                values = {rank: str(subject), self._rank: f"waits in {moment()}"}
                error = Disagreement(
                    f"Ranks do different things at the same time:\n{rank_table(values)}\n"
                    "Fix: do it on all ranks, before the same step.",
                    values,
                )
                self.post_failure(error)
                raise error

    def _wait(
        self,
        wait_slice: Callable[[], object],
        is_completed: Callable[[], bool],
        moment: Callable[[], str],
        meeting: tuple[str, str] | None = None,
    ) -> None:
        pause = self._stall_seconds
        next_report = monotonic() + pause
        missed: dict[int, int] = {}
        while True:
            try:
                wait_slice()
                break
            except RuntimeError:
                if is_completed():  # it ended, perhaps only just now: the next wait says how
                    try:
                        wait_slice()
                        break
                    except RuntimeError as error:
                        self._raise_lost_peer(error, moment)
            self._raise_failed_peer(moment)
            if meeting is not None:
                if meeting[0] not in self._met:
                    self._come_to_meeting(*meeting)
            else:
                self._look_for_meetings(missed, moment)
            if monotonic() >= next_report:
                self._report_stall(moment)
                pause *= 2
                next_report = monotonic() + pause
        if pause > self._stall_seconds and self.board is not None:
            self.board.forget(f"waiting/{self._rank}")

    # ---------------------------------------------------------------- last words

    def post_failure(self, error: BaseException) -> None:
        """Leave this rank's first error on the board, for peers that will otherwise only see a silence."""
        if self.board is None:
            return
        words = json.dumps({"rank": self._rank, "type": type(error).__name__, "text": str(error)[:4000]})
        try:
            self.board.post_first("failure", words)
        except RuntimeError:
            logger.debug("the store is gone; peers will see a closed connection instead of our error")

    def clear_failure(self) -> None:
        """Forget an error that was handled, so that it is not quoted for a later one."""
        if self.board is not None:
            self.board.forget("failure")

    def _raise_failed_peer(self, moment: Callable[[], str]) -> None:
        if self.board is None:
            return
        try:
            words = self.board.read("failure")
        except RuntimeError:
            return
        if not words:
            return
        failure = json.loads(words)
        if failure["rank"] != self._rank:
            if failure["type"] == Disagreement.__name__:
                raise Disagreement(failure["text"])
            raise PeerFailed(
                f"Rank {failure['rank']} failed while rank {self._rank} waited for it in {moment()}. It said:\n"
                f"{failure['type']}: {failure['text']}",
                failure["rank"],
            )

    def _raise_lost_peer(self, error: RuntimeError, moment: Callable[[], str]) -> None:
        self._look_for_last_words(moment)
        raise PeerFailed(
            f"Rank {self._rank} lost a peer in {moment()}: {error}\n"
            "That peer left no error behind: it was killed (out of memory, a signal, a lost host), or it ended without "
            "an error. Look at the first rank that ended, and at the launcher's summary."
        ) from error

    def _look_for_last_words(self, moment: Callable[[], str]) -> None:
        deadline = monotonic() + _LAST_WORDS_SECONDS
        while self.board is not None and monotonic() < deadline:
            self._raise_failed_peer(moment)
            sleep(0.05)

    # ---------------------------------------------------------------- who is late

    def _report_stall(self, moment: Callable[[], str]) -> None:
        here = moment()
        arrived: dict[int, str] = {self._rank: here}
        if self.board is not None:
            try:
                self.board.post(f"waiting/{self._rank}", here)
                for rank in range(self.board.world):
                    elsewhere = self.board.read(f"waiting/{rank}")
                    if elsewhere is not None:
                        arrived[rank] = elsewhere
                late = [rank for rank in range(self.board.world) if arrived.get(rank) != here]
            except RuntimeError:
                late = []
        else:
            late = []
        where = "".join(f"; rank {r} waits in {arrived[r]}" for r in late if r in arrived)
        logger.warning(
            "Rank %d is still waiting in %s. Ranks that have not arrived there: %s%s.",
            self._rank,
            here,
            late or "none is known to be late (a slow link, or all ranks arrived just now)",
            where,
        )


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _leave_last_words(watch: Watch) -> None:
    """An exception that ends this process, wherever it was raised, is left on the board for the peers."""
    if not _is_installed():
        previous = sys.excepthook

        def post_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            for living in _watches:
                living.post_failure(error)
            previous(kind, error, trace)

        post_and_show.is_lockstep = True  # type: ignore[attr-defined]
        sys.excepthook = post_and_show
    _watches.add(watch)


def _is_installed() -> bool:
    return bool(_watches) or hasattr(sys.excepthook, "is_lockstep")
