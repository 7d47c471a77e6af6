"""What feeders bring to a step: gradients in ``.grad``, gradients of compiled graphs, gradients of compiled autograd.

A slot counts as ready when all that this pass brings for it is there.  A gradient for a bucket that has left already is
a remainder; see step.py, [Note: what comes late].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep import errors
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.grads import leave_memory
from lockstep.engine.memory import GradOwnership
from lockstep.engine.states import Kind, State

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep


class Intake:
    """Takes in the gradients of one step, whoever brings them."""

    def __init__(self, step: SyncStep) -> None:
        self._step = step
        self.remainders: set[LiveBucket] = set()  # buckets for which something came after they had left
        self.forget_pass()

    def forget_pass(self) -> None:
        """The pass is over, or broke."""
        # Hooks bring everything, and each parameter once, as far as is known: see ``deliver_plainly``.
        self.is_plain = False
        self.expected_tasks: set[int] = set()  # whose compiled deliveries are counted, see feeders/graph.py
        # Distributed autograd keeps gradients here instead of in .grad.
        self.context_gradients: Mapping[Tensor, Tensor] | None = None
        # Brought by compiled autograd: .grad is not what this pass makes of it.
        self.brought: set[Slot] = set()
        self.brought_late: dict[Slot, Tensor] = {}
        self.results: Mapping[Slot, Tensor] = {}
        self._handed_on: list[Tensor] = []  # buffers that graphs gave to autograd
        self._deferred: list[Slot] = []

    def begin_pass(self) -> None:
        """The first gradient of a pass has come."""
        step = self._step
        self.is_plain = (
            step.syncs
            and step.state is State.OPEN
            and step.kind is Kind.FULL
            and not step.static.is_on
            and not step.memory_is_shared
        )

    def gradients_of(self, bucket: LiveBucket) -> list[Tensor | None]:
        """What this pass has for each slot of a bucket, so far."""
        if self.context_gradients is None and not self.brought:
            return [slot.parameter.grad for slot in bucket.slots]
        return [self.gradient_of(slot) for slot in bucket.slots]

    def gradient_of(self, slot: Slot) -> Tensor | None:
        """What this pass has for ``slot``, so far."""
        if self.context_gradients is not None:
            return self.context_gradients.get(slot.parameter)
        if self.brought and slot in self.brought:
            return None
        return slot.parameter.grad

    def settle(self) -> None:
        """The engine finished a pass: nothing more comes from it."""
        if self._deferred:
            self.flush_deferred()
        if self._handed_on:
            leave_memory(self._step.reducer.slots, self._handed_on)

    # ---------------------------------------------------------------- in .grad

    def deliver_plainly(self, slot: Slot) -> bool:
        """As ``deliver``, for the usual case and at a third of its price; False, and nothing done, in any other."""
        bucket = slot.bucket
        if not self.is_plain or slot.ready or slot.is_taken or bucket.has_left or bucket.covered is not None:
            return False
        step = self._step
        slot.dirty = True
        try:
            if slot.stages_early:
                step.reducer.stage(slot, slot.parameter.grad)
            slot.ready, slot.found_unused = True, False
            step.ready_order.append(slot)
            bucket.num_pending -= 1
            if bucket.num_pending == 0:
                step.send_complete()
        except Exception as error:
            step.tell_peers(error)
            raise
        return True

    def deliver(self, slot: Slot) -> None:
        """All that this pass brings for ``slot`` lies in its ``.grad``."""
        step = self._step
        slot.dirty = True
        if not step.is_in_pass:
            step.lane.begin(step)
        if self._deferred:
            self.flush_deferred()
        if step.syncs:
            try:
                self._count(slot)
            except Exception as error:
                step.tell_peers(error)
                raise

    def defer(self, slot: Slot) -> None:
        """As ``deliver``, but hooks of others still have to run on this gradient: it counts at the next moment."""
        slot.dirty = True
        if not self._step.is_in_pass:
            self._step.lane.begin(self._step)
        self.is_plain = False
        if self._deferred:
            self.flush_deferred()
        self._deferred.append(slot)

    def flush_deferred(self) -> None:
        """The next moment has come."""
        if not self._deferred:
            return
        deferred, self._deferred = self._deferred, []
        for slot in deferred:
            self.deliver(slot)

    def _count(self, slot: Slot) -> None:
        step, bucket = self._step, slot.bucket
        if step.kind is Kind.FOLLOW_UP:
            slot.ready = True
            return
        gradient = self.gradient_of(slot)
        if gradient is None and slot.is_taken:
            return  # a graph delivered it, and autograd had nothing to add
        is_last = not step.static.is_on or step.static.fires(slot, step.reducer.shown_rank)
        if bucket.has_left:
            if gradient is not None and self.context_gradients is None:
                self.remainders.add(bucket)
            return
        slot.found_unused = False
        if slot.is_taken:
            step.reducer.fold(slot)
        bucket.got_extra = bucket.got_extra or slot.is_taken or slot.ready
        if slot.ready or not is_last or (bucket.covered is not None and slot in bucket.covered):
            return  # it is added to what is there, or more is to come
        if slot.stages_early and not slot.is_taken and self.context_gradients is None:
            step.reducer.stage(slot, gradient)
        step.mark_ready(slot)

    # ---------------------------------------------------------------- of a compiled graph

    def expect_delivery(self, bucket: LiveBucket, slots: Sequence[Slot]) -> None:
        """A graph that this pass comes to will deliver these: they are whole when all such deliveries have come."""
        if bucket.has_left:
            return
        covered = bucket.covered
        fresh = [slot for slot in slots if not slot.ready and (covered is None or slot not in covered)]
        bucket.covered = set(slots) if covered is None else covered | set(slots)
        bucket.num_due += 1
        bucket.num_pending += 1 - len(fresh)
        self._hold(bucket)

    def hold_what_may_get_more(self) -> None:
        """A window begins: a reentrant checkpoint may bring a second gradient of a parameter, as a graph may."""
        if not self._step.reducer.exchange.is_linear:
            for bucket in self._step.reducer.buckets:
                self._hold(bucket)

    def _hold(self, bucket: LiveBucket) -> None:
        """Let a bucket leave at the end of the pass, if more may come to it.

        What cannot be reduced by itself must not come late: the first window shows to whom something does.
        """
        is_new = not self._step.reducer.exchange.is_linear and not bucket.was_watched
        if not bucket.is_held and (bucket.waits_for_end or is_new):
            bucket.is_held = True
            bucket.num_pending += 1

    def take_delivery(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> None:
        """A graph delivers these, and hides them from autograd; none where it has made all of them in the buffer."""
        if slots:
            self._step.reducer.absorb(bucket, slots, gradients)
        for slot in slots:
            slot.dirty = True
        self._delivery_came(bucket)

    def take_whole(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> bool:
        """As ``expect_delivery`` and ``take_delivery`` of all that a bucket has, which nothing else has come to.

        False, and nothing done, in any other case.
        """
        size, step = len(bucket.slots), self._step
        if len(slots) != size or bucket.num_pending != size or bucket.num_due or bucket.covered is not None:
            return False
        if bucket.is_held or bucket.waits_for_end or not step.reducer.exchange.is_linear:
            return False
        step.reducer.absorb(bucket, slots, gradients)
        for slot in slots:
            slot.dirty = slot.ready = True
        step.ready_order += slots
        bucket.num_pending = 0
        bucket.left_in_graph = True
        step.send_complete()
        return True

    def leave_delivery(self, bucket: LiveBucket, slots: Sequence[Slot], why: str) -> None:
        """A graph hands these to autograd after all: hooks will bring them."""
        bucket.left_because = why
        if bucket.covered is None or bucket.has_left:
            return
        by_hooks = [slot for slot in slots if slot in bucket.covered and not slot.ready]
        bucket.covered = bucket.covered - set(slots)
        bucket.num_pending += len(by_hooks)
        self._delivery_came(bucket)

    def hand_on(self, buffer: Tensor) -> None:
        """A graph gives this buffer to autograd: where .grad is to have memory of its own, it must not stay in it."""
        if self._step.reducer.memory.ownership is GradOwnership.OWN and self._step.is_in_pass:
            self._handed_on.append(buffer)

    def _delivery_came(self, bucket: LiveBucket) -> None:
        if bucket.num_due == 0:
            return
        bucket.num_due -= 1
        bucket.num_pending -= 1
        if bucket.num_due == 0 and bucket.covered:
            for slot in bucket.slots:
                if not slot.ready and slot in bucket.covered:
                    slot.ready = True
                    self._step.ready_order.append(slot)
            bucket.covered = None
        if bucket.num_pending == bucket.is_held:
            bucket.left_in_graph = True
        if bucket.num_pending == 0:
            self._step.send_complete()

    def settle_deliveries(self) -> None:
        """Deliveries that were expected and did not come: a graph that broke, or handed its gradients elsewhere."""
        for bucket in self._step.reducer.buckets:
            if bucket.num_due and not bucket.has_left:
                waiting = [
                    slot for slot in bucket.slots if bucket.covered and slot in bucket.covered and not slot.ready
                ]
                bucket.num_pending += len(waiting) - bucket.num_due
                bucket.num_due, bucket.covered = 0, None
                for slot in waiting:
                    if slot.is_taken or slot.parameter.grad is not None:
                        self._step.note_ready(slot, found_unused=False)

    def release_held(self) -> None:
        """Nothing more comes late in this pass: the buckets that were held for it may leave."""
        for bucket in self._step.reducer.buckets:
            if bucket.is_held:
                bucket.is_held = False
                bucket.num_pending -= 1

    # ---------------------------------------------------------------- of compiled autograd

    def bring(self, slot: Slot, gradient: Tensor) -> None:
        """All that this pass brings for ``slot``, with what was in ``.grad`` before, is ``gradient``.

        ``.grad`` itself changes when the graph has run (feeders/compiled_autograd.py, [Note: what the graph sees]).
        """
        step = self._step
        slot.dirty = True
        if not step.is_in_pass:
            step.lane.begin(step)
        self.brought.add(slot)
        self.is_plain = False
        if step.syncs:
            try:
                self._count_brought(slot, gradient)
            except Exception as error:
                step.tell_peers(error)
                raise

    def bring_at_end(self, slot: Slot) -> None:
        """As above, but hooks of others still have to run on this gradient."""
        slot.dirty = True
        if not self._step.is_in_pass:
            self._step.lane.begin(self._step)

    def _count_brought(self, slot: Slot, gradient: Tensor) -> None:
        step, bucket = self._step, slot.bucket
        if step.before_hand_out is not None or bucket.is_sparse:
            raise errors.LockstepError(errors.COMPILED_AUTOGRAD)
        bucket.left_because = "compiled autograd: its gradients are brought by the graph of the whole backward"
        is_last = (
            step.kind is Kind.FOLLOW_UP or not step.static.is_on or step.static.fires(slot, step.reducer.shown_rank)
        )
        if bucket.has_left:
            self.brought_late[slot] = gradient.detach().clone()
            self.remainders.add(bucket)
            return
        step.reducer.put(slot, gradient)
        slot.found_unused = False
        if step.kind is Kind.FOLLOW_UP:
            slot.ready = True
        elif is_last and not slot.ready:
            step.mark_ready(slot)

    def take_results_into(self, gradients: Mapping[Slot, Tensor]) -> None:
        """At the end of the graph: these are what will be in ``.grad``."""
        for slot, gradient in gradients.items():
            if self._step.is_in_pass and slot not in self.brought:
                self.bring(slot, gradient)
        self.results = gradients

    def clear_taken(self, gradients: Mapping[Slot, Tensor]) -> None:
        """What was taken, and is in a window that stays open or was used up (an optimizer in the backward), must not be
        in ``.grad`` as well; see grad_memory.py, [Note: taken]."""
        step = self._step
        for slot, gradient in gradients.items():
            if step.state is State.IDLE:
                is_gone = step.after_bucket is not None and slot.parameter.grad is None
            else:
                is_gone = slot.is_taken or slot.bucket.has_left
            if is_gone:
                gradient.zero_()
