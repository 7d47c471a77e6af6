"""The last line of the proof of sync: no optimizer steps on gradients that were not reduced.

One hook on all optimizers looks at the wrappers that are alive.  It costs a set lookup per step, and touches the
parameters only when something is wrong.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep import errors
from lockstep.engine.eager import EagerBackward

_watched: weakref.WeakSet[EagerBackward] = weakref.WeakSet()
_installed = False


def watch(backward: EagerBackward) -> None:
    """Check ``backward`` before every optimizer step from now on."""
    global _installed
    _watched.add(backward)
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step is traced once; the check would be traced away with it
    for backward in _watched:
        if not backward.is_attached:
            continue  # its wrapper is gone
        recorded = backward.deliveries.recorded
        if recorded and not backward.is_in_a_pass and _ids(optimizer) & set(map(id, recorded)):
            backward.deliveries.require_seen()
        if backward.window.is_open and not backward.is_collecting:
            _stop_unfinished(backward, optimizer)
        elif backward.holds_local_gradients and backward.reducer.world > 1:
            _warn_local(backward, optimizer)


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _stop_unfinished(backward: EagerBackward, optimizer: torch.optim.Optimizer) -> None:
    stepped = _ids(optimizer)
    slots = backward.reducer.slots
    if not any(id(slot.parameter) in stepped and slot.parameter.grad is not None for slot in slots):
        return
    error = errors.optimizer_before_reduction(
        [slot.place for slot in backward.window.missing],
        rank=backward.reducer.rank,
        num_parameters=len(slots),
    )
    backward.reducer.watch.post_failure(error)
    raise error


def _warn_local(backward: EagerBackward, optimizer: torch.optim.Optimizer) -> None:
    stepped = _ids(optimizer)
    names = [
        slot.name
        for slot in backward.reducer.slots
        if slot.dirty and slot.parameter.grad is not None and id(slot.parameter) in stepped
    ]
    if names:
        warnings.warn(errors.stepping_on_local_gradients(names, rank=backward.reducer.rank), stacklevel=4)
