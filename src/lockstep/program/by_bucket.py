"""Updates bucket by bucket: a bucket's parameters are stepped as soon as it is reduced, and its gradients are freed.

So gradients need not all exist at once.  It is for optimizers that look at each element by itself: the bits are those
of one step for all.  What needs all gradients first (a norm, a scaler, a policy for NaN that decides before the
update) rules it out, and so does a backward that a compiler made, which may read a parameter after its gradient.

[Note: compared before]  Once a bucket is updated there is no way back.  So ranks compare a window before it begins, as
they do for captured programs, and not when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep import errors, torch_private
from lockstep.engine.bucket import LiveBucket
from lockstep.engine.exchange import HookExchange
from lockstep.engine.grads import set_gradient
from lockstep.program.options import Mode, Options
from lockstep.program.parts import Parallel

# Each element's update depends on its own gradient and state alone.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
# A bucket that left two buckets ago has mostly arrived.  Where the link is slower than the backward it is waited for:
# gradients that pile up while they travel would all exist again.
_BUCKETS_ALOFT = 2


def why_not_by_bucket(options: Options, parallel: Parallel) -> list[str]:
    """Why updates cannot be made bucket by bucket; empty if they can."""
    if len(parallel.wrappers) != 1 or parallel.sharded or parallel.foreign:
        return ["there is no one lockstep.DDP whose buckets could be updated"]
    wrapper = parallel.wrappers[0]
    step = wrapper.step
    reducer = step.reducer
    is_compiled = options.mode is Mode.COMPILED or any(map(torch_private.is_compiled, options.model.modules()))
    checks = {
        "clip_norm needs the norm of all gradients": options.clip_norm is not None,
        "a gradient scaler must have seen all gradients": options.scales,
        "gradients are added up over micro-batches, and all exist then": options.accumulate > 1,
        "a compiled backward may read a parameter after its gradient is made": is_compiled,
        "a communication hook may need its buckets until the end": isinstance(reducer.exchange, HookExchange),
        f"nonfinite={reducer.finiteness.policy!r} decides before the update": reducer.finiteness.waits,
        "find_unused_parameters=True asks at the end what was used": step.finds_unused,
        "static_graph=True waits for the end of a backward": step.static.is_on,
        "optimizers step in the backward already": step.after_bucket is not None,
        "mixed_precision= keeps copies of parameters": wrapper._options.mixed_precision is not None,
        "delayed parameters are reduced by themselves": wrapper._parts.delayed is not None,
        "finalize_backward() is called by hand": step.ends_by_hand,
        "gradients lie in memory that is kept (gradient_as_bucket_view)": not reducer.memory.frees_gradients,
        "ranks of this group have no way to compare before a step": reducer.world > 1
        and step.closing.union.control is None,
    }
    found = [reason for reason, applies in checks.items() if applies]
    for optimizer in options.optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in ELEMENTWISE:
            found.append(f"{name} is not known to look at each element by itself")
        elif torch_private.optimizer_has_hooks(optimizer):
            found.append(f"hooks look at the steps of {name}")
        elif any(group.get("differentiable") for group in optimizer.param_groups):
            found.append(f"{name} was made with differentiable=True")
    return found


class BucketUpdates:
    """Steps the optimizers of one wrapped model for a bucket at a time, inside the backward."""

    def __init__(self, options: Options, parallel: Parallel) -> None:
        self._options = options
        self._step = parallel.wrappers[0].step
        self._stand_ins: dict[LiveBucket, list[Any]] = {}
        self._made_for: tuple[Any, Any] = ((), ())  # parameters by group of the optimizers, and buckets
        self._updated: set[int] = set()
        self._behind = None if self._step.reducer.transport.is_alone else _BUCKETS_ALOFT

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Update within this context whatever bucket is reduced."""
        held = [[id(p) for p in group["params"]] for o in self._options.optimizers for group in o.param_groups]
        step = self._step
        made_for = (held, list(step.reducer.buckets))
        if made_for != self._made_for:
            self._made_for = made_for
            self._stand_ins.clear()
        self._updated.clear()
        if isinstance(step.reducer.exchange, HookExchange) or any(
            map(torch_private.optimizer_has_hooks, self._options.optimizers)
        ):
            yield  # they came later: this step updates in the end
            return
        step.after_bucket, step.num_buckets_behind = self._update, self._behind
        try:
            yield
        finally:
            step.after_bucket, step.num_buckets_behind = None, None

    def _update(self, bucket: LiveBucket) -> None:
        if bucket.index in self._updated:
            raise errors.LockstepError(
                f"{bucket.shown_names} got another gradient after they were updated in this step. Make the step with "
                "update_by_bucket=False."
            )
        self._updated.add(bucket.index)
        stand_ins = self._stand_ins.get(bucket)
        if stand_ins is None:
            stand_ins = self._stand_ins[bucket] = self._make(bucket)
        clipped = [slot.leaf for slot in bucket.slots if slot.leaf.grad is not None]
        if self._options.clip_value is not None and clipped:
            torch.nn.utils.clip_grad_value_(clipped, self._options.clip_value)
        for stand_in, optimizer, indices in stand_ins:
            for mine, index in zip(stand_in.param_groups, indices, strict=True):
                mine.update({k: v for k, v in optimizer.param_groups[index].items() if k != "params"})
            stand_in.state = optimizer.state
            type(optimizer).step(stand_in)
        for slot in bucket.slots:
            set_gradient(slot.parameter, None)
        bucket.spare = None  # what is kept for the next window would be all gradients again

    def _make(self, bucket: LiveBucket) -> list[Any]:
        """Stand-ins for the optimizers, which have the parameters of one bucket and the state of all."""
        members = {id(slot.leaf) for slot in bucket.slots}
        found = []
        for optimizer in self._options.optimizers:
            stand_in: Any = object.__new__(type(optimizer))
            vars(stand_in).update({name: value for name, value in vars(optimizer).items() if name != "step"})
            stand_in.param_groups, indices = [], []
            for index, group in enumerate(optimizer.param_groups):
                mine = [p for p in group["params"] if id(p) in members]
                if mine:
                    stand_in.param_groups.append({**group, "params": mine})
                    indices.append(index)
            if indices:
                found.append((stand_in, optimizer, indices))
        return found
