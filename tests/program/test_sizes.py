"""How long a backward takes, as bucket sizes are chosen by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.program.sizes import BucketSizes


class Wrapper:
    """A stand-in that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[float] = []
        self.records: list[Any] = []
        timeline = SimpleNamespace(steps=self.records)
        self.step = SimpleNamespace(num_windows=0, reducer=SimpleNamespace(timeline=timeline))
        keeper = SimpleNamespace(confirm=lambda: None)
        self._parts = SimpleNamespace(keeper=keeper, compilation=SimpleNamespace(settle_for_program=self.told.append))

    def end_window(self, waited: float) -> None:
        self.step.num_windows += 1
        self.records.append(SimpleNamespace(exposed_seconds=waited))


def test_the_shortest_backward_counts_without_the_wait_for_the_link() -> None:
    wrapper = Wrapper()
    sizes = BucketSizes([wrapper])
    sizes.note(5.0, is_last=False)
    sizes.settle()  # no window has ended yet
    assert wrapper.told == []
    wrapper.end_window(waited=4.0)
    sizes.note(7.0, is_last=True)
    sizes.settle()
    assert wrapper.told == [pytest.approx(3.0)]
    sizes.note(1.0, is_last=False)
    sizes.settle()  # once
    assert len(wrapper.told) == 1


def test_a_wait_that_is_longer_than_the_backward_leaves_something() -> None:
    wrapper = Wrapper()
    sizes = BucketSizes([wrapper])
    wrapper.end_window(waited=4.0)
    sizes.note(3.0, is_last=True)
    sizes.settle()
    assert 0 < wrapper.told[0] < 1e-3
