"""Ranks that meet while they compile (``enable_compiler_collectives``), and before they run what they compiled
(``set_enable_guard_collectives``).

Both are settings of torch's for programs in which all ranks do the same.  Its own collectives wait for ever for a rank
that does not compile, or runs eagerly.  Here ranks meet over the store: who comes leaves its word, and waits until all
words are there, or until it is plain that they will not be; whoever sees that first writes down the outcome, and
all go by what is written.  So either every rank goes on with the words of all, or every rank goes on by itself, and
with a warning that names who did not come the setting is off from then on.

A rank will not come when it waits elsewhere for those who are here (all who are missing have been waiting for some
seconds), when it has ended, or at the deadline.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any

from lockstep import settings, torch_private
from lockstep.agree.board import Board, board_of_all
from lockstep.errors import StoreSilent

logger = logging.getLogger("lockstep")

_PATIENCE_SECONDS = 4.0
_LOOK_SECONDS = 0.2
_LONGEST_WORD = 1_000_000


class _InVain(Exception):
    """Those who are missing will not come."""


class Meeting:
    """The ranks of the default group, where torch lets them meet for its compiler."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._numbers: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def exchange(self, subject: str, mine: str) -> list[str] | None:
        """The words of all ranks, by rank; None on all ranks where one does not come."""
        board = self._board
        self._numbers[subject] += 1
        key = f"{subject}/{self._numbers[subject]}"
        keys = [f"{key}/{rank}" for rank in range(board.world)]
        board.post(keys[board.rank], mine)
        missing = self._wait(keys)
        outcome = board.post_first(f"{key}/outcome", "all" if not missing else "alone")
        if outcome != "all":
            names = [board.members[keys.index(name)] for name in missing]
            _warn_alone(subject, names)
            return None
        words = [text or "" for text in board.read_all(keys)]
        self._forget(subject, key)
        return words

    def _wait(self, keys: Sequence[str]) -> list[str]:
        """Wait for all words; returns those that will not come."""
        board, patience = self._board, _Patience(self._board)

        def look() -> None:
            if patience.is_over([keys.index(name) for name in board.wait_for(keys, monotonic() + _LOOK_SECONDS)]):
                raise _InVain

        try:
            return board.wait_for(keys, monotonic() + settings.compile_timeout(), look)
        except _InVain:
            return board.wait_for(keys, monotonic() + _LOOK_SECONDS)

    def _forget(self, subject: str, key: str) -> None:
        """All ranks are here, so nobody reads the words of the meeting before any more."""
        before, self._last[subject] = self._last.get(subject), key
        if before is not None:
            self._board.remove(f"{before}/{self._board.rank}")
            if self._board.rank == 0:
                self._board.remove(f"{before}/outcome")


class _Patience:
    """Whether those who are missing may still come, by their signs of life."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._in_vain_since: float | None = None

    def is_over(self, missing: Sequence[int]) -> bool:
        """Whether all of them have been waiting elsewhere, or have ended, for some seconds."""
        pulse = self._board.pulse
        members = [self._board.members[rank] for rank in missing]
        beats = pulse.look(members) if pulse is not None else None
        in_vain = bool(members) and beats is not None
        for member in members:
            beat = (beats or {}).get(member)
            in_vain = in_vain and beat is not None and (beat.ended or bool(beat.waits) or bool(beat.meets))
        if not in_vain:
            self._in_vain_since = None
            return False
        now = monotonic()
        self._in_vain_since = self._in_vain_since or now
        return now - self._in_vain_since >= _PATIENCE_SECONDS


def _warn_alone(subject: str, ranks: Sequence[int]) -> None:
    who = f"rank(s) {list(ranks)} did not come" if ranks else "another rank did not wait any longer"
    logger.warning(
        "Ranks were to meet for %s, as a setting of torch's compiler asks, and %s. From now on each rank goes by what "
        "it sees itself. The setting is for programs in which all ranks compile the same at the same time.",
        subject,
        who,
    )


_meetings: weakref.WeakKeyDictionary[Board, Meeting] = weakref.WeakKeyDictionary()


def _meeting() -> Meeting | None:
    """That of all ranks; None where there is nobody to meet."""
    board = board_of_all("compiler")
    if board is None:
        return None
    found = _meetings.get(board)
    if found is None:
        found = _meetings[board] = Meeting(weakref.proxy(board))  # which lives as long as its group does
    return found


# ---------------------------------------------------------------- the two settings


def gather_states(frame: str, mine: Any) -> list[Any]:
    """What all ranks know of the inputs of a frame that they compile, so that sizes become dynamic on all of them."""
    meeting = _meeting()
    if meeting is None:
        return [mine]
    words = _met(meeting, f"the compilation of {frame}", json.dumps(mine))
    if words is None:
        torch_private.compiler_collectives_off()
        return [mine]
    return [json.loads(word[:_LONGEST_WORD]) for word in words]


@torch_private.leave_to_python
def agree_on_guards(mine: bool) -> bool:
    """Whether compiled code fits on all ranks; if it does not on one, all compile."""
    meeting = _meeting()
    if meeting is None:
        return mine
    words = _met(meeting, "the guards of a compiled frame", "yes" if mine else "no")
    if words is None:
        torch_private.guard_collectives_off()
        return mine
    return all(word == "yes" for word in words)


def _met(meeting: Meeting, subject: str, word: str) -> list[str] | None:
    try:
        return meeting.exchange(subject, word)
    except StoreSilent as error:
        logger.warning("Ranks could not meet for %s: %s", subject, error)
        return None


def start() -> None:
    """Let ranks meet here wherever torch's compiler lets them meet."""
    torch_private.stand_in_for_compiler_collectives(gather_states)
    torch_private.stand_in_for_guard_collectives(agree_on_guards)
