"""The countdown from ready parameters to launches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lockstep.engine.window import SyncWindow
from torch import nn

from lockstep.engine.bucket import LiveBucket, Slot, flatten_gradient, is_dense
from lockstep.plan import BucketCaps, ParameterSpec, build_plan


def window_over(num_parameters: int, per_bucket: int) -> tuple[SyncWindow, list[Slot], list[int]]:
    slots = [Slot(f"p{i}", nn.Parameter(torch.zeros(1)), "Linear", i) for i in range(num_parameters)]
    specs = [ParameterSpec(slot.name, (1,), "float32", 4) for slot in slots]
    plan = build_plan(specs, BucketCaps(4 * per_bucket, 4 * per_bucket))
    by_name = {slot.name: slot for slot in slots}
    buckets = [LiveBucket(spec, [by_name[name] for name in spec.names]) for spec in plan]
    launched: list[int] = []
    window = SyncWindow(buckets, slots, lambda bucket: launched.append(bucket.index))
    window.open()
    return window, slots, launched


@given(st.integers(1, 20), st.integers(1, 5), st.randoms())
def test_every_bucket_leaves_once_in_plan_order_whatever_the_order_of_gradients(num, per_bucket, random) -> None:
    window, slots, launched = window_over(num, per_bucket)
    order = list(slots)
    random.shuffle(order)
    for position, slot in enumerate(order):
        assert not window.all_launched
        window.mark_ready(slot)
        complete = [b.index for b in window._buckets if all(s.ready for s in b.slots)]
        leading = next((i for i in range(len(window._buckets)) if i not in complete), len(window._buckets))
        assert launched == list(range(leading)), f"after {position + 1} gradients"
    assert window.all_launched
    assert window.missing == []


def test_missing_parameters_are_given_in_declaration_order() -> None:
    window, slots, _ = window_over(4, 2)
    window.mark_ready(slots[2])
    assert [slot.name for slot in window.missing] == ["p0", "p1", "p3"]
    window.close()
    assert window.missing == []


def test_unused_parameters_count_but_are_not_part_of_the_ready_order() -> None:
    window, slots, launched = window_over(2, 2)
    window.mark_ready(slots[0], found_unused=True)
    window.mark_ready(slots[1])
    assert launched == [0]
    assert window.ready_order == [slots[1]]


def test_a_later_pass_sends_again_what_had_left() -> None:
    window, slots, launched = window_over(3, 1)
    window.mark_ready(slots[2])
    window.expect_more()
    for slot in slots[:2]:
        window.note_ready(slot)
    assert launched == [0]
    window.launch_complete()
    assert launched == [0, 1, 2]
    assert [bucket.index for bucket in window.take_stale()] == [0]
    assert window.take_stale() == []


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.empty(5, 0), True),
        (torch.empty(()), True),
        (torch.empty(3, 8)[:, ::2], False),
        (torch.empty(3, 1).expand(3, 4), False),
    ],
)
def test_dense_means_one_block_without_gaps(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def test_gradients_are_flattened_in_the_parameters_memory_order() -> None:
    weight = nn.Parameter(torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    slot = Slot("conv", weight, "Conv2d", 0)
    row_major = weight.detach().contiguous()
    expected = weight.detach().permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(flatten_gradient(row_major, slot, weight), expected)
    assert torch.equal(flatten_gradient(weight.detach().clone(), slot, weight), expected)
    assert torch.equal(flatten_gradient(None, slot, weight), torch.zeros(24))
