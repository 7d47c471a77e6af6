"""The step: the one place that knows where a model is between two reductions, and proves that nothing was missed.

    IDLE     no window; gradients may have been added up without synchronisation
    OPEN     gradients come in, from whatever feeder; a bucket leaves when it is whole, in plan order, once
    CLOSING  everything has left; ranks compare their stamps, buckets are collected and handed out

Feeders say what has come; they decide nothing (``feeders/``): autograd's hooks, compiled graphs, distributed autograd,
an explicit driver.

[Note: when a pass synchronises]  ``require_backward_grad_sync`` is read when the backward begins, not when the
forward ran.  So it does not matter whether the forward, the backward, or both are inside ``no_sync()``: gradients
are added up locally until a backward runs outside of it, and that one reduces everything that was added up.
Under ``join()`` the forward decides, because ranks that have run out of data must be told then.

[Note: two kinds of window]  The backward of a forward is expected to reach every parameter (unless unused ones are
searched for), so its buckets leave as they become whole; it may take several passes, and the window stays open between
them.  A backward without a forward since the last reduction (a penalty over some weights, say) may reach anything; so
nothing leaves before it has ended, and then the ranks unite what they have reached.

[Note: what comes late]  A gradient may come to a bucket that has left: from a use of the parameter outside of the graph
that delivered it, from a second backward, from a reentrant checkpoint.  It lies in ``.grad`` by itself (grad_memory.py,
[Note: taken]).  At the end of the window ranks tell each other which buckets have such a remainder anywhere, and all
reduce those, with zeros where they have none: the mean of a sum is the sum of the means.

[Note: end of a pass]  Reentrant checkpoints run a backward inside the backward, and a callback queued in there fires
when the inner one ends.  So the end of an inner pass only finishes a window whose buckets have all left.  Where
parameters may legitimately stay without a gradient (find_unused_parameters, static_graph), a hook on the outputs
queues the callback in the outermost pass instead, whose end marks the rest as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep import errors, torch_private
from lockstep.agree.stamp import Stamp
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.grad_memory import GradOwnership, leave_memory
from lockstep.engine.lane import Lane
from lockstep.engine.reducer import Reducer
from lockstep.engine.static_graph import StaticGraph
from lockstep.engine.union import Union
from lockstep.observe.timeline import now

_requires_grad = attrgetter("requires_grad")
_dtype_of = attrgetter("dtype")
_MEETING_SECONDS = 60.0
_PATIENCE = 8.0  # seconds


class State(Enum):
    """Where a step is between two reductions."""

    IDLE = "idle"
    OPEN = "open"
    CLOSING = "closing"


class Kind(Enum):
    """See [Note: two kinds of window]."""

    FULL = "the backward of a forward"
    FOLLOW_UP = "a backward without a forward since the last reduction"


class SyncStep:
    """Drives one wrapped model's reductions, whoever feeds it."""

    def __init__(
        self,
        reducer: Reducer,
        lane: Lane,
        union: Union,
        *,
        wants_sync: Callable[[], bool],
        finds_unused: bool = False,
        skips_unused_buckets: bool = False,
    ) -> None:
        self.reducer = reducer
        self.lane = lane
        self.union = union
        self.finds_unused = finds_unused
        self.skips_unused_buckets = skips_unused_buckets
        self.state = State.IDLE
        self.kind = Kind.FULL
        self.num_windows = 0
        self.num_resets = 0
        self.num_updates = 0  # optimizer steps after a pass, see step_guard.py
        self.has_fresh_gradients = False
        # Accumulated in passes that did not synchronise, and not reduced since.
        self.holds_local_gradients = False
        self.has_forward = False  # a forward with gradients ran since the last reduction
        # The end of the window is the caller's to choose, see ``finalize``.
        self.ends_by_hand = False
        self.static = StaticGraph()
        # Moments that others take part in: optimizers in the backward, mixed precision, logging.
        self.after_bucket: Callable[[LiveBucket], None] | None = None
        self.before_hand_out: Callable[[], None] | None = None
        self.after_pass: Callable[[], None] | None = None
        self.on_error: Callable[[Exception], None] | None = None
        self.is_collecting = False
        self.used_counts: list[int] | None = None
        self.unused_changed = False
        self.ready_order: list[Slot] = []
        self._last_unused: frozenset[str] | None = None
        self._used_in_forward: set[int] | None = None
        self._post_backward_futures: list[torch.futures.Future[Any]] = []
        self._wants_sync = wants_sync
        self._output_task = -2
        self.rebuild()
        self._forget_window()
        self.forget_pass()
        lane.enter(self)

    # ---------------------------------------------------------------- the plan

    def rebuild(self) -> None:
        """The reducer has a new plan: count anew."""
        self._parameters = [slot.parameter for slot in self.reducer.slots]
        self._dtypes = self._planned_dtypes = list(map(_dtype_of, self._parameters))
        self.static.forget()

    def _forget_window(self) -> None:
        self._next = 0
        self._remainders: set[LiveBucket] = set()
        self._frozen: tuple[str, ...] = ()
        self._updates_before = self.num_updates

    def forget_pass(self) -> None:
        """The pass is over, or broke."""
        self.is_in_pass = self.syncs = self._is_ending = False
        self.expected_tasks: set[int] = set()  # whose compiled deliveries are counted, see feeders/graph.py
        self._pass_start = 0
        self._deferred: list[Slot] = []
        self.handed_on: list[Tensor] = []  # buffers that graphs gave to autograd
        self.context_gradients: Mapping[Tensor, Tensor] | None = None
        self._brought: set[Slot] = set()  # by compiled autograd: .grad is not what this pass makes of it
        self._brought_late: dict[Slot, Tensor] = {}
        self._results: Mapping[Slot, Tensor] = {}

    @property
    def memory_is_shared(self) -> bool:
        """Whether another step looks after some of the parameters too."""
        return self.reducer.memory.is_shared

    # ---------------------------------------------------------------- forward

    def note_forward(self) -> None:
        """A forward with gradients is about to run."""
        self.has_forward = True

    def note_used(self, reached: set[int]) -> None:
        """Only these parameters (by ``id``) were used by a forward; several forwards may come before one backward."""
        self._used_in_forward = (self._used_in_forward or set()) | reached

    def note_output_reached(self) -> None:
        """The backward that is running comes from an output of a forward, perhaps of an earlier one."""
        self._output_task = torch_private.graph_task_id()

    def require_finished(self) -> None:
        """Raise if the last backward that synchronises left the window incomplete."""
        if self.state is not State.IDLE:
            with self.telling_peers():
                raise self.unfinished(self.missing)

    # ---------------------------------------------------------------- a pass begins

    def takes_part(self) -> bool:
        """Whether the backward that is running now comes to any of the parameters."""
        return any(slot.parameter.requires_grad and will_accumulate(slot) for slot in self.reducer.slots)

    def begin_pass(self) -> None:
        """The first gradient of a pass has come, from whatever feeder."""
        self.is_in_pass = True
        self._pass_start = now()
        self.syncs = self._wants_sync()
        if self.syncs and self.state is State.IDLE:
            with self.telling_peers():
                self.open_window()

    def open_window(self) -> None:
        """The first pass that synchronises has begun."""
        self.state = State.OPEN
        self.kind = (
            Kind.FULL if self.has_forward or self._output_task == torch_private.graph_task_id() else Kind.FOLLOW_UP
        )
        self._forget_window()
        self.ready_order = []
        self.reducer.num_buckets_reduced = 0
        for bucket in self.reducer.buckets:
            bucket.open()
        for slot in self.reducer.slots:
            slot.ready = slot.found_unused = False
            slot.num_fires = 0
        self._look_at_dtypes()
        if not all(map(_requires_grad, self._parameters)):
            self._frozen = tuple(s.name for s in self.reducer.slots if not s.parameter.requires_grad)
        if self.kind is Kind.FULL:
            self._mark_known_unused()

    def _look_at_dtypes(self) -> None:
        """Parameters that were cast since: their bucket travels in another dtype, so ranks meet before it leaves."""
        if self.reducer.memory.reduce_dtype is not None:
            return
        dtypes = list(map(_dtype_of, self._parameters))
        if dtypes == self._dtypes:
            return
        watch = self.reducer.transport.watch
        if watch.board is not None:
            changed = zip(self.reducer.slots, dtypes, self._dtypes, strict=True)
            cast = ", ".join(f"{slot.name} to {str(new)[6:]}" for slot, new, old in changed if new != old)
            key = f"cast, window {self.num_windows}, reset {self.num_resets}"
            told = watch.meet(key, f"parameters that were cast: {cast}", cast, _MEETING_SECONDS)
            if len(set(told.values())) > 1:
                raise errors.Disagreement(
                    "Parameters were cast differently on different ranks:\n"
                    + errors.rank_table(told)
                    + "\nFix: cast the same parameters on every rank.",
                    told,
                )
        self._dtypes = dtypes  # as agreed

    def _cast_names(self) -> list[str]:
        return [
            slot.name
            for slot, agreed, planned in zip(self.reducer.slots, self._dtypes, self._planned_dtypes, strict=True)
            if agreed != planned
        ]

    def _mark_known_unused(self) -> None:
        if self.static.is_on or self._used_in_forward is not None:
            unused = [slot for slot in self.reducer.slots if self._is_known_unused(slot)]
        elif self._frozen:
            unused = [slot for slot in self.reducer.slots if not slot.parameter.requires_grad]
        else:
            return
        for slot in unused:
            if slot.dirty and self.static.is_on and slot.parameter.requires_grad:
                raise errors.graph_changed(slot.place, rank=self.reducer.rank, expected=0)
            self._mark_ready(slot, found_unused=True)

    def _is_known_unused(self, slot: Slot) -> bool:
        if not slot.parameter.requires_grad:
            return True  # frozen since it was wrapped
        if self.static.is_on:
            return self.static.is_unused(slot)
        return self._used_in_forward is not None and id(slot.parameter) not in self._used_in_forward

    # ---------------------------------------------------------------- gradients come in

    def gradient_of(self, slot: Slot) -> Tensor | None:
        if self.context_gradients is not None:
            return self.context_gradients.get(slot.parameter)
        if self._brought and slot in self._brought:
            return None
        return slot.parameter.grad

    def deliver(self, slot: Slot) -> None:
        """All that this pass brings for ``slot`` lies in its ``.grad``."""
        slot.dirty = True
        if not self.is_in_pass:
            self.lane.begin(self)
        if self._deferred:
            self.flush_deferred()
        if self.syncs:
            try:
                self._count(slot)
            except Exception as error:
                self.tell_peers(error)
                raise

    def defer(self, slot: Slot) -> None:
        """As ``deliver``, but hooks of others still have to run on this gradient: it counts at the next moment."""
        slot.dirty = True
        if not self.is_in_pass:
            self.lane.begin(self)
        if self._deferred:
            self.flush_deferred()
        self._deferred.append(slot)

    def flush_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for slot in deferred:
            self.deliver(slot)

    def _count(self, slot: Slot) -> None:
        bucket = slot.bucket
        if self.kind is Kind.FOLLOW_UP:
            slot.ready = True
            return
        gradient = self.gradient_of(slot)
        if gradient is None and slot.is_taken:
            return  # a graph delivered it, and autograd had nothing to add
        is_last = not self.static.is_on or self.static.fires(slot, self.reducer.rank)
        if bucket.has_left:
            if gradient is not None and self.context_gradients is None:
                self._remainders.add(bucket)
            return
        slot.found_unused = False
        if slot.is_taken:
            self.reducer.fold(slot)
            bucket.got_extra = True
        if slot.ready or not is_last or (bucket.covered is not None and slot in bucket.covered):
            return  # it is added to what is there, or more is to come
        if slot.stages_early and not slot.is_taken and self.context_gradients is None:
            self.reducer.stage(slot, gradient)
        self._mark_ready(slot)

    def _mark_ready(self, slot: Slot, *, found_unused: bool = False) -> None:
        """Count ``slot``; send every bucket that is whole and whose turn it is."""
        slot.ready = True
        slot.found_unused = found_unused
        if not found_unused:
            self.ready_order.append(slot)
        bucket = slot.bucket
        bucket.num_pending -= 1
        if bucket.num_pending == 0:
            self.send_complete()

    # ---------------------------------------------------------------- gradients come in from compiled autograd

    def bring(self, slot: Slot, gradient: Tensor) -> None:
        """All that this pass brings for ``slot``, with what was in ``.grad`` before, is ``gradient``.

        ``.grad`` itself changes when the graph has run (feeders/compiled_autograd.py, [Note: what the graph sees]).
        """
        slot.dirty = True
        if not self.is_in_pass:
            self.lane.begin(self)
        self._brought.add(slot)
        if self.syncs:
            try:
                self._count_brought(slot, gradient)
            except Exception as error:
                self.tell_peers(error)
                raise

    def bring_at_end(self, slot: Slot) -> None:
        """As above, but hooks of others still have to run on this gradient."""
        slot.dirty = True
        if not self.is_in_pass:
            self.lane.begin(self)

    def _count_brought(self, slot: Slot, gradient: Tensor) -> None:
        bucket = slot.bucket
        if self.before_hand_out is not None or bucket.is_sparse:
            raise errors.LockstepError(errors.COMPILED_AUTOGRAD)
        bucket.left_because = "compiled autograd: its gradients are brought by the graph of the whole backward"
        is_last = self.kind is Kind.FOLLOW_UP or not self.static.is_on or self.static.fires(slot, self.reducer.rank)
        if bucket.has_left:
            self._brought_late[slot] = gradient.detach().clone()
            self._remainders.add(bucket)
            return
        self.reducer.put(slot, gradient)
        slot.found_unused = False
        if self.kind is Kind.FOLLOW_UP:
            slot.ready = True
        elif is_last and not slot.ready:
            self._mark_ready(slot)

    def take_results_into(self, gradients: Mapping[Slot, Tensor]) -> None:
        """At the end of the graph: these are what will be in ``.grad``."""
        for slot, gradient in gradients.items():
            if self.is_in_pass and slot not in self._brought:
                self.bring(slot, gradient)
        self._results = gradients

    def clear_taken(self, gradients: Mapping[Slot, Tensor]) -> None:
        """What was taken, and is in a window that stays open or was used up (an optimizer in the backward), must not be
        in ``.grad`` as well; see [Note: taken]."""
        for slot, gradient in gradients.items():
            if self.state is State.IDLE:
                is_gone = self.after_bucket is not None and slot.parameter.grad is None
            else:
                is_gone = slot.is_taken or slot.bucket.has_left
            if is_gone:
                gradient.zero_()

    # ---------------------------------------------------------------- gradients come in from a compiled graph

    def expect_delivery(self, bucket: LiveBucket, slots: Sequence[Slot]) -> None:
        """A graph that this pass comes to will deliver these: they are whole when all such deliveries have come."""
        if bucket.has_left:
            return
        covered = bucket.covered
        fresh = [slot for slot in slots if not slot.ready and (covered is None or slot not in covered)]
        bucket.covered = set(slots) if covered is None else covered | set(slots)
        bucket.num_due += 1
        bucket.num_pending += 1 - len(fresh)
        # What cannot be reduced by itself must not come late: the first window shows to whom something does.
        is_new = not self.reducer.exchange.is_linear and not bucket.was_watched
        if not bucket.is_held and (bucket.waits_for_end or is_new):
            bucket.is_held = True
            bucket.num_pending += 1

    def take_delivery(self, bucket: LiveBucket, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> None:
        """A graph delivers these, and hides them from autograd."""
        self.reducer.absorb(bucket, slots, gradients)
        for slot in slots:
            slot.dirty = True
        self._delivery_came(bucket)

    def hand_on(self, buffer: Tensor) -> None:
        """A graph gives this buffer to autograd: where .grad is to have memory of its own, it must not stay in it."""
        if self.reducer.memory.ownership is GradOwnership.OWN and self.is_in_pass:
            self.handed_on.append(buffer)

    def leave_delivery(self, bucket: LiveBucket, slots: Sequence[Slot], why: str) -> None:
        """A graph hands these to autograd after all: hooks will bring them."""
        bucket.left_because = why
        if bucket.covered is None or bucket.has_left:
            return
        by_hooks = [slot for slot in slots if slot in bucket.covered and not slot.ready]
        bucket.covered = bucket.covered - set(slots)
        bucket.num_pending += len(by_hooks)
        self._delivery_came(bucket)

    def _delivery_came(self, bucket: LiveBucket) -> None:
        if bucket.num_due == 0:
            return
        bucket.num_due -= 1
        bucket.num_pending -= 1
        if bucket.num_due == 0 and bucket.covered:
            for slot in bucket.slots:
                if not slot.ready and slot in bucket.covered:
                    slot.ready = True
                    self.ready_order.append(slot)
            bucket.covered = None
        if bucket.num_pending == bucket.is_held:
            bucket.left_in_graph = True
        if bucket.num_pending == 0:
            self.send_complete()

    # ---------------------------------------------------------------- buckets leave

    def send_complete(self) -> None:
        """Launch the whole buckets whose turn it is: strictly in plan order, since ranks must issue the same."""
        if self.state is not State.OPEN or not self._may_send_now():
            return
        buckets = self.reducer.buckets
        while self._next < len(buckets) and buckets[self._next].num_pending == 0:
            self._next += 1
            self._launch(buckets[self._next - 1])
        if self.all_launched:
            self.lane.sent_all(self)

    def _may_send_now(self) -> bool:
        if self.kind is Kind.FOLLOW_UP or (self.reducer.memory.is_shared and not self._is_ending):
            return False
        return self.lane.may_send(self)

    @property
    def all_launched(self) -> bool:
        return self._next == len(self.reducer.buckets)

    def has_sent_all(self) -> bool:
        """Whether others need not wait for this one in the current pass."""
        if not self.syncs or self.state is not State.OPEN or self.kind is Kind.FOLLOW_UP:
            return True  # the last kind sends when all others have
        return self.all_launched or self._is_ending

    def _launch(self, bucket: LiveBucket) -> None:
        if self.skips_unused_buckets and all(slot.found_unused and not slot.dirty for slot in bucket.slots):
            bucket.skipped = bucket.has_left = True
            return
        gradients = [self.gradient_of(slot) for slot in bucket.slots]
        self.reducer.launch(bucket, gradients, takes=self.context_gradients is None)
        if self.after_bucket is not None and not (self.finds_unused or self.static.is_on or self._brought):
            self._collect_landed(bucket)

    def _collect_landed(self, newest: LiveBucket) -> None:
        """With an optimizer in the backward, buckets that have arrived are used, and freed, while it goes on."""
        for bucket in self.reducer.buckets[: newest.index]:
            if bucket.flight is not None and bucket.flight.is_done():
                self._collect(bucket, None)

    # ---------------------------------------------------------------- a pass ends

    def settle_pass(self, *, is_inner: bool) -> None:
        """The engine finished a pass: what it brought is complete."""
        if not self.is_in_pass:
            return
        if self._deferred:
            self.flush_deferred()
        if self.handed_on:
            leave_memory(self.reducer.slots, self.handed_on)
        self.reducer.timeline.record("backward", self._pass_start, now())
        if not self.syncs:
            self.holds_local_gradients = True
            self.has_fresh_gradients = True
            self._used_in_forward = None
            return
        if self.state is not State.OPEN or self.kind is Kind.FOLLOW_UP:
            return
        self._is_ending = True
        with self.telling_peers():
            if not is_inner:
                self._settle_deliveries()
            self._release_held()
            self._settle_missing(is_inner=is_inner)
            self.send_complete()

    def _settle_deliveries(self) -> None:
        """Deliveries that were expected and did not come: a graph that broke, or handed its gradients elsewhere."""
        for bucket in self.reducer.buckets:
            if bucket.num_due and not bucket.has_left:
                waiting = [
                    slot for slot in bucket.slots if bucket.covered and slot in bucket.covered and not slot.ready
                ]
                bucket.num_pending += len(waiting) - bucket.num_due
                bucket.num_due, bucket.covered = 0, None
                for slot in waiting:
                    if slot.is_taken or slot.parameter.grad is not None:
                        slot.ready = True
                        bucket.num_pending -= 1
                        self.ready_order.append(slot)

    def _release_held(self) -> None:
        for bucket in self.reducer.buckets:
            if bucket.is_held:
                bucket.is_held = False
                bucket.num_pending -= 1

    def _settle_missing(self, *, is_inner: bool) -> None:
        """Parameters that need not be waited for any longer count as ready."""
        if self.all_launched and not self.static.is_on:
            return
        missing = self.missing
        if self._rest_is_unused(is_inner):
            for slot in missing:
                self._note_ready(slot, found_unused=not (self.static.is_on and slot.num_fires))
            if self.static.is_on:
                self.ready_order = self.static.order
        elif not self.static.is_on and not is_inner and all(slot.dirty for slot in missing):
            # All of them got their gradient in passes that did not synchronise.
            for slot in missing:
                self._note_ready(slot, found_unused=False)

    def _note_ready(self, slot: Slot, *, found_unused: bool) -> None:
        slot.ready, slot.found_unused = True, found_unused
        slot.bucket.num_pending -= 1
        if not found_unused:
            self.ready_order.append(slot)

    def _rest_is_unused(self, is_inner: bool) -> bool:
        """Whether parameters that are not ready at the end of a pass count as unused (or as a missing gradient)."""
        if not self.static.is_on:
            return self.finds_unused and not is_inner
        if self.static.is_learned:
            return False
        self.static.learn(self.reducer.slots)
        return True

    def end_pass(self, *, is_inner: bool) -> None:
        """All models have settled: close the window, or leave it open for the next pass."""
        try:
            self._end_pass(is_inner)
        finally:
            if self.state is State.IDLE and self.after_pass is not None:
                self.after_pass()

    def _end_pass(self, is_inner: bool) -> None:
        if not self.syncs or self.state is not State.OPEN:
            return
        if self.kind is Kind.FULL and not self.all_launched:
            return  # more is to come, in the outer pass or in the user's next one
        self.state = State.CLOSING
        if not self.ends_by_hand or is_inner:
            self.close_window()

    def finalize(self) -> None:
        """Close a window whose end is the caller's to choose."""
        if self.state is State.OPEN:
            raise self.unfinished(self.missing)
        if self.state is State.CLOSING:
            self.close_window()

    # ---------------------------------------------------------------- the window closes

    def close_window(self) -> None:
        """Compare with the other ranks, collect everything, hand it out."""
        with self.telling_peers():
            reached = self._unite()
            if self.kind is Kind.FOLLOW_UP:
                self._reduce_reached(reached)
            else:
                self._collect_all(self._remaining(reached))
            for future in self._post_backward_futures:
                self.reducer.transport.watch.wait_future(future, lambda: "a buffer communication hook")
        self._end_window()

    def _end_window(self) -> None:
        self._post_backward_futures = []
        self._used_in_forward = None
        self._note_unused()
        self.state = State.IDLE
        self.static.just_learned = self.holds_local_gradients = self.has_forward = False
        self.has_fresh_gradients = True
        self.num_windows += 1
        self.reducer.timeline.end_step()

    # ---------------------------------------------------------------- what ranks tell each other

    def _unite(self) -> int:
        """Compare stamps; returns what any rank has: remainders by bucket, or parameters reached, as a set of bits."""
        bits, num_bits = self._own_bits()
        used = self.local_used_counts() if self._asks_for_used() else None
        if self.union.control is None:
            return self._unite_alone(bits, used)
        self.reducer.land_unordered()
        moment = self._closing_moment
        bits, counts = self.union.unite(self.reducer.transport, self._stamp, bits, num_bits, used, moment)
        self.used_counts = self.used_counts if counts is None else counts
        return bits

    def _own_bits(self) -> tuple[int, int]:
        if self.kind is Kind.FOLLOW_UP:
            slots = self.reducer.slots
            return _bits(slot.position for slot in slots if slot.ready), len(slots)
        return _bits(bucket.index for bucket in self._remainders), len(self.reducer.buckets)

    def _unite_alone(self, bits: int, used: list[int] | None) -> int:
        """In a world of one, or where ranks have no way to tell each other anything but gradients."""
        reducer = self.reducer
        if used is not None:
            device = self._parameters[0].device
            self.used_counts = used if reducer.world == 1 else self.union.count_used(reducer.transport, used, device)
        if reducer.world == 1:
            return bits
        if self.kind is Kind.FOLLOW_UP:
            return (1 << len(reducer.slots)) - 1
        if bits:
            raise errors.late_gradient(self._late_names(self._remainders), rank=reducer.rank, hook="")
        return 0

    def _closing_moment(self) -> str:
        return f"the comparison of ranks at the end of step {self.reducer.timeline.step}"

    def _stamp(self) -> Stamp:
        reducer = self.reducer
        divisor = reducer.mean.divisor
        return Stamp(
            wrapper=self.union.name,
            window=self.num_windows,
            kind=self.kind.value,
            updates=self._updates_before,
            plan=reducer.plan.digest,
            frozen=self._frozen,
            cast=tuple(self._cast_names()) if self._dtypes is not self._planned_dtypes else (),
            exchange=reducer.exchange.name if divisor is None else f"{reducer.exchange.name} over {divisor:g} ranks",
            num_buckets=reducer.num_buckets_reduced if not self.skips_unused_buckets else -1,
            resets=self.num_resets,
        )

    def _asks_for_used(self) -> bool:
        """Whether ranks must know which parameters any of them used."""
        if self.kind is Kind.FOLLOW_UP:
            return False
        if self.static.is_on:
            return self.static.just_learned
        return self.finds_unused and not self.skips_unused_buckets

    def local_used_counts(self) -> list[int]:
        """1 for each parameter, in declaration order, that this rank has a new gradient for."""
        return [
            int(slot.dirty and (slot.is_taken or self.gradient_of(slot) is not None)) for slot in self.reducer.slots
        ]

    def _is_used(self) -> Callable[[Slot], bool] | None:
        """Which parameters any rank used; the others keep their .grad as it was (None, usually)."""
        if self.kind is Kind.FOLLOW_UP or not (self.static.is_on or self.finds_unused):
            return None
        if self.finds_unused and self.skips_unused_buckets and not self.static.is_on:
            return lambda slot: slot.dirty or not slot.found_unused
        counts = self.used_counts
        return None if counts is None else lambda slot: counts[slot.position] > 0

    # ---------------------------------------------------------------- everything is collected

    def _remaining(self, bits: int) -> list[LiveBucket]:
        """The buckets with a remainder on any rank; see [Note: what comes late]."""
        buckets = [bucket for bucket in self.reducer.buckets if bits >> bucket.index & 1]
        for bucket in self.reducer.buckets:
            bucket.waits_for_end = bucket.got_extra or bucket in buckets
            bucket.was_watched = True
        if buckets and not self.reducer.exchange.is_linear:
            raise errors.late_gradient(
                self._late_names(buckets), rank=self.reducer.rank, hook=self.reducer.exchange.name
            )
        return buckets

    @staticmethod
    def _late_names(buckets: Iterable[LiveBucket]) -> list[str]:
        return [slot.name for bucket in buckets for slot in bucket.slots]

    def _collect_all(self, remaining: Sequence[LiveBucket]) -> None:
        is_used = self._is_used()
        if self.before_hand_out is not None:
            for bucket in self.reducer.buckets:
                self.reducer.collect(bucket)
            self.before_hand_out()
        for bucket in self.reducer.buckets:
            if bucket in remaining:
                late = self.reducer.memory.set_late_aside(bucket)
                if self._brought:
                    brought = self._brought_late
                    late = [
                        brought.get(s) if s in self._brought else g for s, g in zip(bucket.slots, late, strict=True)
                    ]
                self._collect_only(bucket, is_used)
                self.reducer.add_late(bucket, late)
            else:
                self._collect(bucket, is_used)
        for bucket in remaining:
            self._after(bucket)

    def _collect(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None) -> None:
        if bucket.skipped or bucket.flat is None:
            return  # nothing left, or it was collected earlier in this pass
        self._collect_only(bucket, is_used)
        self._after(bucket)

    def _collect_only(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None) -> None:
        self.reducer.collect(bucket)
        self.reducer.hand_out(bucket, is_used, in_place=self.context_gradients is not None, into=self._results)

    def _after(self, bucket: LiveBucket) -> None:
        if self.after_bucket is not None:
            self.is_collecting = True
            try:
                self.after_bucket(bucket)
            finally:
                self.is_collecting = False

    def _reduce_reached(self, bits: int) -> None:
        """Reduce what a backward without a forward has reached, on any rank, as it lies in .grad."""
        buckets = [b for b in self.reducer.buckets if any(bits >> slot.position & 1 for slot in b.slots)]
        reached = {slot for bucket in buckets for slot in bucket.slots if bits >> slot.position & 1}
        if self.before_hand_out is not None:
            self.before_hand_out()
        for bucket in buckets:
            self._launch(bucket)
        self.reducer.land_unordered()
        for bucket in buckets:
            self._collect(bucket, lambda slot: slot in reached or slot.is_taken)

    def mirror_window(self) -> None:
        """As a rank without data (join): contribute zeros to everything, in the order of the others.

        The mean gradients are kept, because an optimizer that is part of the join (ZeRO) steps its share with them.
        """
        self.static.learn_as_joined()
        self.kind = Kind.FULL
        reducer = self.reducer
        for bucket in reducer.buckets:
            bucket.open()
            reducer.launch(bucket, [None] * len(bucket.slots), takes=False)
        reducer.land_unordered()
        remaining: list[LiveBucket] = []
        if self.union.control is not None:
            num_used = len(reducer.slots) if self._asks_for_used() else 0
            bits, counts = self.union.mirror(reducer.transport, len(reducer.buckets), num_used, self._closing_moment)
            self.used_counts = self.used_counts if counts is None else counts
            remaining = self._remaining(bits)
        is_used = self._is_used()
        for bucket in reducer.buckets:
            reducer.collect(bucket)
            for slot in bucket.slots:
                reducer.memory.set(slot, None)
            reducer.hand_out(bucket, is_used)
            if bucket in remaining:
                reducer.add_late(bucket, [None] * len(bucket.slots))
        self.static.just_learned = False
        self.num_windows += 1

    def _note_unused(self) -> None:
        """Remember whether the set of unused parameters ever changed: whether static_graph=True could be set."""
        unused = frozenset(slot.name for slot in self.reducer.slots if slot.found_unused)
        if self._last_unused is not None and unused != self._last_unused:
            self.unused_changed = True
        self._last_unused = unused

    # ---------------------------------------------------------------- the proof

    @property
    def missing(self) -> list[Slot]:
        """Parameters that an open window still waits for, in declaration order."""
        if self.state is not State.OPEN or self.kind is Kind.FOLLOW_UP:
            return []
        return [slot for slot in self.reducer.slots if not slot.ready]

    def unfinished(self, slots: Iterable[Slot]) -> errors.LockstepError:
        """The error for parameters whose gradients no reduction has seen."""
        return errors.unfinished_reduction(
            [slot.place for slot in slots],
            rank=self.reducer.rank,
            num_parameters=len(self.reducer.slots),
            finds_unused=self.finds_unused,
            static_graph=self.static.is_on,
        )

    def reset_together(self) -> None:
        """Forget the current window on all ranks: what some have sent the others send too, so that all are level."""
        reducer, watch = self.reducer, self.reducer.transport.watch
        if watch.board is not None and reducer.world > 1:
            sent = sum(bucket.has_left and not bucket.skipped for bucket in reducer.buckets)
            sent = sent if self.state is not State.IDLE else 0
            key = f"reset {self.num_resets + 1}"
            watch.forget_own_failure()
            # Others may still be raising what all of them are to handle.
            told = watch.meet(key, "reset_sync_window()", str(sent), _MEETING_SECONDS, patience_seconds=_PATIENCE)
            if reducer.exchange.is_linear:
                self._catch_up(sent, max(map(int, told.values())))
            if self.union.control is not None:
                self.union.control.renew()
            watch.clear_failure()
            self.num_updates = 0
            self.has_fresh_gradients = False
        self.num_resets += 1
        self.reset()

    def _catch_up(self, sent: int, most: int) -> None:
        """Send zeros for the buckets that other ranks have sent, and land everything that is under way."""
        dtypes = dict(zip(self.reducer.slots, self._dtypes, strict=True))
        for bucket in self.reducer.buckets[:sent]:
            self.reducer.collect(bucket)
        for bucket in self.reducer.buckets[sent:most]:
            self.reducer.send_zeros(bucket, [dtypes[slot] for slot in bucket.slots])

    def reset(self) -> None:
        """Forget the current window, after an error in a backward that was caught."""
        for bucket in self.reducer.buckets:
            self.reducer.abandon(bucket)
        self.state = State.IDLE
        self._forget_window()
        self._used_in_forward = None
        self._post_backward_futures = []
        self.static.just_learned = False
        self.lane.forget_broken_pass()
        self.forget_pass()

    def add_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        self._post_backward_futures.extend(futures)

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tell_peers(error)
            raise

    def tell_peers(self, error: Exception) -> None:
        """Leave an error on the board for peers, and in the log, before it goes up to the user."""
        if not isinstance(error, errors.PeerFailed):
            self.reducer.transport.watch.post_failure(error)
        if self.on_error is not None:
            self.on_error(error)


def will_accumulate(slot: Slot) -> bool:
    """Whether this backward ends in ``.grad`` of the parameter; torch.autograd.grad does not."""
    if slot.accumulator is not None and torch_private.engine_will_run(slot.accumulator):
        return True
    slot.accumulator = torch_private.gradient_accumulator(slot.parameter)  # a new one after .to() and the like
    return slot.accumulator is not None and torch_private.engine_will_run(slot.accumulator)


def _bits(positions: Iterable[int]) -> int:
    bits = 0
    for position in positions:
        bits |= 1 << position
    return bits
