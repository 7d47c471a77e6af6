"""The reducer: the only place that starts and finishes the exchange of a bucket.

    launch(bucket, gradients)     complete the flat buffer, start its exchange
    collect(bucket)               wait for it
    memory.hand_out(bucket, ...)  .grad of each parameter

It owns the buckets and three parts: a :class:`Transport` (the group), an :class:`Exchange` (what is done with a bucket)
and a :class:`Memory` (whose memory gradients lie in).  When and in which order buckets leave is decided in
``step.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep import errors, torch_private
from lockstep.agree.beat import Place
from lockstep.engine.between import Between
from lockstep.engine.bucket import LiveBucket, Slot, are_all_none, are_all_taken
from lockstep.engine.exchange import CommHook, Exchange, HookExchange, MeanExchange
from lockstep.engine.memory import Memory
from lockstep.engine.nonfinite import Finiteness
from lockstep.engine.sparse import pack_sparse
from lockstep.engine.transport import Transport
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.observe.timeline import Timeline, now
from lockstep.plan import Plan


class Reducer:
    """Packs, sends, receives and hands back the gradients of one wrapped model."""

    def __init__(
        self, plan: Plan, slots: Sequence[Slot], transport: Transport, memory: Memory, timeline: Timeline
    ) -> None:
        self.transport = transport
        self.memory = memory
        self.timeline = timeline
        self.mean = MeanExchange(transport)
        self.exchange: Exchange = self.mean
        self.num_buckets_reduced = 0
        self.between = Between()
        self.finiteness = Finiteness()
        self.use_plan(plan, slots)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def shown_rank(self) -> int:
        """This rank as messages name it: by its global number."""
        return self.transport.shown_rank

    @property
    def world(self) -> int:
        return self.transport.world

    def use_plan(self, plan: Plan, slots: Sequence[Slot]) -> None:
        """Lay the slots out as ``plan`` says.  Only between windows."""
        by_name = {slot.name: slot for slot in slots}
        self.plan = plan
        self.slots = list(slots)
        self.buckets = [LiveBucket(spec, [by_name[name] for name in spec.names]) for spec in plan]

    def use_transport(self, transport: Transport) -> None:
        """Go on with another group."""
        self.transport = self.mean._transport = transport
        if isinstance(self.exchange, HookExchange):
            self.exchange._transport = transport
            transport.keep_order_of(self)

    def set_comm_hook(self, state: Any, hook: CommHook, name: str) -> None:
        if isinstance(self.exchange, HookExchange):
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. The hook in place is "
                f"{self.exchange.name}; write one hook that does both, or build a new wrapper."
            )
        self.exchange = HookExchange(self.transport, state, hook, name)
        self.transport.keep_order_of(self)
        if self.slots:
            self.memory.serve_hook(self.slots[0].parameter.device)

    def scale_of(self, bucket: LiveBucket) -> float:
        """What this bucket's gradients are multiplied with on their way into its buffer."""
        like = bucket.parameters[0]
        if self.exchange is not self.mean:
            return self.exchange.scale(like)  # whatever the dtype
        dtype = self.memory.travel_dtype(bucket)
        return self.exchange.scale(like if like.dtype is dtype else like.new_empty(0, dtype=dtype))

    # ---------------------------------------------------------------- launch

    def stage(self, slot: Slot, gradient: Tensor | None) -> None:
        """Take a gradient before its bucket is complete, if it is large."""
        self.memory.stage(slot, gradient, self.scale_of(slot.bucket))

    def absorb(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> None:
        """Take gradients that a compiled graph delivers."""
        self.memory.absorb(bucket, slots, gradients, self.scale_of(bucket))

    def put(self, slot: Slot, gradient: Tensor) -> None:
        """Copy a gradient that is not in ``.grad`` into the buffer."""
        self.memory.put(slot, gradient, self.scale_of(slot.bucket))

    def fold(self, slot: Slot) -> None:
        """Add what came after the gradient was taken, while the bucket is still here."""
        self.memory.fold(slot, self.scale_of(slot.bucket))

    def launch(self, bucket: LiveBucket, gradients: Sequence[Tensor | None], *, takes: bool = True) -> None:
        """Complete the flat buffer with ``gradients`` (one per slot, None for none) and start its exchange.

        ``takes``: these are what lies in ``.grad``, and are taken out of it.
        """
        if listeners:
            self._tell(StepMoment.LAUNCH, bucket)
        start = now()
        with torch.no_grad(), torch_private.RecordFunction(bucket.launch_name):
            if bucket.is_sparse:
                bucket.gradients = list(gradients)
                bucket.flat = pack_sparse(bucket.slots[0], gradients[0])
                if takes and not self.memory.is_shared:
                    self.memory.take_packed(bucket, bucket.flat)
            elif not self._is_full(bucket, gradients):
                self.memory.pack(bucket, gradients, self.scale_of(bucket), takes=takes)
            assert bucket.flat is not None
            self.finiteness.look(bucket, len(self.buckets))
            packed = now()
            if listeners:
                self._tell(StepMoment.PACKED, bucket)
            self.between.note_start(self.transport, f"bucket {bucket.index}")
            bucket.flight = self.exchange.start(bucket, bucket.flat, is_last=bucket is self.buckets[-1])
            if self.exchange is self.mean:  # a hook may start more when it likes
                self.between.note_started(self.transport)
            if self.timeline.precise and hasattr(bucket.flight, "note_landing"):
                bucket.flight.note_landing()
        bucket.has_left = True
        bucket.launched_ns = packed
        self.num_buckets_reduced += 1
        self.timeline.record("launch", start, packed, bucket.index)

    @staticmethod
    def _is_full(bucket: LiveBucket, gradients: Sequence[Tensor | None]) -> bool:
        """Whether everything was taken into the buffer already, and nothing came since."""
        return bucket.has_taken and are_all_none(gradients) and are_all_taken(bucket.slots)

    def land_unordered(self) -> None:
        """Finish what is under way before the next collective, if a hook's own ones might come in between.

        A hook may start another collective when its first one is done (PowerSGD does), on gloo in a thread of the
        backend.  With two buckets under way these would start in a different order on each rank, and be paired up
        wrongly; so buckets go one after the other.  A hook that starts all its collectives at once, or orders them
        itself, says so by an attribute: ``hook.keeps_order = True``.
        """
        if not self.exchange.keeps_order:
            for bucket in self.buckets:
                if bucket.flight is not None:
                    self.collect(bucket)

    # ---------------------------------------------------------------- collect

    def moment(self, bucket: LiveBucket) -> Place:
        """How messages name this bucket's reduction."""
        step = self.timeline.step
        return Place(
            f"the reduction of bucket {bucket.index} ({bucket.shown_names}) in step {step}", step, bucket.index
        )

    def _tell(self, moment: StepMoment, bucket: LiveBucket) -> None:
        reached(moment, self.timeline.step, bucket.index, bucket.shown_names, bucket)

    def collect(self, bucket: LiveBucket) -> None:
        """Wait for the bucket's exchange; the reduced gradients are in its flat buffer then."""
        if bucket.flight is None or bucket.flat is None:
            return
        if listeners:
            self._tell(StepMoment.COLLECT, bucket)
        start = now()
        with torch_private.RecordFunction(bucket.collect_name):
            result = bucket.flight.land(self.transport.watch, partial(self.moment, bucket))
        end = now()
        self.timeline.record("collect", start, end, bucket.index)
        self.timeline.record("travel", bucket.launched_ns, bucket.flight.landed_ns or end, bucket.index)
        bucket.flight = None
        bucket.has_landed = True
        if result is not None and result is not bucket.flat:
            self._take_result(bucket, bucket.flat, result)

    def _take_result(self, bucket: LiveBucket, flat: Tensor, result: Tensor) -> None:
        if flat.is_sparse or result.is_sparse:
            bucket.flat = result
            return
        if result.numel() != flat.numel():
            raise errors.BadHookResult(
                f"The communication hook {self.exchange.name} returned {result.numel()} elements for bucket "
                f"{bucket.index}, which holds {flat.numel()}. It must return as many as it was given."
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            with torch.no_grad():
                flat.copy_(result.reshape(-1))

    def add_late(
        self, bucket: LiveBucket, late: Sequence[Tensor | None], is_used: Callable[[Slot], bool] | None
    ) -> None:
        """Reduce what came after the bucket had left, and add it to the result."""
        self.launch(bucket, late, takes=False)
        self.collect(bucket)
        self.memory.add(bucket, is_used)

    def send_zeros(self, bucket: LiveBucket, dtypes: Sequence[torch.dtype]) -> None:
        """Take part in a reduction of others that this rank has nothing for, and drop the result."""
        dtype = self.memory.reduce_dtype or dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        if not bucket.is_sparse:
            mine = bucket.flat
            flight = self.exchange.start(bucket, self.memory.zeros(bucket, dtype), is_last=False)
            flight.land(self.transport.watch, partial(self.moment, bucket))
            bucket.flat = mine  # an exchange may put its result there

    def abandon(self, bucket: LiveBucket) -> None:
        """Forget a window in progress: what was taken goes back into ``.grad``, as far as it can."""
        self.memory.give_back(bucket, 1.0 if bucket.flat is None else self.scale_of(bucket))
        bucket.has_left = bucket.has_landed = False
