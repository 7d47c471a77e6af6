"""The reducer: the only place that starts and finishes a gradient collective.

A bucket is *launched* (packed into a flat buffer, its collective started) and *collected* (waited for, its result in
the flat buffer).  Anyone may call the two: the autograd hooks of the eager path (``engine/eager.py``) do, and so does
a compiled backward.  What the two do with comm hooks, averaging, dtypes and sparse gradients is decided here, once.

    launch(bucket, gradients) -> flat      pack, start
    collect(bucket)           -> flat      wait, finish
    write_back(bucket, ...)                .grad of each parameter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from lockstep import errors, torch_private
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import LiveBucket, Slot, local_tensor
from lockstep.engine.flight import Flight, HookFlight, NoFlight, WorkFlight, blocks_host
from lockstep.engine.grad_bucket import GradBucket
from lockstep.engine.packing import GradOwnership, Packing
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


class Reducer(Packing, ReducerTorchNames):
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
            parameter.grad = value.clone() if self.ownership is GradOwnership.OWN else value
