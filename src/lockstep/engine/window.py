"""The sync window: which parameters are ready, which buckets have left, and the proof that all were reduced once.

A window opens with the first gradient of a backward that synchronises and closes when every bucket was collected.
It may span several backward passes (partial graphs).  While it is open and incomplete, neither a new forward nor an
optimizer step is let through: that is how no rank trains on unreduced gradients without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.engine.bucket import LiveBucket, Slot


class SyncWindow:
    """Counts parameters down to launches, in plan order."""

    def __init__(self, buckets: list[LiveBucket], slots: list[Slot], launch: Callable[[LiveBucket], None]) -> None:
        self._buckets = buckets
        self._slots = slots
        self._launch = launch
        self.is_open = False
        self._next = 0
        # Names in the order gradients became ready in this window, for logging and for an observed plan.
        self.ready_order: list[Slot] = []
        self._stale: list[LiveBucket] = []

    def open(self) -> None:
        self.is_open = True
        self._next = 0
        self.ready_order = []
        self._stale = []
        for bucket in self._buckets:
            bucket.num_pending = len(bucket.slots)
            bucket.skipped = bucket.came_clean = False
            bucket.flight = None
            bucket.probe = None
        for slot in self._slots:
            slot.ready = False
            slot.found_unused = False
            slot.num_fires = 0

    def mark_ready(self, slot: Slot, *, found_unused: bool = False) -> None:
        """Count ``slot`` as ready; launch every bucket that is complete and whose turn it is."""
        self.note_ready(slot, found_unused=found_unused)
        if slot.bucket.num_pending == 0:
            self.launch_complete()

    def note_ready(self, slot: Slot, *, found_unused: bool = False) -> None:
        """Count ``slot`` as ready and launch nothing yet."""
        assert not slot.ready
        slot.ready = True
        slot.found_unused = found_unused
        if not found_unused:
            self.ready_order.append(slot)
        slot.bucket.num_pending -= 1

    def note_bucket_ready(self, bucket: LiveBucket) -> None:
        """Count all of a bucket's slots as ready and used, none of which was ready."""
        for slot in bucket.slots:
            slot.ready = True
        self.ready_order += bucket.slots
        bucket.num_pending = 0

    def is_next(self, bucket: LiveBucket) -> bool:
        """Whether ``bucket`` leaves as soon as it is complete."""
        return self._next == bucket.index

    def launch_complete(self) -> None:
        """Launch the complete buckets whose turn it is.

        Buckets leave strictly in plan order, because every rank must issue the same collectives in the same order.
        """
        while self._next < len(self._buckets) and self._buckets[self._next].num_pending == 0:
            self._next += 1
            self._launch(self._buckets[self._next - 1])

    def expect_more(self) -> None:
        """A later pass of this window begins: what has left may be added to, so it leaves once more at the end.

        All of it, not only what this rank adds to: that set may differ between ranks, and the collectives must not.
        """
        self._stale = self._buckets[: self._next]

    def take_stale(self) -> list[LiveBucket]:
        """Buckets to send again, in plan order."""
        stale, self._stale = self._stale, []
        return stale

    @property
    def all_launched(self) -> bool:
        return self._next == len(self._buckets)

    @property
    def missing(self) -> list[Slot]:
        """Parameters that are not ready, in declaration order."""
        return [slot for slot in self._slots if not slot.ready] if self.is_open else []

    def close(self) -> None:
        self.is_open = False
        for bucket in self._buckets:
            bucket.probe = None
