"""The end of a backward by hand: ``require_manual_backward_finalization``, as in torch 2.15."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep
from multirank.compare import Tensors, gradients_of
from multirank.harness import lockstep_only, run_ranks
from multirank.models import CASES
from multirank.steps import DTYPE, assert_steps, descend, local_batch, reference_steps, wrapped

MLP_CASE = CASES["mlp"]
pytestmark = lockstep_only


def by_hand(**options: object) -> lockstep.DDP:
    ddp: lockstep.DDP = wrapped(MLP_CASE.module(DTYPE), **options)
    ddp.require_manual_backward_finalization = True
    return ddp


def backward(ddp: nn.Module, step: int = 0) -> None:
    MLP_CASE.loss(ddp, local_batch(MLP_CASE, step)).backward()


def train_by_hand(options: dict[str, object]) -> list[Tensors]:
    ddp = by_hand(**options)
    steps: list[Tensors] = []
    for step in range(3):
        ddp.zero_grad()
        loss = MLP_CASE.loss(ddp, local_batch(MLP_CASE, step))
        assert ddp.should_finalize_after_backward is False
        loss.backward()
        ddp.finalize_backward()
        steps.append(gradients_of(ddp))
        descend(ddp)
    return steps


OPTIONS = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "own": {"gradient_as_bucket_view": False},
    "lazy_view": {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_the_mean_after_finalize(name: str) -> None:
    values = run_ranks(2, train_by_hand, OPTIONS[name])
    assert_steps(values, reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, 2), name)


class Last(torch.autograd.Function):
    """Calls back in the backward, after everything that comes after it in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.call()
        return gradient, None


def finalize_in_the_backward() -> list[Tensors]:
    ddp = by_hand()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps: list[Tensors] = []

    def finalize_and_step() -> None:
        ddp.finalize_backward()
        steps.append(gradients_of(ddp))
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        batch = local_batch(MLP_CASE, step)
        batch["x"] = Last.apply(batch["x"].requires_grad_(), finalize_and_step)
        MLP_CASE.loss(ddp, batch).backward()
    assert len(ddp.timeline.steps) == 3
    return steps


def test_finalize_once_all_buckets_have_left() -> None:
    values = run_ranks(2, finalize_in_the_backward)
    assert_steps(values, reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, 2), "inside the backward")


def errors_in_every_state() -> None:
    ddp = wrapped(MLP_CASE.module(DTYPE))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        ddp.finalize_backward()
    with pytest.raises(TypeError):
        ddp.require_manual_backward_finalization = "yes"
    assert ddp.require_manual_backward_finalization is False
    ddp.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        ddp.finalize_backward()
    loss = MLP_CASE.loss(ddp, local_batch(MLP_CASE, 0))
    for value in (True, False):
        with pytest.raises(RuntimeError, match="cannot be called after forward"):
            ddp.require_manual_backward_finalization = value
    loss.backward()
    with pytest.raises(RuntimeError, match="cannot be called after forward"):
        ddp.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward pass"):
        ddp(local_batch(MLP_CASE, 1)["x"])
    ddp.finalize_backward()  # nothing was lost
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        ddp.finalize_backward()
    optimizer.step()
    with ddp.no_sync():
        backward(ddp)
        with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
            ddp.finalize_backward()
    ddp.require_manual_backward_finalization = False
    backward(ddp)
    with pytest.raises(AttributeError):
        ddp.should_finalize_after_backward = True


def test_errors_in_the_wrong_state() -> None:
    run_ranks(2, errors_in_every_state)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def finalize_too_early() -> None:
    ddp = wrapped(Halves())
    ddp.require_manual_backward_finalization = True
    ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"before all DDP buckets were ready. next_bucket_=0"):
        ddp.finalize_backward()


def test_finalize_with_parameters_that_got_no_gradient() -> None:
    run_ranks(2, finalize_too_early)


def step_too_early() -> str:
    ddp = by_hand()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    backward(ddp)
    with pytest.raises(lockstep.errors.LockstepError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_does_not_step_before_finalize() -> None:
    assert all("reduc" in text for text in run_ranks(2, step_too_early))


def finalize_with_low_precision() -> tuple[bool, bool]:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = wrapped(MLP_CASE.module(torch.float32), mixed_precision=precision)
    off = ddp.should_finalize_after_backward
    ddp.require_manual_backward_finalization = True
    ddp(local_batch(MLP_CASE, 0, torch.float32)["x"]).float().sum().backward()
    ddp.finalize_backward()
    assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in ddp.parameters())
    return off, ddp.should_finalize_after_backward


def test_low_precision_is_finalized_after_the_backward() -> None:
    assert run_ranks(2, finalize_with_low_precision) == [(False, True)] * 2


def copy_by_hand() -> list[Tensors]:
    twin = copy.deepcopy(by_hand())
    assert twin.require_manual_backward_finalization is True
    backward(twin)
    twin.reducer._finalize_backward_manual()
    return [gradients_of(twin)]


def test_a_copy_ends_by_hand_too() -> None:
    values = run_ranks(2, copy_by_hand)
    assert_steps(values, reference_steps(MLP_CASE.module(DTYPE), MLP_CASE, 2, num_steps=1), "copy")
