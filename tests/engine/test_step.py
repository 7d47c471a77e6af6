"""The step, driven explicitly in a world of one: what leaves when, and what is an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import errors
from lockstep.agree.watch import Watch
from lockstep.engine.bucket import LiveBucket, Slot
from lockstep.engine.feeders.driver import ExplicitDriver
from lockstep.engine.grad_memory import GradMemory
from lockstep.engine.lane import Lane
from lockstep.engine.memory import GradOwnership
from lockstep.engine.reducer import Reducer
from lockstep.engine.states import State
from lockstep.engine.step import SyncStep
from lockstep.engine.transport import Transport
from lockstep.engine.union import Union
from lockstep.observe.timeline import Timeline
from lockstep.plan import BucketCaps, ParameterSpec, build_plan


class GroupOfOne:
    """The facts of a process group; a world of one needs nothing else of it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def name(self) -> str:
        return "gloo"


def step_over(num: int, per_bucket: int, **options: bool) -> tuple[SyncStep, ExplicitDriver, list[int]]:
    """A step over scalar parameters p0, p1, ..., and the list of buckets as they leave."""
    slots = [Slot(f"p{i}", nn.Parameter(torch.zeros(1)), "Linear", i) for i in range(num)]
    specs = [ParameterSpec(slot.name, (1,), "float32", 4) for slot in slots]
    plan = build_plan(specs, BucketCaps(4 * per_bucket, 4 * per_bucket))
    transport = Transport(GroupOfOne(), Watch(None, 0))  # type: ignore[arg-type]
    reducer = Reducer(plan, slots, transport, GradMemory(GradOwnership.ALIAS), Timeline(0))
    left: list[int] = []
    launch = reducer.launch

    def note_and_launch(bucket: LiveBucket, gradients: list[Tensor | None], *, takes: bool = True) -> None:
        left.append(bucket.index)
        launch(bucket, gradients, takes=takes)

    reducer.launch = note_and_launch  # type: ignore[method-assign]
    step = SyncStep(reducer, Lane(), Union(None, "test", "step"), wants_sync=lambda: True, **options)
    return step, ExplicitDriver(step), left


@given(st.integers(1, 20), st.integers(1, 5), st.randoms())
def test_every_bucket_leaves_once_in_plan_order_whatever_the_order_of_gradients(num, per_bucket, random) -> None:
    step, driver, left = step_over(num, per_bucket)
    order = list(step.reducer.slots)
    random.shuffle(order)
    driver.begin()
    for position, slot in enumerate(order):
        driver.deliver(slot.parameter, torch.full((1,), float(slot.position)))
        complete = [b.index for b in step.reducer.buckets if all(s.ready for s in b.slots)]
        leading = next((i for i in range(len(step.reducer.buckets)) if i not in complete), len(step.reducer.buckets))
        assert left == list(range(leading)), f"after {position + 1} gradients"
    driver.finish()
    assert step.state is State.IDLE
    assert left == list(range(len(step.reducer.buckets)))
    assert [slot.parameter.grad.item() for slot in step.reducer.slots] == [float(i) for i in range(num)]


def test_gradients_are_out_of_reach_while_they_travel() -> None:
    step, driver, _ = step_over(2, 1)
    first, second = (slot.parameter for slot in step.reducer.buckets[0].slots + step.reducer.buckets[1].slots)
    driver.begin()
    driver.deliver(first, torch.ones(1))
    assert first.grad is None
    driver.deliver(second, torch.ones(1))
    driver.finish()
    assert first.grad is not None


def test_what_comes_after_a_bucket_has_left_is_added() -> None:
    step, driver, left = step_over(2, 1)
    first, second = (slot.parameter for slot in step.reducer.buckets[0].slots + step.reducer.buckets[1].slots)
    with driver.window():
        driver.deliver(first, torch.ones(1))
        driver.deliver(first, torch.full((1,), 2.0))
        driver.deliver(second, torch.ones(1))
    assert first.grad.item() == 3.0
    assert left == [0, 1, 0]  # the remainder travels by itself
    assert step.reducer.buckets[0].waits_for_end


def test_missing_parameters_are_named_in_declaration_order() -> None:
    step, driver, _ = step_over(4, 2)
    driver.begin()
    driver.deliver(step.reducer.slots[2].parameter, torch.ones(1))
    assert [slot.name for slot in step.missing] == ["p0", "p1", "p3"]
    with pytest.raises(errors.UnfinishedReduction, match="p0"):
        driver.finish()
    with pytest.raises(errors.UnfinishedReduction):
        driver.begin()
    step.reset()
    assert step.missing == []
    assert step.reducer.slots[2].parameter.grad.item() == 1.0


def test_unused_parameters_count_but_are_not_part_of_the_ready_order() -> None:
    step, driver, left = step_over(2, 2, finds_unused=True)
    with driver.window():
        driver.deliver(step.reducer.slots[1].parameter, torch.ones(1))
    assert left == [0]
    assert step.ready_order == [step.reducer.slots[1]]
    assert step.closing.used_counts == [0, 1]
    assert step.reducer.slots[0].parameter.grad is None


def test_a_driver_refuses_what_it_cannot_place() -> None:
    step, driver, _ = step_over(1, 1)
    with pytest.raises(ValueError, match="begin"):
        driver.deliver(step.reducer.slots[0].parameter, torch.ones(1))
    driver.begin()
    with pytest.raises(ValueError, match="shape"):
        driver.deliver(step.reducer.slots[0].parameter, torch.ones(2))
    with pytest.raises(RuntimeError, match="finish"):
        driver.begin()


def test_an_end_chosen_by_hand() -> None:
    step, driver, _ = step_over(2, 1)
    step.ends_by_hand = True
    driver.begin()
    for slot in step.reducer.slots:
        driver.deliver(slot.parameter, torch.ones(1))
    driver.finish()
    assert step.state is State.CLOSING
    assert all(slot.parameter.grad is None for slot in step.reducer.slots)
    step.finalize()
    assert step.state is State.IDLE
    assert all(slot.parameter.grad is not None for slot in step.reducer.slots)
