"""The flat numbers of a step: the right ones, always under the same names, and as documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.observe.metrics import METRICS, metrics_of
from lockstep.observe.timeline import Interval, StepRecord, Timeline
from lockstep.plan import BucketCaps, Plan
from lockstep.plan.model import Bucket, ParameterSpec

MS = 1_000_000
DOCS = Path(__file__).parents[2] / "docs" / "observing.md"


def make_plan(*num_elements: int) -> Plan:
    specs = [ParameterSpec(f"p{i}", (n,), "float32", 4) for i, n in enumerate(num_elements)]
    return Plan(tuple(Bucket(i, (spec,)) for i, spec in enumerate(specs)), BucketCaps())


def make_step() -> StepRecord:
    timeline = Timeline(0)
    for _ in range(13):
        timeline.record("forward", 0, 10 * MS)
        timeline.record("backward", 10 * MS, 30 * MS)
        timeline.record("launch", 19 * MS, 20 * MS, 0)
        timeline.record("launch", 23 * MS, 24 * MS, 1)
        timeline.record("travel", 20 * MS, 26 * MS, 0)
        timeline.record("travel", 24 * MS, 32 * MS, 1)
        timeline.record("collect", 29 * MS, 29 * MS, 0)
        timeline.record("collect", 29 * MS, 32 * MS, 1)
        timeline.end_step()
    return timeline.steps[-1]


def test_numbers_of_a_step() -> None:
    found = metrics_of(make_step(), make_plan(100, 50), num_launched_in_graph=1)
    assert found == {
        "lockstep/step": 12,
        "lockstep/forward_ms": pytest.approx(10),
        "lockstep/backward_ms": pytest.approx(20),
        "lockstep/launch_ms": pytest.approx(2),
        "lockstep/travel_ms": pytest.approx(12),  # 20 to 32: together, not one after the other
        "lockstep/exposed_ms": pytest.approx(3),
        "lockstep/gathered_ms": 0,
        "lockstep/overlap": pytest.approx(0.75),
        "lockstep/bytes": 600,
        "lockstep/buckets": 2,
        "lockstep/launched_in_graph": 1,
    }


def test_the_exchange_that_ends_a_step_is_exposed_too() -> None:
    step = make_step()
    step.intervals.append(Interval("compare", -1, 25 * MS, 29 * MS))
    found = metrics_of(step, make_plan(100, 50))
    assert found["lockstep/exposed_ms"] == pytest.approx(7)
    assert step.exposed_seconds == pytest.approx(0.007)
    assert found["lockstep/overlap"] == pytest.approx(1 - 7 / 12)  # a bucket was under way all that time


def test_waiting_for_sharded_units_is_exposed_too() -> None:
    step = make_step()
    step.intervals.append(Interval("gather", 0, 2 * MS, 3 * MS))
    step.intervals.append(Interval("gathered", 0, 4 * MS, 6 * MS))
    found = metrics_of(step, make_plan(100, 50))
    assert found["lockstep/exposed_ms"] == pytest.approx(5)
    assert found["lockstep/gathered_ms"] == pytest.approx(2)
    assert found["lockstep/overlap"] == pytest.approx(0.75)  # of the buckets


def test_names_are_the_same_in_every_step_and_values_are_plain_numbers() -> None:
    nothing, all_of_it = metrics_of(StepRecord(0), make_plan(1)), metrics_of(make_step(), make_plan(1, 1))
    assert list(nothing) == list(all_of_it) == [f"lockstep/{name}" for name in METRICS]
    for found in (nothing, all_of_it):
        assert all(type(value) in (int, float) for value in found.values())
        assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_before_the_first_step_there_is_nothing() -> None:
    assert metrics_of(None, make_plan(1)) == {}


def test_a_bucket_that_the_plan_no_longer_has_is_counted_without_a_size() -> None:
    found = metrics_of(make_step(), make_plan(100))
    assert (found["lockstep/buckets"], found["lockstep/bytes"]) == (2, 400)


def test_the_documented_table_is_the_code() -> None:
    rows = re.findall(r"^\| `lockstep/(\w+)` \| (.*) \|$", DOCS.read_text(), re.M)
    assert dict(rows) == METRICS
