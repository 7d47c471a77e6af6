"""The model of a link: what it is fitted to, what it says, how it is stored."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.link import LinkModel

KIB, MIB = 1024, 1024**2
SIZES = [8 * KIB * 4**step for step in range(6)]

latencies = st.floats(0, 0.1)
rates = st.floats(1e5, 1e12)
measured = st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 100)), min_size=1, max_size=12)


@given(latencies, rates)
def test_points_on_a_line_give_that_line(latency: float, rate: float) -> None:
    truth = LinkModel(latency, rate)
    points = [(size, truth.seconds(size)) for size in SIZES]
    link = LinkModel.fit(points)
    for size in SIZES:
        # Where nearly all is latency, the rate is held to what was seen, which costs a little in between.
        assert link.seconds(size) == pytest.approx(truth.seconds(size), rel=0.15)
    if rate * latency < SIZES[-1]:
        assert link.bytes_per_second == pytest.approx(rate, rel=1e-6)
        assert link.latency_seconds == pytest.approx(latency, rel=1e-6, abs=1e-9)


@given(measured)
def test_any_points_give_a_link_that_makes_sense(points: list[tuple[int, float]]) -> None:
    link = LinkModel.fit(points)
    assert link.points == tuple(points)
    assert 0 <= link.latency_seconds < math.inf
    assert 0 < link.bytes_per_second < math.inf
    assert link.seconds(2 * MIB) >= link.seconds(MIB)
    assert LinkModel.from_dict(json.loads(json.dumps(link.as_dict()))) == link


@given(st.permutations(SIZES[:-1]), latencies, st.floats(1e6, 1e9))
def test_the_order_of_points_does_not_matter(sizes: list[int], latency: float, rate: float) -> None:
    points = [(size, LinkModel(latency, rate).seconds(size)) for size in sizes]
    assert LinkModel.fit(points).seconds(MIB) == LinkModel.fit(sorted(points)).seconds(MIB)


@pytest.mark.parametrize("disturbed", range(len(SIZES) - 1))
def test_one_disturbed_size_is_let_go(disturbed: int) -> None:
    truth = LinkModel(1e-3, 120e6)
    points = [(size, truth.seconds(size) * (5 if i == disturbed else 1)) for i, size in enumerate(SIZES)]
    link = LinkModel.fit(points)
    assert link.latency_seconds == pytest.approx(1e-3)
    assert link.bytes_per_second == pytest.approx(120e6)


def test_points_of_one_size_count_as_their_median() -> None:
    points = [(MIB, 1e-3), (MIB, 9e-3), (MIB, 1e-3), (4 * MIB, 4e-3)]
    assert LinkModel.fit(points).seconds(2 * MIB) == pytest.approx(2e-3)


def test_a_rate_that_changes_with_the_size_is_met_half_way() -> None:
    """The shape of a GPU's link: small messages are all latency, the rate is reached late."""
    microseconds = {8: 20, 32: 21, 128: 24, 512: 35, 2048: 60, 8192: 120, 32768: 300}
    points = [(size * KIB, us * 1e-6) for size, us in microseconds.items()]
    link = LinkModel.fit(points)
    for size, seconds in points:
        assert seconds / 2 < link.seconds(size) < seconds * 2
    assert link.seconds(32 * MIB) == pytest.approx(300e-6, rel=0.35)


def test_a_shaper_that_lets_small_bursts_through_does_not_hide_the_rate() -> None:
    """Measured behind a token bucket of 100 Mbit/s: two sizes pass at once, two pay."""
    points = [(8 * KIB, 0.444e-3), (32 * KIB, 0.403e-3), (128 * KIB, 10.839e-3), (512 * KIB, 40.121e-3)]
    assert LinkModel.fit(points).bytes_per_second == pytest.approx(12.5e6, rel=0.1)


def test_times_that_do_not_grow_are_latency_and_a_rate_still() -> None:
    link = LinkModel.fit([(size, 1e-3) for size in SIZES])
    assert link.latency_seconds == pytest.approx(1e-3, rel=0.15)
    assert SIZES[-1] / 1e-3 < link.bytes_per_second < math.inf


def test_times_that_shrink_do_not_give_a_negative_rate() -> None:
    link = LinkModel.fit([(MIB, 5e-3), (4 * MIB, 1e-3)])
    assert link.bytes_per_second > 0
    assert link.latency_seconds >= 0


def test_a_free_link_takes_no_time_and_survives_json() -> None:
    link = LinkModel.free()
    assert link.seconds(10**12) == 0
    text = json.dumps(link.as_dict(), allow_nan=False)
    assert LinkModel.from_dict(json.loads(text)) == link
    assert "any rate" in str(link)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        LinkModel.fit([(0, 1.0)])
    with pytest.raises(ValueError, match="latency"):
        LinkModel(-1e-3, 1e9)
    with pytest.raises(ValueError, match="rate"):
        LinkModel(1e-3, 0)
