"""Going on after an error: all ranks forget the window in progress, and are level again.

A rank that comes here alone makes the others raise an error that says so, wherever they wait; when they have handled it
they come here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.casts import MEETING_SECONDS
from lockstep.engine.states import State

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep

_PATIENCE_SECONDS = 8.0  # others may still be raising what all of them are to handle


def reset_together(step: SyncStep) -> None:
    """Forget the current window on all ranks: what some have sent the others send too, so that all are level."""
    reducer, watch = step.reducer, step.reducer.transport.watch
    if watch.board is not None and reducer.world > 1:
        sent = sum(bucket.has_left and not bucket.skipped for bucket in reducer.buckets)
        sent = sent if step.state is not State.IDLE else 0
        key = f"reset {step.num_resets + 1}"
        told = watch.meet(key, "reset_sync_window()", str(sent), MEETING_SECONDS, patience_seconds=_PATIENCE_SECONDS)
        if reducer.exchange.is_linear:
            _catch_up(step, sent, max(map(int, told.values())))
        control = step.closing.union.control
        if control is not None:
            control.renew()
            control.connect(watch)
        if reducer.transport.audit is not None:
            reducer.transport.audit.renew()
            reducer.transport.audit.connect(watch)
        watch.clear_failure()
        step.num_updates = 0
        step.has_fresh_gradients = False
    step.num_resets += 1
    step.reset()


def _catch_up(step: SyncStep, sent: int, most: int) -> None:
    """Send zeros for the buckets that other ranks have sent, and land everything that is under way."""
    for bucket in step.reducer.buckets[:sent]:
        step.reducer.collect(bucket)
    for bucket in step.reducer.buckets[sent:most]:
        step.reducer.send_zeros(bucket, step.casts.of(bucket.slots))
