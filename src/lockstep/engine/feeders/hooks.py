"""Autograd's hooks: a step is told of every parameter when autograd has added its gradient.

The hook sits on the parameter, so it survives ``.data`` and device changes.  It must be the last one there: hooks of
others, whenever they were registered, see and may change the local gradient.  Where one was registered after ours, ours
moves behind it for the next time, and this time the parameter counts when the next thing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from lockstep import torch_private
from lockstep.engine import registry
from lockstep.engine.bucket import Slot, has_lost_hook
from lockstep.engine.feeders import compiled_autograd
from lockstep.engine.step import SyncStep
from lockstep.engine.used import find_tensors, parameters_reached_from


class HookFeeder:
    """Puts the hooks on the parameters of one step, and takes them off."""

    def __init__(self, step: SyncStep) -> None:
        self._step = step
        self._intake = step.intake
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Put a hook on every parameter of the plan."""
        self.detach()
        slots = self._step.reducer.slots
        is_multi_device = len({slot.parameter.device for slot in slots}) > 1
        for slot in slots:
            self._handles.append(self._hook(slot, self._on_gradient_locked if is_multi_device else self._on_gradient))
        registry.register(self._step)

    def _hook(self, slot: Slot, function: Callable[[Slot, Tensor], None]) -> Any:
        is_frozen = not slot.parameter.requires_grad
        if is_frozen:  # for now; it takes no hook otherwise
            slot.parameter.requires_grad_(True)
        handle = slot.parameter.register_post_accumulate_grad_hook(partial(function, slot))
        slot.hook_id, slot.accumulator = handle.id, None
        slot.inner = torch_private.inner_tensor(slot.parameter)
        if is_frozen:
            slot.parameter.requires_grad_(False)
        return handle

    def find_lost(self) -> list[Slot]:
        """The parameters that have lost their hook (``torch.utils.swap_tensors``)."""
        return [slot for slot in self._step.reducer.slots if has_lost_hook(slot)]

    def find_again(self) -> None:
        """Let parameters that have lost their hooks have them again, other people's too."""
        for slot in self.find_lost():
            torch_private.install_hooks_again(slot.parameter)
            slot.inner, slot.accumulator = torch_private.inner_tensor(slot.parameter), None

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        registry.unregister(self._step)

    @torch_private.leave_to_python
    def _on_gradient(self, slot: Slot, given: Tensor) -> None:
        """The hook: runs once per parameter and backward, so it does as little as it can."""
        if torch.compiler.is_dynamo_compiling():
            compiled_autograd.capture(self._step, given)
            return
        parameter = slot.parameter  # ``given`` is something else behind a hook that returns it, which torch refuses
        if slot.is_taken and parameter.grad is None:
            return  # a graph delivered it, and autograd had nothing to add
        num_hooks = len(torch_private.hooks_after(parameter))
        if num_hooks == 1 and self._intake.deliver_plainly(slot):
            return
        if self._step.memory_is_shared and not registry.is_for(self._step, slot):
            return
        if num_hooks > 1 and not torch_private.move_hook_to_end(parameter, slot.hook_id):
            self._intake.defer(slot)
        else:
            self._intake.deliver(slot)

    @torch_private.leave_to_python
    def _on_gradient_locked(self, slot: Slot, parameter: Tensor) -> None:
        """The hook for a module on several devices, each of which has its own backward thread."""
        if torch.compiler.is_dynamo_compiling():
            compiled_autograd.capture(self._step, parameter)
            return
        with self._step.lane.lock:
            self._on_gradient(slot, parameter)

    # ---------------------------------------------------------------- outputs

    def watch_outputs(self, output: Any) -> None:
        """After a forward: find the parameters it used, and watch for the backward that starts from its outputs."""
        step = self._step
        compiled_autograd.forget_captured()
        outputs = [t for t in find_tensors(output) if t.requires_grad]
        if step.finds_unused and not step.static.is_on and outputs:
            with record_function("search_unused_parameters"):
                step.note_used(parameters_reached_from(outputs))
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output_gradient)

    @torch_private.leave_to_python
    def _on_output_gradient(self, _: Tensor) -> None:
        """Notice the backward of a forward: the end of its outermost pass says what stayed without a gradient."""
        step = self._step
        if torch.compiler.is_dynamo_compiling():
            compiled_autograd.capture_output(step)
            return
        with step.lane.lock:
            step.note_output_reached()
            if step.finds_unused or step.static.is_on:
                step.lane.queue_end_of_outermost()
