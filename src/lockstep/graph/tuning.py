"""Candidates for an operator are timed by one rank of a job, and all ranks choose by its timings.

Ranks of a host that share Inductor's cache find each other's work there anyway.  Ranks elsewhere would time the same
candidates again, and where two are about as fast, choose another one: then ranks round differently.  So whoever comes
to a choice first times it and leaves the timings on the store; the others wait for them.  If they do not come in time
they time for themselves, and whoever is done first decides for all who have not decided yet.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from time import monotonic

from lockstep import settings, torch_private
from lockstep.agree.board import Board, board_of_all
from lockstep.errors import StoreSilent

logger = logging.getLogger("lockstep")


class _Gone(Exception):
    """The rank that was to time has ended."""


def start() -> None:
    """Share timings from now on, in all that this process compiles."""
    torch_private.stand_in_for_timing(share)


def share(what: str, candidates: Sequence[str], measure: Callable[[], list[float]]) -> list[float]:
    """The seconds of each candidate, the same on all ranks that ask for the same."""
    board = board_of_all("tuning")
    if board is None:
        return measure()
    try:
        return _shared(board, what, candidates, measure)
    except StoreSilent as error:
        logger.warning("Timings of %s are this rank's own: %s", what, error)
        return measure()


def _shared(board: Board, what: str, candidates: Sequence[str], measure: Callable[[], list[float]]) -> list[float]:
    key = f"timings/{what}"
    owner = board.post_first(f"{key}/by", str(board.rank))
    if owner != str(board.rank):
        found = _wait(board, key, owner, candidates)
        if found is not None:
            return found
        logger.warning(
            "Timings of %s did not come from rank %s within %g s; this rank times too.",
            what,
            owner,
            settings.compile_timeout(),
        )
    mine = measure()
    told = board.post_first(key, json.dumps([list(candidates), mine]))
    return _read(told, candidates) or mine


def _wait(board: Board, key: str, owner: str, candidates: Sequence[str]) -> list[float] | None:
    member = board.members[int(owner)] if owner.isdigit() and int(owner) < board.world else None

    def look() -> None:
        beats = board.pulse.look([member]) if board.pulse is not None and member is not None else None
        beat = beats.get(member) if beats and member is not None else None
        if beat is not None and (beat.ended or (beat.process is not None and beat.process.is_dead)):
            raise _Gone

    try:
        missing = board.wait_for([key], monotonic() + settings.compile_timeout(), look)
    except _Gone:
        return None
    return None if missing else _read(board.read(key) or "", candidates)


def _read(text: str, candidates: Sequence[str]) -> list[float] | None:
    """The timings in a text, in the order of these candidates; None where it has not the right form."""
    try:
        names, seconds = json.loads(text)
        by_name = {str(name): float(value) for name, value in zip(names, seconds, strict=True)}
        found = [by_name[name] for name in candidates]
    except (ValueError, TypeError, KeyError):
        return None
    return None if any(map(math.isnan, found)) else found
