"""Gradient accumulation: however forward and backward are placed, the window's gradient is the big batch's.

All in float64 on three ranks, judged against one process that runs every micro-step on the whole batch. Where
torch's class is known to give another result, or to stop, the test says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from multirank.compare import Tensors, assert_close, gradients_of
from multirank.harness import run_ranks, torch_fails
from multirank.models import CASES, shard
from multirank.steps import DTYPE, WORLD, assert_steps, descend, local_batch, seeded, wrapped

NUM_WINDOWS = 3


def big_batch_windows(name: str, num_micro_steps: int) -> list[Tensors]:
    case = CASES[name]
    module = case.module(DTYPE)
    windows: list[Tensors] = []
    for window in range(NUM_WINDOWS):
        module.zero_grad()
        for micro_step in range(num_micro_steps):
            step = window * num_micro_steps + micro_step
            (case.loss(module, case.batch(step, DTYPE)) / num_micro_steps).backward()
        windows.append(gradients_of(module))
        descend(module)
    return windows


# The five ways to place the last, synchronised micro-step and those before it

MicroStep = Callable[[Any, Callable[[], torch.Tensor], bool], None]


def all_inside(ddp: Any, loss: Callable[[], torch.Tensor], last: bool) -> None:
    with contextlib.nullcontext() if last else ddp.no_sync():
        loss().backward()


def forward_outside(ddp: Any, loss: Callable[[], torch.Tensor], last: bool) -> None:
    value = loss()
    with contextlib.nullcontext() if last else ddp.no_sync():
        value.backward()


def forward_always_inside(ddp: Any, loss: Callable[[], torch.Tensor], last: bool) -> None:
    with ddp.no_sync():
        value = loss()
        if not last:
            value.backward()
    if last:
        value.backward()


def flag_before_forward(ddp: Any, loss: Callable[[], torch.Tensor], last: bool) -> None:
    ddp.require_backward_grad_sync = last
    loss().backward()


def flag_before_backward(ddp: Any, loss: Callable[[], torch.Tensor], last: bool) -> None:
    value = loss()
    ddp.require_backward_grad_sync = last
    value.backward()


PLACEMENTS: dict[str, MicroStep] = {
    placement.__name__: placement
    for placement in (
        all_inside,
        forward_outside,
        forward_always_inside,
        flag_before_forward,
        flag_before_backward,
    )
}


def accumulate(
    name: str, placement: str, num_micro_steps: int, set_to_none: bool, options: dict[str, Any]
) -> list[Tensors]:
    case = CASES[name]
    ddp = wrapped(case.module(DTYPE), **{**case.ddp_options, **options})
    windows: list[Tensors] = []
    for window in range(NUM_WINDOWS):
        ddp.zero_grad(set_to_none=set_to_none)
        for micro_step in range(num_micro_steps):
            batch = local_batch(case, window * num_micro_steps + micro_step)
            PLACEMENTS[placement](
                ddp,
                lambda batch=batch: case.loss(ddp, batch) / num_micro_steps,
                micro_step == num_micro_steps - 1,
            )
        windows.append(gradients_of(ddp))
        descend(ddp)
    return windows


TORCH_DECIDES_IN_FORWARD = "decides in forward whether the backward will sync"


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("num_micro_steps", [1, 4, 8])
@pytest.mark.parametrize("placement", ["all_inside", "forward_outside", "flag_before_forward"])
def test_accumulated_equals_big_batch(placement: str, num_micro_steps: int, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    values = run_ranks(WORLD, accumulate, "gpt_tied", placement, num_micro_steps, True, options)
    assert_steps(values, big_batch_windows("gpt_tied", num_micro_steps), placement)


@torch_fails(TORCH_DECIDES_IN_FORWARD)
@pytest.mark.parametrize("num_micro_steps", [1, 4, 8])
def test_forward_inside_no_sync_and_backward_outside_syncs(num_micro_steps: int) -> None:
    values = run_ranks(WORLD, accumulate, "mlp", "forward_always_inside", num_micro_steps, True, {})
    assert_steps(values, big_batch_windows("mlp", num_micro_steps), "forward inside, backward outside")


@torch_fails(TORCH_DECIDES_IN_FORWARD)
@pytest.mark.parametrize("num_micro_steps", [4, 8])
def test_flag_set_between_forward_and_backward_syncs(num_micro_steps: int) -> None:
    """A well-known training script sets the flag after the forward; its ranks then drift apart."""
    values = run_ranks(WORLD, accumulate, "mlp", "flag_before_backward", num_micro_steps, True, {})
    assert_steps(values, big_batch_windows("mlp", num_micro_steps), "flag set before backward only")


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeroed", "none"])
def test_both_ways_to_clear_gradients(set_to_none: bool, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    values = run_ranks(WORLD, accumulate, "mlp", "all_inside", 4, set_to_none, options)
    assert_steps(values, big_batch_windows("mlp", 4), f"set_to_none={set_to_none}")


@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("num_micro_steps", [4, 8])
def test_static_graph_with_no_sync(placement: str, num_micro_steps: int, request: pytest.FixtureRequest) -> None:
    if placement != "forward_outside":  # there torch syncs every micro-step
        request.applymarker(torch_fails("stops with an internal assertion, or does not sync"))
    values = run_ranks(WORLD, accumulate, "mlp", placement, num_micro_steps, True, {"static_graph": True})
    assert_steps(values, big_batch_windows("mlp", num_micro_steps), f"static graph, {placement}")


def test_static_graph_without_accumulation() -> None:
    values = run_ranks(WORLD, accumulate, "gpt_tied", "all_inside", 1, True, {"static_graph": True})
    assert_steps(values, big_batch_windows("gpt_tied", 1), "static graph")


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_unused_parameters_that_differ_per_micro_step_and_rank(placement: str, request: pytest.FixtureRequest) -> None:
    """Which branches a rank uses follows its samples, so it differs per micro-step and per rank."""
    if placement in ("forward_always_inside", "flag_before_backward"):
        request.applymarker(torch_fails(TORCH_DECIDES_IN_FORWARD))
    values = run_ranks(WORLD, accumulate, "branches", placement, 4, True, {})
    assert_steps(values, big_batch_windows("branches", 4), placement)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, use_left: bool) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        return self.left(h) if use_left else self.right(h)


def alternate_branches() -> Tensors:
    """Left in the first micro-step, right in the last: the window used both, the last backward only one."""
    case = CASES["mlp"]
    ddp = wrapped(seeded(TwoBranches), find_unused_parameters=True)
    with ddp.no_sync():
        x = local_batch(case, 0)["x"]
        ddp(x, True).square().mean().backward()
    ddp(local_batch(case, 1)["x"], False).square().mean().backward()
    return gradients_of(ddp)


def test_a_branch_used_only_under_no_sync_is_reduced_too() -> None:
    values = run_ranks(WORLD, alternate_branches)
    case, module = CASES["mlp"], seeded(TwoBranches)
    module(case.batch(0, DTYPE)["x"], True).square().mean().backward()
    module(case.batch(1, DTYPE)["x"], False).square().mean().backward()
    assert_steps([[v] for v in values], [gradients_of(module)], "a branch per micro-step")


# Under no_sync the gradients are this rank's own


def unsynced_gradients(name: str, placement: str) -> Tensors:
    case = CASES[name]
    ddp = wrapped(case.module(DTYPE))
    PLACEMENTS[placement](ddp, lambda: case.loss(ddp, local_batch(case, 0)), False)
    return gradients_of(ddp)


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_gradients_stay_local_until_the_window_closes(placement: str, request: pytest.FixtureRequest) -> None:
    if placement in ("forward_outside", "flag_before_backward"):
        request.applymarker(torch_fails(TORCH_DECIDES_IN_FORWARD))
    values = run_ranks(WORLD, unsynced_gradients, "mlp", placement)
    case = CASES["mlp"]
    for rank in range(WORLD):
        module = case.module(DTYPE)
        case.loss(module, shard(case.batch(0, DTYPE), rank, WORLD)).backward()
        assert_close(values[rank], gradients_of(module), f"{placement}: local gradients of rank {rank}")


def nested_no_sync() -> list[bool]:
    ddp = wrapped(CASES["mlp"].module(DTYPE))
    seen = [ddp.require_backward_grad_sync]
    with ddp.no_sync():
        seen.append(ddp.require_backward_grad_sync)
        with ddp.no_sync():
            seen.append(ddp.require_backward_grad_sync)
        seen.append(ddp.require_backward_grad_sync)
    seen.append(ddp.require_backward_grad_sync)
    with contextlib.suppress(KeyError), ddp.no_sync():
        raise KeyError
    seen.append(ddp.require_backward_grad_sync)
    return seen


def test_no_sync_restores_the_flag_also_nested_and_after_an_error() -> None:
    assert run_ranks(2, nested_no_sync) == [[True, False, False, False, True, True]] * 2


# More than one backward per forward, more than one forward per backward


class Trunk(nn.Module):
    """Two outputs over one trunk; with `crossed` both outputs use every parameter."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.crossed = crossed
        self.trunk = nn.Linear(8, 8)
        self.first = nn.Linear(8, 3)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        first, second = self.first(h), self.second(h)
        if self.crossed:
            return first * second, first + second
        return first, second


