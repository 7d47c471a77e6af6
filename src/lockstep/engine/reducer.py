"""The reducer: the only place that starts and finishes a gradient collective.

A bucket is *launched* (packed into a flat buffer, its collective started) and *collected* (waited for, its result in
the flat buffer).  Anyone may call the two: the autograd hooks of the eager path (``engine/eager.py``) do, and so does
a compiled backward.  What the two do with comm hooks, averaging, dtypes and sparse gradients is decided here, once.

    launch(bucket, gradients) -> flat      pack, start
    collect(bucket)           -> flat      wait, finish
    write_back(bucket, ...)                .grad of each parameter

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

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from lockstep import errors, torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import LiveBucket, Slot, flatten_gradient, local_tensor
from lockstep.engine.flight import Flight, HookFlight, NoFlight, WorkFlight, blocks_host
from lockstep.engine.grad_bucket import GradBucket
from lockstep.engine.reducer_torch_names import ReducerTorchNames
from lockstep.engine.sparse import pack_sparse, start_sparse
from lockstep.observe.timeline import Timeline, now
from lockstep.plan import Plan

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


# torch's hooks that start one collective and nothing after it.
_ONE_COLLECTIVE = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    debugging_hooks.noop_hook,
)


class GradOwnership(Enum):
    """See [Note: who owns .grad]."""

    ALIAS = "alias"
    PERSISTENT = "persistent"
    OWN = "own"


class Reducer(ReducerTorchNames):
    """Packs, sends, receives and hands back the gradients of one wrapped model."""

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        process_group: dist.ProcessGroup,
        *,
        watch: Watch,
        timeline: Timeline,
        ownership: GradOwnership = GradOwnership.ALIAS,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.watch = watch
        self.timeline = timeline
        self.ownership = ownership
        self.reduce_dtype = reduce_dtype
        self.comm_hook: CommHook | None = None
        self.comm_hook_state: Any = None
        self.comm_hook_name = ""
        self.hook_keeps_order = False
        # None: the mean over the group. A number (set by join): what to divide by instead.
        self.divisor: float | None = None
        self.sparse_metadata: dict[str, Tensor] = {}
        self.num_buckets_reduced = 0
        self.shares_parameters = False  # with another wrapper, see engine/delivery.py
        self.use_plan(plan, slots)
        self.use_process_group(process_group)

    # ---------------------------------------------------------------- what and where

    def use_plan(self, plan: Plan, slots: Sequence[Slot]) -> None:
        """Lay the slots out as ``plan`` says.  Only between windows."""
        by_name = {slot.name: slot for slot in slots}
        self.plan = plan
        self.slots = list(slots)
        self.buckets = [LiveBucket(spec, [by_name[name] for name in spec.names]) for spec in plan]

    def use_process_group(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.world = process_group.size()
        self.rank = process_group.rank()
        self._backends: dict[torch.device, str] = {}

    def backend(self, device: torch.device) -> str:
        """The backend that serves ``device``; asked anew for a device the model was moved to."""
        name = self._backends.get(device)
        if name is None:
            name = self._backends[device] = torch_private.backend_name(self.process_group, device)
        return name

    def land(self, work: Any, tensor: Tensor, moment: str) -> None:
        """Wait for a collective on ``tensor`` that is not a bucket's."""
        WorkFlight(work, self._blocks_host(tensor)).land(self.watch, lambda: moment)

    def set_comm_hook(self, state: Any, hook: CommHook, name: str) -> None:
        if self.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. The hook in place is "
                f"{self.comm_hook_name}; write one hook that does both, or build a new wrapper."
            )
        self.comm_hook, self.comm_hook_state, self.comm_hook_name = hook, state, name
        self.hook_keeps_order = bool(getattr(hook, "keeps_order", False)) or any(hook is h for h in _ONE_COLLECTIVE)

    # ---------------------------------------------------------------- launch

    def launch(self, bucket: LiveBucket, gradients: Sequence[Tensor | None]) -> Tensor:
        """Pack ``gradients`` (one per slot, None for none) into a flat buffer and start its collective."""
        start = now()
        bucket.gradients = list(gradients)
        with torch.no_grad(), torch_private.RecordFunction(bucket.launch_name):
            if bucket.is_sparse:
                flat = pack_sparse(bucket.slots[0], bucket.gradients[0])
            else:
                flat = self._pack(bucket)
                if self._divides_first(flat):
                    self._divide(bucket, flat)
            bucket.flat = flat
            self.send(bucket, start)
        return flat

    def send(self, bucket: LiveBucket, start: int) -> None:
        """Start the collective of a bucket that is packed."""
        assert bucket.flat is not None
        packed = now()
        bucket.flight = self.start(bucket, bucket.flat)
        bucket.was_sent = True
        bucket.launched_ns = packed
        self.num_buckets_reduced += 1
        self.timeline.record("pack", start, packed, bucket.index)

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
        like = bucket.parameters[0].detach()
        is_mixed = {gradient.dtype for gradient in gradients} != {like.dtype}
        divides = leaves_now and not is_mixed and self._factor != 1.0 and self._divides_first(like)
        if accumulated is not None:
            flat = self._pack_onto(bucket, gradients, accumulated, like)
        elif like.device.type == "cpu" or self.ownership is GradOwnership.PERSISTENT or not bucket.all_row_major:
            flat = self._buffer_for(bucket, like).view(-1)
            views = bucket.views(flat)
            if divides:  # on the way, as it costs nothing there
                for gradient, view, slot in zip(gradients, views, bucket.slots, strict=True):
                    torch.mul(gradient, self._factor, out=view)
                    slot.is_divided = bucket.has_divided = True
            else:
                _copy_by_kind(views, gradients)
        elif is_mixed:
            flat = like.new_empty(bucket.spec.num_elements)
            _copy_by_kind(bucket.views(flat), gradients)
        else:
            flat = torch_private.flatten_dense(list(gradients))
            if len(gradients) == 1:  # a tensor that is alone comes back as a view
                flat = flat.clone()
        bucket.flat = flat
        return flat

    def _pack_onto(
        self, bucket: LiveBucket, gradients: Sequence[Tensor], accumulated: Sequence[Tensor | None], like: Tensor
    ) -> Tensor:
        buffer = self._buffer_for(bucket, like)
        home = buffer.untyped_storage().data_ptr()
        # What lies in the buffer itself (gradients that were kept, zeroed or not) is read before it is written.
        aside = list(accumulated)
        for position, (slot, value) in enumerate(zip(bucket.slots, accumulated, strict=True)):
            if value is not None and value.untyped_storage().data_ptr() == home:
                aside[position] = slot.kept_value = value.clone()
        flat = buffer.view(-1)
        views = bucket.views(flat)
        _copy_by_kind(views, gradients)
        pairs = [(view, a) for view, a in zip(views, aside, strict=True) if a is not None]
        torch_private.foreach_add([view for view, _ in pairs], [a for _, a in pairs])
        return flat

    def send_delivered(self, bucket: LiveBucket) -> None:
        """Start the collective of a bucket that a compiled graph delivered."""
        assert bucket.flat is not None
        start = now()
        with torch_private.RecordFunction(bucket.launch_name):
            if self._divides_first(bucket.flat):
                self._divide(bucket, bucket.flat)
            self.send(bucket, start)

    def finish_delivered(self, bucket: LiveBucket) -> None:
        """.grad lies in the buffer already; give it memory of its own where that was asked for."""
        for slot in bucket.slots:
            slot.dirty = False
        if self.ownership is GradOwnership.OWN:
            for slot in bucket.slots:
                kept, slot.kept_grad = slot.kept_grad, None
                gradient = slot.parameter.grad
                if kept is not None and gradient is not None:
                    slot.parameter.grad = kept.copy_(gradient)
                elif gradient is not None:
                    gradient.data = gradient.clone()
        bucket.clear()

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
            piece = bucket.staging.narrow(0, slot.offset, slot.num_elements)
            view = piece.view(slot.shape) if slot.is_dense_row_major else piece.as_strided(slot.shape, slot.stride)
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

    # ---------------------------------------------------------------- the collective itself

    def start(self, bucket: LiveBucket, flat: Tensor) -> Flight:
        """Start the reduction of ``flat``: the comm hook's if there is one, an averaging all-reduce otherwise."""
        if self.comm_hook is not None:
            return self._start_hook(bucket, flat)
        if flat.is_sparse:
            return start_sparse(
                flat,
                self.process_group,
                self.backend(flat.device),
                divisor=1.0 / self._factor,
                known_rows=self.sparse_metadata.get(bucket.slots[0].name),
            )
        if flat.numel() == 0 or self.world == 1:
            return NoFlight()  # the mean over one rank is there already
        op = dist.ReduceOp.SUM if self._divides_first(flat) else dist.ReduceOp.AVG
        wire = torch.view_as_real(flat) if flat.is_complex() else flat
        flight = WorkFlight(torch_private.all_reduce(self.process_group, wire, op), self._blocks_host(flat))
        if self.timeline.precise and self._blocks_host(flat):
            flight.note_landing()
        return flight

    def _start_hook(self, bucket: LiveBucket, flat: Tensor) -> Flight:
        assert self.comm_hook is not None
        self._finish_previous_hook(bucket, flat)
        view = GradBucket(bucket, flat, is_last=bucket is self.buckets[-1])
        try:
            future = self.comm_hook(self.comm_hook_state, view)
        except Exception as error:
            error.add_note(
                f"lockstep: raised by the communication hook {self.comm_hook_name} on rank {self.rank} for bucket "
                f"{bucket.index} ({', '.join(bucket.spec.names[:5])}{', ...' if len(bucket.slots) > 5 else ''})."
            )
            raise
        if not (callable(getattr(future, "wait", None)) and callable(getattr(future, "then", None))):
            raise errors.bad_hook_result(self.comm_hook_name, type(future).__name__)
        return HookFlight(future, self.comm_hook_name)

    def _finish_previous_hook(self, bucket: LiveBucket, flat: Tensor) -> None:
        """On a backend whose follow-up collectives start in its own threads, hooks run one bucket after the other.

        A hook may start another collective when its first one is done (PowerSGD does). With two buckets under way
        these would start in a different order on each rank, and be paired up wrongly. A hook that starts all its
        collectives at once, or orders them itself, says so by an attribute: ``hook.keeps_order = True``.
        """
        if self._blocks_host(flat):
            self.land_unordered()

    def land_unordered(self) -> None:
        """Finish what is under way before the next collective, if a hook's own ones might come in between."""
        if self.comm_hook is None or self.hook_keeps_order:
            return
        for bucket in self.buckets:
            if bucket.flight is not None:
                self.collect(bucket)

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

    def _blocks_host(self, flat: Tensor) -> bool:
        return blocks_host(self.backend(flat.device))

    # ---------------------------------------------------------------- collect

    def moment(self, bucket: LiveBucket) -> str:
        """How messages name this bucket's reduction."""
        names = bucket.spec.names
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        return f"the reduction of bucket {bucket.index} ({shown}) in step {self.timeline.step}"

    def collect(self, bucket: LiveBucket) -> Tensor:
        """Wait for the bucket's collective; the reduced gradients are in the flat buffer that is returned."""
        assert bucket.flight is not None, "collect() needs a launched bucket"
        assert bucket.flat is not None
        start = now()
        with torch_private.RecordFunction(bucket.collect_name):
            result = bucket.flight.land(self.watch, partial(self.moment, bucket))
        end = now()
        self.timeline.record("wait", start, end, bucket.index)
        self.timeline.record("reduce", bucket.launched_ns, bucket.flight.landed_ns or end, bucket.index)
        bucket.flight = None
        if result is not None and result is not bucket.flat:
            self._take_result(bucket, result)
        return bucket.flat

    def _take_result(self, bucket: LiveBucket, result: Tensor) -> None:
        flat = bucket.flat
        assert flat is not None
        if flat.is_sparse or result.is_sparse:
            bucket.flat = result
            return
        if result.numel() != flat.numel():
            raise errors.BadHookResult(
                f"The communication hook {self.comm_hook_name} returned {result.numel()} elements for bucket "
                f"{bucket.index}, which holds {flat.numel()}. It must return as many as it was given."
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            with torch.no_grad():
                flat.copy_(result.reshape(-1))

    # ---------------------------------------------------------------- .grad

    def adopt(self, bucket: LiveBucket) -> None:
        """Let .grad point into the flat buffer already while it travels, so that the unpacked gradients are freed."""
        flat = bucket.flat
        if bucket.num_adopted or bucket.is_sparse or flat is None:
            return  # the gradients are the flat buffer as they lie, or there is none
        if self.ownership is GradOwnership.OWN or self.shares_parameters:
            return
        bucket.views_of_flat = bucket.views(flat.detach())
        for slot, gradient, view in zip(bucket.slots, bucket.gradients, bucket.views_of_flat, strict=True):
            if slot.dirty and gradient is not None and self._can_alias(slot, gradient, flat):
                gradient.data = view
                bucket.num_adopted += 1

    def _can_alias(self, slot: Slot, gradient: Tensor, flat: Tensor) -> bool:
        # A gradient that is itself part of a graph (create_graph=True) must stay the tensor that graph made.
        return not (gradient.requires_grad or slot.is_dtensor) and gradient.dtype == flat.dtype

    @staticmethod
    def _changes_dtype(slot: Slot, gradient: Tensor) -> bool:
        """Native mixed precision: the gradient came in a lower dtype than the parameter has outside the backward."""
        return gradient.dtype != slot.parameter.dtype

    def write_back(
        self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None = None, *, in_place: bool = False
    ) -> None:
        """Give every parameter its reduced gradient; those that no rank used are left as they are.

        ``in_place``: only change the tensors that were launched, and leave ``.grad`` alone (distributed autograd).
        """
        flat, gradients, num_adopted = bucket.flat, bucket.gradients, bucket.num_adopted
        views = bucket.views_of_flat
        bucket.clear()
        if flat is None:
            return
        if num_adopted == len(bucket.slots):  # the usual case: every .grad points at its result already
            for slot in bucket.slots:
                slot.dirty = False
            return
        copy_to: list[Tensor] = []
        copy_from: list[Tensor] = []
        with torch.no_grad():
            if views is None:
                views = [flat] if flat.is_sparse else bucket.views(flat)
            for slot, gradient, view in zip(bucket.slots, gradients, views, strict=True):
                slot.dirty = False
                if not slot.parameter.requires_grad or (is_used is not None and not is_used(slot)):
                    continue
                if in_place and (gradient is None or gradient.is_sparse):
                    if gradient is not None:
                        gradient.copy_(view)
                elif gradient is None or gradient.is_sparse or view.is_sparse or self._changes_dtype(slot, gradient):
                    self._set_new_gradient(slot, view)
                elif self.ownership is not GradOwnership.OWN and self._can_alias(slot, gradient, flat):
                    if gradient.data_ptr() != view.data_ptr():
                        gradient.data = view
                else:
                    target = local_tensor(gradient).data
                    if target.data_ptr() != view.data_ptr():
                        copy_to.append(target)
                        copy_from.append(view)
            if copy_to:
                torch_private.foreach_copy(copy_to, copy_from)

    def _set_new_gradient(self, slot: Slot, value: Tensor) -> None:
        parameter = slot.parameter
        if slot.is_dtensor:
            parameter.grad = torch_private.dtensor_like(parameter, value.clone())
        elif value.is_sparse:
            parameter.grad = value
        elif value.dtype != parameter.dtype:
            parameter.grad = value.to(parameter.dtype)
        else:
            # ``.data`` makes a tensor that shares memory without being an autograd view, so that in-place
            # methods such as detach_() work on it.
            parameter.grad = value.clone() if self.ownership is GradOwnership.OWN else value.data


def _all_are(gradients: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
    return all(g is not None and g.dtype is dtype for g in gradients)


def _copy_by_kind(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, those of one dtype and memory order by one kernel, as it takes no others."""
    kinds: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = kinds.setdefault((source.dtype, source.stride() == target.stride()), ([], []))
        kind[0].append(target)
        kind[1].append(source)
    for some_targets, some_sources in kinds.values():
        torch_private.foreach_copy(some_targets, some_sources)
