"""Parameters whose reduction waits for a signal: ``delay_all_reduce_named_params``.

Their gradients are left alone until the gradient of another parameter, the trigger, is about to be added; then they
leave together.  torch starts that all-reduce and never waits for it; here the end of the backward does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket
from lockstep.engine.reducer import Reducer
from lockstep.engine.transport import Transport


class DelayedReduction:
    """Reduces its own few buckets when the trigger fires."""

    def __init__(self, reducer: Reducer, trigger: nn.Parameter) -> None:
        self._reducer = reducer
        self._came: set[Tensor] = set()  # parameters that got their gradient since the last reduction
        self._handles = [trigger.register_hook(self._on_trigger)]
        for slot in reducer.slots:
            if slot.parameter.requires_grad:
                self._handles.append(slot.parameter.register_post_accumulate_grad_hook(self._came.add))

    def use_transport(self, transport: Transport) -> None:
        self._reducer.use_transport(transport)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """A new forward: what came before does not count for its backward."""
        self._came.clear()

    @torch_private.leave_to_python
    def _on_trigger(self, gradient: Tensor) -> Tensor:
        """Launch the buckets whose gradients are all there; a compiled backward hands out all at once, so some may not
        be: those leave when the backward is over."""
        waiting = []
        for bucket in self._reducer.buckets:
            if all(slot.parameter in self._came for slot in bucket.slots):
                self._launch(bucket)
            else:
                waiting.append(bucket)
        torch_private.queue_backward_callback(lambda: self._finish(waiting))
        return gradient

    def _launch(self, bucket: LiveBucket) -> None:
        gradients: Sequence[Tensor | None] = [slot.parameter.grad for slot in bucket.slots]
        for slot in bucket.slots:
            slot.dirty = True
        self._reducer.launch(bucket, gradients)

    @torch_private.leave_to_python
    def _finish(self, waiting: list[LiveBucket]) -> None:
        self._came.clear()
        with torch.no_grad():
            for bucket in waiting:
                self._launch(bucket)
            for bucket in self._reducer.buckets:
                self._reducer.collect(bucket)
                self._reducer.hand_out(bucket)
