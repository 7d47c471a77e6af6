"""What ranks compare beside the stamp of a window: by which settings they have updated, and some of their weights.

Both are of the updates before this window, when only then anyone can know.  They travel with the exchange that ends a
window; a difference is one error on all ranks.

[Note: when]  Within a step ranks may have other weights on purpose, and put them back before they update: SAM moves
them along each rank's own gradient for a second backward, others add noise.  So weights are looked at when an optimizer
is about to step.  Where there is none, the loop updates by hand: then they are looked at as the first forward since the
last window begins, which comes before a step can have moved anything; not in the first window, for which they were made
equal, unless nobody has.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from lockstep import torch_private
from lockstep.agree.drift import (
    Updates,
    settings_differ,
    settings_shown,
    weights_differ,
    word_of,
    words_differ,
)
from lockstep.engine.recovery import WEIGHTS_DIFFER
from lockstep.engine.registry import optimizers_of
from lockstep.engine.weights import Weights

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep

_SECONDS = 60.0
_MOST_UPDATES = 1000
_MOST_WINDOWS_OF_A_STEP = 16  # after so many, an optimizer that has not stepped is not how the loop updates
_trains = attrgetter("parameter.requires_grad")


# What a rank tells: a number for the settings and one for the weights, each 0 where there is nothing to tell.
Words = Sequence[int]
NOTHING: Words = (0, 0)
_SETTINGS, _WEIGHTS = 0, 1


class Drift:
    """Compares what one model was updated by, and what it has become."""

    def __init__(self) -> None:
        self.weights: Weights | None = Weights()  # None where ranks hold different parts of a model
        self.is_of_shards = False  # all ranks update all parameters, each its part: what differs is no share
        self.is_known = False  # until weights are made equal again
        self._updates: Updates = {}  # since the last window; made anew where it changes
        self._last: Updates = {}  # before this window
        self._is_ahead = False  # they are of the update that is to come
        self._word: tuple[Updates, int] = ({}, 0)  # updates, and the number that stands for them
        self._has_looked = False  # at weights, since the last window
        self._has_optimizer = False  # that has updated any of them
        self._waits_for_optimizer = True  # as long as there is one that might
        self._asked_in = 0  # the window in which that was last asked
        self.begins_equal = True  # weights were made equal when the model was wrapped

    def hold_shards(self) -> None:
        """Ranks have different weights, and update all of them alike."""
        self.weights, self.is_of_shards = None, True

    def note_update(self, updates: Updates) -> None:
        """Parameters are about to be updated by an optimizer, by these settings."""
        self._waits_for_optimizer = False
        if not self._updates or len(self._updates) > _MOST_UPDATES:  # the latter: no window of this model opens
            self._updates = updates
            return
        merged = dict(self._updates)
        for settings, places in updates.items():
            before = merged.get(settings, 0)
            merged[settings] = before + places if self.is_of_shards else before | places
        self._updates = merged

    def look_before_update(self, step: SyncStep) -> None:
        """An optimizer is about to step: see [Note: when]."""
        self._has_optimizer = self._has_looked = True
        if self.weights is not None and step.reducer.exchange.is_same_on_all:
            self.weights.look(step.num_windows, step.reducer.slots)

    def look_before_forward(self, step: SyncStep) -> None:
        """A forward with gradients begins: look at weights that no optimizer updates."""
        if self._has_looked or self._has_optimizer or (step.num_windows == 0 and self.begins_equal):
            return
        if self.weights is None or not step.closing.compares or torch_private.in_backward():
            return
        if not step.num_windows or not self._optimizer_is_to_step(step):
            self._look(step)

    def _optimizer_is_to_step(self, step: SyncStep) -> bool:
        """Whether there is an optimizer that has not stepped yet: its first step may take several windows."""
        if not self._waits_for_optimizer or step.num_windows >= _MOST_WINDOWS_OF_A_STEP:
            return False
        if self._asked_in != step.num_windows:  # it takes a search through all objects
            self._asked_in = step.num_windows
            self._waits_for_optimizer = bool(optimizers_of({id(slot.leaf) for slot in step.reducer.slots}))
        return self._waits_for_optimizer

    def look_before_program(self, step: SyncStep) -> None:
        """A program of the whole step, its update included, begins."""
        if not self._has_looked:
            self._look(step)

    def _look(self, step: SyncStep) -> None:
        """Look as a step begins."""
        self._has_looked = True
        if self.weights is not None and step.reducer.exchange.is_same_on_all:
            self.weights.look(step.num_windows, step.reducer.slots, is_before_update=False)

    def open(self, step: SyncStep) -> None:
        """A window begins: what is told at its end is as it is now, before anything is updated."""
        self._tell(step, self._updates, is_ahead=False)
        self._updates = {}
        self._has_looked = False

    def use_settings(self, step: SyncStep, updates: Sequence[Updates]) -> None:
        """The coming update is a program's, which is by these."""
        self._updates = {}
        for one in updates:
            self.note_update(one)
        self._tell(step, self._updates, is_ahead=True)
        self._updates = {}

    def _tell(self, step: SyncStep, updates: Updates, *, is_ahead: bool) -> None:
        """Tell the others of these updates, as far as they are of parameters that train."""
        if updates and (is_ahead or step.frozen):
            trains = 0xFF * int.from_bytes(bytes(map(_trains, step.reducer.slots)), "little")
            updates = {settings: places & trains for settings, places in updates.items() if places & trains}
        self._last, self._is_ahead = updates, is_ahead

    def words(self) -> Words:
        """What this rank tells."""
        if self._word[0] is not self._last:
            self._word = (self._last, word_of(self._last))
        return self._word[1], self.weights.word() if self.weights is not None else 0

    def judge(self, step: SyncStep, told: dict[int, Words]) -> None:
        """Compare the words of the ranks that take part, by rank of the group; raises the same error on all."""
        everyones = list(told.values())
        if not everyones or everyones.count(everyones[0]) == len(everyones):
            if self.weights is not None and everyones and everyones[0][_WEIGHTS]:
                self.weights.forget()  # all have it, and the same
            return
        control = step.closing.union.control
        assert control is not None
        norms = {}
        if self.weights is not None:
            found = self.weights.compare([words[_WEIGHTS] for words in everyones])
            norms = {list(told)[place]: norm for place, norm in found.items()}
        if words_differ((words[_SETTINGS] for words in everyones), of_shards=self.is_of_shards):
            self.is_known = not self._is_ahead
            how = "" if self._is_ahead else WEIGHTS_DIFFER
            mine = settings_shown(self._last, [slot.name for slot in step.reducer.slots])
            raise settings_differ(
                control.board, control.moment, mine, list(told), how, _SECONDS, of_shards=self.is_of_shards
            )
        if norms and self.weights is not None:
            self.is_known = True
            raise weights_differ(self.weights.name, control.board.by_global(norms), WEIGHTS_DIFFER)

    def forget(self) -> None:
        """All ranks begin anew, with equal weights."""
        self.is_known = self._has_looked = False
        self._updates, self._last = {}, {}
        if self.weights is not None:
            self.weights.begin_anew()
