"""The last step as a flat dict of numbers, for TensorBoard and any other logger.

Every name begins with ``lockstep/``, every value is a plain number, and the names are the same in each step, so that a
logger can be given the dict as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from lockstep.observe.timeline import Interval, StepRecord

__all__ = ["METRICS", "metrics_of"]

# Name and meaning; docs/observing.md has the same table.
METRICS = {
    "step": "number of the step, from 0; one that synchronised gradients",
    "forward_ms": "time in the forward, all forwards since the step before",
    "backward_ms": "time in the backward, all backwards since the step before",
    "launch_ms": "time spent packing buckets and starting their reduction",
    "travel_ms": "time in which at least one bucket was under way",
    "exposed_ms": "time this rank stood still, for a bucket, a sharded unit or the exchange that ends the step",
    "gathered_ms": "the part of it in which it waited for sharded units",
    "overlap": "share of travel_ms in which this rank did not wait for a bucket, from 0 to 1",
    "bytes": "bytes of gradients handed to the reduction",
    "buckets": "number of buckets that were reduced",
    "launched_in_graph": "how many of them left from inside a compiled backward",
}


class _Bucket(Protocol):
    @property
    def index(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


def metrics_of(step: StepRecord | None, plan: Iterable[_Bucket], num_launched_in_graph: int = 0) -> dict[str, float]:
    """What ``step`` did with the buckets of ``plan``; an empty dict where no step has ended yet."""
    if step is None:
        return {}
    num_bytes = {bucket.index: bucket.num_bytes for bucket in plan}
    travels = [interval for interval in step.intervals if interval.name == "travel"]
    travel = _covered_seconds(travels)
    waits = [interval for interval in step.intervals if interval.name in ("compare", "collect")]
    waited = _covered_seconds([both for wait in waits for one in travels if (both := _common(wait, one))])
    values: dict[str, float] = {
        "step": step.step,
        "forward_ms": 1e3 * step.seconds("forward"),
        "backward_ms": 1e3 * step.seconds("backward"),
        "launch_ms": 1e3 * step.seconds("launch"),
        "travel_ms": 1e3 * travel,
        "exposed_ms": 1e3 * step.exposed_seconds,
        "gathered_ms": 1e3 * step.seconds("gathered"),
        "overlap": min(1.0, max(0.0, 1 - waited / travel)) if travel else 1.0,
        # A bucket that is no longer in the plan (the plan was exchanged since) has no size that is known here.
        "bytes": sum(num_bytes.get(interval.bucket, 0) for interval in travels),
        "buckets": len(travels),
        "launched_in_graph": num_launched_in_graph,
    }
    return {f"lockstep/{name}": values[name] for name in METRICS}


def _common(one: Interval, other: Interval) -> Interval | None:
    """The time that two intervals share."""
    start, end = max(one.start_ns, other.start_ns), min(one.end_ns, other.end_ns)
    return one._replace(start_ns=start, end_ns=end) if start < end else None


def _covered_seconds(intervals: Sequence[Interval]) -> float:
    """Length of the union: buckets that travel together count once."""
    covered, reached = 0, 0
    for interval in sorted(intervals, key=lambda i: i.start_ns):
        covered += max(0, interval.end_ns - max(interval.start_ns, reached))
        reached = max(reached, interval.end_ns)
    return covered / 1e9
