"""How many micro-batches a train step has run since its last update: ranks compare it where a window ends.

A loop by hand may run as many passes before it synchronises as it likes, on each rank another number.  The calls of a
train step are the same on all ranks; one that was reset in the middle of its micro-batches would pair up windows that
began at different times, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.program.parts import Parallel


class Passes:
    """Counts the micro-batches of one train step, with those that were dropped."""

    def __init__(self, parallel: Parallel, accumulate: int) -> None:
        self._parallel = parallel
        self._accumulate = accumulate
        self._epoch = 0  # how often ranks had been made level when this window began
        self._dropped: list[tuple[int, int]] = []  # then, and how many micro-batches

    @contextmanager
    def counted(self, index: int, *, is_last: bool) -> Iterator[None]:
        """Run micro-step ``index``; the last one of a window tells its number to the other ranks."""
        steps = self._steps() if self._accumulate > 1 and (index == 0 or is_last) else []
        if index == 0:
            self._epoch = _epoch_of(steps)
        for step in steps if is_last else ():
            step.num_passes_told = index + 1 + self._num_dropped(steps)
        try:
            yield
        finally:
            for step in steps if is_last else ():
                step.num_passes_told = 0
        if is_last:
            self._dropped.clear()

    def drop(self, num_micro: int) -> None:
        """The micro-batches of this window so far do not count."""
        if num_micro and self._accumulate > 1:
            self._dropped.append((self._epoch, num_micro))

    def _num_dropped(self, steps: list[Any]) -> int:
        """Those since ranks were last made level, by ``reset_sync_window()`` on all of them."""
        now = _epoch_of(steps)
        return sum(number for epoch, number in self._dropped if epoch == now)

    def _steps(self) -> list[Any]:
        """What ends windows; a sharded model gathers in every micro-batch, and ranks that differ meet nowhere."""
        return [wrapper.step for wrapper in self._parallel.wrappers]


def _epoch_of(steps: list[Any]) -> int:
    return sum(step.num_resets for step in steps)
