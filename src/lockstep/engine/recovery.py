"""Going on after an error: all ranks forget the window in progress, and are level again.

A rank that comes here alone makes the others raise an error that says so, wherever they wait; when they have handled it
they come here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.engine.casts import MEETING_SECONDS
from lockstep.engine.states import State
from lockstep.errors import Disagreement, rank_table

if TYPE_CHECKING:
    from lockstep.engine.step import SyncStep

_PATIENCE_SECONDS = 8.0  # others may still be raising what all of them are to handle


MADE_EQUAL = "made equal by the program"
WEIGHTS_DIFFER = (
    "load a checkpoint on all ranks and call reset_sync_window(weights_are_equal=True); or, for a replicated model, "
    "call reset_sync_window(take_weights_from=0) on all ranks and give each optimizer rank 0's state"
)


def reset_together(step: SyncStep, mended: str = "") -> None:
    """Forget the current window on all ranks: what some have sent the others send too, so that all are level.

    Where ranks have made different numbers of updates their weights differ, and this is an error on all ranks unless
    the caller makes them equal, in a way that all ranks name alike (``mended``).
    """
    reducer, watch = step.reducer, step.reducer.transport.watch
    facts: dict[int, tuple[int, int, str]] = {}
    if watch.board is not None and watch.world > 1:
        sent = sum(bucket.has_left and not bucket.skipped for bucket in reducer.buckets)
        sent = sent if step.state is not State.IDLE else 0
        key = f"reset {step.num_resets + 1}"
        mine = json.dumps([sent, step.num_updates, mended])
        told = watch.meet(key, "reset_sync_window()", mine, MEETING_SECONDS, patience_seconds=_PATIENCE_SECONDS)
        facts = {rank: _read_fact(rank, text) for rank, text in told.items()}
        with step.telling_peers():  # a communication hook may raise
            _catch_up(step, sent, max(fact[0] for fact in facts.values()))
        control = step.closing.union.control
        if control is not None:
            control.renew()
            control.connect(watch)
        if reducer.transport.audit is not None:
            reducer.transport.audit.renew()
            reducer.transport.audit.connect(watch)
        watch.clear_failure()
    step.num_resets += 1
    step.reset()
    if facts:
        _require_equal(step, facts)
        step.num_updates = 0
        step.has_fresh_gradients = False
        step.drift.forget()


def _read_fact(rank: int, text: str) -> tuple[int, int, str]:
    """What a rank has told about itself; what is not of that form is not from a rank of this program."""
    try:
        sent, updates, mended = json.loads(text)
    except (ValueError, TypeError):
        sent = updates = mended = None
    if not (isinstance(sent, int) and isinstance(updates, int) and isinstance(mended, str)):
        raise Disagreement(f"What rank {rank} has told for reset_sync_window() cannot be read: {text[:200]!r}.")
    return sent, updates, mended


def _require_equal(step: SyncStep, facts: Mapping[int, tuple[int, int, str]]) -> None:
    """Raise on all ranks where weights differ and nothing is done about it, or not the same everywhere."""
    facts = step.reducer.transport.watch.by_global(facts)
    mended = {rank: how or "nothing" for rank, (_, _, how) in facts.items()}
    updates = {rank: str(number) for rank, (_, number, _) in facts.items()}
    if len(set(mended.values())) > 1:
        raise Disagreement(
            f"Ranks make their weights equal in different ways:\n{rank_table(mended)}\n"
            "Fix: call reset_sync_window() with the same arguments on all ranks.",
            mended,
        )
    if len(set(updates.values())) > 1 and "nothing" in mended.values() and step.closing.union.compares_updates:
        raise Disagreement(
            "Ranks have updated the model a different number of times, so their weights differ:\n"
            f"{rank_table(updates)}\nFix: {WEIGHTS_DIFFER}.",
            updates,
        )
    if step.drift.is_known and "nothing" in mended.values():
        raise Disagreement(f"The weights of ranks differ, as was told.\nFix: {WEIGHTS_DIFFER}.")


def _catch_up(step: SyncStep, sent: int, most: int) -> None:
    """Send zeros for the buckets that other ranks have sent, and land everything that is under way."""
    for bucket in step.reducer.buckets[:sent]:
        step.reducer.collect(bucket)
    for bucket in step.reducer.buckets[sent:most]:
        step.reducer.send_zeros(bucket, step.casts.of(bucket.slots))
