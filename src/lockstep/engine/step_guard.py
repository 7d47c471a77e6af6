"""The last line of the proof of sync: no optimizer steps on gradients that were not reduced.

One hook on all optimizers looks at the steps that are alive.  It also counts how often each model was updated, which is
part of what ranks compare: an extra backward on one rank shows as an update that it has not made yet.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import repeat
from operator import attrgetter, is_, is_not, or_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep import errors
from lockstep.agree.drift import SETTINGS, Settings, Updates, can_change, settings_of
from lockstep.engine import registry
from lockstep.engine.bucket import Slot, has_lost_hook
from lockstep.engine.states import State
from lockstep.engine.step import SyncStep

_watched: weakref.WeakSet[SyncStep] = weakref.WeakSet()
_installed = False
_gradient, _num_writes = attrgetter("leaf.grad"), attrgetter("_version")
_WRITTEN = ("gradients", "changed by the program")  # told as a setting


class _Share:
    """Which parameters of a step an optimizer updates, by its groups, and by which settings it did so last."""

    def __init__(self, step: SyncStep, places: Sequence[int]) -> None:
        self.step = weakref.ref(step)
        self._places = places
        self._values: Sequence[Any] = ()  # of those settings, if none can change without being replaced
        self._updates: Updates = {}
        self._own: tuple[Sequence[Slot], list[Slot]] | None = None  # all slots of the step, and those it updates

    def updates(self, optimizer: torch.optim.Optimizer) -> Updates:
        """What an update now would be (``Updates`` of agree/drift.py)."""
        groups = optimizer.param_groups
        # As the groups hold them: settings stay what they are while none is replaced or can change.
        values = [value for group in groups for value in map(group.get, SETTINGS)]
        if self._values and all(map(is_, values, self._values)):
            return self._updates
        updates: dict[Settings, int] = {}
        for group, places in zip(groups, self._places, strict=True):
            if places:
                settings = settings_of(group)
                updates[settings] = updates.get(settings, 0) | places
        self._values, self._updates = () if any(map(can_change, values)) else values, updates
        return updates

    def updates_of_shards(self, optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> Updates:
        """As ``updates``, of what has a gradient; and whether the program has written to gradients."""
        updates = self.updates(optimizer)
        own = self._own
        if own is None or own[0] is not slots:
            places = reduce(or_, self._places)
            own = self._own = (slots, [slot for slot in slots if places >> 8 * slot.position & 1])
        gradients = list(map(_gradient, own[1]))
        if not all(map(is_not, gradients, repeat(None))):
            there = sum(1 << 8 * slot.position for slot in own[1] if slot.leaf.grad is not None)
            updates = {settings: places & there for settings, places in updates.items() if places & there}
            gradients = [gradient for gradient in gradients if gradient is not None]
        if any(map(_num_writes, gradients)):
            return {(*settings, _WRITTEN): places for settings, places in updates.items()}
        return updates


# As long as an optimizer holds as many parameters and nobody has other ones to look after.
_touched: weakref.WeakKeyDictionary[Any, tuple[Any, list[_Share]]] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[SyncStep, tuple[list[Slot], dict[int, int]]] = weakref.WeakKeyDictionary()


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
    for share in _shares_of(optimizer):
        step = share.step()
        if step is not None:
            _note_settings(optimizer, step, share)
            step.reducer.finiteness.drop(step.reducer.slots)
            before_update(step, lambda: _ids(optimizer))


def before_update(step: SyncStep, stepped: Callable[[], set[int]], *, in_program: bool = False) -> None:
    """Some parameters of a model (``stepped``, by ``id``) are about to be updated: count it, and stop what is wrong.

    A program of the whole step (``in_program``) has the gradients for itself, and none are in ``.grad``.
    """
    step.num_writes += 1
    step.reducer.transport.watch.raise_verdict()
    if step.state is not State.IDLE:
        if not step.closing.is_collecting:
            _stop_unfinished(step, stepped())
    elif step.holds_local_gradients and step.reducer.world > 1:
        _warn_local(step, stepped())
    elif step.has_forward and step.reducer.world > 1:
        _stop_without_hooks(step, stepped())
    if step.has_fresh_gradients and (in_program or not step.drift.is_of_shards or _has_gradients(step)):
        step.has_fresh_gradients = False
        step.num_updates += 1


def _has_gradients(step: SyncStep) -> bool:
    """Whether an update of shards changes any: ranks cannot compare what becomes of them, as they do with weights."""
    return any(slot.leaf.grad is not None for slot in step.reducer.slots)


def _note_settings(optimizer: torch.optim.Optimizer, step: SyncStep, share: _Share) -> None:
    """Remember by which settings an optimizer updates which parameters; ranks compare them in the next window."""
    if step.closing.compares:
        of_shards = step.drift.is_of_shards
        step.drift.note_update(
            share.updates_of_shards(optimizer, step.reducer.slots) if of_shards else share.updates(optimizer)
        )
        if step.state is State.IDLE:
            step.drift.look_before_update(step)


class SoleOptimizer:
    """The optimizer that a compiled update is of, as far as that is known: of several nobody knows whose step it is."""

    def __init__(self, ids: set[int]) -> None:
        self._ids = ids
        self._find()

    def _find(self) -> None:
        optimizers = registry.optimizers_of(self._ids)
        one = {id(optimizer.param_groups) for optimizer in optimizers}  # one may be the face of another
        self._optimizer = weakref.ref(optimizers[0]) if len(one) == 1 else None

    def note_settings(self) -> None:
        """It is about to update."""
        if self._optimizer is not None and self._optimizer() is None:
            self._find()  # another has taken its place
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return
        for share in _shares_of(optimizer):
            step = share.step()
            if step is not None:
                _note_settings(optimizer, step, share)


def updates_of(optimizer: torch.optim.Optimizer, step: SyncStep) -> Updates:
    """By which settings an optimizer would update which parameters of a step."""
    shares = [share for share in _shares_of(optimizer) if share.step() is step]
    return shares[0].updates(optimizer) if shares else {}


def steps_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[SyncStep]]:
    """The steps whose parameters an optimizer has."""
    return [share.step for share in _shares_of(optimizer)]


def _shares_of(optimizer: torch.optim.Optimizer) -> list[_Share]:
    """The steps whose parameters an optimizer has, and which of them each of its groups."""
    state = (registry.num_changes(), [len(group["params"]) for group in optimizer.param_groups])
    known = _touched.get(optimizer)
    if known is not None and known[0] == state:
        return known[1]
    found = [(step, [_places_of(step, group["params"]) for group in optimizer.param_groups]) for step in _watched]
    shares = [_Share(step, places) for step, places in found if any(places)]
    _touched[optimizer] = (state, shares)
    return shares


def _places_of(step: SyncStep, parameters: Iterable[Any]) -> int:
    """Which of a step's parameters are among these."""
    slots = step.reducer.slots
    known = _places.get(step)
    if known is None or known[0] is not slots:
        known = _places[step] = (slots, {id(slot.leaf): place for place, slot in enumerate(slots)})
    flags = bytearray(len(slots))
    for parameter in parameters:
        place = known[1].get(id(parameter))
        if place is not None:
            flags[place] = 1
    return int.from_bytes(flags, "little")


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
