"""The lookout: a peer that gives no sign of life while this process stands in a wait that is not ours.

A program's own ``dist.barrier()`` or ``all_reduce`` waits inside torch, where gloo cannot be interrupted and nobody
looks around.  So a thread looks at the main thread once a second.  While that stands at the same place, the signs of
life of the others are read, and a silent peer, or a silent store, is told in the log; at the deadline this process says
so to its peers and its launcher, and ends, if it stands in a collective: nothing else gets it out of there.  Waits of
our own raise instead (``vigil.py``), and a program that handles an error, or does something else that takes long (a
download, an export after the others have left), is left alone.
"""

from __future__ import annotations

import contextlib
import dis
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING

import torch

from lockstep import settings
from lockstep.agree import sudden
from lockstep.agree.alive import is_standing_still
from lockstep.agree.beat import stack_now, where_now, words_of
from lockstep.agree.deadline import silence_limit
from lockstep.errors import PeerLate, StoreSilent, rank_table

if TYPE_CHECKING:
    from lockstep.agree.pulse import Pulse

logger = logging.getLogger("lockstep")

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = str(Path(threading.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH, "distributed"))
_FILES = str(Path(_COLLECTIVES, "checkpoint"))  # writes and reads, which may take long
_PERIOD_SECONDS = 1.0
_LONGEST_SLICE = 2.0  # what one look may count for, at most: time in which this process stood still does not
_STANDS_AFTER = 2.0  # seconds at the same place, before the others are looked for
_SILENT_AFTER = 5.0  # seconds without a sign of life; below, it may just not have come yet
_TELLING_SECONDS = 1.0


class Lookout:
    """One process that looks after its peers while its main thread cannot."""

    def __init__(
        self,
        pulse: Pulse,
        is_excused: Callable[[], bool] = lambda: False,
        leave: Callable[[BaseException], None] = sudden.leave,
    ) -> None:
        self._pulse = weakref.ref(pulse)
        self._is_excused = is_excused
        self._leave = leave
        self._stall = settings.stall_seconds()
        self._deadline = silence_limit()
        self._last = monotonic()
        self._next_survey = 0.0
        self._place: object = None
        self._stood = 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._unsurveyed = 0.0
        self._numbers: dict[int, int] = {}
        self._silent: dict[int, float] = {}  # rank: for how long its last sign of life is the same
        self._store_silent = 0.0
        self._num_answers = -1
        self._pause = self._stall
        self._next_warning = self._stall

    def look(self) -> bool:
        """Look once, about a second after the last time; False where there is nothing to look at any more."""
        pulse = self._pulse()
        if pulse is None or pulse.has_ended or not pulse.line.is_ours:
            return False
        now = monotonic()
        passed, self._last = min(now - self._last, _LONGEST_SLICE), now
        place = None if pulse.is_waiting or self._is_excused() else _place_of_main(pulse)
        if place is None or place != self._place:
            self._place, self._stood = place, 0.0
            self._begin_anew()
            return True
        self._stood += passed
        self._unsurveyed += passed
        if self._stood >= _STANDS_AFTER and now >= self._next_survey:
            self._next_survey = now + 0.8 * pulse.period
            self._survey(pulse, self._unsurveyed)
            self._unsurveyed = 0.0
            self._judge(pulse)
        return True

    def _survey(self, pulse: Pulse, passed: float) -> None:
        beats = pulse.look()
        if beats is None:
            if pulse.line.is_broken:  # with a rank that has ended; who was silent before has not spoken since
                self._silent = {
                    rank: silent + passed for rank, silent in self._silent.items() if silent >= _SILENT_AFTER
                }
            # Where the launcher hosts it, and was paused without us, no rank is to blame; nor where it answers, and a
            # thread that holds the interpreter's lock keeps us from hearing it in time.
            answers = pulse.line.num_answers != self._num_answers
            self._num_answers = pulse.line.num_answers
            is_paused = not pulse.hosts() and is_standing_still(os.getppid())
            is_excused = pulse.line.is_broken or is_paused or answers
            self._store_silent = 0.0 if is_excused else self._store_silent + passed
            return
        self._store_silent = 0.0
        for rank, beat in beats.items():
            if beat.ended or beat.number != self._numbers.get(rank):
                self._silent[rank] = 0.0
                self._numbers[rank] = beat.number
            else:
                self._silent[rank] = self._silent.get(rank, 0.0) + passed

    # ---------------------------------------------------------------- what comes of it

    def _silent_for(self, seconds: float) -> list[int]:
        return sorted(rank for rank, silent in self._silent.items() if silent >= seconds)

    def _judge(self, pulse: Pulse) -> None:
        ends = self._deadline > 0 and _is_in_collective()
        if ends and self._store_silent >= self._deadline:
            self._give_up(pulse, self._store_is_silent(pulse))
        late = self._silent_for(self._deadline) if ends else []
        if late and not self._store_silent:
            self._give_up(pulse, self._too_late(pulse, late))
        longest = max(self._store_silent, *self._silent.values(), 0.0)
        if longest >= self._next_warning:
            self._pause *= 2
            self._next_warning = longest + self._pause
            self._warn(pulse)

    def _warn(self, pulse: Pulse) -> None:
        what = f"the store has not answered for {self._store_silent:.0f} s"
        if not self._store_silent:
            late = self._silent_for(min(self._stall, _SILENT_AFTER))
            what = "; ".join(f"rank {rank} {self._condition(pulse, rank)}" for rank in late)
        logger.warning("Rank %d has been at %s for %.0f s, and %s.", pulse.rank, where_now(), self._stood, what)

    def _condition(self, pulse: Pulse, rank: int) -> str:
        silent = f"gives no sign of life for {self._silent.get(rank, 0.0):.0f} s"
        process = pulse.process_of(rank)
        if process is None:
            return silent
        if process.is_dead:
            return f"has ended ({process})"
        return f"{silent}: it is stopped, by SIGSTOP or a debugger ({process})" if process.is_stopped else silent

    def _too_late(self, pulse: Pulse, late: list[int]) -> PeerLate:
        words = {pulse.rank: f"stands at {where_now()}"}
        for rank in range(pulse.world):
            beat = pulse.last_seen(rank)
            if rank != pulse.rank and beat is not None:
                told = self._condition(pulse, rank) if rank in late else ""
                words[rank] = "; ".join(part for part in (told, beat.words) if part)
        return PeerLate(
            f"Rank(s) {late} gave no sign of life for {self._deadline:g} s, while rank {pulse.rank} stood in a wait of "
            f"the program's own, at {where_now()}.\nLast seen:\n{rank_table(words)}\n"
            "Likely causes: a rank that is stopped, frozen or cut off, or that holds the interpreter's lock.\n"
            "Fix: look at that rank; LOCKSTEP_HEARTBEAT_TIMEOUT sets the deadline (0: never).",
            late,
        )

    def _store_is_silent(self, pulse: Pulse) -> StoreSilent:
        hosts = [rank for rank in pulse.hosts() if rank != pulse.rank]
        state = "".join(f" Rank {rank}, which hosts it, {self._condition(pulse, rank)}." for rank in hosts)
        return StoreSilent(
            f"The store has not answered rank {pulse.rank} for {self._store_silent:.0f} s, which stands in a wait of "
            f"the program's own, at {where_now()}. So the process that hosts it is stopped, frozen or gone, or this "
            f"rank is cut off.{state}",
            hosts,
        )

    def _give_up(self, pulse: Pulse, error: PeerLate) -> None:
        """Say why, to whoever can hear it, and end."""
        is_interactive = hasattr(sys, "ps1")
        after = "" if is_interactive else "\nIts wait cannot be interrupted, so this process ends."
        logger.error("%s\nThe main thread of rank %d is here:\n%s%s", error, pulse.rank, stack_now().rstrip(), after)
        self._begin_anew()
        if is_interactive:
            return
        with contextlib.suppress(Exception):
            pulse.end_with(words_of(error, pulse.rank), _TELLING_SECONDS)
            pulse.stay_until_heard()
        self._leave(error)


