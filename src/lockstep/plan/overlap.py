"""How much of the communication hides behind the backward, and the bucket caps that hide the most.

A model on paper: gradients become ready at known moments, a complete bucket is launched in plan order, launching
takes a little of the computing thread's time, and the link carries one bucket after the other.  What computing and
communication take from each other otherwise (cores, memory bandwidth) is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lockstep.plan.build import build_plan
from lockstep.plan.caps import MIB, BucketCaps
from lockstep.plan.link import LinkModel
from lockstep.plan.model import Bucket, ParameterSpec, Plan, Prediction

# What one more bucket costs the backward: a GPT-2 step on an H200 with 475 buckets instead of 20 (benchmarks/gpu.py).
DEFAULT_LAUNCH_SECONDS = 15e-6
# A gain smaller than this is within what the model on paper can tell; fewer buckets are worth more then.
_NEGLIGIBLE_GAIN = 0.01
_SMALLEST_CAP_BYTES, _LARGEST_CAP_BYTES = MIB // 16, 256 * MIB
# While a bucket is packed its gradients are in memory twice. A cap is modest if it is not above the default one, or not
# above this part of all gradients;
_MODEST_PART = 1 / 4
# others have to gain more than this.
_GAIN_WORTH_MEMORY = 0.03
# Variants are tried on the even caps within this factor of the best one.
_VARIANT_FACTOR = 4


# ---------------------------------------------------------------- when gradients are ready


@dataclass(frozen=True)
class Pace:
    """When each parameter's gradient is ready, in seconds from the start of the backward, and when that ends."""

    ready_seconds: Mapping[str, float]
    backward_seconds: float


def pace_from_total(
    parameters: Sequence[ParameterSpec], backward_seconds: float, *, ready_order: Sequence[str] | None = None
) -> Pace:
    """A pace for when only the length of the backward is known: a parameter takes time by its number of elements.

    ``parameters`` are in declaration order and ``ready_order`` is as in ``build_plan``.  A sparse parameter takes
    none: its gradient is a few rows of it.
    """
    weights = {spec.name: 0 if spec.sparse else spec.num_elements for spec in parameters}
    names = list(ready_order) if ready_order is not None else [spec.name for spec in reversed(parameters)]
    total = sum(weights.values())
    ready, done = {}, 0
    for name in names:
        done += weights[name]
        ready[name] = backward_seconds * (done / total if total else 1.0)
    return Pace(ready, backward_seconds)


# ---------------------------------------------------------------- the simulation


