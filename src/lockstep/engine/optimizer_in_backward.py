"""Optimizers that step inside the backward: ``_apply_optimizer_in_backward`` under data parallel.

That function steps a parameter as soon as its gradient is there, which would be before the reduction.  So its hooks
are taken off, and the step runs when the parameter's bucket has been collected; the gradient is freed right after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket
from lockstep.engine.exchange import HookExchange
from lockstep.engine.grads import set_gradient
from lockstep.engine.step import SyncStep


def take_over_optimizers(step: SyncStep, parameters: Sequence[nn.Parameter]) -> None:
    owned = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if not owned:
        return
    if isinstance(step.reducer.exchange, HookExchange):
        raise RuntimeError(
            "Optimizers in the backward and a communication hook cannot both finish a bucket. Remove the hook "
            f"({step.reducer.exchange.name}) or step the optimizer after the backward."
        )
    if step.before_hand_out is not None:
        raise RuntimeError(
            "Optimizers in the backward and mixed_precision do not go together: an optimizer would step the "
            "low-precision copies. Step the optimizer after the backward, or use torch.autocast."
        )
    for parameter in owned:
        for handle in torch_private.in_backward_optimizer_handles(parameter):
            handle.remove()

    def step_bucket(bucket: LiveBucket) -> None:
        with torch.enable_grad():
            for slot in bucket.slots:
                if slot.parameter.grad is None:
                    continue
                for optimizer in getattr(slot.parameter, "_in_backward_optimizers", ()):
                    optimizer.step()
                if hasattr(slot.parameter, "_in_backward_optimizers"):
                    set_gradient(slot.parameter, None)

    step.after_bucket = step_bucket
