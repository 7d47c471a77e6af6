"""Which gather comes next, and what ranks do when it is another one: they compare before it starts, not after.

A gather that is paired with one of other parameters ends the process where sizes differ (gloo), or mixes weights up
where they do not.  Comparing before every gather would cost a round trip each.  But gathers repeat from step to step:
each rank foresees the next one by what came before, and ranks that have done the same so far foresee the same.  So a
rank whose next gather is the foreseen one starts it and tells nobody.  One whose gather is not foreseen (the first
step, an evaluation that begins or ends) meets the others first.  If they have come to the same one, all go on.  If not,
they wait in the gather that was foreseen, see that they are missed in the meeting, and all have one error.

Gathers of all models on one process group are one row, since that is how they pair up: a rank that runs one model where
another rank runs another one does what was not foreseen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from lockstep.agree.control import ControlPlane
from lockstep.agree.stamp import GATHER, Stamp, disagreement
from lockstep.agree.watch import Watch
from lockstep.engine.step import SyncStep

_CONTEXT = 4  # gathers by which the next is foreseen, where the window so far is a new one
_MOST_KNOWN = 20_000
_STAMP_SECONDS = 60.0


class Foresight:
    """Foresees gathers on one process group; a function of those that were noted, and of whether a step begins."""

    def __init__(self) -> None:
        self._num_models = 0
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.forget()

    def enter(self, watch: Watch) -> int:
        """A model gathers here from now on, on all ranks; returns its number among those that do."""
        self._num_models += 1
        self._watches.add(watch)
        watch.companions = partial(_others, self._watches, weakref.ref(watch))
        return self._num_models - 1

    def forget(self) -> None:
        """Ranks begin anew."""
        self._known: dict[Any, int] = {}  # what came after
        self._last: deque[int] = deque(maxlen=_CONTEXT)
        self.end_window()

    def end_window(self) -> None:
        """A reduction has ended, on all ranks."""
        self._window = 0
        self._first: int | None = None

    def _contexts(self) -> tuple[Any, ...]:
        """What the next one may depend on, the most telling first."""
        return ("window", self._window), tuple(self._last), self._last[-1] if self._last else None

    def foresees(self, gather: int, *, trains: bool) -> bool:
        """Whether this gather was to come next, as far as is known.

        Where the first one of a window comes again in a step, another forward begins: that is foreseen only if windows
        have gone on like this before.  A rank without the backward that others run would get that far in silence.
        """
        known, contexts = self._known, self._contexts()
        for context in contexts[:1] if trains and gather == self._first else contexts:
            if context in known:
                return known[context] == gather
        return False

    def note(self, gather: int) -> None:
        """It has come."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        for context in self._contexts():
            self._known[context] = gather
        self._last.append(gather)
        self._first = gather if self._first is None else self._first
        self._window = hash((self._window, gather))


def _others(watches: Iterable[Watch], mine: weakref.ref[Watch]) -> list[Watch]:
    return [watch for watch in watches if watch is not mine()]


_by_group: weakref.WeakKeyDictionary[Any, Foresight] = weakref.WeakKeyDictionary()


def foresight_on(process_group: Any) -> Foresight:
    """The one of a process group."""
    found = _by_group.get(process_group)
    if found is None:
        found = _by_group[process_group] = Foresight()
    return found


class Meeting:
    """Where the ranks that have a shard each compare a gather that was not foreseen."""

    def __init__(self, step: SyncStep, control: ControlPlane, watch: Watch, place: str, *, is_own: bool) -> None:
        self._step = weakref.ref(step)
        self.control = control
        self.is_own = is_own  # a control plane that only these ranks have, of all that the step is for
        self._watch = watch
        self._place = place  # names these ranks, the same on all of them

    def is_foreign(self, key: str) -> bool:
        """Whether a meeting is one of other ranks."""
        return key.startswith(GATHER) and not key.startswith(f"{GATHER} in {self._place},")

    def compare(self, number: int, name: str, said: str, moment: Callable[[], str]) -> None:
        """Raise on all ranks unless all of them are about to start the same gather."""
        step = self._step()
        if step is None:
            return
        about = f"{said}; next is {name}"
        mine = Stamp(
            wrapper=step.closing.union.name,
            window=step.num_windows,
            kind=GATHER,
            updates=0,
            plan="",
            frozen=(),
            cast=(),
            exchange="",
            num_buckets=0,
            skipped=(),
            resets=step.num_resets,
            gathers=about,
        )
        key = f"{GATHER} in {self._place}, {number} of {mine.wrapper}, reset {step.num_resets}"
        subject = f"is about to gather {name}, which the others are not; gathers of sharded units so far: {said}"
        digest = mine.digest()
        with torch.inference_mode(False):  # its memory outlives an evaluation
            told = self.control.start([digest], self._watch).wait(moment, meeting=(key, subject))
        if {numbers[0] for numbers in told} != {digest}:
            error = disagreement(self.control.board, self.control.moment, mine, False, _STAMP_SECONDS)
            if error is not None:
                step.tell_peers(error)
                raise error

    def renew(self) -> None:
        """Ranks begin anew; the others' plane is renewed with the step."""
        if self.is_own:
            self.control.renew()
            self.control.connect(self._watch)
