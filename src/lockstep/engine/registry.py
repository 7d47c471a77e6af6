"""Who looks after a parameter: the steps of this process, by parameter.

A parameter may belong to two wrapped models (a shared encoder, a wrapped module inside a wrapped module).  Each must
then find in ``.grad`` what autograd put there; and a backward that began with the forward of one of them is not a
backward of the other.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.engine.bucket import Slot
from lockstep.engine.states import State

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep

# A slot keeps its parameter alive, so an id in here is never another parameter's.
_slots: dict[int, list[tuple[weakref.ref[SyncStep], Slot]]] = {}
_num_changes = 0


def num_changes() -> int:
    """How often anyone began to look after parameters: what was found out about them before may not hold."""
    return _num_changes


def register(step: SyncStep) -> None:
    """Look after these parameters from now on."""
    global _num_changes
    _num_changes += 1
    reference = weakref.ref(step)
    step.reducer.memory.is_shared = False
    for slot in step.reducer.slots:
        entries = _slots.setdefault(id(slot.parameter), [])
        for other, _ in entries:
            its = other()
            if its is not None and its is not step:
                its.reducer.memory.is_shared = step.reducer.memory.is_shared = True
        entries.append((reference, slot))


def unregister(step: SyncStep) -> None:
    """Look after them no longer; who shared them with nobody else has them alone again."""
    others: set[SyncStep] = set()
    for slot in step.reducer.slots:
        entries = _slots.get(id(slot.parameter), [])
        entries[:] = [entry for entry in entries if entry[0]() not in (step, None)]
        others |= {other for reference, _ in entries if (other := reference()) is not None}
        if not entries:
            _slots.pop(id(slot.parameter), None)
    for other in others:
        other.reducer.memory.is_shared = any(
            len(_slots.get(id(slot.parameter), ())) > 1 for slot in other.reducer.slots
        )


def slot_of(parameter: Tensor) -> tuple[SyncStep, Slot] | None:
    """The slot of a parameter that a step looks after, and that step; of several, the one that was made last."""
    for reference, slot in reversed(_slots.get(id(parameter), ())):
        step = reference()
        if step is not None:
            return step, slot
    return None


def entries_of(parameter: Tensor) -> list[tuple[SyncStep, Slot]]:
    """All who look after a parameter and whom its gradient is for; an error where it is not known at all."""
    entries = [(step, slot) for reference, slot in _slots.get(id(parameter), ()) if (step := reference()) is not None]
    if not entries:
        raise RuntimeError("A compiled backward brought the gradient of a parameter that no wrapped model looks after.")
    return entries if len(entries) == 1 else [entry for entry in entries if is_for(*entry)]


def is_for(step: SyncStep, slot: Slot) -> bool:
    """Whether a gradient of a shared parameter is for ``step``: not if only others had a forward before it."""
    if step.has_forward or step.state is not State.IDLE:
        return True
    others = [reference() for reference, _ in _slots.get(id(slot.parameter), ())]
    return not any(other is not None and other is not step and other.has_forward for other in others)


def optimizers_of(ids: set[int]) -> list[torch.optim.Optimizer]:
    """All optimizers of this process that have any of these parameters (by ``id``); a search through all objects."""
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)  # asking an object for its class may run code of its own
        # One that could not be made has no groups.
        and any(id(parameter) in ids for group in getattr(found, "param_groups", ()) for parameter in group["params"])
    ]
