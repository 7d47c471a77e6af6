"""When the buckets of a program are chosen: after its first window, which the loop has run.

Sizes that the user did not give are chosen for the link and for how long a backward takes, as for a compiled model (see
``ddp/compilation.py``); one large bucket would travel when the backward is over, and everything would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from lockstep.program import precompiling

# Of a forward with its backward: a backward takes about twice as long.
_BACKWARD_PART = 2 / 3


class BucketSizes:
    """Chooses the buckets of wrapped models once, on all ranks at the same place."""

    def __init__(self, wrappers: Sequence[Any]) -> None:
        self._wrappers = wrappers
        self._seconds = 0.0
        self._is_settled = False
        self._num_before = self._num_windows()

    @contextmanager
    def timed(self, is_last: bool) -> Iterator[None]:
        """Run a forward and its backward by the loop; the first that ends a window tells how long they take."""
        begun = perf_counter()
        yield
        if is_last and not self._seconds:
            self._seconds = perf_counter() - begun

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
            wrapper._parts.compilation.settle_for_program(self._seconds * _BACKWARD_PART)

    def _num_windows(self) -> list[int]:
        return [wrapper.step.num_windows for wrapper in self._wrappers]
