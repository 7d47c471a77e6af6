"""Gradients that a compiled backward delivers bucket by bucket, before autograd hands them to ``.grad``.

    deliver(grads, parameters) -> flat     pack the bucket, start its collective; or only pack it (see below)
    land(flats)                            at the end of a graph: wait for what it launched

[Note: delivered and accumulated]  ``deliver`` returns the flat buffer, the graph's outputs are views of it, and
autograd puts them into ``.grad`` without a copy; so the hook on each parameter still runs, and is the proof that the
gradient came.  Buckets leave in plan order, whoever completes them, so that a rank whose graph differs (or that runs
eagerly) still issues the same collectives as the others.

[Note: passing through]  Where the reduction cannot start here, the gradients are only packed, and the hooks reduce
them after the graph as in an eager backward: in a pass that does not synchronise, where these parameters are not
exactly one bucket of the plan, for parameters with hooks of their own (which must see the local gradient), under
``torch.autograd.grad``, and for buckets that are on probation.

[Note: probation]  A parameter may be used in the graph and outside of it (a penalty in the loss, a second graph).
Autograd adds up what comes from both before the hook sees it, so a part that left early would be missing the rest.
Nothing tells in advance; so a bucket passes through until it came from its graph alone, which shows in ``.grad``
being the very memory that was handed out.  Ranks need not agree on that: who passes through only launches later.

[Note: an addition that comes later]  What autograd then finds is the mean over the ranks of one part plus this rank's
value of the other.  The mean is the same on all ranks, so sending the bucket once more gives the mean of both; the
ranks agree over the board that they do, and the bucket is back on probation.  That needs the first part to have
arrived when autograd adds, which ``land`` sees to at the end of the backward's last graph.  Where it had not, or a
communication hook makes something else than a mean, the step is lost, and an error says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep import errors, torch_private
from lockstep.engine.bucket import LiveBucket, Slot, in_memory_order
from lockstep.engine.packing import GradOwnership, leave_memory

if TYPE_CHECKING:
    from lockstep.engine.eager import EagerBackward

_dtype_of, _grad_of = attrgetter("dtype"), attrgetter("grad")

# Who looks after a parameter. A slot keeps its parameter alive, so an id in here is never another parameter's.
_slots: dict[int, list[tuple[weakref.ref[EagerBackward], Slot]]] = {}
# Buffers that a graph launched and has not landed yet, by address.
_travelling: dict[int, tuple[weakref.ref[EagerBackward], LiveBucket]] = {}

# How long ranks wait for each other to say that a bucket must be sent once more.
_AGREEMENT_SECONDS = 30.0
# How many times more windows a bucket has to come clean after an addition, until it is launched by its graph again.
_HARDER = 64


def register(backward: EagerBackward) -> None:
    """Look after these parameters from now on.

    Where another wrapper does too (a wrapped module inside a wrapped module), neither may let ``.grad`` point at memory
    that is being reduced, since the other one still has to read it.
    """
    reference = weakref.ref(backward)
    for slot in backward.reducer.slots:
        entries = _slots.setdefault(id(slot.parameter), [])
        for other in entries:
            its = other[0]()
            if its is not None and its.is_attached:
                its.reducer.shares_parameters = backward.reducer.shares_parameters = True
        entries.append((reference, slot))


def unregister(backward: EagerBackward) -> None:
    for slot in backward.reducer.slots:
        entries = _slots.get(id(slot.parameter), [])
        entries[:] = [entry for entry in entries if entry[0]() not in (backward, None)]
        if not entries:
            _slots.pop(id(slot.parameter), None)


def slot_of(parameter: Tensor) -> tuple[EagerBackward, Slot] | None:
    """The slot of a parameter that a wrapper looks after, and that wrapper's caller of the reducer."""
    for reference, slot in reversed(_slots.get(id(parameter), ())):
        backward = reference()
        if backward is not None:
            return backward, slot
    return None


