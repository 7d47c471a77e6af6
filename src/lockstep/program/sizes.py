"""When the buckets of a program are chosen: after its first window, which the loop has run.

Sizes that the user did not give are chosen for the link and for how long a backward takes, as for a compiled model (see
``ddp/compilation.py``); one large bucket would travel when the backward is over, and everything would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.program import precompiling


class BucketSizes:
    """Chooses the buckets of wrapped models once, on all ranks at the same place."""

    def __init__(self, wrappers: Sequence[Any]) -> None:
        self._wrappers = wrappers
        self._seconds = 0.0
        self._is_settled = False
        self._num_before = self._num_windows()

    def note(self, backward_seconds: float, is_last: bool) -> None:
        """Note how long a backward of the loop took, without what it waited for the link; the shortest counts.

        The first forward of a process is slow, since much is made in it; a backward comes after one.
        """
        if self._is_settled or not self._wrappers:
            return
        waited = sum(_waited(wrapper.step.reducer.timeline) for wrapper in self._wrappers) if is_last else 0.0
        seconds = max(backward_seconds - waited, _LEAST_SECONDS)
        self._seconds = min(self._seconds or seconds, seconds)

    def settle(self) -> None:
        """Between two windows, choose; in a world that is pretended there is no link to measure.

        Whether a window has passed is what ranks compare; that this rank was timed is its own business.
        """
        for wrapper in self._wrappers:
            wrapper._parts.keeper.confirm()  # it may take another order: before a program is made, not as it runs
        if self._is_settled or self._num_windows() == self._num_before:
            return
        self._is_settled = True
        for wrapper in self._wrappers if precompiling.active is None else ():
            wrapper._parts.compilation.settle_for_program(self._seconds)

    def _num_windows(self) -> list[int]:
        return [wrapper.step.num_windows for wrapper in self._wrappers]


_LEAST_SECONDS = 1e-6


def _waited(timeline: Any) -> float:
    """How long the window that has just ended stood still for the link, or for a slower rank."""
    steps = timeline.steps
    return float(steps[-1].exposed_seconds) if steps else 0.0