def trunk(crossed: bool) -> nn.Module:
    return seeded(lambda: Trunk(crossed))


def two_losses(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = module(batch["x"])
    return (first - batch["y"]).square().mean(), (second + batch["y"]).square().mean()


def two_backwards(crossed: bool, first_in_no_sync: bool, options: dict[str, Any]) -> list[Tensors]:
    ddp = wrapped(trunk(crossed), **options)
    windows: list[Tensors] = []
    for window in range(NUM_WINDOWS):
        ddp.zero_grad()
        first, second = two_losses(ddp, local_batch(CASES["mlp"], window))
        with ddp.no_sync() if first_in_no_sync else contextlib.nullcontext():
            first.backward(retain_graph=True)
        second.backward()
        windows.append(gradients_of(ddp))
        descend(ddp)
    return windows


def two_loss_windows(crossed: bool) -> list[Tensors]:
    module = trunk(crossed)
    windows: list[Tensors] = []
    for window in range(NUM_WINDOWS):
        module.zero_grad()
        first, second = two_losses(module, CASES["mlp"].batch(window, DTYPE))
        (first + second).backward()
        windows.append(gradients_of(module))
        descend(module)
    return windows


@torch_fails("the second backward is not reduced, and nothing says so")
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("first_in_no_sync", [False, True], ids=["both_sync", "second_syncs"])
def test_two_backwards_through_every_parameter(first_in_no_sync: bool, view: bool) -> None:
    values = run_ranks(WORLD, two_backwards, True, first_in_no_sync, {"gradient_as_bucket_view": view})
    assert_steps(values, two_loss_windows(True), "two losses, each through every parameter")


@torch_fails("marks the trunk ready twice, or waits for the other head")
@pytest.mark.parametrize("unused", [False, True], ids=["strict", "find_unused"])
def test_two_backwards_with_a_head_each_second_syncs(unused: bool) -> None:
    values = run_ranks(WORLD, two_backwards, False, True, {"find_unused_parameters": unused})
    assert_steps(values, two_loss_windows(False), "a head per loss, second syncs")


@torch_fails("marks the trunk ready twice")
def test_two_synced_backwards_with_a_head_each_and_find_unused() -> None:
    values = run_ranks(WORLD, two_backwards, False, False, {"find_unused_parameters": True})
    assert_steps(values, two_loss_windows(False), "a head per loss, both sync")


def several_forwards(one_backward: bool, options: dict[str, Any]) -> list[Tensors]:
    case = CASES["mlp"]
    ddp = wrapped(case.module(DTYPE), **options)
    windows: list[Tensors] = []
    for window in range(NUM_WINDOWS):
        ddp.zero_grad()
        losses = [case.loss(ddp, local_batch(case, 3 * window + i)) / 3 for i in range(3)]
        if one_backward:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()
        windows.append(gradients_of(ddp))
        descend(ddp)
    return windows


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["plain", "views", "find_unused"],
)
def test_several_forwards_before_one_backward(options: dict[str, Any]) -> None:
    values = run_ranks(WORLD, several_forwards, True, options)
    assert_steps(values, big_batch_windows("mlp", 3), "three forwards, one backward")


@torch_fails("only the first backward after the forwards is reduced")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "find_unused"])
def test_several_forwards_before_several_backwards(options: dict[str, Any]) -> None:
    values = run_ranks(WORLD, several_forwards, False, options)
    assert_steps(values, big_batch_windows("mlp", 3), "three forwards, three backwards")


def accumulate_synced_steps(view: bool) -> list[Tensors]:
    """Every backward syncs and nothing clears .grad in between."""
    case = CASES["mlp"]
    ddp = wrapped(case.module(DTYPE), gradient_as_bucket_view=view)
    windows: list[Tensors] = []
    for window in range(NUM_WINDOWS):
        for i in range(2):
            (case.loss(ddp, local_batch(case, 2 * window + i)) / 2).backward()
        windows.append(gradients_of(ddp))
        descend(ddp)
        ddp.zero_grad()
    return windows


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_gradients_left_in_place_accumulate_over_synced_steps(view: bool) -> None:
    values = run_ranks(WORLD, accumulate_synced_steps, view)
    assert_steps(values, big_batch_windows("mlp", 2), "two synced steps without clearing")
