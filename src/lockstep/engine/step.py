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

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from lockstep import errors, torch_private
from lockstep.engine import registry
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.casts import Casts
from lockstep.engine.closing import Closing
from lockstep.engine.drift import Drift
from lockstep.engine.intake import Intake
from lockstep.engine.lane import Lane
from lockstep.engine.reducer import Reducer
from lockstep.engine.states import Kind, State
from lockstep.engine.static_graph import StaticGraph
from lockstep.engine.union import Union
from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.observe.timeline import now

_requires_grad = attrgetter("requires_grad")


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
        self.finds_unused = finds_unused
        self.skips_unused_buckets = skips_unused_buckets
        self.state = State.IDLE
        self.kind = Kind.FULL
        self.num_windows = 0
        self.num_resets = 0
        self.num_updates = 0  # optimizer steps after a pass, see step_guard.py
        self.num_passes_told = 0  # by a train step while it runs, which all ranks must run alike (program/passes.py)
        self.num_writes = 0  # by optimizers: some write without a tensor's version counting it
        self.has_fresh_gradients = False
        # Accumulated in passes that did not synchronise, and not reduced since.
        self.holds_local_gradients = False
        self.has_forward = False  # a forward with gradients ran since the last reduction
        # The end of the window is the caller's to choose, see ``finalize``.
        self.ends_by_hand = False
        self.static = StaticGraph()
        # Moments that others take part in: optimizers in the backward, mixed precision, logging.
        self.after_bucket: Callable[[LiveBucket], None] | None = None
        # With it: a bucket is waited for when so many younger ones have left; None: it is never waited for.
        self.num_buckets_behind: int | None = None
        self.before_hand_out: Callable[[], None] | None = None
        self.after_pass: Callable[[], None] | None = None
        self.on_error: Callable[[Exception], None] | None = None
        # Of a sharded model, for ranks to compare: what it has gathered so far, and which gradients are added to.
        self.gathers: Callable[[], str] = str
        self.kept: Callable[[], str] = str
        self.unused_changed = False
        self.ready_order: list[Slot] = []
        self._last_unused: frozenset[str] | None = None
        self._used_in_forward: set[int] | None = None
        self._post_backward_futures: list[torch.futures.Future[Any]] = []
        self._wants_sync = wants_sync
        self._output_task = -2
        self.intake = Intake(self)
        self.closing = Closing(self, union)
        self.drift = Drift()
        self.rebuild()
        self._forget_window()
        self.forget_pass()
        lane.enter(self)
        self.report_progress()

    def report_progress(self) -> None:
        """Let the watch say which step this rank is in, to those who wait for it."""
        me = weakref.ref(self)
        watch = self.reducer.transport.watch
        watch.progress = lambda: "" if (step := me()) is None else step.progress()
        watch.is_in_window = lambda: (step := me()) is not None and step.state is not State.IDLE

    def progress(self) -> str:
        """Where this rank is, in a few words."""
        step = self.reducer.timeline.step
        return f"after {step} steps" if self.state is State.IDLE else f"in step {step}"

    # ---------------------------------------------------------------- the plan

    def rebuild(self) -> None:
        """The reducer has a new plan: count anew."""
        self._parameters = [slot.parameter for slot in self.reducer.slots]
        self.casts = Casts(self.reducer.slots)
        self.closing.union.reserve(len(self.reducer.slots))
        self.static.forget()

    def _forget_window(self) -> None:
        self._next = 0
        self.intake.remainders = set()
        self.frozen: tuple[str, ...] = ()
        self.updates_before = self.num_updates

    def forget_pass(self) -> None:
        """The pass is over, or broke."""
        self.is_in_pass = self.syncs = self._is_ending = False
        self._pass_start = 0
        self.intake.forget_pass()

    @property
    def memory_is_shared(self) -> bool:
        """Whether another step looks after some of the parameters too."""
        return self.reducer.memory.is_shared

    # ---------------------------------------------------------------- forward

    def note_forward(self) -> None:
        """A forward with gradients is about to run."""
        self.has_forward = True
        self.drift.look_before_forward(self)

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
        """Whether the backward that is running now comes to any of the parameters, for this step."""
        is_shared = self.memory_is_shared
        return any(
            slot.parameter.requires_grad and will_accumulate(slot) and (not is_shared or registry.is_for(self, slot))
            for slot in self.reducer.slots
        )

    def begin_pass(self) -> None:
        """The first gradient of a pass has come, from whatever feeder."""
        self.is_in_pass = True
        self._pass_start = now()
        if listeners:
            reached(StepMoment.BACKWARD, self.reducer.timeline.step, subject=self.reducer)
        self.syncs = self._wants_sync()
        if self.syncs and self.state is State.IDLE:
            with self.telling_peers():
                self.open_window()
        self.intake.begin_pass()

    def open_window(self) -> None:
        """The first pass that synchronises has begun."""
        self.state = State.OPEN
        self.kind = (
            Kind.FULL if self.has_forward or self._output_task == torch_private.graph_task_id() else Kind.FOLLOW_UP
        )
        self._forget_window()
        self.ready_order = []
        self.reducer.num_buckets_reduced = 0
        self.reducer.between.open()
        self.reducer.finiteness.open()
        for bucket in self.reducer.buckets:
            bucket.open(is_full=self.kind is Kind.FULL)
        for slot in self.reducer.slots:
            slot.ready = slot.found_unused = False
            slot.num_fires = 0
        if self.reducer.memory.reduce_dtype is None:
            self.casts.look(self.reducer.transport.watch, f"window {self.num_windows}, reset {self.num_resets}")
        if not all(map(_requires_grad, self._parameters)):
            self.frozen = tuple(s.name for s in self.reducer.slots if not s.parameter.requires_grad)
        if self.closing.compares:
            self.drift.open(self)
        if self.kind is Kind.FULL:
            if self.finds_unused:  # so that the end of the outermost pass is told, see [Note: end of a pass]
                self.intake.hold_what_may_get_more()
            self._mark_known_unused()

    def _mark_known_unused(self) -> None:
        if self.static.is_on or self._used_in_forward is not None:
            unused = [slot for slot in self.reducer.slots if self._is_known_unused(slot)]
        elif self.frozen:
            unused = [slot for slot in self.reducer.slots if not slot.parameter.requires_grad]
        else:
            return
        for slot in unused:
            if slot.dirty and self.static.is_on and slot.parameter.requires_grad:
                raise errors.graph_changed(slot.place, rank=self.reducer.shown_rank, expected=0)
            self.mark_ready(slot, found_unused=True)

    def _is_known_unused(self, slot: Slot) -> bool:
        if not slot.parameter.requires_grad:
            return True  # frozen since it was wrapped
        if self.static.is_on:
            return self.static.is_unused(slot)
        # What was accumulated before waits for the end of the pass: a reentrant checkpoint may hide a use of it.
        return self._used_in_forward is not None and id(slot.parameter) not in self._used_in_forward and not slot.dirty

    # ---------------------------------------------------------------- parameters become ready

    def mark_ready(self, slot: Slot, *, found_unused: bool = False) -> None:
        """Count ``slot``; send every bucket that is whole and whose turn it is."""
        self.note_ready(slot, found_unused=found_unused)
        if slot.bucket.num_pending == 0:
            self.send_complete()

    # ---------------------------------------------------------------- buckets leave

    def send_complete(self) -> None:
        """Launch the whole buckets whose turn it is: strictly in plan order, since ranks must issue the same."""
        if self.state is not State.OPEN or not self._may_send_now():
            return
        buckets = self.reducer.buckets
        while self._next < len(buckets) and buckets[self._next].num_pending == 0:
            self._next += 1
            self.launch(buckets[self._next - 1])
        if self.all_launched:
            self.lane.sent_all(self)

    def _may_send_now(self) -> bool:
        if self.kind is Kind.FOLLOW_UP or (self.reducer.memory.is_shared and not self._is_ending):
            return False
        return self.lane.may_send(self)

    @property
    def all_launched(self) -> bool:
        return self._next == len(self.reducer.buckets)

    def all_launched_before(self, number: int) -> bool:
        """Whether no bucket before this one is still here."""
        return self._next >= number

    def has_sent_all(self) -> bool:
        """Whether others need not wait for this one in the current pass."""
        if not self.syncs or self.state is not State.OPEN or self.kind is Kind.FOLLOW_UP:
            return True  # the last kind sends when all others have
        return self.all_launched or self._is_ending

    def launch(self, bucket: LiveBucket) -> None:
        """Send a bucket with what its parameters have."""
        if self.skips_unused_buckets and all(slot.found_unused and not slot.dirty for slot in bucket.slots):
            bucket.skipped = bucket.has_left = True
            return
        intake = self.intake
        self.reducer.launch(bucket, intake.gradients_of(bucket), takes=intake.context_gradients is None)
        if self.after_bucket is not None:
            waits = self.finds_unused or self.static.is_on or intake.brought or self.reducer.finiteness.waits
            if not waits and not self._in_graph():
                self._collect_landed(bucket)

    @property
    def num_left_in_graph(self) -> int:
        """How many buckets of the last window left from inside a compiled backward."""
        return 0 if self.kind is Kind.FOLLOW_UP else sum(bucket.left_in_graph for bucket in self.reducer.buckets)

    def _in_graph(self) -> bool:
        """Whether a compiled backward delivers in this pass: it may read parameters after their gradients are made."""
        return any(bucket.left_in_graph or bucket.num_due for bucket in self.reducer.buckets)

    def _collect_landed(self, newest: LiveBucket) -> None:
        """With an optimizer in the backward, buckets that have arrived are used, and freed, while it goes on."""
        behind = self.num_buckets_behind
        # A GPU that records a program cannot be asked; it waits on its stream, when there is hardly a wait left.
        may_ask = behind is None or newest.parameters[0].device.type == "cpu"
        for bucket in self.reducer.buckets[: newest.index]:
            if bucket.flight is None:
                continue
            is_old = behind is not None and bucket.index <= newest.index - behind
            if is_old or (may_ask and bucket.flight.is_done()):
                self.closing.collect(bucket, None)

    # ---------------------------------------------------------------- a pass ends

    def settle_pass(self, *, is_inner: bool) -> None:
        """The engine finished a pass: what it brought is complete."""
        if not self.is_in_pass:
            return
        self.intake.settle()
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
                self.intake.settle_deliveries()
            if not (is_inner and self.finds_unused):
                self.intake.release_held()
            self._settle_missing(is_inner=is_inner)
            self.send_complete()

    def _settle_missing(self, *, is_inner: bool) -> None:
        """Parameters that need not be waited for any longer count as ready."""
        if self.all_launched and not self.static.is_on:
            return
        missing = self.missing
        if self._rest_is_unused(is_inner):
            for slot in missing:
                self.note_ready(slot, found_unused=not (self.static.is_on and slot.num_fires))
            if self.static.is_on:
                self.ready_order = self.static.order
        elif not self.static.is_on and not is_inner and all(slot.dirty for slot in missing):
            # All of them got their gradient in passes that did not synchronise.
            for slot in missing:
                self.note_ready(slot, found_unused=False)

    def note_ready(self, slot: Slot, *, found_unused: bool) -> None:
        """As ``mark_ready``, but nothing is sent yet."""
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
        """Close a window whose end is the caller's to choose; what still comes in a pass that runs now stays local."""
        if self.state is State.OPEN:
            if not self.all_launched:
                raise self.unfinished(self.missing)
            self.state, self.syncs = State.CLOSING, False
        if self.state is State.CLOSING:
            self.close_window()

    # ---------------------------------------------------------------- the window closes

    def close_window(self) -> None:
        """Compare with the other ranks, collect everything, hand it out."""
        with self.telling_peers():
            self.closing.close()
            for future in self._post_backward_futures:
                self.reducer.transport.watch.wait_future(future, lambda: "a buffer communication hook")
        self._end_window()

    def mirror_window(self) -> None:
        """As a rank without data (join): take part in a window of the others."""
        self.static.learn_as_joined()
        self.kind = Kind.FULL
        with self.telling_peers():
            self.closing.mirror()
        self.static.just_learned = False
        self.num_windows += 1

    def _end_window(self) -> None:
        self._post_backward_futures = []
        self._used_in_forward = None
        self._note_unused()
        self.state = State.IDLE
        self.static.just_learned = self.holds_local_gradients = self.has_forward = False
        self.has_fresh_gradients = True
        self.num_windows += 1
        self.reducer.timeline.end_step()
        self.reducer.transport.watch.forget_handled_failure()
        if listeners:
            reached(StepMoment.END, self.reducer.timeline.step - 1)

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
            rank=self.reducer.shown_rank,
            num_parameters=len(self.reducer.slots),
            finds_unused=self.finds_unused,
            static_graph=self.static.is_on,
        )

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

    def updates_itself(self) -> bool:
        """Whether any optimizer of this process has a parameter of this model; a search through all objects."""
        return bool(registry.optimizers_of({id(slot.leaf) for slot in self.reducer.slots}))

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
    kind = torch_private.accumulator_kind(slot.parameter)
    if slot.accumulator is not None and slot.accumulator_kind == kind:
        return False  # asked of every parameter of models that a backward does not come to
    slot.accumulator, slot.accumulator_kind = torch_private.gradient_accumulator(slot.parameter), kind
    return slot.accumulator is not None and torch_private.engine_will_run(slot.accumulator)
