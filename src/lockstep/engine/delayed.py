"""Parameters whose reduction waits until a backward is over: ``delay_all_reduce_named_params``.

torch starts it when the gradient of another parameter, the trigger, is about to be added, and never waits for it.  But
the trigger may come before some of them, more than once (reentrant checkpoints) or not at all, on some ranks; so here
they leave together when the backward is over that came to any of them, or to the trigger.  A checkpoint's backward
within a backward counts by itself: what is reduced twice is the same mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.engine.bucket import Slot
from lockstep.engine.lane import Lane
from lockstep.engine.reducer import Reducer
from lockstep.engine.transport import Transport
from lockstep.engine.union import Union


class DelayedReduction:
    """Reduces its own few buckets at the end of a backward."""

    def __init__(self, reducer: Reducer, trigger: nn.Parameter, lane: Lane, *, finds_unused: bool) -> None:
        self._reducer = reducer
        self._lane = lane
        self._finds_unused = finds_unused
        self._tasks: set[int] = set()  # the backwards whose end is awaited
        self._handles = [trigger.register_hook(self._note)]
        for slot in reducer.slots:
            if slot.parameter.requires_grad:
                self._handles.append(slot.parameter.register_post_accumulate_grad_hook(self._note))

    def use_transport(self, transport: Transport, lane: Lane) -> None:
        self._reducer.use_transport(transport)
        self._lane = lane

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch_private.leave_to_python
    def _note(self, _: Tensor) -> None:
        """A backward has come to one of them, or to the trigger."""
        task = torch_private.graph_task_id()
        with self._lane.lock:  # devices have a thread each
            if task not in self._tasks:
                self._tasks.add(task)
                self._lane.queue_end()  # all else that leaves at the end comes before, on every rank
                torch_private.queue_backward_callback(lambda: self._reduce(task))

    @torch_private.leave_to_python
    def _reduce(self, task: int) -> None:
        self._tasks.discard(task)
        is_used = self._ask_for_used() if self._finds_unused else None
        with torch.no_grad():
            for bucket in self._reducer.buckets:
                for slot in bucket.slots:
                    slot.dirty = True
                self._reducer.launch(bucket, [slot.parameter.grad for slot in bucket.slots])
            for bucket in self._reducer.buckets:
                self._reducer.collect(bucket)
                self._reducer.memory.hand_out(bucket, is_used)

    def _ask_for_used(self) -> Callable[[Slot], bool]:
        """Which of them any rank has a gradient for; the others stay without."""
        slots = self._reducer.slots
        mine = [int(slot.parameter.grad is not None) for slot in slots]
        counts = Union.count_used(self._reducer.transport, mine, slots[0].parameter.device)
        return lambda slot: counts[slot.position] > 0
