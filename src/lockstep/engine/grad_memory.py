"""Whose memory gradients lie in, and how they come into a flat buffer; ``grad_results.py`` has the way back.

[Note: who owns .grad]  Three ways, chosen by ``gradient_as_bucket_view``:
  ``ALIAS`` (None, the default)  .grad points into a flat buffer that belongs to this window.  No copy back; a
      reference to an old .grad stays valid, because a buffer that anything still lies in is never written again.  On
      a GPU the gradients of a window that was zeroed to None cost no memory while the next forward runs; on the CPU
      the buffer is kept and used again once it is free.
  ``PERSISTENT`` (True)  .grad points into a buffer that is kept, so addresses never change.
  ``OWN`` (False)  .grad keeps its own memory and the result is copied into it.
In all three the tensor object in .grad survives: only what it points at changes.  And as in autograd itself, a .grad
that was there before the backward keeps its memory where somebody else looks at that (a flat tensor of the program's
own that all gradients are views of, an array of numpy's): the result is copied into it.

[Note: taken]  A gradient that has gone into the flat buffer is taken out of ``.grad``, which is None until the result
is handed out.  So nobody reads or writes memory that travels; and whatever autograd adds after that lies in a ``.grad``
of its own, and is known to have come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket, Slot, are_all_none, flatten_gradient, have_no_gradient, local_tensor
from lockstep.engine.grad_results import GradResults
from lockstep.engine.grads import move_out_of
from lockstep.engine.memory import GradOwnership

_dtype_of = attrgetter("dtype")
_grad_of = attrgetter("grad")


class GradMemory(GradResults):
    """Moves gradients between ``.grad`` and the flat buffers of one wrapped model.  The way back is inherited.

    ``scale`` is what gradients are multiplied with on their way into a buffer, so that a sum over ranks is a mean.
    """

    def __init__(self, ownership: GradOwnership, reduce_dtype: torch.dtype | None = None) -> None:
        super().__init__(ownership)
        self.reduce_dtype = reduce_dtype
        self.keeps_buffers = False

    def serve_hook(self, device: torch.device) -> None:
        """A communication hook will be given the buffers: on a GPU they are kept, and never become ``.grad``.

        What it starts holds on to its buffer until the device is done and someone has looked, which is later than the
        next step; so a buffer that waited to be free would be made anew in every step.
        """
        if device.type != "cpu":
            self.keeps_buffers = True
            if self.ownership is GradOwnership.ALIAS:
                self.ownership = GradOwnership.OWN

    @property
    def frees_gradients(self) -> bool:
        """Whether a gradient that is dropped from ``.grad`` is gone."""
        return self.ownership is not GradOwnership.PERSISTENT and not self.keeps_buffers and not self.is_shared

    # ---------------------------------------------------------------- into the buffer, one by one

    def stage(self, slot: Slot, gradient: Tensor | None, scale: float) -> None:
        """Take a large gradient before its bucket is complete (see STAGE_BYTES)."""
        if gradient is None or gradient.requires_grad or not self.aliases:
            return
        bucket = slot.bucket
        num_bytes = slot.num_elements * gradient.element_size()
        if gradient.dtype is not self.travel_dtype(bucket) or gradient.untyped_storage().nbytes() > num_bytes:
            return  # the second: it lies in a flat buffer already, since it was zeroed in place
        if gradient._version and torch_private.memory_owners(gradient) > 1:
            return  # see _note_onlookers
        with torch.no_grad():
            if bucket.flat is None:
                bucket.flat = self._buffer_for(bucket, gradient.dtype).view(-1)
            view = bucket.view(slot)
            torch.mul(gradient, scale, out=view) if scale != 1.0 else view.copy_(gradient)
            gradient.data = view
        self._take(slot, gradient)

    def put(self, slot: Slot, gradient: Tensor, scale: float) -> None:
        """Copy a gradient that is not in ``.grad`` into the buffer, or add it to what was taken before."""
        bucket = slot.bucket
        with torch.no_grad():
            if bucket.flat is None:
                dtype = self.travel_dtype(bucket)
                # What lies in the buffer that is kept may still have to be read, by the graph that made the gradient.
                bucket.flat = (
                    torch.empty(bucket.spec.num_elements, dtype=dtype, device=gradient.device)
                    if self.ownership is GradOwnership.PERSISTENT
                    else self._buffer_for(bucket, dtype).view(-1)
                )
            view = bucket.view(slot)
            gradient = local_tensor(gradient)
            if slot.is_taken:
                view.add_(gradient, alpha=scale)
            elif scale != 1.0 and view.dtype is gradient.dtype:
                torch.mul(gradient, scale, out=view)
            else:
                view.copy_(gradient)
                if scale != 1.0:
                    view.mul_(scale)
        slot.is_taken = bucket.has_taken = True

    def fold(self, slot: Slot, scale: float) -> None:
        """Add what autograd put into ``.grad`` after the rest was taken, while the bucket is still here."""
        late = slot.parameter.grad
        if late is None:
            return
        with torch.no_grad():
            slot.bucket.view(slot).add_(local_tensor(late), alpha=scale)
        slot.parameter.grad = None

    def _take(self, slot: Slot, gradient: Tensor) -> None:
        slot.held, slot.is_taken, slot.bucket.has_taken = gradient, True, True
        slot.parameter.grad = None

    # ---------------------------------------------------------------- into the buffer, as a graph delivers them

    def absorb(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor], scale: float) -> None:
        """Take gradients that a graph computed, and what has accumulated in ``.grad`` before, if anything has.

        Autograd runs compiled backwards without recording, so nothing here needs to turn it off.
        """
        dtypes = list(map(_dtype_of, gradients))
        dtype = self.travel_dtype(bucket)
        accumulated = self._accumulated(slots)
        is_first = not any(slot.is_taken for slot in slots) if bucket.has_taken else True
        if bucket.flat is None:
            if accumulated is None and scale == 1.0 and self._one_call_packs(bucket, slots, dtypes, dtype):
                bucket.flat = torch_private.flatten_dense(list(gradients))
                bucket.mark_taken(slots)
                return
            bucket.flat = self._buffer_for(bucket, dtype).view(-1)
        flat = bucket.flat
        if accumulated is not None:
            self._note_onlookers(bucket, slots, accumulated)
            move_out_of(flat, accumulated)
        if len(slots) == len(bucket.slots):
            views = bucket.views(flat)
            bucket.parts = views if is_first else None
        else:
            views = [torch_private.alias(flat, slot.shape, slot.stride, slot.offset) for slot in slots]
        if not is_first:
            for slot, view, gradient in zip(slots, views, gradients, strict=True):
                if slot.is_taken:
                    view.add_(gradient, alpha=scale)
                else:
                    torch.mul(gradient, scale, out=view) if scale != 1.0 else view.copy_(gradient)
        elif scale != 1.0 and set(dtypes) == {dtype}:
            for view, gradient in zip(views, gradients, strict=True):
                torch.mul(gradient, scale, out=view)
        else:
            _copy_by_kind(views, gradients, dtypes, all_row_major=bucket.all_row_major)
            if scale != 1.0:
                torch_private.foreach_mul(views, scale)
        if accumulated is not None:
            for slot, view, value in zip(slots, views, accumulated, strict=True):
                if value is not None:
                    view.add_(value, alpha=scale)
                    slot.held = value
                    slot.parameter.grad = None
        bucket.mark_taken(slots)

    def room_for(self, slot: Slot) -> Tensor:
        """The part of the buffer in which a graph is to make a gradient; who has made it marks it as taken."""
        bucket = slot.bucket
        if bucket.flat is None:
            bucket.flat = self._buffer_for(bucket, self.travel_dtype(bucket)).view(-1)
        return bucket.view(slot)

    @staticmethod
    def _accumulated(slots: Sequence[Slot]) -> list[Tensor | None] | None:
        """What lies in .grad of each parameter; None if nothing does."""
        return None if have_no_gradient(slots) else [slot.parameter.grad for slot in slots]

    def can_fold(self, slots: Sequence[Slot]) -> bool:
        """Whether what lies in ``.grad`` can be added to a buffer of plain numbers."""
        return have_no_gradient(slots) or all(
            (g := slot.parameter.grad) is None or not (g.is_sparse or g.requires_grad or slot.is_dtensor)
            for slot in slots
        )

    def _one_call_packs(
        self, bucket: LiveBucket, slots: Sequence[Slot], dtypes: Sequence[torch.dtype], dtype: torch.dtype
    ) -> bool:
        """Whether the buffer is new each time and its parts lie as the gradients do, so that none need be named."""
        if bucket.parameters[0].device.type == "cpu" or self._keeps(bucket):
            return False
        is_whole = len(slots) == len(bucket.slots) > 1  # what is alone would come back as a view of itself
        return is_whole and bucket.all_row_major and set(dtypes) == {dtype}

    # ---------------------------------------------------------------- into the buffer, the whole bucket

    def pack(self, bucket: LiveBucket, gradients: Sequence[Tensor | None], scale: float, *, takes: bool) -> Tensor:
        """Complete the flat buffer with ``gradients`` (one per slot, None for none or for one that was taken).

        ``takes``: the gradients are those in ``.grad``, and are taken out of it.
        """
        bucket.gradients = list(gradients)
        takes = takes and not self.is_shared
        if bucket.flat is not None:
            self._fill(bucket, bucket.flat, scale)
            flat = bucket.flat
        else:
            flat = self._pack_new(bucket, takes)
            if scale != 1.0:
                flat.mul_(scale)
        bucket.flat = flat
        if takes:
            self.take_packed(bucket, flat)
        return flat

    def _pack_new(self, bucket: LiveBucket, takes: bool) -> Tensor:
        slots, gradients = bucket.slots, bucket.gradients
        dtype = self.travel_dtype(bucket)
        if takes:
            in_place = self._already_flat(bucket, dtype)
            if in_place is not None:
                bucket.in_place = True
                return in_place
        keeps = takes and self._keeps(bucket)  # otherwise .grad may lie in the buffer that is kept
        if bucket.all_row_major and not keeps and _all_are(gradients, dtype):
            flat = torch_private.flatten_dense(gradients)  # type: ignore[arg-type]
            return flat.clone() if len(gradients) == 1 else flat  # a tensor that is alone comes back as a view
        like = torch.empty(0, dtype=dtype, device=bucket.parameters[0].device)
        pieces = [flatten_gradient(g, slot, like) for g, slot in zip(gradients, slots, strict=True)]
        if not keeps:
            return torch.cat(pieces)
        buffer = self._buffer_for(bucket, dtype)
        home = buffer.untyped_storage().data_ptr()
        pieces = [p.clone() if p.untyped_storage().data_ptr() == home else p for p in pieces]
        return torch.cat(pieces, out=buffer).view(-1)

    def _already_flat(self, bucket: LiveBucket, dtype: torch.dtype) -> Tensor | None:
        """The gradients as they lie, where they already form this bucket's flat buffer: nothing to pack then.

        True for gradients that were zeroed in place since the last window, and for a parameter that is alone.
        """
        first = bucket.gradients[0]
        if first is None or first.requires_grad or bucket.slots[0].is_dtensor or self.ownership is GradOwnership.OWN:
            return None
        base, itemsize = first.data_ptr(), first.element_size()
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            if (
                gradient is None
                or gradient.data_ptr() != base + slot.offset * itemsize
                or gradient.dtype is not dtype
                or gradient.stride() != slot.stride
                or gradient.requires_grad
            ):
                return None
        num_elements = bucket.spec.num_elements
        if self.ownership is GradOwnership.PERSISTENT:
            if bucket.persistent is None or base != bucket.persistent.data_ptr():
                return None
        else:
            # Nobody else may look: autograd hands out gradients that share memory with ones it still has to read.
            owners = len(bucket.slots) + (bucket.spare is not None and bucket.spare.data_ptr() == base)
            if torch_private.memory_owners(first) > owners:
                return None
            if len(bucket.slots) > 1:  # neighbours in memory may still be separate allocations
                room = first.untyped_storage().nbytes() - first.storage_offset() * itemsize
                if room < num_elements * itemsize:
                    return None
        return first.detach().as_strided((num_elements,), (1,))

    def _fill(self, bucket: LiveBucket, flat: Tensor, scale: float) -> None:
        """Copy in what was not taken one by one; add what came to those that were."""
        views = bucket.views(flat)
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for slot, gradient, view in zip(bucket.slots, bucket.gradients, views, strict=True):
            if slot.is_taken:
                if gradient is not None:
                    self.fold(slot, scale)
            elif gradient is None:
                view.zero_()
            else:
                sources.append(local_tensor(gradient).detach())
                targets.append(view)
        if sources:
            torch_private.foreach_copy(list(targets), list(sources))
            if scale != 1.0:
                torch_private.foreach_mul(targets, scale)

    def take_packed(self, bucket: LiveBucket, flat: Tensor) -> None:
        """Take the gradients that were packed out of ``.grad``.

        Where the result will lie in the buffer, the memory they lay in is free at once.
        """
        moves = self.aliases and not (bucket.in_place or flat.is_sparse)
        if moves:
            # Autograd adds in place to what was there before, which the version shows.
            were_there = [g if g is None or g._version else None for g in bucket.gradients]
            self._note_onlookers(bucket, bucket.slots, were_there)
        views = bucket.views(flat) if moves else [flat] * len(bucket.slots)
        dtype = flat.dtype
        for slot, gradient, view in zip(bucket.slots, bucket.gradients, views, strict=True):
            if gradient is None or slot.is_taken:
                continue
            if (
                moves
                and slot.dirty
                and not slot.stays_put
                and gradient.dtype is dtype
                and not (gradient.requires_grad or gradient.is_sparse or slot.is_dtensor)
            ):
                gradient.data = view
            slot.held, slot.is_taken = gradient, True
            slot.parameter.grad = None
        bucket.has_taken = True
        bucket.gradients = []

    def _note_onlookers(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor | None]) -> None:
        """Mark those of these gradients, all there before the backward, in whose memory tensors of others lie."""
        if self.ownership is not GradOwnership.ALIAS or are_all_none(gradients):
            return
        together: dict[int, list[tuple[Slot, Tensor]]] = {}
        for slot, gradient in zip(slots, gradients, strict=True):
            if gradient is not None and not (gradient.is_sparse or slot.is_dtensor):
                together.setdefault(gradient.untyped_storage().data_ptr(), []).append((slot, gradient))
        for home, members in together.items():
            kept = (bucket.spare, bucket.persistent)
            ours = len(members) + sum(b is not None and b.untyped_storage().data_ptr() == home for b in kept)
            if torch_private.memory_owners(members[0][1]) > ours:
                for slot, _ in members:
                    slot.stays_put = True

    # ---------------------------------------------------------------- the buffer

    def travel_dtype(self, bucket: LiveBucket) -> torch.dtype:
        """The dtype a bucket travels in."""
        dtype = bucket.travel_dtype()
        return self.reduce_dtype if self.reduce_dtype is not None and dtype.is_floating_point else dtype

    def _keeps(self, bucket: LiveBucket) -> bool:
        return self.ownership is GradOwnership.PERSISTENT or (
            self.keeps_buffers and bucket.parameters[0].device.type != "cpu"
        )

    def _buffer_for(self, bucket: LiveBucket, dtype: torch.dtype) -> Tensor:
        """A buffer for the bucket; with ``PERSISTENT``, gradients that were zeroed in place still lie in it."""
        device = bucket.parameters[0].device
        if self.ownership is not GradOwnership.PERSISTENT:
            if device.type != "cpu" and not self.keeps_buffers:
                return torch.empty(bucket.spec.num_elements, dtype=dtype, device=device)
            # On the CPU a freed buffer leaves a hole in the heap; so the last one is kept, and used again if free.
            spare = bucket.spare
            if (
                spare is None
                or spare.dtype is not dtype
                or spare.device != device
                or (not self.keeps_buffers and torch_private.memory_owners(spare) > 1)
            ):
                spare = bucket.spare = torch.empty(bucket.spec.num_elements, dtype=dtype, device=device)
            return spare
        kept = bucket.persistent
        if kept is None or kept.dtype is not dtype or kept.device != device:
            kept = bucket.persistent = torch.empty(bucket.spec.num_elements, dtype=dtype, device=device)
        return kept

    def zeros(self, bucket: LiveBucket, dtype: torch.dtype) -> Tensor:
        """What a rank sends that has nothing for a bucket."""
        return torch.zeros(bucket.spec.num_elements, dtype=dtype, device=bucket.parameters[0].device)


def _all_are(gradients: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
    return all(g is not None and g.dtype is dtype for g in gradients)


def _copy_by_kind(
    targets: Sequence[Tensor], sources: Sequence[Tensor], dtypes: Sequence[torch.dtype], *, all_row_major: bool
) -> None:
    """Copy each source into its target, those of one dtype and memory order by one kernel, as it takes no others."""
    kinds: Sequence[Any] = dtypes
    if not (all_row_major and all(map(Tensor.is_contiguous, sources))):
        same_order = [s.stride() == t.stride() for s, t in zip(sources, targets, strict=True)]
        kinds = list(zip(dtypes, same_order, strict=True))
    found = dict.fromkeys(kinds)
    if len(found) == 1:
        torch_private.foreach_copy(list(targets), list(sources))
        return
    for kind in found:
        chosen = [k == kind for k in kinds]
        torch_private.foreach_copy(list(compress(targets, chosen)), list(compress(sources, chosen)))
