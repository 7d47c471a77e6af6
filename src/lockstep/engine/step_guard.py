"""The last line of the proof of sync: no optimizer steps on gradients that were not reduced.

One hook on all optimizers looks at the steps that are alive.  It also counts how often each model was updated, which is
part of what ranks compare: an extra backward on one rank shows as an update that it has not made yet.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep import errors
from lockstep.engine.bucket import has_lost_hook
from lockstep.engine.states import State
from lockstep.engine.step import SyncStep

_watched: weakref.WeakSet[SyncStep] = weakref.WeakSet()
_installed = False
# Which steps an optimizer updates and how much of each, as long as it holds as many parameters.
_Shares = list[tuple[weakref.ref[SyncStep], int]]
_touched: weakref.WeakKeyDictionary[Any, tuple[Any, _Shares]] = weakref.WeakKeyDictionary()


def watch(step: SyncStep) -> None:
    """Check ``step`` before every optimizer step from now on."""
    global _installed
    _watched.add(step)
    _touched.clear()
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # it is traced once, and would be traced away; the graph itself is watched, see ddp/dispatch.py
    for reference, num_parameters in _shares_of(optimizer):
        step = reference()
        if step is not None:
            if step.closing.union.control is not None:
                step.drift.note_update(optimizer, num_parameters)
            step.reducer.finiteness.drop(step.reducer.slots)
            before_update(step, lambda: _ids(optimizer))


def before_update(step: SyncStep, stepped: Callable[[], set[int]]) -> None:
    """Some parameters of a model (``stepped``, by ``id``) are about to be updated: count it, and stop what is wrong."""
    step.num_writes += 1
    step.reducer.transport.watch.raise_verdict()
    if step.state is not State.IDLE:
        if not step.closing.is_collecting:
            _stop_unfinished(step, stepped())
    elif step.holds_local_gradients and step.reducer.world > 1:
        _warn_local(step, stepped())
    elif step.has_forward and step.reducer.world > 1:
        _stop_without_hooks(step, stepped())
    if step.has_fresh_gradients:
        step.has_fresh_gradients = False
        step.num_updates += 1


def steps_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[SyncStep]]:
    """The steps whose parameters an optimizer has."""
    return [reference for reference, _ in _shares_of(optimizer)]


def _shares_of(optimizer: torch.optim.Optimizer) -> _Shares:
    """The steps whose parameters an optimizer has, and how many of each."""
    size = [len(group["params"]) for group in optimizer.param_groups]
    known = _touched.get(optimizer)
    if known is not None and known[0] == size:
        return known[1]
    ids = _ids(optimizer)
    counts = [(step, sum(id(slot.leaf) in ids for slot in step.reducer.slots)) for step in _watched]
    shares = [(weakref.ref(step), count) for step, count in counts if count]
    _touched[optimizer] = (size, shares)
    return shares


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _stop_unfinished(step: SyncStep, stepped: set[int]) -> None:
    slots = step.reducer.slots
    if not any(id(slot.leaf) in stepped and (slot.is_taken or slot.parameter.grad is not None) for slot in slots):
        return
    error = errors.optimizer_before_reduction(
        [slot.place for slot in step.missing], rank=step.reducer.shown_rank, num_parameters=len(slots)
    )
    step.reducer.transport.watch.post_failure(error)
    raise error


def _stop_without_hooks(step: SyncStep, stepped: set[int]) -> None:
    """A forward ran, and no reduction since: a mistake only if gradients can come without our being told."""
    lost = [
        slot
        for slot in step.reducer.slots
        if slot.parameter.requires_grad
        and id(slot.parameter) in stepped
        and slot.parameter.grad is not None
        and has_lost_hook(slot)
    ]
    if lost:
        error = errors.hooks_lost([slot.place for slot in lost], rank=step.reducer.shown_rank)
        step.reducer.transport.watch.post_failure(error)
        raise error


def _warn_local(step: SyncStep, stepped: set[int]) -> None:
    names = [
        slot.name
        for slot in step.reducer.slots
        if slot.dirty and slot.parameter.grad is not None and id(slot.leaf) in stepped
    ]
    if names:
        warnings.warn(errors.stepping_on_local_gradients(names, rank=step.reducer.shown_rank), stacklevel=4)
