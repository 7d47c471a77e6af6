"""Who made the others wait: the rank that waited least, by what the others waited more."""

from __future__ import annotations

import logging

import pytest

from lockstep.observe import stragglers as module
from lockstep.observe.stragglers import Stragglers


def by_rank(*waits_us: int) -> dict[int, int]:
    return dict(enumerate(waits_us))


def test_the_one_that_waits_least_is_the_one_others_wait_for() -> None:
    found = Stragglers()
    found.note(by_rank(100_000, 1_000, 120_000, 110_000), 0)
    found.note(by_rank(50_000, 51_000, 1_000, 50_000), 0)
    assert found.seconds == {1: pytest.approx(0.109), 2: pytest.approx(0.049)}


def test_small_differences_and_single_ranks_are_nobodys_fault() -> None:
    found = Stragglers()
    found.note(by_rank(1_000, 2_000, 2_500), 0)
    found.note(by_rank(500_000), 0)
    found.note(by_rank(), 0)
    assert found.seconds == {}


def test_a_lasting_straggler_is_one_line_of_the_first_rank_with_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    zero, one = Stragglers(), Stragglers()
    with caplog.at_level(logging.WARNING, "lockstep"):
        for second in range(1, 400):
            clock[0] = float(second)
            zero.note(by_rank(500_000, 500_000, 0), 0)
            one.note(by_rank(500_000, 500_000, 0), 1)
    assert len(caplog.messages) == 1
    assert "Rank 2 made the others wait 30 s of the last 60 s (50 %)" in caplog.messages[0]
    caplog.clear()
    later = Stragglers()  # rank 0 has run out of data
    with caplog.at_level(logging.WARNING, "lockstep"):
        for _ in range(100):
            clock[0] += 1.0
            later.note({1: 500_000, 2: 0}, 1)
    assert len(caplog.messages) == 1
