"""What ranks compare beside the stamp of a window: by which settings they have updated, and some of their weights.

Both are of the updates before this window, when only then anyone can know.  They travel with the exchange that ends a
window; a difference is one error on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.agree.drift import settings_differ, settings_of, weights_differ, word_of
from lockstep.engine.recovery import WEIGHTS_DIFFER
from lockstep.engine.weights import Weights

if TYPE_CHECKING:
    import torch

    from lockstep.engine.step import SyncStep

_SECONDS = 60.0


class Words(NamedTuple):
    """What a rank tells: two numbers, each 0 where there is nothing to tell."""

    settings: int = 0
    weights: int = 0


NOTHING = Words()


class Drift:
    """Compares what one model was updated by, and what it has become."""

    def __init__(self) -> None:
        self.weights: Weights | None = Weights()  # None where ranks hold different parts of a model
        self.is_known = False  # until weights are made equal again
        self._settings: list[tuple[Any, ...]] = []  # of the updates since the last window
        self._num_covered = 0
        self._last: list[tuple[Any, ...]] = []  # of the updates before this window
        self._is_ahead = False  # they are of the update that is to come
        self._word: tuple[list[tuple[Any, ...]], int] = ([], 0)  # settings, and the number that stands for them

    def note_update(self, optimizer: torch.optim.Optimizer, num_parameters: int) -> None:
        """An optimizer that has so many of the parameters is about to update them."""
        self._settings.append(settings_of(optimizer))
        self._num_covered += num_parameters

    def open(self, step: SyncStep) -> None:
        """A window begins: what is told at its end is as it is now, before anything is updated."""
        slots = step.reducer.slots
        # A rank may update only its share of a model, and be given the rest: its settings are not all of them.
        is_whole = self._num_covered >= len(slots) - len(step.frozen)
        self._last, self._is_ahead = self._settings if is_whole else [], False
        self._settings, self._num_covered = [], 0
        if self.weights is not None and step.reducer.exchange.is_same_on_all:
            self.weights.look(step.num_windows, slots)

    def use_settings(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The coming update is a program's, which is by these."""
        self._last, self._is_ahead = [settings_of(optimizer) for optimizer in optimizers], True

    def words(self) -> Words:
        """What this rank tells."""
        if self._word[0] != self._last:
            self._word = (self._last, word_of(self._last))
        return Words(self._word[1], self.weights.word() if self.weights is not None else 0)

    def judge(self, step: SyncStep, told: dict[int, Words]) -> None:
        """Compare the words of the ranks that take part, by rank of the group; raises the same error on all."""
        if len(set(told.values())) <= 1:
            if self.weights is not None and any(words.weights for words in told.values()):
                self.weights.forget()  # all have it, and the same
            return
        control = step.closing.union.control
        assert control is not None
        norms = {}
        if self.weights is not None:
            found = self.weights.compare([words.weights for words in told.values()])
            norms = {list(told)[place]: norm for place, norm in found.items()}
        settings = {words.settings for words in told.values()} - {0}
        if len(settings) > 1:
            self.is_known = not self._is_ahead
            how = "" if self._is_ahead else WEIGHTS_DIFFER
            raise settings_differ(control.board, control.moment, self._last, how, _SECONDS)
        if norms and self.weights is not None:
            self.is_known = True
            raise weights_differ(self.weights.name, control.board.by_global(norms), WEIGHTS_DIFFER)

    def forget(self) -> None:
        """All ranks begin anew, with equal weights."""
        self.is_known = False
        self._settings, self._last, self._num_covered = [], [], 0
        if self.weights is not None:
            self.weights.forget()
