"""Packing: how the gradients of a bucket come to lie in one flat buffer, and whose memory that is.

[Note: who owns .grad]  Three ways, chosen by ``gradient_as_bucket_view``:
  ``ALIAS`` (None, the default)  .grad points into a flat buffer that belongs to this window.  No copy back; a
      reference to an old .grad stays valid, because a buffer that anything still lies in is never written again.  On
      a GPU the gradients of a window that was zeroed to None cost no memory while the next forward runs; on the CPU
      the buffer is kept and used again once it is free.
  ``PERSISTENT`` (True)  .grad points into a buffer that is kept, so addresses never change.
  ``OWN`` (False)  .grad keeps its own memory and the result is copied into it.
In all three the tensor object in .grad survives: only what it points at changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket, Slot, flatten_gradient, local_tensor

_dtype_of = attrgetter("dtype")


class GradOwnership(Enum):
    """See [Note: who owns .grad]."""

    ALIAS = "alias"
    PERSISTENT = "persistent"
    OWN = "own"


class Packing:
    """Mixed into the reducer."""

    world: int
    divisor: float | None
    comm_hook: Any
    backend: Callable[[torch.device], str]
    ownership: GradOwnership
    reduce_dtype: torch.dtype | None
    shares_parameters: bool

    # ---------------------------------------------------------------- as hooks bring them

    def _pack(self, bucket: LiveBucket) -> Tensor:
        slots, gradients = bucket.slots, bucket.gradients
        like = self._travels_like(slots[0])
        bucket.num_adopted = 0
        in_place = None if self.shares_parameters else self._already_flat(bucket, like)
        if in_place is not None:
            return in_place
        if bucket.staging is not None:
            return self._fill_staging(bucket, bucket.staging)
        if bucket.all_row_major and self.ownership is not GradOwnership.PERSISTENT and _all_are(gradients, like.dtype):
            flat = torch_private.flatten_dense(gradients)  # type: ignore[arg-type]
            return flat.clone() if len(gradients) == 1 else flat  # a tensor that is alone comes back as a view
        pieces = [flatten_gradient(g, slot, like) for g, slot in zip(gradients, slots, strict=True)]
        if self.ownership is not GradOwnership.PERSISTENT:
            return torch.cat(pieces)
        buffer = self._buffer_for(bucket, like)
        home = buffer.untyped_storage().data_ptr()
        pieces = [p.clone() if p.untyped_storage().data_ptr() == home else p for p in pieces]
        return torch.cat(pieces, out=buffer)

    def _already_flat(self, bucket: LiveBucket, like: Tensor) -> Tensor | None:
        """The gradients as they lie, where they already form this bucket's flat buffer: nothing to pack then.

        True for gradients that were zeroed in place since the last window, and for a parameter that is alone.
        """
        first = bucket.gradients[0]
        if first is None or first.requires_grad or bucket.slots[0].is_dtensor:
            return None
        base, itemsize, dtype = first.data_ptr(), like.element_size(), like.dtype
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            if (
                gradient is None
                or gradient.data_ptr() != base + slot.offset * itemsize
                or gradient.dtype is not dtype
                or gradient.stride() != slot.stride
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
        bucket.num_adopted = len(bucket.slots)
        return first.detach().as_strided((num_elements,), (1,))

    def stage(self, slot: Slot, gradient: Tensor | None) -> None:
        """Move a large gradient into its place in the flat buffer before the bucket is complete (see STAGE_BYTES)."""
        if gradient is None or gradient.requires_grad or self.ownership is GradOwnership.OWN or self.shares_parameters:
            return
        like = self._travels_like(slot)
        num_bytes = slot.num_elements * gradient.element_size()
        if gradient.dtype is not like.dtype or gradient.untyped_storage().nbytes() > num_bytes:
            return  # the second: it lies in a flat buffer already, since it was zeroed in place
        bucket = slot.bucket
        with torch.no_grad():
            if bucket.staging is None:
                bucket.staging = self._buffer_for(bucket, like)
            view = torch_private.alias(bucket.staging, slot.shape, slot.stride, slot.offset)
            if self._divides_first(view):
                torch.mul(gradient, self._factor, out=view)
                slot.is_divided = bucket.has_divided = True
            else:
                view.copy_(gradient)
            gradient.data = view

    def unstage(self, bucket: LiveBucket) -> None:
        """The bucket does not leave in this pass after all: undo the division, since a later pass may add to it."""
        for slot in bucket.slots:
            if slot.is_divided and slot.parameter.grad is not None:
                slot.parameter.grad.div_(self._factor)
            slot.is_divided = False
        bucket.staging = None

    def _fill_staging(self, bucket: LiveBucket, staging: Tensor) -> Tensor:
        """Copy in what was not staged one by one."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for gradient, view in zip(bucket.gradients, bucket.views(staging), strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                sources.append(local_tensor(gradient).detach())
                targets.append(view)
        if sources:
            torch_private.foreach_copy(targets, sources)
        return staging.view(-1)  # a tensor of its own, so that whoever keeps it is counted as an owner

    # ---------------------------------------------------------------- as a compiled graph delivers them

    def pack_delivered(
        self,
        bucket: LiveBucket,
        gradients: Sequence[Tensor],
        accumulated: Sequence[Tensor | None] | None,
        *,
        leaves_now: bool,
    ) -> Tensor:
        """Pack gradients that a compiled graph delivers, and add what has accumulated in .grad to them, if any has.

        Autograd runs compiled backwards without recording, so nothing here needs to turn it off.
        """
        like, dtypes = bucket.parameters[0], list(map(_dtype_of, gradients))
        is_uniform = set(dtypes) == {like.dtype}
        if is_uniform and accumulated is None and self._one_call_packs(bucket, like):
            bucket.flat = torch_private.flatten_dense(list(gradients))
            return bucket.flat
        buffer = self._buffer_for(bucket, like)
        aside = None if accumulated is None else self._set_aside(bucket, accumulated, buffer)
        # A tensor of its own, so that a buffer that is kept can tell whether anyone still uses it.
        bucket.flat = flat = buffer.view(-1)
        views = bucket.views(flat)
        if is_uniform and aside is None and leaves_now and self._divides_on_the_way(like):
            for gradient, view, slot in zip(gradients, views, bucket.slots, strict=True):
                torch.mul(gradient, self._factor, out=view)
                slot.is_divided = bucket.has_divided = True
        else:
            _copy_by_kind(views, gradients, dtypes, all_row_major=bucket.all_row_major)
        if aside is not None:
            pairs = [(view, value) for view, value in zip(views, aside, strict=True) if value is not None]
            torch_private.foreach_add([view for view, _ in pairs], [value for _, value in pairs])
        return flat

    def _one_call_packs(self, bucket: LiveBucket, like: Tensor) -> bool:
        """Whether the buffer is new each time and its parts lie as the gradients do, so that none need be named."""
        if like.device.type == "cpu" or self.ownership is GradOwnership.PERSISTENT:
            return False
        return bucket.all_row_major and len(bucket.slots) > 1  # what is alone would come back as a view of itself

    def _divides_on_the_way(self, like: Tensor) -> bool:
        """Whether dividing costs nothing while the gradients move: not on a GPU, where one kernel moves them all."""
        return like.device.type == "cpu" and self._factor != 1.0 and self._divides_first(like)

    def _set_aside(
        self, bucket: LiveBucket, accumulated: Sequence[Tensor | None], buffer: Tensor
    ) -> list[Tensor | None]:
        """What has accumulated; copied where it lies in the buffer (kept, zeroed or not), which is written now."""
        home = buffer.untyped_storage().data_ptr()
        aside = list(accumulated)
        for position, (slot, value) in enumerate(zip(bucket.slots, accumulated, strict=True)):
            if value is not None and value.untyped_storage().data_ptr() == home:
                aside[position] = slot.kept_value = value.clone()
        return aside

    # ---------------------------------------------------------------- the buffer

    def _buffer_for(self, bucket: LiveBucket, like: Tensor) -> Tensor:
        if self.ownership is not GradOwnership.PERSISTENT:
            if like.device.type != "cpu":
                return like.new_empty(bucket.spec.num_elements)
            # On the CPU a freed buffer leaves a hole in the heap; so the last one is kept, and used again if free.
            spare = bucket.spare
            if (
                spare is None
                or spare.dtype is not like.dtype
                or spare.device != like.device
                or torch_private.memory_owners(spare) > 1
            ):
                spare = bucket.spare = like.new_empty(bucket.spec.num_elements)
            return spare
        kept = bucket.persistent
        if kept is None or kept.dtype is not like.dtype or kept.device != like.device:
            kept = bucket.persistent = like.new_empty(bucket.spec.num_elements)
        return kept

    def _travels_like(self, slot: Slot) -> Tensor:
        """A tensor of the dtype and on the device that this parameter's gradient travels in."""
        like = local_tensor(slot.parameter)
        if self.reduce_dtype is not None and like.is_floating_point():
            like = like.new_empty(0, dtype=self.reduce_dtype)
        return like

    # ---------------------------------------------------------------- the division that makes a sum a mean

    @property
    def _factor(self) -> float:
        return 1.0 / (self.world if self.divisor is None else self.divisor)

    def _divides_first(self, flat: Tensor) -> bool:
        """Whether gradients are divided here and summed by the backend, instead of averaged by the backend.

        The same on all ranks, since it must be the same operation.  gloo's mean is a sum and then a pass over the
        buffer in its own thread; on the CPU the division costs nothing while gradients move into the flat buffer.
        gloo's sum of fp16 gradients could also overflow.  A hook gets gradients undivided.
        """
        if self.comm_hook is not None:
            return False
        if self.divisor is not None or self.world == 1 or flat.is_complex():
            return True
        backend = self.backend(flat.device)
        if backend == "gloo":
            return flat.device.type == "cpu" or flat.dtype == torch.float16
        return backend != "nccl"

    def _divide(self, bucket: LiveBucket, flat: Tensor) -> None:
        """Divide what was not divided while it was staged."""
        factor = self._factor
        if factor == 1.0:
            return
        undivided = [not slot.is_divided for slot in bucket.slots]
        if all(undivided):
            flat.mul_(factor)
        elif any(undivided):
            views = bucket.views(flat)
            torch_private.foreach_mul([v for v, is_left in zip(views, undivided, strict=True) if is_left], factor)


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
    for kind in dict.fromkeys(kinds):
        chosen = [k == kind for k in kinds]
        torch_private.foreach_copy(list(compress(targets, chosen)), list(compress(sources, chosen)))


def leave_memory(slots: Iterable[Slot], buffers: Iterable[Tensor]) -> None:
    """Give every .grad that lies in one of these buffers memory of its own."""
    homes = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    for slot in slots:
        gradient = slot.parameter.grad
        if gradient is None or gradient.is_sparse or slot.is_dtensor:
            continue  # such a gradient never lies in a flat buffer
        if gradient.untyped_storage().data_ptr() in homes:
            gradient.data = gradient.clone()