class Span(NamedTuple):
    """One bucket on the link, in seconds from the start of the backward; ``ready_seconds`` is when it was launched."""

    bucket: int
    ready_seconds: float
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Overlap:
    """A backward with its communication, as predicted."""

    spans: tuple[Span, ...]
    # The end of the backward, with the time that launching took from it.
    compute_end_seconds: float

    @property
    def comm_end_seconds(self) -> float:
        return max((span.end_seconds for span in self.spans), default=0.0)

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication: how long the rank waits for the link after it has computed everything."""
        return max(0.0, self.comm_end_seconds - self.compute_end_seconds)

    @property
    def end_seconds(self) -> float:
        """When all gradients are computed and reduced: what a choice of buckets is judged by."""
        return max(self.comm_end_seconds, self.compute_end_seconds)


def simulate(
    buckets: Iterable[Bucket], pace: Pace, link: LinkModel, launch_seconds: float = DEFAULT_LAUNCH_SECONDS
) -> Overlap:
    """Send ``buckets`` (a plan, or any partition in launch order) over the link at the given pace."""
    spans = []
    launched = launching = link_free = 0.0
    for bucket in buckets:
        complete = max((pace.ready_seconds[name] for name in bucket.names), default=0.0)
        # All launches so far pushed this moment back; and buckets are launched in plan order.
        launched = max(complete + launching, launched) + launch_seconds
        launching += launch_seconds
        start = max(launched, link_free)
        link_free = start + _travel_seconds(bucket, link)
        spans.append(Span(bucket.index, launched, start, link_free))
    # The larger of two ways to add the same up, so that rounding exposes nothing.
    return Overlap(tuple(spans), max(pace.backward_seconds + launching, launched))


def _travel_seconds(bucket: Bucket, link: LinkModel) -> float:
    if bucket.sparse:  # a few rows of the parameter, nobody knows how many: at least it is a message
        return link.latency_seconds
    return link.seconds(bucket.num_bytes) if bucket.num_bytes else 0.0  # nothing is sent for nothing


# ---------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Choice:
    """The plan with the chosen caps (it carries link and prediction), and the simulation that spoke for it."""

    plan: Plan
    overlap: Overlap

    @property
    def caps(self) -> BucketCaps:
        return self.plan.caps


def choose_caps(
    parameters: Sequence[ParameterSpec],
    pace: Pace,
    link: LinkModel,
    *,
    launch_seconds: float = DEFAULT_LAUNCH_SECONDS,
    ready_order: Sequence[str] | None = None,
) -> Choice:
    """The caps under which a backward with its communication ends soonest, by simulation.

    Small buckets leave little for the time after the backward, where the last bucket is always exposed; large ones
    pay latency and launches fewer times.  Among caps within 1 % of the best, those with the fewest buckets win, but
    never caps that are worse than the default ones.  Caps above the default one that hold more than a quarter of all
    gradients have to gain more than 3 %, and a smaller first bucket, or smaller buckets at the end, more than 1 % over
    even ones.

    The same arguments give the same choice on every rank.
    """

    def consider(caps: BucketCaps) -> Choice:
        plan = build_plan(parameters, caps, ready_order=ready_order)
        return Choice(plan, simulate(plan, pace, link, launch_seconds))

    chosen = default = consider(BucketCaps())
    if link != LinkModel.free():  # where nothing takes time to travel, nothing speaks for another layout
        even = [consider(caps) for caps in _even_caps(_packed_bytes(default.plan))]
        chosen = _fewest_buckets_among_the_best([default, *even], default)
        variants = [consider(caps) for caps in _variants(even, chosen.caps.cap_bytes)]
        varied = _fewest_buckets_among_the_best([chosen, *variants], default)
        if varied.overlap.end_seconds < chosen.overlap.end_seconds * (1 - _NEGLIGIBLE_GAIN):
            chosen = varied
    prediction = Prediction(pace.backward_seconds, chosen.overlap.exposed_seconds)
    return replace(chosen, plan=replace(chosen.plan, link=link, prediction=prediction))


def _fewest_buckets_among_the_best(choices: Sequence[Choice], default: Choice) -> Choice:
    modest_bytes = max(default.caps.cap_bytes, int(_packed_bytes(default.plan) * _MODEST_PART))
    modest = [choice for choice in choices if choice.caps.cap_bytes <= modest_bytes]
    if modest and _soonest(choices) >= _soonest(modest) * (1 - _GAIN_WORTH_MEMORY):
        choices = modest
    soonest = _soonest(choices)
    limit = min(soonest * (1 + _NEGLIGIBLE_GAIN), max(soonest, default.overlap.end_seconds))
    good = [choice for choice in choices if choice.overlap.end_seconds <= limit]
    return min(good, key=lambda choice: (len(choice.plan), choice.overlap.end_seconds))  # in a tie the first


def _packed_bytes(plan: Plan) -> int:
    """All gradients but the sparse ones, which are a few rows of their parameter and never packed."""
    return sum(bucket.num_bytes for bucket in plan if not bucket.sparse)


def _soonest(choices: Sequence[Choice]) -> float:
    return min(choice.overlap.end_seconds for choice in choices)


def _even_caps(total_bytes: int) -> Iterator[BucketCaps]:
    """The same cap for all buckets, in powers of the root of 2, up to one that holds everything."""
    step, cap = 0, _SMALLEST_CAP_BYTES
    while cap <= _LARGEST_CAP_BYTES:
        yield BucketCaps(cap_bytes=cap, first_cap_bytes=cap)
        if cap >= total_bytes:
            return
        step += 1
        cap = round(_SMALLEST_CAP_BYTES * 2 ** (step / 2))


def _variants(even: Sequence[Choice], best_cap: int) -> Iterator[BucketCaps]:
    """Caps with a smaller first bucket, so that the link starts early, or with last buckets that halve one by one.

    Caps go by position, so the number of buckets before the taper is taken from the even plan.  With several dtypes
    it is right for the one with the most buckets; what it does to the others, the simulation sees.
    """
    for choice in even:
        cap = choice.caps.cap_bytes
        if not best_cap <= cap * _VARIANT_FACTOR <= best_cap * _VARIANT_FACTOR**2:
            continue
        for part in (4, 16):
            yield BucketCaps(cap_bytes=cap, first_cap_bytes=cap // part)
        for num_replaced in (1, 2):
            for num_halvings in (1, 2, 3):
                num_full = max(0, _most_buckets_of_a_kind(choice.plan) - num_replaced)
                caps = (*([cap] * num_full), *(cap >> halving for halving in range(1, num_halvings + 1)))
                yield BucketCaps(cap_bytes=cap, first_cap_bytes=caps[0], per_bucket_bytes=caps)


def _most_buckets_of_a_kind(plan: Plan) -> int:
    counts = Counter((bucket.dtype, bucket.device) for bucket in plan if not bucket.sparse)
    return max(counts.values(), default=0)
