"""What Python counts in each window, and a replay does not: put right after one."""

from __future__ import annotations

from lockstep.observe.moments import StepMoment, listeners, reached
from lockstep.program.parts import Parallel

_COUNTED = (
    "num_windows",
    "num_updates",
    "updates_before",
    "has_fresh_gradients",
    "holds_local_gradients",
    "has_forward",
    "ready_order",
)


class WindowCounts:
    """What a step has counted, taken before a capture and put back after it: nothing has happened in between."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._steps = [(step, {name: getattr(step, name) for name in _COUNTED}) for step in parallel.steps]
        self._due = [w._parts.buffers.is_due for w in parallel.wrappers]

    def put_back(self) -> None:
        for step, counted in self._steps:
            for name, value in counted.items():
                setattr(step, name, value)
        for wrapper, is_due in zip(self._parallel.wrappers, self._due, strict=True):
            wrapper._parts.buffers.is_due = is_due


def note_replay(parallel: Parallel, *, is_last: bool) -> None:
    """Count a micro-step that a program ran, as the loop would have counted it."""
    for wrapper in parallel.wrappers:
        wrapper._parts.buffers.is_due = is_last
    for step in parallel.steps:
        if step.holds_local_gradients or not is_last:
            # If the loop ends the window it reduces what was added up here, of parameters that are frozen by then too.
            for slot in step.reducer.slots:
                slot.dirty = not is_last and slot.parameter.requires_grad
        step.holds_local_gradients = not is_last
        if is_last:
            step.has_forward = step.has_fresh_gradients = False
            step.reducer.finiteness.note_replay(step.num_windows)
            step.num_windows += 1
            step.num_updates += 1
            step.reducer.timeline.end_step()
            step.reducer.transport.watch.forget_handled_failure()
            if listeners:
                reached(StepMoment.END, step.reducer.timeline.step - 1)
        else:
            step.has_forward = True


def missing_in_proof(parallel: Parallel) -> list[str]:
    """Which parameters the window that just ended did not reduce: a program must reduce all of them."""
    found = []
    for step in parallel.steps:
        reducer = step.reducer
        if reducer.num_buckets_reduced != len(reducer.buckets):
            found += [slot.name for bucket in reducer.buckets if not bucket.has_left for slot in bucket.slots]
    return found
