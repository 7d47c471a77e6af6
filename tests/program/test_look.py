"""A place that is looked at before every step."""

from __future__ import annotations

import gc
from typing import Any

from lockstep.program.look import Look


def look_at(held: list[Any]) -> Look:
    return Look(lambda: list(held))


def test_the_same_objects_are_the_same_value() -> None:
    place = look_at([1.5, "word", object()])
    assert place.value() is place.value()


def test_an_equal_number_is_the_same_value() -> None:
    held: list[Any] = [float("1.5"), 10**6]
    place = look_at(held)
    before = place.value()
    held[:] = [float("1.5"), int("1000000")]
    assert place.value() == before


def test_numbers_that_only_compare_equal_are_others() -> None:
    held: list[Any] = [1]
    place = look_at(held)
    seen = [place.value()]
    for other in (True, 1.0):
        held[0] = other
        seen.append(place.value())
    held[0] = 0.0
    seen.append(place.value())
    held[0] = -0.0
    seen.append(place.value())
    assert len(set(seen)) == 5


def test_a_new_number_is_never_taken_for_one_that_is_gone() -> None:
    """A number that is freed leaves its place in memory, and its identity, to the next one."""
    held: list[Any] = [0.0]
    place = look_at(held)
    seen = set()
    for number in range(1000):
        held[0] = number + 0.5
        seen.add(place.value())
    assert len(seen) == 1000


def test_what_is_no_number_is_not_kept_alive() -> None:
    class Thing:
        pass

    held: list[Any] = [Thing()]
    place = look_at(held)
    place.value()
    held[0] = None
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, Thing)]


def test_more_may_be_looked_through_than_counts() -> None:
    held = {"counts": 1, "other": 1000}
    place = Look(lambda: [held["counts"]], held.values)
    before = place.value()
    held["other"] = 2000
    assert place.value() == before
    held["counts"] = 2
    assert place.value() != before
