"""The step as a plain loop does it: what every other mode must equal.

begin    gradients of the step before are dropped
micro    forward and backward of one micro-batch, local in all but the last
update   clipping, optimizers, scaler, weight average
follow   learning rates, which are numbers of the host
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lockstep.program.averaging import WeightAverage
from lockstep.program.batch import map_tensors
from lockstep.program.by_bucket import BucketUpdates
from lockstep.program.changing import Numbers
from lockstep.program.options import Options
from lockstep.program.parts import Parallel


class Recipe:
    """Runs the moments of a step one after the other; each rank's Python walks through all of them."""

    def __init__(self, options: Options, parallel: Parallel) -> None:
        self.options = options
        self.parallel = parallel
        self.parameters = options.parameters()
        self._held: list[int] = []  # by optimizers, when this was last looked at
        self.average = WeightAverage(options.model, options.average) if isinstance(options.average, float) else None
        self.grad_norm: Tensor | None = None  # of the last update, before it was clipped
        self.backward_seconds = 0.0  # of the last micro-batch, on the host, with what it waited for
        self.compute: Callable[[Any], Any] = self._compute  # what is compiled, where something is
        self._device = parallel.device
        self.numbers = Numbers(options.optimizers, parallel.device)  # what a program reads of optimizers in each step
        self.by_bucket: BucketUpdates | None = None  # where updates are made bucket by bucket

    def follow_optimizers(self) -> None:
        """Before a window: take up parameters that have come to an optimizer since the last one."""
        held = [id(p) for o in self.options.optimizers for group in o.param_groups for p in group["params"]]
        if held != self._held:
            self._held = held
            self.parameters = self.options.parameters()

    def _compute(self, batch: Any) -> Any:
        return self.options.loss(self.options.model, batch)

    # ---------------------------------------------------------------- the moments

    def moved(self, batch: Any) -> Any:
        """The batch with its tensors where the model is."""
        if self._device.type == "cpu":
            return batch
        return map_tensors(batch, lambda t: t.to(self._device, non_blocking=True))

    def begin(self) -> None:
        """Drop the gradients of the step before."""
        for parameter in self.parameters:
            parameter.grad = None

    def micro(self, batch: Any, *, is_last: bool) -> Any:
        """Run one micro-batch forward and backward; return what the loss function returned, detached."""
        options = self.options
        with nullcontext() if is_last else self.parallel.local():
            result = self.compute(batch)
            loss = loss_of(result)
            share = loss / options.accumulate if options.accumulate > 1 else loss
            scaled = options.scaler.scale(share) if options.scales else share
            begun = perf_counter()
            with self.by_bucket.in_backward() if self.by_bucket is not None else nullcontext():
                scaled.backward()
            self.backward_seconds = perf_counter() - begun
        return map_tensors(result, Tensor.detach)

    def update(self) -> None:
        """Use the gradients, which are whole and reduced now; of parameters that were updated there are none left."""
        options = self.options
        if options.scales and (options.clip_norm is not None or options.clip_value is not None):
            for optimizer in options.optimizers:
                options.scaler.unscale_(optimizer)
        if options.clip_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, options.clip_norm)
        elif options.clip_value is not None and (
            self.by_bucket is None or any(p.grad is not None for p in self.parameters)
        ):
            torch.nn.utils.clip_grad_value_(self.parameters, options.clip_value)
        for optimizer in options.optimizers:
            options.scaler.step(optimizer) if options.scales else optimizer.step()
        if options.scales:
            options.scaler.update()
        if self.average is not None:
            self.average.update()

    def follow(self) -> None:
        """What is the host's after an update: learning rates, and averages that are kept by others."""
        if self.options.average is not None and self.average is None:
            self.options.average.update_parameters(self.options.model)
        for scheduler in self.options.schedulers:
            scheduler.step()


def loss_of(result: Any) -> Tensor:
    """The loss in what a loss function returned, or an error that says what it must return."""
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss(model, batch) must return a tensor, or a tuple that begins with it, and returned "
            f"{type(loss).__name__}{' first' if loss is not result else ''}."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss(model, batch) must return one number, and returned a tensor of shape {list(loss.shape)}; "
            "take its mean or sum."
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss(model, batch) returned a tensor that does not depend on any parameter: it was detached, made under "
            "torch.no_grad(), or all parameters are frozen."
        )
    return loss
