"""Uneven inputs: what a rank that has run out of data does so that the others can go on.

It mirrors, in the same order, every collective that a forward and backward issue on the others: the buffer sync, the
question whether this iteration synchronises, each bucket with zeros, and the exchange of used parameters.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from lockstep.engine.grads import set_gradient
from lockstep.engine.step import SyncStep


class Joining(Protocol):
    """What the join hook needs of the wrapper."""

    step: SyncStep

    def mirror_forward(self) -> None: ...

    def ask_whether_to_sync(self) -> bool: ...

    def sync_final_model(self, is_last_joiner: bool) -> None: ...


class MirrorHook(JoinHook):
    """The join hook of one wrapper."""

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        self._ddp: Joining = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.logger.values["join_uneven_inputs"] = 1
        self._own_gradients: list[Tensor | None] | None = None
        super().__init__()

    def main_hook(self) -> None:
        """Mirror one iteration of the ranks that still have data."""
        ddp = self._ddp
        ddp.mirror_forward()
        if ddp.ask_whether_to_sync():
            if self._own_gradients is None:
                self._own_gradients = [slot.parameter.grad for slot in ddp.step.reducer.slots]
            ddp.step.mirror_window()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: everyone takes the model of one that trained to the end."""
        if self._own_gradients is not None:  # what mirroring left in .grad is not this rank's
            for slot, gradient in zip(self._ddp.step.reducer.slots, self._own_gradients, strict=True):
                set_gradient(slot.parameter, gradient)
        self._ddp.sync_final_model(is_last_joiner)
