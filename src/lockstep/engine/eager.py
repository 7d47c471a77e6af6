"""The eager caller of the reducer: autograd hooks count parameters down and launch buckets during the backward.

    first gradient  -> begin_pass      is this a pass that synchronises?  open the window
    each gradient   -> on_gradient     count down; a complete bucket is launched, in plan order
    engine callback -> end_pass        collect all buckets, write .grad back, close the window

[Note: when a pass synchronises]  ``require_backward_grad_sync`` is read when the backward begins, not when the
forward ran.  So it does not matter whether the forward, the backward, or both are inside ``no_sync()``: gradients
are added up locally until a backward runs outside of it, and that one reduces everything that was added up.
Under ``join()`` the forward decides, because ranks that have run out of data must be told then.

[Note: end of a pass]  Reentrant checkpoints run a backward inside the backward, and a callback queued in there fires
when the inner one ends.  So the end of a pass only *finishes* a window whose buckets have all left; a window that is
still short of parameters stays open for the outer pass, or for the user's next backward.  In the second case what
has left is collected, and the next pass launches nothing before its end, since it may add to any parameter; what had
left is then sent again, which is right because averaging leaves alone what is equal on all ranks.  Where
parameters may legitimately stay without a gradient (find_unused_parameters, static_graph), a hook on the outputs
queues the callback in the outermost pass instead, whose end marks the rest as unused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from lockstep import errors, torch_private
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.delivery import Deliveries, register, unregister
from lockstep.engine.packing import leave_memory
from lockstep.engine.reducer import Reducer
from lockstep.engine.used import find_tensors, parameters_reached_from
from lockstep.engine.window import SyncWindow
from lockstep.observe.timeline import now


class EagerBackward:
    """Watches one wrapped model's backward passes."""

    def __init__(
        self,
        reducer: Reducer,
        wants_sync: Callable[[], bool],
        *,
        finds_unused: bool = False,
        skips_unused_buckets: bool = False,
    ) -> None:
        self.reducer = reducer
        self.finds_unused = finds_unused
        self.skips_unused_buckets = skips_unused_buckets
        self.static_graph = False
        self.graph_is_learned = False  # static_graph: the first window showed how often each parameter fires
        self._just_learned = False
        self._fire_order: list[Slot] = []
        self.num_synced_passes = 0
        # Accumulated in passes that did not synchronise, and not reduced since.
        self.holds_local_gradients = False
        self.is_collecting = False
        # Called when a window is closed: in-backward optimizers, mixed precision, logging.
        self.after_bucket: Callable[[LiveBucket], None] | None = None
        self.before_write_back: Callable[[], None] | None = None
        self.after_pass: Callable[[], None] | None = None
        self.on_error: Callable[[Exception], None] | None = None
        self.used_map: Tensor | None = None
        self.unused_changed = False
        self._wants_sync = wants_sync
        self._post_backward_futures: list[torch.futures.Future[Any]] = []
        self._last_unused: frozenset[str] | None = None
        self._used_in_forward: set[int] | None = None
        self.continues = self._left_open = False  # see [Note: end of a pass]
        self.lock = threading.RLock()
        self._handles: dict[int, Any] = {}
        self._pass_running = self._callback_queued = self._outermost_seen = self.syncs = False
        self._pass_start = 0
        self._context_gradients: Mapping[Tensor, Tensor] | None = None
        self.deliveries = Deliveries(self)
        self.graphs: list[Any] = []  # what was compiled of this model, for lockstep.explain
        self.window = self._new_window()
        self.attach()

    def _new_window(self) -> SyncWindow:
        return SyncWindow(self.reducer.buckets, self.reducer.slots, self._launch)

    # ---------------------------------------------------------------- hooks on parameters and outputs

    def attach(self) -> None:
        """Put the hooks on.  They sit on the parameter, so they survive ``.data`` and device changes."""
        self.detach()
        self.reducer.shares_parameters = False
        self._is_multi_device = len({slot.parameter.device for slot in self.reducer.slots}) > 1
        self._slot_by_id = {id(slot.parameter): slot for slot in self.reducer.slots}
        for slot in self.reducer.slots:
            self.set_hook(slot)
        register(self)

    def set_hook(self, slot: Slot, hook: Callable[[Tensor], None] | None = None) -> None:
        """Let ``hook`` be what runs when the parameter's gradient is there; by default the one that counts."""
        if hook is None:
            hook = partial(self._on_gradient_locked if self._is_multi_device else self._on_gradient, slot)
        before = self._handles.pop(id(slot), None)
        if before is not None:
            before.remove()
        is_frozen = not slot.parameter.requires_grad
        if is_frozen:  # for now; it takes no hook otherwise
            slot.parameter.requires_grad_(True)
        self._handles[id(slot)] = slot.parameter.register_post_accumulate_grad_hook(hook)
        if is_frozen:
            slot.parameter.requires_grad_(False)

    def slot_of(self, parameter: Tensor) -> Slot:
        """The slot of a parameter that this wrapper looks after."""
        return self._slot_by_id[id(parameter)]

    @property
    def is_in_a_pass(self) -> bool:
        return self._pass_running

    @property
    def in_dist_autograd(self) -> bool:
        return self._context_gradients is not None or torch_private.current_dist_autograd_context() is not None

    @property
    def needs_every_hook(self) -> bool:
        """Whether what each hook sees decides something before the end of the pass."""
        return self.finds_unused or self.static_graph or self._is_multi_device or self.after_bucket is not None

    @property
    def is_attached(self) -> bool:
        return bool(self._handles)

    def detach(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        unregister(self)

    def rebuild(self) -> None:
        """The reducer has a new plan: count anew."""
        self.reset()
        self.window = self._new_window()
        self.graph_is_learned = False
        self._fire_order = []

    def prepare_backward(self, output: Any) -> None:
        """After a forward: find the parameters it used, and watch for the backward that starts from its outputs."""
        if not (self.finds_unused or self.static_graph):
            return
        outputs = [t for t in find_tensors(output) if t.requires_grad]
        if self.finds_unused and not self.static_graph and outputs:
            # Several forwards may come before one backward: the parameters of all of them count as used.
            with record_function("search_unused_parameters"):
                reached = parameters_reached_from(outputs)
            self._used_in_forward = (self._used_in_forward or set()) | reached
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, _: Tensor) -> None:
        with self.lock:
            if not self._outermost_seen:
                self._outermost_seen = True
                self._callback_queued = True
                torch_private.queue_backward_callback(self._end_pass)

    def on_context_gradient(self, slot: Slot, gradients: Mapping[Tensor, Tensor]) -> None:
        """A gradient arrived in a distributed autograd context instead of ``.grad``."""
        self._context_gradients = gradients
        self._on_gradient(slot, slot.parameter)

    def _gradient_of(self, slot: Slot) -> Tensor | None:
        if self._context_gradients is not None:
            return self._context_gradients.get(slot.parameter)
        return slot.parameter.grad

    def _on_gradient(self, slot: Slot, _: Tensor) -> None:
        """The hook: runs once per parameter and backward, so it does as little as it can."""
        slot.dirty = True
        if not self._pass_running:
            self.begin_pass()
        if self.syncs:
            self._count(slot)

    def _on_gradient_locked(self, slot: Slot, parameter: Tensor) -> None:
        """The hook for a module on several devices, each of which has its own backward thread."""
        with self.lock:
            self._on_gradient(slot, parameter)

    # ---------------------------------------------------------------- the pass

    def _reset_pass(self) -> None:
        self._pass_running = self._callback_queued = self._outermost_seen = self.syncs = False
        self._pass_start = 0
        self._context_gradients = None

    def begin_pass(self) -> None:
        """The first gradient of a pass has come, from a hook or from a compiled graph."""
        if self._pass_running:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(errors.COMPILED_AUTOGRAD)
        self._pass_running = True
        if not self._callback_queued:
            self._callback_queued = True
            torch_private.queue_backward_callback(self._end_pass)
        self.continues = self.window.is_open and self._left_open
        if self.continues:
            self.window.expect_more()
        self._pass_start = now()
        self.syncs = self._wants_sync()
        if self.syncs and not self.window.is_open:
            self.window.open()
            self.reducer.num_buckets_reduced = 0
            with self.telling_peers():
                self._mark_known_unused()

    def _mark_known_unused(self) -> None:
        if self.static_graph or self._used_in_forward is not None:
            unused = [slot for slot in self.reducer.slots if self._is_known_unused(slot)]
        else:  # the usual case, in which only those frozen since the wrapping are
            unused = [slot for slot in self.reducer.slots if not slot.parameter.requires_grad]
        for slot in unused:
            if slot.dirty and self.static_graph and slot.parameter.requires_grad:
                raise errors.graph_changed(slot.place, rank=self.reducer.rank, expected=0)
            self.window.mark_ready(slot, found_unused=True)

    def _is_known_unused(self, slot: Slot) -> bool:
        if not slot.parameter.requires_grad:
            return True  # frozen since it was wrapped
        if self.static_graph:
            return self.graph_is_learned and slot.expected_fires == 0
        return self._used_in_forward is not None and id(slot.parameter) not in self._used_in_forward

    def _count(self, slot: Slot) -> None:
        try:
            if self.static_graph and not self._fired_for_the_last_time(slot):
                return
            bucket = slot.bucket
            if bucket.is_delivered:
                return  # looked at when the pass ends
            if bucket.probe is not None:
                self.deliveries.check_probe(slot)
                self.deliveries.put_back(slot)
            if self.continues:
                if not slot.ready:
                    self.window.note_ready(slot)
            elif slot.ready:
                raise errors.ready_twice(slot.place, rank=self.reducer.rank, was_found_unused=slot.found_unused)
            else:
                if slot.stages_early:
                    self.reducer.stage(slot, self._gradient_of(slot))
                self.window.mark_ready(slot)
        except Exception as error:
            self.tell_peers(error)
            raise

    def _fired_for_the_last_time(self, slot: Slot) -> bool:
        """static_graph: whether ``slot`` has now received as many gradients as in the first window."""
        slot.num_fires += 1
        if not self.graph_is_learned:
            if slot.num_fires == 1:
                self._fire_order.append(slot)
            return False  # the first window only watches; it is reduced as a whole at its end
        expected = 1 if slot.expected_fires is None else slot.expected_fires  # None: learned as a joined rank
        if slot.num_fires > expected:
            raise errors.graph_changed(slot.place, rank=self.reducer.rank, expected=expected)
        return slot.num_fires == expected

    def _launch(self, bucket: LiveBucket) -> None:
        if self.skips_unused_buckets and all(slot.found_unused and not slot.dirty for slot in bucket.slots):
            bucket.skipped = True
            return
        if bucket.is_delivered:
            self.reducer.send_delivered(bucket)
            return
        self.reducer.launch(bucket, [self._gradient_of(slot) for slot in bucket.slots])
        self.reducer.adopt(bucket)
        if self.after_bucket is not None and not (self.finds_unused or self.static_graph):
            self._collect_landed(bucket)

    def _collect_landed(self, newest: LiveBucket) -> None:
        """With an optimizer in the backward, buckets that have arrived are used, and freed, while it goes on."""
        for bucket in self.reducer.buckets[: newest.index]:
            # What a graph delivered is in .grad only when the graph has returned.
            if bucket.flight is not None and bucket.flight.is_done() and not bucket.is_delivered:
                self._collect(bucket, None)

    def _end_pass(self) -> None:
        """The engine finished a pass: reduce what is complete, or leave the window open for the next pass."""
        with self.lock:
            if not self._pass_running:  # no parameter received a gradient (torch.autograd.grad)
                self._reset_pass()
                return
            end = now()
            self.reducer.timeline.record("backward", self._pass_start, end)
            self.deliveries.read_recorded()
            if self.syncs and self.window.is_open:
                with self.telling_peers():
                    self.deliveries.settle()
                    self._settle_missing()
                    self.window.launch_complete()
                if self.window.all_launched:
                    self._finish_window()
                elif not self._is_inner_pass():
                    self._left_open = True
                    self._collect_launched()
            else:
                self.holds_local_gradients = True
                self._used_in_forward = None
            self.deliveries.leave_passed()
            is_over = not self.window.is_open
            self._reset_pass()
        if is_over and self.after_pass is not None:
            self.after_pass()

    def _settle_missing(self) -> None:
        """At the end of a pass: parameters that need not be waited for any longer count as ready."""
        if self.window.all_launched and not self.static_graph:
            return
        missing = self.window.missing
        if self._rest_is_unused():
            for slot in missing:
                self.window.note_ready(slot, found_unused=not (self.static_graph and slot.num_fires))
            if self.static_graph:
                self.window.ready_order = self._fire_order
        elif not self.static_graph and all(slot.dirty for slot in missing) and not self._is_inner_pass():
            # All of them got their gradient in passes that did not synchronise.
            for slot in missing:
                self.window.note_ready(slot)

    def _is_inner_pass(self) -> bool:
        return torch_private.in_nested_backward()

    def _rest_is_unused(self) -> bool:
        """Whether parameters that are not ready at the end of a pass count as unused (or as a missing gradient)."""
        if not self.static_graph:
            return self.finds_unused
        if self.graph_is_learned:
            return False
        self.graph_is_learned = self._just_learned = True
        for slot in self.reducer.slots:
            slot.expected_fires = slot.num_fires
        return True

    # ---------------------------------------------------------------- finish

    def _collect_launched(self) -> None:
        """The pass is over but the window is not: land what has left, so that a later pass may add to it."""
        with self.telling_peers():
            for bucket in self.reducer.buckets:
                self._collect(bucket, None)
                self.reducer.unstage(bucket)

    def _finish_window(self) -> None:
        with self.telling_peers():
            self.reducer.land_unordered()
            for bucket in self.deliveries.buckets_to_send_again():
                # Each .grad holds the mean of what the graph delivered, and what was added to it.
                if bucket.flight is not None:
                    self.reducer.collect(bucket)
                for slot in bucket.slots:
                    self.deliveries.put_back(slot)
                if bucket.is_delivered:
                    bucket.clear()
                else:
                    self.reducer.write_back(bucket)
                self._launch(bucket)
            for bucket in self.window.take_stale():
                self._launch(bucket)
            self.reducer.land_unordered()
            is_used = self._agree_on_used()
            if self.before_write_back is not None:
                self._land_all()
                self.before_write_back()
            for bucket in self.reducer.buckets:
                self._collect(bucket, is_used)
            for future in self._post_backward_futures:
                self.reducer.watch.wait_future(future, lambda: "a buffer communication hook")
        self._post_backward_futures = []
        self._used_in_forward = None
        self._note_unused()
        self.deliveries.end_window()
        self.window.close()
        self._just_learned = self._left_open = False
        self.holds_local_gradients = False
        self.num_synced_passes += 1
        self.reducer.timeline.end_step()

    def _land_all(self) -> None:
        for bucket in self.reducer.buckets:
            if bucket.flight is not None:
                self.reducer.collect(bucket)

    def _collect(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None) -> None:
        if bucket.skipped:
            return
        if bucket.flight is not None:
            self.reducer.collect(bucket)
        if bucket.flat is None:
            return  # collected earlier in this pass
        if bucket.is_delivered:
            self.reducer.finish_delivered(bucket)
        else:
            self.reducer.write_back(bucket, is_used, in_place=self._context_gradients is not None)
        if self.after_bucket is not None:
            self.is_collecting = True
            try:
                self.after_bucket(bucket)
            finally:
                self.is_collecting = False

    def _agree_on_used(self) -> Callable[[Slot], bool] | None:
        """Which parameters any rank used; the others keep their .grad as it was (None, usually)."""
        if self.static_graph:
            if self._just_learned:
                self._reduce_used_map()
        elif self.finds_unused:
            if self.skips_unused_buckets:
                return lambda slot: slot.dirty or not slot.found_unused
            self._reduce_used_map()
        if self.used_map is None:
            return None
        counts = self.used_map.tolist()
        return lambda slot: counts[slot.position] > 0

    def agree_as_joined(self) -> Callable[[Slot], bool] | None:
        """As a rank without data: take part in the exchange of used parameters, if the others have one now."""
        self._just_learned = self.static_graph and not self.graph_is_learned
        self.graph_is_learned = self.static_graph
        is_used = self._agree_on_used()
        self._just_learned = False
        return is_used

    def local_used_map(self) -> Tensor:
        """1 for each parameter, in declaration order, that this rank has a new gradient for."""
        device = self.reducer.slots[0].parameter.device
        used = [int(slot.dirty and self._gradient_of(slot) is not None) for slot in self.reducer.slots]
        return torch.tensor(used, dtype=torch.int32, device=device)

    def _reduce_used_map(self) -> None:
        self.used_map = self.local_used_map()
        work = dist.all_reduce(self.used_map, group=self.reducer.process_group, async_op=True)
        self.reducer.land(work, self.used_map, "the exchange of used parameters")

    def _note_unused(self) -> None:
        """Remember whether the set of unused parameters ever changed: whether static_graph=True could be set."""
        unused = frozenset(slot.name for slot in self.reducer.slots if slot.found_unused)
        if self._last_unused is not None and unused != self._last_unused:
            self.unused_changed = True
        self._last_unused = unused

    # ---------------------------------------------------------------- the proof

    def forget_broken_pass(self) -> None:
        """Before a forward: a backward that raised has left its marks, because the engine skips its callbacks then."""
        if not torch_private.in_backward():
            self._reset_pass()

    def require_finished(self) -> None:
        """Raise if the last backward that synchronises left the window incomplete."""
        self.deliveries.require_seen()
        if self.window.is_open:
            with self.telling_peers():
                raise self.unfinished(self.window.missing)

    def unfinished(self, slots: Iterable[Slot]) -> errors.LockstepError:
        """The error for parameters whose gradients no reduction has seen."""
        return errors.unfinished_reduction(
            [slot.place for slot in slots],
            rank=self.reducer.rank,
            num_parameters=len(self.reducer.slots),
            finds_unused=self.finds_unused,
            static_graph=self.static_graph,
        )

    def reset(self) -> None:
        """Forget the current window, after an error in a backward that was caught."""
        abandoned: list[Tensor] = []
        for bucket in self.reducer.buckets:
            if bucket.was_sent and bucket.flight is None:
                pass  # reduced already; what is in .grad stays as it is
            elif bucket.flight is None:
                self.reducer.unstage(bucket)
            else:  # a collective that nobody will wait for may still write into these
                bucket.spare = bucket.persistent = None
                if bucket.flat is not None and not bucket.is_sparse:
                    abandoned.append(bucket.flat)
            bucket.clear()
        self.deliveries.reset()
        leave_memory(self.reducer.slots, abandoned)
        self.window.close()
        self._left_open = False
        self._used_in_forward = None
        self._post_backward_futures = []
        self._reset_pass()

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
            self.reducer.watch.post_failure(error)
        if self.on_error is not None:
            self.on_error(error)
