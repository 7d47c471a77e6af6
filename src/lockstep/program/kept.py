"""Gradients that stay between micro-steps, where captured programs add up.

With micro-batches, several programs add to the same gradients.  They lie in memory that is the same for all programs
and for the loop, so that any of them may run any micro-step of a window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.program.guards import TrainedInWindow
from lockstep.program.recipe import Recipe


class Kept:
    """The memory in which the micro-steps of one train step add up; none without micro-batches."""

    def __init__(self, recipe: Recipe, trained: TrainedInWindow) -> None:
        self._recipe = recipe
        self._trained = trained
        self._tensors: list[Tensor] | None = None

    def forget(self) -> None:
        """There are no programs any more that add to it."""
        self._tensors = None

    def adding(self) -> list[Any]:
        """In whose ``.grad`` micro-steps add up; of a sharded model the whole parameters."""
        steps = [step for root in self._recipe.parallel.roots for step in root.steps]
        return [slot.parameter for step in steps for slot in step.reducer.slots] if steps else self._recipe.parameters

    def _flags(self) -> tuple[bool, ...]:
        """Which of those trained when the window began; of a sharded model they are only those that do."""
        return self._trained.as_it_began if not self._recipe.parallel.roots else (True,) * len(self.adding())

    def begin(self) -> None:
        """A window begins: drop the gradients of the one before."""
        recipe = self._recipe
        if recipe.options.accumulate == 1:
            recipe.begin()
            return
        if self._tensors is None:
            self._tensors = [torch.zeros_like(p) for p in self.adding()]
        torch_private.foreach_zero(self._tensors)
        if recipe.parallel.roots:
            recipe.begin()  # what shards have comes with the last micro-step
        self.attach()

    def attach(self) -> None:
        """Let ``.grad`` be this memory."""
        if self._tensors is not None:
            for parameter, kept, has_one in zip(self.adding(), self._tensors, self._flags(), strict=True):
                parameter.grad = kept.detach() if has_one else None

    def note_replay(self, *, is_last: bool) -> None:
        """A program has added to it, or reduced it: let ``.grad`` of whole parameters say so, as the loop would."""
        if self._tensors is None or not self._recipe.parallel.roots:
            return
        if not is_last:
            self.attach()
            return
        for parameter in self.adding():
            parameter.grad = None

    def take_edits(self) -> None:
        """Between two micro-steps the user may have done something to ``.grad``: it is done to what programs add to."""
        if self._tensors is None:
            return
        places = zip(self.adding(), self._tensors, self._flags(), strict=True)
        for parameter, kept in [(parameter, kept) for parameter, kept, has_one in places if has_one]:
            if parameter.grad is None:
                kept.zero_()
            elif parameter.grad.data_ptr() != kept.data_ptr():
                kept.copy_(parameter.grad)
            else:
                continue
            parameter.grad = kept.detach()
