"""The number that stands for a window."""

from __future__ import annotations

import itertools

import pytest

from lockstep.agree.stamp import Stamp

STAMP = Stamp("model 0", 3, "full", 3, "plan", ("a",), (), "", 2, (), 0, 0, "")


def other(field: str) -> Stamp:
    value = getattr(STAMP, field)
    return STAMP._replace(
        **{field: value + (1 if isinstance(value, int) else ("x",) if isinstance(value, tuple) else "x")}
    )


@pytest.mark.parametrize("field", [field for field in Stamp._fields if field not in ("exchange", "gathers")])
def test_each_field_is_part_of_the_number(field: str) -> None:
    assert other(field).digest() != STAMP.digest() == Stamp(*STAMP).digest() > 0
    assert STAMP._replace(gathers="x").digest() != STAMP.digest() != STAMP._replace(exchange="x").digest()


def test_counts_that_differ_in_any_way_give_other_numbers() -> None:
    counts = list(itertools.product(range(6), repeat=4))
    numbers = {STAMP._replace(window=w, updates=u, resets=r, passes=p).digest() for w, u, r, p in counts}
    assert len(numbers) == len(counts)
