"""The end of a window: ranks compare and unite what they have, everything is collected and handed out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lockstep import errors
from lockstep.agree.beat import Place
from lockstep.agree.stamp import Stamp
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.drift import NOTHING
from lockstep.engine.grads import set_gradient, set_late_aside
from lockstep.engine.states import Kind
from lockstep.engine.union import Union
from lockstep.observe.timeline import now

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep


class Closing:
    """Closes the windows of one step."""

    def __init__(self, step: SyncStep, union: Union) -> None:
        self._step = step
        self.union = union
        self.used_counts: list[int] | None = None  # on how many ranks each parameter was used
        self.is_collecting = False
        self._waited_before = 0.0  # in the window before this one
        self._marks: Sequence[int] = ()  # what ranks saw in their gradients, see nonfinite.py
        # With the first window on a group, when all ranks are at the same place.
        self.after_first: Callable[[], None] | None = None
        # Ranks have compared this window already, before it began (program/together.py).
        self.is_compared = False

    def close(self) -> None:
        """Compare with the other ranks, collect everything, hand it out."""
        reducer = self._step.reducer
        bits = self._unite()
        if self._step.kind is Kind.FOLLOW_UP:
            self._reduce_reached(bits)
        else:
            self._collect_all(self._remaining(bits))
        self._end_first()
        self._waited_before = reducer.timeline.waited_seconds
        if not self.is_compared and (any(self._marks) or reducer.finiteness.is_episode):
            reducer.finiteness.judge(self._marks, reducer.transport, reducer.timeline.step, reducer.buckets)
            if self._step.intake.context_gradients is None:
                reducer.finiteness.drop(reducer.slots)

    def _end_first(self) -> None:
        if self._step.num_windows == 0 and self.after_first is not None and not self.is_compared:
            self.after_first()

    # ---------------------------------------------------------------- what ranks tell each other

    @property
    def compares(self) -> bool:
        """Whether ranks compare at the end of this window."""
        return self.union.control is not None and self.union.check != "off" and not self.is_compared

    def _unite(self) -> int:
        """Compare stamps; returns what any rank has: remainders by bucket, or parameters reached, as a set of bits."""
        reducer = self._step.reducer
        bits = self._own_bits()
        used = self.local_used_counts() if self._asks_for_used() else None
        if self.is_compared:
            return self._unite_compared(bits, used)
        waited_us = int(1e6 * self._waited_before)
        mark = reducer.finiteness.mark(self._step.num_windows)
        if self.union.control is None:
            self._marks = [mark]
            return self._unite_alone(bits, used)
        reducer.land_unordered()
        start = now()
        bits, counts = self.union.unite(
            reducer.transport,
            self._stamp,
            bits,
            used,
            self._moment,
            self._step.updates_itself,
            mark,
            waited_us,
            self._step.drift.words() if self.compares else NOTHING,
        )
        self._step.drift.judge(self._step, self.union.drift)
        reducer.timeline.record("compare", start, now())
        self._marks = self.union.marks
        reducer.timeline.stragglers.note(self.union.waits, reducer.rank, reducer.transport.watch.shown)
        self.used_counts = self.used_counts if counts is None else counts
        reducer.transport.watch.require_wanted(self._moment)
        return bits

    def _own_bits(self) -> int:
        if self._step.kind is Kind.FOLLOW_UP:
            return _bits(slot.position for slot in self._step.reducer.slots if slot.ready)
        return _bits(bucket.index for bucket in self._step.intake.remainders)

    def _unite_compared(self, bits: int, used: list[int] | None) -> int:
        """In a step that ranks compared before it began: nothing is exchanged, nor asked of a GPU that may capture."""
        self._marks = ()
        if self._step.reducer.world == 1:
            return self._unite_alone(bits, used)
        if bits:
            raise errors.late_gradient(
                _names_of(self._step.intake.remainders), rank=self._step.reducer.shown_rank, hook=""
            )
        return 0

    def _unite_alone(self, bits: int, used: list[int] | None) -> int:
        """In a world of one, or where ranks have no way to tell each other anything but gradients."""
        reducer = self._step.reducer
        if used is not None:
            device = reducer.slots[0].parameter.device
            self.used_counts = used if reducer.world == 1 else self.union.count_used(reducer.transport, used, device)
        if reducer.world == 1:
            return bits
        if self._step.kind is Kind.FOLLOW_UP:
            return (1 << len(reducer.slots)) - 1
        if bits:
            raise errors.late_gradient(_names_of(self._step.intake.remainders), rank=reducer.shown_rank, hook="")
        return 0

    def _moment(self) -> Place:
        """What ranks that compare wait for: mostly for a peer that has not sent a bucket yet."""
        reducer = self._step.reducer
        under_way = [bucket for bucket in reducer.buckets if bucket.flight is not None]
        for bucket in under_way:
            if not bucket.flight.is_done():
                return reducer.moment(bucket)
        step = reducer.timeline.step
        end = f"the comparison of ranks at the end of step {step}"
        after = f", after {reducer.moment(under_way[-1])}" if under_way else ""
        return Place(end + after, step, len(reducer.buckets))

    def _stamp(self) -> Stamp:
        step = self._step
        reducer = step.reducer
        divisor = reducer.mean.divisor
        skipped = tuple(b.shown_names for b in reducer.buckets if b.skipped) if step.skips_unused_buckets else ()
        return Stamp(
            self.union.name,
            step.num_windows,
            step.kind._value_,  # which is not looked up in the class first
            step.updates_before if self.union.compares_updates else 0,
            reducer.plan.digest,
            step.frozen,
            step.casts.names(),
            reducer.exchange.name if divisor is None else f"{reducer.exchange.name} over {divisor:g} ranks",
            reducer.num_buckets_reduced,
            skipped,
            step.num_resets,
            step.num_passes_told,
            step.gathers(),
            reducer.between.places(reducer.transport),
            step.kept(),
        )

    # ---------------------------------------------------------------- who used what

    def _asks_for_used(self) -> bool:
        """Whether ranks must know which parameters any of them used."""
        step = self._step
        if step.kind is Kind.FOLLOW_UP:
            return False
        if step.static.is_on:
            return step.static.just_learned
        return step.finds_unused and not self._decides_alone

    @property
    def _decides_alone(self) -> bool:
        """Whether used parameters are this rank's own matter: an exchange on the gradients' group is to be spared."""
        return self._step.skips_unused_buckets and self.union.control is None

    def local_used_counts(self) -> list[int]:
        """1 for each parameter, in declaration order, that this rank has a new gradient for."""
        gradient_of = self._step.intake.gradient_of
        return [
            int(slot.dirty and (slot.is_taken or gradient_of(slot) is not None)) for slot in self._step.reducer.slots
        ]

    def _is_used(self) -> Callable[[Slot], bool] | None:
        """Which parameters any rank used; the others keep their .grad as it was (None, usually)."""
        step = self._step
        if step.kind is Kind.FOLLOW_UP or not (step.static.is_on or step.finds_unused):
            return None
        if self._decides_alone and not step.static.is_on:
            return lambda slot: slot.dirty or not slot.found_unused
        counts = self.used_counts
        return None if counts is None else lambda slot: counts[slot.position] > 0

    # ---------------------------------------------------------------- everything is collected

    def _remaining(self, bits: int) -> list[LiveBucket]:
        """The buckets with a remainder on any rank; see step.py, [Note: what comes late]."""
        reducer = self._step.reducer
        buckets = [bucket for bucket in reducer.buckets if bits >> bucket.index & 1]
        for bucket in reducer.buckets:
            bucket.waits_for_end = bucket.got_extra or bucket in buckets
            bucket.was_watched = True
        if buckets and not reducer.exchange.is_linear:
            raise errors.late_gradient(_names_of(buckets), rank=reducer.shown_rank, hook=reducer.exchange.name)
        return buckets

    def _collect_all(self, remaining: Sequence[LiveBucket]) -> None:
        step, is_used = self._step, self._is_used()
        reducer, intake = step.reducer, step.intake
        if step.before_hand_out is not None:
            for bucket in reducer.buckets:
                reducer.collect(bucket)
            step.before_hand_out()
        for bucket in reducer.buckets:
            if bucket not in remaining:
                self.collect(bucket, is_used)
                continue
            late = set_late_aside(bucket)
            if intake.brought:
                pairs = zip(bucket.slots, late, strict=True)
                late = [intake.brought_late.get(s) if s in intake.brought else g for s, g in pairs]
            bucket.has_more = True
            try:
                self._collect_only(bucket, is_used)
            finally:
                bucket.has_more = False
            with self._handing_out():
                reducer.add_late(bucket, late, is_used)
        for bucket in remaining:
            self._after(bucket)

    def collect(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None) -> None:
        """Wait for a bucket, and hand it out."""
        if bucket.skipped or bucket.flat is None:
            return  # nothing left, or it was collected earlier in this pass
        self._collect_only(bucket, is_used)
        self._after(bucket)

    def _collect_only(self, bucket: LiveBucket, is_used: Callable[[Slot], bool] | None) -> None:
        reducer, intake = self._step.reducer, self._step.intake
        reducer.collect(bucket)
        with self._handing_out():  # hooks on the shards of a sharded model run in here, and may be optimizers
            reducer.memory.hand_out(bucket, is_used, in_place=intake.context_gradients is not None, into=intake.results)

    def _after(self, bucket: LiveBucket) -> None:
        if self._step.after_bucket is not None and not self._is_withheld():
            with self._handing_out():
                self._step.after_bucket(bucket)

    def _is_withheld(self) -> bool:
        """Whether optimizers in the backward must not use what has come."""
        return any(self._marks) and self._step.reducer.finiteness.waits

    @contextlib.contextmanager
    def _handing_out(self) -> Iterator[None]:
        """Let optimizers step inside: what they are given is reduced, though the window is still open."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def _reduce_reached(self, bits: int) -> None:
        """Reduce what a backward without a forward has reached, on any rank, as it lies in .grad."""
        step = self._step
        buckets = [b for b in step.reducer.buckets if any(bits >> slot.position & 1 for slot in b.slots)]
        reached = {slot for bucket in buckets for slot in bucket.slots if bits >> slot.position & 1}
        if step.before_hand_out is not None:
            step.before_hand_out()
        for bucket in buckets:
            step.launch(bucket)
        for bucket in buckets:
            self.collect(bucket, lambda slot: slot in reached or slot.is_taken)

    def mirror(self) -> None:
        """As a rank without data (join): contribute zeros to everything, in the order of the others.

        The mean gradients are kept, because an optimizer that is part of the join (ZeRO) steps its share with them.
        """
        step = self._step
        reducer = step.reducer
        for bucket in reducer.buckets:
            bucket.open(is_full=False)
            reducer.launch(bucket, [None] * len(bucket.slots), takes=False)
        reducer.land_unordered()
        remaining: list[LiveBucket] = []
        if self.union.control is not None:
            num_used = len(reducer.slots) if self._asks_for_used() else 0
            if self.compares:
                step.drift.open(step)
            bits, counts = self.union.mirror(reducer.transport, num_used, self._moment)
            step.drift.judge(step, self.union.drift)
            self.used_counts = self.used_counts if counts is None else counts
            remaining = self._remaining(bits)
        is_used = self._is_used()
        for bucket in reducer.buckets:
            reducer.collect(bucket)
            for slot in bucket.slots:
                set_gradient(slot.parameter, None)
            reducer.memory.hand_out(bucket, is_used)
            if bucket in remaining:
                reducer.add_late(bucket, [None] * len(bucket.slots), is_used)
        self._end_first()


def _names_of(buckets: Iterable[LiveBucket]) -> list[str]:
    return [slot.name for bucket in buckets for slot in bucket.slots]


def _bits(positions: Iterable[int]) -> int:
    bits = 0
    for position in positions:
        bits |= 1 << position
    return bits
