"""The explicit driver: for programs that compute gradients without autograd's engine.

    with driver.window():            # begin ... finish
        driver.deliver(parameter, gradient)

It feeds the same step as autograd's hooks, so what leaves, when, and how ranks compare it, is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lockstep.engine.bucket import Slot
from lockstep.engine.grads import accumulate
from lockstep.engine.states import State
from lockstep.engine.step import SyncStep


class ExplicitDriver:
    """Begins a window, delivers gradients into it, and finishes it."""

    def __init__(self, step: SyncStep) -> None:
        self._step = step
        self._slots: dict[int, Slot] = {}

    def begin(self) -> None:
        """Open a window in which every parameter is expected."""
        step = self._step
        step.require_finished()
        if step.is_in_pass:
            raise RuntimeError("begin() was called before: call finish() first.")
        self._slots = {id(slot.parameter): slot for slot in step.reducer.slots}
        step.note_forward()
        step.begin_pass()

    def deliver(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` to what is reduced for ``parameter``; its bucket leaves when it is whole."""
        step = self._step
        slot = self._slots.get(id(parameter))
        if slot is None or not step.is_in_pass:
            raise ValueError("deliver() needs begin() before it, and a parameter of the wrapped model.")
        accumulate(slot, gradient)
        step.intake.deliver(slot)

    def finish(self) -> None:
        """Wait for everything, and hand the reduced gradients out in ``.grad``."""
        step = self._step
        try:
            step.settle_pass(is_inner=False)
            if step.state is State.OPEN and step.missing:
                raise step.unfinished(step.missing)
            step.end_pass(is_inner=False)
        finally:
            step.forget_pass()

    @contextmanager
    def window(self) -> Iterator[ExplicitDriver]:
        """``begin`` and ``finish`` around a block; a block that raises finishes nothing."""
        self.begin()
        try:
            yield self
        except BaseException:
            self._step.reset()
            raise
        self.finish()