def deliver(grads: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """The operator ``launch``: one buffer with these gradients, on its way if they are a bucket that may leave."""
    found = slot_of(parameters[0])
    if found is None:
        return pack(grads, parameters)
    backward, slot = found
    if list(map(id, parameters)) == slot.bucket.parameter_ids:
        flat = backward.deliveries.take(slot.bucket, grads)
        if flat is not None:
            return flat
    flat = pack(grads, parameters)
    backward.deliveries.note_passed(flat, slot)
    return flat


def land(flats: Sequence[Tensor]) -> None:
    """The operator ``collect``: the end of a graph."""
    for flat in flats:
        entry = _travelling.pop(flat.data_ptr(), None)
        backward = entry[0]() if entry is not None else None
        if entry is not None and backward is not None:
            backward.deliveries.end_of_graph(entry[1])


def pack(grads: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """One flat buffer with each gradient in its parameter's memory order."""
    return torch.cat(
        [in_memory_order(g.to(p.dtype), p.shape, p.stride()) for g, p in zip(grads, parameters, strict=True)]
    )


class Deliveries:
    """What compiled graphs delivered to one wrapper in the current window."""

    def __init__(self, backward: EagerBackward) -> None:
        self._backward_ref = weakref.ref(backward)
        # Parameters that were accumulated into and whose hook only says so, see [Note: recorded hooks].
        self.recorded: list[Tensor] = []
        self._delivered: list[LiveBucket] = []  # in the current pass
        self._to_send_again: list[LiveBucket] = []
        self._num_resets = 0
        self._passed: list[Tensor] = []  # handed out in this pass, where .grad must not stay in them

    @property
    def _backward(self) -> EagerBackward:
        backward = self._backward_ref()
        assert backward is not None
        return backward

    # ---------------------------------------------------------------- from the graph

    def take(self, bucket: LiveBucket, grads: Sequence[Tensor]) -> Tensor | None:
        """Pack ``bucket``, and launch it if it may; None to leave it to the hooks, see [Note: passing through]."""
        backward = self._backward
        with backward.lock:
            if not _will_accumulate(bucket.slots[0]):
                return None
            backward.begin_pass()
            if not backward.syncs:
                return None
            accumulated = _accumulated(bucket)
            bucket.left_because = self._why_not_here(bucket, grads, accumulated)
            bucket.comes_from_graph = False
            if bucket.left_because:
                self.count_by_hooks(bucket)
                return None
            try:
                if bucket.num_clean_windows < bucket.num_clean_needed:
                    return self._watch_for_additions(bucket, grads, accumulated)
                return self._take(bucket, grads, accumulated)
            except Exception as error:
                backward.tell_peers(error)
                raise

    def _why_not_here(
        self, bucket: LiveBucket, grads: Sequence[Tensor], accumulated: Sequence[Tensor | None] | None
    ) -> str:
        """Why this bucket must be left to the hooks; empty if it need not."""
        backward = self._backward
        reducer = backward.reducer
        if backward.continues or bucket.num_pending < len(bucket.slots) or bucket.probe is not None:
            # What came first is handed out already, and may lie in the one buffer that this would be packed into.
            return "it gets gradients more than once before the reduction"
        if not backward.is_attached:
            return "its wrapper is gone"
        if reducer.shares_parameters:
            return "another wrapper reduces it too"
        if reducer.reduce_dtype is not None:
            return "native mixed precision reduces in another dtype"
        if backward.static_graph and not (
            backward.graph_is_learned and all(slot.expected_fires == 1 for slot in bucket.slots)
        ):
            return "static_graph=True is still learning, or it is used several times"
        if backward.in_dist_autograd:
            return "distributed autograd keeps gradients elsewhere"
        dtype = bucket.parameters[0].dtype
        for other in set(map(_dtype_of, grads)) - {dtype}:
            if not (other.is_floating_point and dtype is torch.float32):
                return "its gradient has another dtype"
        if accumulated is not None:
            if not _can_fold(accumulated, dtype):
                return "what lies in .grad cannot be added to it"
            if not all(map(_will_accumulate, bucket.slots)):
                return "this backward leaves some of its parameters out"
        if not torch_private.only_hooks_are_ours(bucket.parameters):
            return "hooks of your own look at its gradient"
        return ""

    def _watch_for_additions(
        self, bucket: LiveBucket, grads: Sequence[Tensor], accumulated: list[Tensor | None] | None
    ) -> Tensor:
        """See [Note: probation]."""
        bucket.left_because = "it is not yet known to come from the graph alone"
        flat = self._pack(bucket, grads, accumulated, leaves_now=False)
        # Held until the window closes: autograd adds in place to memory that nobody else holds, and nothing would show.
        bucket.probe, bucket.flat = flat, None
        self.note_passed(flat, bucket.slots[0])
        bucket.came_clean = True
        self.count_by_hooks(bucket)
        return flat.view(-1)  # see ``_take``

    def _take(self, bucket: LiveBucket, grads: Sequence[Tensor], accumulated: list[Tensor | None] | None) -> Tensor:
        backward = self._backward
        window = backward.window
        window.note_bucket_ready(bucket)
        flat = self._pack(bucket, grads, accumulated, leaves_now=window.is_next(bucket))
        if accumulated is not None or backward.needs_every_hook:
            for slot in bucket.slots:
                slot.dirty = True
        bucket.is_delivered = bucket.comes_from_graph = True
        self._delivered.append(bucket)
        window.launch_complete()
        if flat.numel():
            _travelling[flat.data_ptr()] = (self._backward_ref, bucket)
        # Another tensor than the reducer's own: autograd keeps what nobody else holds, and copies the rest.
        return flat.view(-1)

    def _pack(
        self,
        bucket: LiveBucket,
        grads: Sequence[Tensor],
        accumulated: list[Tensor | None] | None,
        *,
        leaves_now: bool,
    ) -> Tensor:
        flat = self._backward.reducer.pack_delivered(bucket, grads, accumulated, leaves_now=leaves_now)
        if accumulated is not None:
            # Folded in; autograd must not add it a second time. The tensor itself comes back in ``put_back``.
            bucket.has_kept = True
            for slot, gradient in zip(bucket.slots, accumulated, strict=True):
                slot.kept_grad = gradient
                slot.parameter.grad = None
        return flat

    def end_of_graph(self, bucket: LiveBucket) -> None:
        """The graph is about to hand its gradients to autograd: the last chance to wait before something is added.

        While other buckets are still to come, this one goes on travelling.
        """
        backward = self._backward
        if bucket.flight is None or not backward.window.all_launched:
            return
        with backward.lock:
            try:
                backward.reducer.collect(bucket)
            except Exception as error:
                backward.tell_peers(error)
                raise

    def note_passed(self, flat: Tensor, first: Slot) -> None:
        """This buffer was handed out; where .grad is to have memory of its own, it must not stay in it.

        What torch.autograd.grad asked for is the caller's, and no pass ends that would forget it here.
        """
        if self._backward.reducer.ownership is GradOwnership.OWN and _will_accumulate(first):
            self._passed.append(flat)

    def leave_passed(self) -> None:
        """At the end of a pass: give every .grad that lies in a buffer that was handed out memory of its own."""
        if self._passed:
            leave_memory(self._backward.reducer.slots, self._passed)
            self._passed.clear()

    def check_probe(self, slot: Slot) -> None:
        """From the hook of a parameter whose bucket is on probation: whether its gradient is what was handed out."""
        bucket, gradient = slot.bucket, slot.parameter.grad
        if gradient is None or bucket.probe is None or slot.num_elements == 0:
            return
        if gradient.data_ptr() != bucket.probe.data_ptr() + slot.offset * gradient.element_size():
            bucket.came_clean = False
            bucket.left_because = "it is used outside of the graph as well"

    # ---------------------------------------------------------------- [Note: recorded hooks]
    #
    # The hook on a parameter is the proof that its gradient came, and the way out when no graph delivers. Called for
    # every parameter in every backward it costs as much as all the rest. So once a bucket came from a graph alone, its
    # hooks become the ``append`` of a list: nothing is lost, since the list is looked through at the end of the pass,
    # and one parameter of each bucket keeps a hook that counts, so that a backward without the graph is noticed as it
    # happens. Gradients that are on the list when nobody looked (a backward that reached none of those) are noticed by
    # the next forward and the next optimizer step.

    def record_by_hooks(self, bucket: LiveBucket) -> None:
        if not bucket.is_recorded and not self._backward.needs_every_hook:
            bucket.is_recorded = True
            for slot in bucket.slots[1:]:
                self._backward.set_hook(slot, self.recorded.append)

    def count_by_hooks(self, bucket: LiveBucket) -> None:
        """Let every hook of the bucket count again, from this very pass on."""
        if bucket.is_recorded:
            bucket.is_recorded = False
            for slot in bucket.slots[1:]:
                self._backward.set_hook(slot)

    def read_recorded(self) -> None:
        """At the end of a pass: what the recording hooks saw."""
        backward = self._backward
        expected = sum(len(bucket.slots) - 1 for bucket in self._delivered if bucket.is_recorded)
        if len(self.recorded) == expected and backward.window.all_launched:
            self.recorded.clear()  # all of it from graphs, which ``settle`` looks at
            return
        recorded = list(self.recorded)
        self.recorded.clear()
        for slot in map(backward.slot_of, recorded):
            slot.dirty = True
            bucket = slot.bucket
            if backward.syncs and not bucket.is_delivered:
                self.count_by_hooks(bucket)
                if not slot.ready:
                    backward.window.note_ready(slot)

    # ---------------------------------------------------------------- the end of a pass

    def settle(self) -> None:
        """Autograd has put the delivered gradients into ``.grad``: as they were, or with something added."""
        delivered, self._delivered = self._delivered, []
        stays_open = not self._backward.window.all_launched
        owns = self._backward.reducer.ownership is GradOwnership.OWN  # then the result is copied, once it is there
        for bucket in delivered:
            assert bucket.flat is not None
            bucket.came_clean = True
            base, itemsize = bucket.flat.data_ptr(), bucket.flat.element_size()
            expected = [base + offset * itemsize for offset in bucket.spec.offsets]
            gradients = list(map(_grad_of, bucket.parameters))
            if _addresses(gradients) != expected:
                self._look_for_additions(bucket, gradients, expected)
            if bucket.has_kept and not owns:
                for slot in bucket.slots:
                    self.put_back(slot)
            if stays_open:
                for slot in bucket.slots:
                    slot.dirty = True

    def _look_for_additions(
        self, bucket: LiveBucket, gradients: Sequence[Tensor | None], expected: Sequence[int]
    ) -> None:
        for slot, gradient, address in zip(bucket.slots, gradients, expected, strict=True):
            if gradient is None:
                raise self._backward.unfinished([slot])
            if slot.num_elements and gradient.data_ptr() != address:
                self._note_addition(bucket, slot)

    def _note_addition(self, bucket: LiveBucket, slot: Slot) -> None:
        """See [Note: an addition that comes later]."""
        if bucket.came_clean:
            bucket.num_clean_needed *= _HARDER
        bucket.came_clean = False
        bucket.num_clean_windows = 0
        bucket.left_because = "it is used outside of the graph as well"
        reducer = self._backward.reducer
        if not bucket.was_sent or bucket.flight is not None:
            raise errors.late_gradient(slot.place, rank=reducer.rank, because="while its bucket was travelling")
        if reducer.comm_hook is not None:
            because = f"and the communication hook {reducer.comm_hook_name} had reduced its bucket already"
            raise errors.late_gradient(slot.place, rank=reducer.rank, because=because)
        if bucket not in self._to_send_again:
            self._to_send_again.append(bucket)

    def put_back(self, slot: Slot) -> None:
        """Let the tensor that was in ``.grad`` before be the one that is there afterwards."""
        kept, slot.kept_grad = slot.kept_grad, None
        gradient = slot.parameter.grad
        if kept is not None and gradient is not None and kept is not gradient:
            if self._backward.reducer.ownership is GradOwnership.OWN:
                kept.copy_(gradient)
            else:
                kept.data = gradient.detach()
            slot.parameter.grad = kept
        slot.kept_value = None

    # ---------------------------------------------------------------- the end of the window

    def buckets_to_send_again(self) -> list[LiveBucket]:
        """Buckets whose parameters got gradients from outside the graph as well; the same on all ranks."""
        mine, self._to_send_again = self._to_send_again, []
        if not mine:
            return []
        backward = self._backward
        if backward.reducer.watch.board is None:
            return mine
        key = f"gradients from outside a graph, window {backward.num_synced_passes}, attempt {self._num_resets}"
        names = [slot.name for bucket in mine for slot in bucket.slots]
        try:
            indices_text = ",".join(str(bucket.index) for bucket in mine)
            told = backward.reducer.watch.gather(key, indices_text, _AGREEMENT_SECONDS)
        except errors.PeerLate as late:
            raise errors.lone_addition(names, rank=backward.reducer.rank, others=late.ranks) from late
        indices = {int(i) for text in told.values() for i in text.split(",")}
        buckets = [backward.reducer.buckets[i] for i in sorted(indices)]
        for bucket in buckets:
            bucket.came_clean = False
        return buckets

    def end_window(self) -> None:
        """Remember which buckets came from a graph alone."""
        for bucket in self._backward.reducer.buckets:
            if bucket.came_clean:
                bucket.num_clean_windows += 1
                if bucket.num_clean_windows > bucket.num_clean_needed:  # launched by a graph, and clean
                    self.record_by_hooks(bucket)
            else:
                bucket.num_clean_windows = 0
                self.count_by_hooks(bucket)

    def keep_local(self) -> None:
        """Passes that did not synchronise are over: what only the recording hooks saw of them stays local."""
        backward = self._backward
        for slot in map(backward.slot_of, self.recorded):
            slot.dirty = backward.holds_local_gradients = True
        self.recorded.clear()

    def require_seen(self) -> None:
        """Before a forward, and an optimizer step on these: nothing was accumulated that no pass looked at."""
        if self.recorded:
            raise self._backward.unfinished(map(self._backward.slot_of, self.recorded))

    def reset(self) -> None:
        """After an error: nothing that had accumulated before is lost."""
        self.leave_passed()
        self.recorded.clear()
        self._delivered = []
        self._to_send_again = []
        self._num_resets += 1
        for address in [a for a, (reference, _) in _travelling.items() if reference is self._backward_ref]:
            del _travelling[address]
        for bucket in self._backward.reducer.buckets:
            bucket.num_clean_windows = 0
            self.count_by_hooks(bucket)
        for slot in self._backward.reducer.slots:
            if slot.kept_grad is not None:
                if slot.kept_value is not None:  # it lay in the buffer that was written over, and may travel still
                    slot.kept_grad.data = slot.kept_value
                slot.parameter.grad, slot.kept_grad, slot.kept_value = slot.kept_grad, None, None


def _accumulated(bucket: LiveBucket) -> list[Tensor | None] | None:
    """What lies in .grad of each parameter; None if nothing does."""
    if set(map(type, map(_grad_of, bucket.parameters))) == {type(None)}:
        return None
    return list(map(_grad_of, bucket.parameters))


def _addresses(gradients: Sequence[Tensor | None]) -> list[int] | None:
    try:
        return list(map(Tensor.data_ptr, gradients))  # type: ignore[arg-type]
    except TypeError:  # one of them is None
        return None


def _can_fold(accumulated: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
    return all(a is None or (a.dtype is dtype and not a.is_sparse and not a.requires_grad) for a in accumulated)


def _will_accumulate(slot: Slot) -> bool:
    """Whether this backward ends in ``.grad`` of the parameter; torch.autograd.grad does not."""
    if slot.accumulator is not None and torch_private.engine_will_run(slot.accumulator):
        return True
    slot.accumulator = torch_private.gradient_accumulator(slot.parameter)  # a new one after .to() and the like
    return slot.accumulator is not None and torch_private.engine_will_run(slot.accumulator)
