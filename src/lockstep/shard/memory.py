"""Whose memory gradients of a sharded model lie in.

Autograd adds whole gradients to ``.grad`` of the whole parameters.  They are packed as they are scattered, rank by
rank, and what comes back is added to ``.grad`` of the shards, which is a DTensor.  A window's gradients are added to
what is there, as autograd does; a pass that does not synchronise leaves whole gradients behind, as with a replicated
model.

[Note: kept in the reduction's dtype]  Gradients that wait for a later pass are added up in the dtype in which they
will be reduced: in their buffer, if that is another dtype than autograd's.

What the engine needs of it is said in ``engine/memory.py``, and what each method is for in ``engine/grad_memory.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.bucket import LiveBucket, Slot, are_all_none, have_no_gradient
from lockstep.engine.memory import NOTHING, GradOwnership
from lockstep.shard.exchange import Load
from lockstep.shard.layout import Cut, Piece, Strided
from lockstep.shard.parameter import ShardedParameter
from lockstep.shard.store import spread
from lockstep.shard.uneven import Attendance

_MOST_NAMES = 8
_gradient, _grad_of = attrgetter("leaf.grad"), attrgetter("grad")


def _plain(gradient: Tensor) -> Tensor:
    """A gradient as plain numbers: parameters of a class of their own may have gradients of it."""
    if type(gradient) is Tensor:
        return gradient
    plain = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    plain.copy_(gradient)  # what that returns is for the class to say
    return plain


class ShardMemory:
    """Moves gradients from whole parameters into flat buffers, and from those to the shards."""

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance
        self.ownership = GradOwnership.ALIAS
        self.reduce_dtype: torch.dtype | None = None  # each unit has its own
        self.is_shared = False  # a whole parameter belongs to one unit
        self.loads: list[Load] = []
        self.divides = True  # unless a communication hook does
        self._places: dict[Slot, tuple[ShardedParameter, Cut, tuple[Piece, ...]]] = {}
        self._homes: dict[Slot, tuple[ShardedParameter, Strided]] = {}  # this rank's part of each, in what comes back

    def use(self, loads: Sequence[Load], slots: Mapping[str, Slot]) -> None:
        """Go by another plan."""
        self.loads = list(loads)
        self._places = {
            slots[cut.name]: (parameter, cut, pieces)
            for load in loads
            for parameter, cut, pieces in zip(load.parameters, load.layout.cuts, load.layout.pieces, strict=True)
        }

        self._homes = {
            slot: (parameter, cut.shard(parameter.mesh.rank)) for slot, (parameter, cut, _) in self._places.items()
        }

    def travel_dtype(self, bucket: LiveBucket) -> torch.dtype:
        dtype = bucket.travel_dtype()
        wanted = self.loads[bucket.index].unit.wants_reduce_dtype
        return wanted if wanted is not None and dtype.is_floating_point else dtype

    # ---------------------------------------------------------------- into the buffer

    def stage(self, slot: Slot, gradient: Tensor | None, scale: float) -> None:
        """Nothing: whole gradients leave soon, with their unit."""

    def put(self, slot: Slot, gradient: Tensor, scale: float) -> None:
        if self._attendance.counts_as_zero:
            return
        self._move(slot.bucket, [slot], [gradient])
        slot.bucket.mark_taken([slot])

    def fold(self, slot: Slot, scale: float) -> None:
        late = slot.parameter.grad
        if late is not None:
            self.put(slot, late, scale)
            slot.parameter.grad = None

    def absorb(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor], scale: float) -> None:
        if not self._attendance.counts_as_zero:
            self._move(bucket, slots, gradients)
            bucket.mark_taken(slots)
        if have_no_gradient(slots):
            return
        for slot in slots:
            if slot.parameter.grad is not None:
                self.fold(slot, scale)

    def pack(self, bucket: LiveBucket, gradients: Sequence[Tensor | None], scale: float, *, takes: bool) -> Tensor:
        is_idle = self._attendance.counts_as_zero
        coming = [(slot, g) for slot, g in zip(bucket.slots, gradients, strict=True) if g is not None and not is_idle]
        self._move(bucket, [slot for slot, _ in coming], [g for _, g in coming])
        flat = self._buffer_of(bucket)
        is_partial = self.loads[bucket.index].partial is not None
        for slot, gradient in zip(bucket.slots, gradients, strict=True):
            if (gradient is None or is_idle) and not slot.is_taken:
                for piece in self._places[slot][2]:
                    torch_private.alias(flat, *piece.ranked).zero_()
                slot.dirty = slot.dirty and (is_partial or not is_idle)  # who has no data has not used it
            if takes and gradient is not None:
                slot.parameter.grad = None
        bucket.mark_taken(bucket.slots)
        return flat

    def _buffer_of(self, bucket: LiveBucket) -> Tensor:
        """The flat buffer; what it is padded with is zero, and the rest is written before it leaves."""
        if bucket.flat is None:
            load = self.loads[bucket.index]
            make = torch.zeros if load.layout.has_padding else torch.empty
            bucket.flat = make(load.layout.num_elements, dtype=self.travel_dtype(bucket), device=load.unit.device)
        return bucket.flat

    def zeros(self, bucket: LiveBucket, dtype: torch.dtype) -> Tensor:
        load = self.loads[bucket.index]
        return torch.zeros(load.layout.num_elements, dtype=self.travel_dtype(bucket), device=load.unit.device)

    def _move(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> None:
        """Add gradients of one bucket to its buffer, or copy them where it is still empty."""
        if not slots or self._pack_at_once(bucket, gradients):
            return
        flat = self._buffer_of(bucket)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        scale = self._scale(bucket, flat)
        with torch.no_grad():
            for slot, gradient in zip(slots, gradients, strict=True):
                local = _plain(self._places[slot][0].local_gradient(gradient).detach())
                if not local.is_contiguous():
                    local = local.contiguous()
                for piece in self._places[slot][2]:
                    source = torch_private.alias(local, *piece.full)
                    target = torch_private.alias(flat, *piece.ranked)
                    if slot.is_taken:
                        target.add_(source, alpha=scale)
                    elif scale != 1.0 and source.dtype is target.dtype:
                        torch.mul(source, scale, out=target)
                    elif scale != 1.0:
                        target.copy_(source).mul_(scale)
                    else:
                        targets.append(target)
                        sources.append(source)
            if targets:
                torch_private.foreach_copy(targets, sources)

    def _pack_at_once(self, bucket: LiveBucket, gradients: Sequence[Tensor]) -> bool:
        """Fill an empty buffer with the gradients of all its parameters, by one kernel; returns whether it could."""
        load = self.loads[bucket.index]
        if bucket.flat is not None or len(gradients) != len(bucket.slots) or not load.packs_at_once:
            return False
        flat = torch.empty(load.layout.num_elements, dtype=self.travel_dtype(bucket), device=load.unit.device)
        with torch.no_grad():
            if not load.pack(gradients, flat):
                return False
            scale = self._scale(bucket, flat)
            if scale != 1.0:
                flat.mul_(scale)
        bucket.flat = flat
        return True

    def _scale(self, bucket: LiveBucket, flat: Tensor) -> float:
        return self.loads[bucket.index].scale(flat) if self.divides else 1.0

    def can_fold(self, slots: Sequence[Slot]) -> bool:
        """Whole gradients are plain numbers, or are made so."""
        return True

    def take_packed(self, bucket: LiveBucket, flat: Tensor) -> None:
        """For sparse gradients, which no sharded parameter has."""

    def serve_hook(self, device: torch.device) -> None:
        """A hook is given a buffer of its own (exchange.py)."""

    def keep(self, bucket: LiveBucket) -> None:
        """After a pass that does not synchronise: see [Note: kept in the reduction's dtype], and in uneven.py
        [Note: zeros]."""
        if bucket.travel_dtype() is self.travel_dtype(bucket) and not self._attendance.is_joining:
            return
        for slot in bucket.slots:
            self.fold(slot, 1.0)
            if self._attendance.counts_as_zero:
                slot.dirty = slot.is_taken

    # ---------------------------------------------------------------- out of the buffer

    def kept(self) -> str:
        """Which shards have a gradient that the next one is added to, in words, for ranks to compare."""
        slots = list(self._homes)
        flags = bytes(map(is_not, map(_gradient, slots), repeat(None)))
        if not any(flags):
            return ""
        if all(flags):
            return "of all parameters"
        names = [slot.name for slot, has_gradient in zip(slots, flags, strict=True) if has_gradient]
        digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
        return f"of {', '.join(names[:_MOST_NAMES])}{', ...' if len(names) > _MOST_NAMES else ''} ({digest})"

    def hand_out(
        self,
        bucket: LiveBucket,
        is_used: Callable[[Slot], bool] | None = None,
        *,
        in_place: bool = False,
        into: Mapping[Slot, Tensor] = NOTHING,
    ) -> None:
        flat, load = bucket.flat, self.loads[bucket.index]
        if flat is None:
            return
        if load.is_kept:
            return  # it stays in its buffer for a later window
        if load.partial is None:
            own = load.parameters[0].local
            is_same = flat.dtype is own.dtype and flat.device == own.device
            slots = bucket.slots if is_used is None else list(filter(is_used, bucket.slots))  # frozen by now or not
            with torch.no_grad():
                if not is_same or not self._give_at_once(slots, flat):
                    for slot in slots:
                        self._give(slot, flat, None if is_same else own)
            for slot in bucket.slots:
                slot.dirty = False
        # Where replicas reduce it in a later window, it is used in that one too.
        bucket.forget_buffer()

    def _give_at_once(self, slots: Sequence[Slot], flat: Tensor) -> bool:
        """Give shards without a gradient theirs, to which no hook looks; returns whether there are no others."""
        homes = list(map(self._homes.__getitem__, slots))
        shards = [parameter.sharded for parameter, _ in homes]
        if not are_all_none(map(_grad_of, shards)) or any(map(torch_private.hooks_after, shards)):
            return False
        for shard, (_, place) in zip(shards, homes, strict=True):
            value = torch_private.alias(flat, *place)
            shard.grad = torch_private.dtensor_around(value, torch_private.spec_of(shard))
        return True

    def _give(self, slot: Slot, flat: Tensor, like: Tensor | None) -> None:
        """Give a shard its gradient, with dtype and device of ``like`` where that has others."""
        parameter, place = self._homes[slot]
        sharded = parameter.sharded
        value = torch_private.alias(flat, *place)
        if like is not None:
            value = value.to(device=like.device, dtype=like.dtype)
        before = sharded.grad
        if before is None:
            sharded.grad = torch_private.dtensor_around(value, torch_private.spec_of(sharded))
        else:
            torch_private.local_of(before).add_(value)
        hooks = torch_private.hooks_after(sharded)
        if hooks and not slot.bucket.has_more:
            for hook in hooks.values():
                hook(sharded)

    def add(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None = None) -> None:
        """Add what came late: the shards' gradients are added to anyway."""
        self.hand_out(bucket, is_used)

    # ---------------------------------------------------------------- when a window is abandoned

    def give_back(self, bucket: LiveBucket, scale: float) -> None:
        """Undo the taking, where nothing was sent: whole gradients lie in ``.grad`` again.  What was sent is lost."""
        load, flat = self.loads[bucket.index], bucket.flat
        if flat is not None and not bucket.has_left and not load.is_kept:
            with torch.no_grad():
                self._unpack(bucket, load, flat)
        load.partial = None
        load.is_kept = False
        bucket.forget_buffer()

    def _unpack(self, bucket: LiveBucket, load: Load, flat: Tensor) -> None:
        whole = [flat.new_empty(cut.spec.shape) for cut in load.layout.cuts]
        spread(load.layout, flat, whole)
        scale = load.scale(flat) if self.divides else 1.0
        for parameter, gradient in zip(load.parameters, whole, strict=True):
            slot = next(slot for slot in bucket.slots if self._places[slot][0] is parameter)
            if slot.is_taken and slot.parameter.grad is None and parameter.whole_spec is None:
                slot.parameter.grad = gradient.div_(scale).to(slot.parameter.dtype)

    def take_partial(self) -> dict[ShardedParameter, tuple[Tensor, bool]]:
        """What was reduced over the shards and not over the replicas yet, by parameter; then comes another plan."""
        found = {}
        for slot, (parameter, place) in self._homes.items():
            partial = self.loads[slot.bucket.index].partial
            if partial is not None:
                found[parameter] = (torch_private.alias(partial, *place), slot.dirty)
        return found

    def put_partial(self, found: Mapping[ShardedParameter, tuple[Tensor, bool]]) -> None:
        """Let the loads of another plan have it."""
        for slot, (parameter, place) in self._homes.items():
            if parameter not in found:
                continue
            value, was_used = found[parameter]
            load = self.loads[slot.bucket.index]
            if load.partial is None:
                load.partial = value.new_zeros(load.layout.shard_elements)
            torch_private.alias(load.partial, *place).copy_(value)
            slot.dirty = slot.dirty or was_used

    def drop(self, loads: Sequence[Load], buckets: Sequence[LiveBucket]) -> None:
        """Forget the gradients of these that wait for a later window, wherever they lie."""
        for bucket in buckets:
            load = self.loads[bucket.index]
            if load in loads:
                load.partial, load.is_kept = None, False
                bucket.forget_buffer()
                self.forget(bucket.slots)

    def forget(self, slots: Iterable[Slot]) -> None:
        """Drop the whole gradients of these."""
        for slot in slots:
            slot.parameter.grad = None
            slot.dirty = False
