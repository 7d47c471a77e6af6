"""Gradients that stay between micro-steps, where captured programs add up.

With micro-batches, several programs add to the same gradients.  They lie in memory that is the same for all programs
and for the loop, so that any of them may run any micro-step of a window.
"""

from __future__ import annotations

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

    def begin(self) -> None:
        """A window begins: drop the gradients of the one before."""
        recipe = self._recipe
        if recipe.options.accumulate == 1:
            recipe.begin()
            return
        if self._tensors is None:
            self._tensors = [torch.zeros_like(p) for p in recipe.parameters]
        torch_private.foreach_zero(self._tensors)
        self.attach()

    def attach(self) -> None:
        """Let ``.grad`` be this memory."""
        if self._tensors is not None:
            places = zip(self._recipe.parameters, self._tensors, self._trained.as_it_began, strict=True)
            for parameter, kept, has_one in places:
                parameter.grad = kept.detach() if has_one else None

    def take_edits(self) -> None:
        """Between two micro-steps the user may have done something to ``.grad``: it is done to what programs add to."""
        if self._tensors is None:
            return
        places = zip(self._recipe.parameters, self._tensors, self._trained.as_it_began, strict=True)
        for parameter, kept in [(parameter, kept) for parameter, kept, has_one in places if has_one]:
            if parameter.grad is None:
                kept.zero_()
            elif parameter.grad.data_ptr() != kept.data_ptr():
                kept.copy_(parameter.grad)
            else:
                continue
            parameter.grad = kept.detach()