def keep_lookout(pulse: Pulse, is_excused: Callable[[], bool]) -> None:
    """Look after the peers of this process, as long as its pulse lives."""
    over = threading.Event()
    weakref.finalize(pulse, over.set)
    lookout = Lookout(pulse, is_excused)

    def run() -> None:
        has_warned = False
        while not over.wait(_PERIOD_SECONDS):
            try:
                if not lookout.look():
                    return
            except Exception as error:  # training goes on without it
                if not has_warned:
                    logger.warning("The lookout for silent ranks could not look: %s: %s", type(error).__name__, error)
                has_warned = True

    threading.Thread(target=run, name="lockstep lookout", daemon=True).start()


def _place_of_main(pulse: Pulse) -> object:
    """Where the main thread is, to the instruction, and in which step; None in a wait of ours, which has a deadline."""
    frame = _main_frame()
    innermost = _beyond_standard(frame)
    if innermost is None or innermost.f_code.co_filename.startswith(_PACKAGE):
        return None
    place: list[object] = [pulse.step_words()]
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return place


def _is_in_collective() -> bool:
    """Whether the main thread stands in torch's collectives, or in the ``wait`` of what one has returned."""
    frame = _main_frame()
    innermost = _beyond_standard(frame)
    if innermost is not None and innermost is frame and _called(innermost) == "wait":
        return True
    while innermost is not None and innermost.f_code.co_filename.startswith(_TORCH):
        name = innermost.f_code.co_filename
        if name.startswith(_COLLECTIVES):
            return not name.startswith(_FILES)
        innermost = innermost.f_back
    return False


def _called(frame: FrameType) -> str:
    """Name the method that a frame is just calling, as far as its code tells."""
    found = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            found = str(instruction.argval)
    return found


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _beyond_standard(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is not of Python's own files."""
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_standard(name: str) -> bool:
    """Whether a file is Python's own; packages may be installed below its folder."""
    return name.startswith("<") or (name.startswith(_STANDARD) and "-packages" not in name)
