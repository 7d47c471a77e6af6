"""Compiled autograd: the whole backward, with the hooks on the parameters, is one graph that dynamo traces.

    traced     capture(...)           where a parameter's hook would run: an operator that brings its gradient
               finish_captured()      where the backward's callbacks would run: an operator that ends the pass
    at run     bring(...)             the operator ``accumulated``: the gradient is copied into its bucket
               finish(...)            the operator ``finish``: buckets are collected, results written into the gradients

[Note: what the graph sees]  Dynamo changes ``.grad`` after the graph has run, so while it runs ``.grad`` holds what it
held before.  The operators know only the tensors that they are given: ``accumulated`` copies its one at once, because a
compiler may use that memory again afterwards; ``finish`` writes into those that will be in ``.grad``.
What ``accumulated`` returns is an argument of ``finish``; nothing else keeps the two in order.

[Note: one graph]  Whether a pass synchronises, what the communication hook does and which buckets are whole is decided
when the operators run, so ``no_sync`` needs no second graph.  Where the compiler gives up and leaves the backward to
Python, the hooks run as they always do, and only the end of the pass comes from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine import registry
from lockstep.engine.bucket import Slot
from lockstep.engine.lane import end_compiled_passes
from lockstep.engine.step import SyncStep

# What the backward that is being traced has brought so far; empty again at its end.
_parameters: list[Tensor] = []
_tokens: list[Tensor] = []
_outputs: list[Tensor] = []

# ---------------------------------------------------------------- traced


def capture(step: SyncStep, parameter: Tensor) -> None:
    """In the place of a parameter's hook."""
    if step.memory_is_shared and any(p is parameter for p in _parameters):
        return  # one operator tells all wrappers
    gradient = parameter.grad
    if gradient is None:
        return
    _tokens.append(torch.ops.lockstep.accumulated(gradient, parameter, list(_outputs)))
    _parameters.append(parameter)


def capture_output(step: SyncStep) -> None:
    """In the place of the hook on an output."""
    _outputs.append(torch.ops.lockstep.output_reached(step.reducer.slots[0].parameter))


def finish_captured() -> None:
    """At the end of the backward, traced or not."""
    if _parameters:
        parameters = list(_parameters)
        gradients = [p.grad for p in parameters]
        torch.ops.lockstep.finish(gradients, list(_tokens), parameters)
        _parameters.clear()
        _tokens.clear()
    if _outputs:
        _outputs.clear()
    if not torch.compiler.is_dynamo_compiling():
        end_compiled_passes()


def forget_captured() -> None:
    """A backward broke between two parts of its graph."""
    if _parameters or _outputs:
        _parameters.clear()
        _tokens.clear()
        _outputs.clear()


def start() -> None:
    """Have the end of every compiled backward told here."""
    torch_private.at_end_of_compiled_backward(finish_captured)


# ---------------------------------------------------------------- when the graph runs


def bring(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The operator ``accumulated``."""
    entries = registry.entries_of(parameter)
    for step, slot in entries:
        with step.lane.lock:
            if not _comes_last(slot, parameter):
                step.intake.bring_at_end(slot)
            else:
                step.intake.bring(slot, gradient)
    return gradient.new_empty(0)


def note_output_reached(parameter: Tensor) -> Tensor:
    """The operator ``output_reached``: the backward starts from an output of the wrapper that has this parameter."""
    for step, _ in registry.entries_of(parameter):
        step.note_output_reached()
    return parameter.new_empty(0)


def finish(gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """The operator ``finish``: ``gradients`` are what will be in ``.grad``; the results go there."""
    by_step: dict[SyncStep, dict[Slot, Tensor]] = {}
    for gradient, parameter in zip(gradients, parameters, strict=True):
        for step, slot in registry.entries_of(parameter):
            by_step.setdefault(step, {})[slot] = gradient
    for step, results in by_step.items():
        step.intake.take_results_into(results)
    end_compiled_passes()
    for step, results in by_step.items():
        step.intake.clear_taken(results)


def _comes_last(slot: Slot, parameter: Tensor) -> bool:
    """Whether no hook of others still has to see this gradient; if one has, ours moves behind it for the next time."""
    return len(torch_private.hooks_after(parameter)) <= 1 or torch_private.move_hook_to_end(parameter, slot.hook_id)
