"""How results come out of the flat buffers of a replicated model: into ``.grad``, by pointing at them or by copying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket, Slot, are_all_none, are_all_taken, local_tensor
from lockstep.engine.memory import NOTHING, GradOwnership

_parameter_of, _held_of, _is_dtensor = attrgetter("parameter"), attrgetter("held"), attrgetter("is_dtensor")
_grad_of, _dtype_of, _requires_grad = attrgetter("grad"), attrgetter("dtype"), attrgetter("requires_grad")


class GradResults:
    """Hands out what has landed; who owns ``.grad`` decides how (grad_memory.py, [Note: who owns .grad])."""

    def __init__(self, ownership: GradOwnership) -> None:
        self.ownership = ownership
        # Another wrapper looks after some of these parameters too: it must find in .grad what autograd put there.
        self.is_shared = False

    @property
    def aliases(self) -> bool:
        """Whether ``.grad`` may point into a flat buffer."""
        return self.ownership is not GradOwnership.OWN and not self.is_shared

    def hand_out(
        self,
        bucket: LiveBucket,
        is_used: Callable[[Slot], bool] | None = None,
        *,
        in_place: bool = False,
        into: Mapping[Slot, Tensor] = NOTHING,
    ) -> None:
        """Give every parameter its reduced gradient; those that no rank used are left as they are.

        ``in_place``: only change the tensors that were launched, and leave ``.grad`` alone (distributed autograd).
        ``into``: the tensors that are to hold the results of some (compiled autograd).
        """
        flat = bucket.flat
        if flat is None:
            return
        is_usual = is_used is None and not in_place and not into and bucket.has_taken and not flat.is_sparse
        if is_usual and self._put_back(bucket, flat):
            bucket.forget_buffer()
            return
        views: Sequence[Tensor] | None = [flat] if flat.is_sparse else None
        copy_to: list[Tensor] = []
        copy_from: list[Tensor] = []
        with torch.no_grad():
            for position, slot in enumerate(bucket.slots):
                was_dirty, slot.dirty = slot.dirty, False
                held = slot.held
                if held is None and bucket.gradients:
                    held = bucket.gradients[position]  # packed, and left in .grad
                # What was added up before a parameter was frozen is reduced, too.
                is_left = not slot.parameter.requires_grad and not (was_dirty and held is not None)
                if is_left or (is_used is not None and not is_used(slot)):
                    if slot.is_taken and held is not None:
                        slot.parameter.grad = held
                    continue
                target = into.get(slot)
                if target is None and held is not None and slot.is_taken and self._lies_in(held, slot, flat):
                    slot.parameter.grad = held
                    continue
                if views is None:
                    views = bucket.views(flat)
                view = views[position]
                if target is not None:
                    copy_to.append(local_tensor(target))
                    copy_from.append(view)
                    slot.parameter.grad = target
                elif in_place:
                    if held is not None:
                        held.copy_(view)
                elif held is None or held.is_sparse or view.is_sparse or held.dtype != slot.parameter.dtype:
                    self._set_new(slot, view)
                elif self._can_alias(slot, held, flat):
                    held.data = view
                    slot.parameter.grad = held
                else:
                    copy_to.append(local_tensor(held).data)
                    copy_from.append(view)
                    slot.parameter.grad = held
            if copy_to:
                torch_private.foreach_copy(copy_to, copy_from)
        bucket.forget_buffer()

    def _put_back(self, bucket: LiveBucket, flat: Tensor) -> bool:
        """Hand out the usual way: all was taken, and lies in the buffer.  False where anything is otherwise."""
        if self._put_first(bucket, flat):
            return True
        base, size, dtype = flat.data_ptr(), flat.element_size(), flat.dtype
        views = bucket.parts
        for position, slot in enumerate(bucket.slots):
            held, parameter = slot.held, slot.parameter
            if not slot.is_taken or parameter.dtype is not dtype or not parameter.requires_grad or slot.is_dtensor:
                return False
            if held is None:
                if not self.aliases or parameter.grad is not None:
                    return False
                if views is None:
                    views = bucket.views(flat)
                held = views[position]
            elif (
                held.is_sparse
                or held.dtype is not dtype
                or not slot.num_elements
                or held.data_ptr() != base + slot.offset * size
            ):
                return False
            parameter.grad = held
            slot.dirty = False
        return True

    def _put_first(self, bucket: LiveBucket, flat: Tensor) -> bool:
        """The same where graphs delivered everything and ``.grad`` was empty before: all slots are asked at once."""
        if not self.aliases:
            return False
        slots = bucket.slots
        parameters = list(map(_parameter_of, slots))
        if (
            not are_all_none(map(_held_of, slots))
            or not are_all_taken(slots)
            or any(map(_is_dtensor, slots))
            or not all(map(_requires_grad, parameters))
            or set(map(_dtype_of, parameters)) != {flat.dtype}
            or not are_all_none(map(_grad_of, parameters))
        ):
            return False
        views = bucket.views(flat) if bucket.parts is None else bucket.parts
        for slot, parameter, view in zip(slots, parameters, views, strict=True):
            parameter.grad = view
            slot.dirty = False
        return True

    @staticmethod
    def _lies_in(held: Tensor, slot: Slot, flat: Tensor) -> bool:
        if held.is_sparse or slot.is_dtensor or held.dtype is not flat.dtype or held.dtype != slot.parameter.dtype:
            return False
        return held.data_ptr() == flat.data_ptr() + slot.offset * flat.element_size() and slot.num_elements > 0

    def _can_alias(self, slot: Slot, gradient: Tensor, flat: Tensor) -> bool:
        # A gradient that is itself part of a graph (create_graph=True) must stay the tensor that graph made.
        if not self.aliases or slot.stays_put:
            return False
        return not (gradient.requires_grad or slot.is_dtensor or gradient.is_sparse) and gradient.dtype == flat.dtype

    def _set_new(self, slot: Slot, value: Tensor) -> None:
        parameter = slot.parameter
        parameter.grad = None
        if slot.is_dtensor:
            parameter.grad = torch_private.dtensor_like(parameter, value.clone())
        elif value.is_sparse:
            parameter.grad = value
        elif value.dtype != parameter.dtype:
            parameter.grad = value.to(parameter.dtype)
        else:
            parameter.grad = value if self.aliases else value.clone()

    # ---------------------------------------------------------------- what came late

    def add(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None = None) -> None:
        """Add a landed bucket to what has been handed out of it before; not to those that no rank used."""
        flat = bucket.flat
        if flat is None:
            return
        views = [flat] if flat.is_sparse else bucket.views(flat)
        with torch.no_grad():
            for slot, view in zip(bucket.slots, views, strict=True):
                slot.dirty = False
                gradient = slot.parameter.grad
                if gradient is not None and not gradient.requires_grad:
                    local_tensor(gradient).add_(view)
                elif gradient is not None:
                    slot.parameter.grad = gradient + view
                elif slot.parameter.requires_grad and (is_used is None or is_used(slot)):
                    self._set_new(slot, view)
        bucket.forget_buffer()

    # ---------------------------------------------------------------- when a window is abandoned

    def give_back(self, bucket: LiveBucket, scale: float) -> None:
        """Undo the taking: ``.grad`` gets back what can be had of it, in memory that nothing else writes to."""
        flat, is_here = bucket.flat, not bucket.has_left
        with torch.no_grad():
            for slot in bucket.slots if flat is not None else ():
                held, late = slot.held, slot.parameter.grad
                if not slot.is_taken or held is None:
                    continue
                if flat is not None and not flat.is_sparse and self._lies_in(held, slot, flat):
                    held.data = held.div(scale) if is_here and scale != 1.0 else held.clone()
                if late is not None:
                    held.add_(late)
                slot.parameter.grad = held
        if not is_here:  # a collective that nobody waited for may still write into these
            bucket.spare = bucket.persistent = None
        bucket.forget_buffer()
