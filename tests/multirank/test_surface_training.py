"""What people put around the step: double backward, clipping, scaling, autocast, checkpointing, ZeRO.

Compared with one process on the whole batch that does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from multirank.compare import Tensors, assert_close, assert_identical, gradients_of, state_of
from multirank.harness import SUBJECT, run_ranks, torch_fails
from multirank.models import CASES, Case, regression_batch, squared_error
from multirank.steps import (
    DTYPE,
    NUM_STEPS,
    WORLD,
    assert_steps,
    descend,
    local_batch,
    rank_steps,
    reference_steps,
    seeded,
    wrapped,
)

MLP_CASE = CASES["mlp"]
Batch = dict[str, torch.Tensor]


def whole_batch(step: int) -> Batch:
    return MLP_CASE.batch(step, DTYPE)


def rank_batch(step: int) -> Batch:
    return local_batch(MLP_CASE, step)


# Double backward


def gradient_penalty_steps(module: Any, batch_of: Callable[[int], Batch], create_graph: bool) -> list[Tensors]:
    steps: list[Tensors] = []
    for step in range(NUM_STEPS):
        module.zero_grad()
        batch = batch_of(step)
        x = batch["x"].requires_grad_(True)
        output = module(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = functional.mse_loss(output, batch["y"]) + slope.square().mean()
        loss.backward(create_graph=create_graph)
        steps.append(gradients_of(module))
        descend(module)
    return steps


def penalise(create_graph: bool, options: dict[str, Any]) -> list[Tensors]:
    return gradient_penalty_steps(wrapped(MLP_CASE.module(DTYPE), **options), rank_batch, create_graph)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True], ids=["plain", "create_graph"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_gradient_penalty(create_graph: bool, view: bool, request: pytest.FixtureRequest) -> None:
    if create_graph:
        request.applymarker(torch_fails("stops on the gradients that carry a graph"))
    values = run_ranks(WORLD, penalise, create_graph, {"gradient_as_bucket_view": view})
    expected = gradient_penalty_steps(MLP_CASE.module(DTYPE), whole_batch, create_graph)
    assert_steps(values, expected, "gradient penalty")


# Clipping and scaling


def clipped_steps(module: Any, batch_of: Callable[[int], Batch]) -> tuple[list[Tensors], list[float]]:
    steps: list[Tensors] = []
    norms = []
    for step in range(NUM_STEPS):
        module.zero_grad()
        MLP_CASE.loss(module, batch_of(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05).item())
        steps.append(gradients_of(module))
        descend(module)
    return steps, norms


def clip(view: bool) -> tuple[list[Tensors], list[float]]:
    return clipped_steps(wrapped(MLP_CASE.module(DTYPE), gradient_as_bucket_view=view), rank_batch)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_clipping_sees_the_reduced_gradients(view: bool) -> None:
    values = run_ranks(WORLD, clip, view)
    expected, norms = clipped_steps(MLP_CASE.module(DTYPE), whole_batch)
    assert min(norms) > 0.05, "nothing would be clipped"
    assert_steps([steps for steps, _ in values], expected, "clipped gradients")
    assert [n for _, n in values] == [values[0][1]] * WORLD
    assert values[0][1] == pytest.approx(norms, rel=1e-9)


def scaled_steps(
    module: Any, batch_of: Callable[[int], Batch], overflow_at: int | None, overflow_here: bool
) -> list[Any]:
    """Gradients after unscaling, the scale and the parameters, step by step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        loss = MLP_CASE.loss(module, batch_of(step))
        if step == overflow_at and overflow_here:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = gradients_of(module)
        scaler.step(optimizer)
        scaler.update()
        steps.append((gradients, scaler.get_scale(), state_of(module)))
    return steps


def scale(overflow_at: int | None, overflow_rank: int) -> list[Any]:
    ddp = wrapped(MLP_CASE.module(torch.float32).to(DTYPE))
    return scaled_steps(ddp, rank_batch, overflow_at, dist.get_rank() == overflow_rank)


def test_grad_scaler() -> None:
    values = run_ranks(WORLD, scale, None, 0)
    expected = scaled_steps(MLP_CASE.module(torch.float32).to(DTYPE), whole_batch, None, False)
    assert_steps([[s[0] for s in steps] for steps in values], [s[0] for s in expected], "unscaled gradients")
    assert [s[1] for s in values[0]] == [s[1] for s in expected]


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    values = run_ranks(WORLD, scale, 1, 2)
    for rank in range(WORLD):
        gradients, _, _ = values[rank][1]
        assert not all(g is None or g.isfinite().all() for g in gradients.values()), "the overflow was lost"
        assert_identical(values[rank][1][2], values[rank][0][2], f"rank {rank} stepped in spite of the overflow")
        assert [s[1] for s in values[rank]] == [s[1] for s in values[0]], "scales differ between ranks"
        assert_identical(values[rank][-1][2], values[0][-1][2], f"rank {rank} against rank 0 at the end")
    assert values[0][1][1] == 2.0**9


def autocast_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(batch["x"])
    assert output.dtype == torch.bfloat16
    return functional.mse_loss(output.float(), batch["y"])


AUTOCAST = Case("autocast", MLP_CASE.build_module, regression_batch, autocast_loss)


def train_under_autocast(options: dict[str, Any]) -> list[Tensors]:
    return rank_steps(wrapped(AUTOCAST.module(), **options), AUTOCAST, torch.float32)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_autocast_keeps_gradients_in_the_parameter_dtype(view: bool) -> None:
    values = run_ranks(WORLD, train_under_autocast, {"gradient_as_bucket_view": view})
    expected = reference_steps(AUTOCAST.module(), AUTOCAST, WORLD, torch.float32)
    assert_steps(values, expected, "autocast", tolerance=0.05)


# Activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(3))
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class CheckpointedTwice(Checkpointed):
    """The same block in two checkpoints: its parameters get their gradient in two nested passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


CHECKPOINTED = Case("checkpointed", lambda: Checkpointed(False), regression_batch, squared_error)


def checkpointed(twice: bool, use_reentrant: bool) -> nn.Module:
    return seeded(lambda: (CheckpointedTwice if twice else Checkpointed)(use_reentrant))


def train_checkpointed(twice: bool, use_reentrant: bool, options: dict[str, Any]) -> list[Tensors]:
    return rank_steps(wrapped(checkpointed(twice, use_reentrant), **options), CHECKPOINTED)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("use_reentrant", "options"),
    [
        (False, {}),
        (False, {"find_unused_parameters": True}),
        (False, {"static_graph": True}),
        (True, {}),
        (True, {"static_graph": True}),
        (True, {"static_graph": True, "gradient_as_bucket_view": True}),
    ],
    ids=["plain", "find_unused", "static", "reentrant", "reentrant_static", "reentrant_static_views"],
)
def test_activation_checkpointing(twice: bool, use_reentrant: bool, options: dict[str, Any]) -> None:
    if twice and use_reentrant and not options and SUBJECT == "torch":
        pytest.xfail("torch's DDP: marks a parameter ready twice")
    values = run_ranks(WORLD, train_checkpointed, twice, use_reentrant, options)
    expected = reference_steps(checkpointed(twice, use_reentrant), CHECKPOINTED, WORLD)
    assert_steps(values, expected, "activation checkpointing")


# Optimizer states spread over ranks


def train_with_zero(view: bool) -> dict[str, torch.Tensor]:
    ddp = wrapped(MLP_CASE.module(DTYPE), gradient_as_bucket_view=view)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        MLP_CASE.loss(ddp, rank_batch(step)).backward()
        optimizer.step()
    return state_of(ddp)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_zero_redundancy_optimizer(view: bool) -> None:
    values = run_ranks(WORLD, train_with_zero, view)
    module = MLP_CASE.module(DTYPE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        MLP_CASE.loss(module, whole_batch(step)).backward()
        optimizer.step()
    for rank in range(WORLD):
        assert_identical(values[rank], values[0], f"rank {rank} against rank 0")
    assert_close(values[0], state_of(module), "parameters after AdamW in shards", tolerance=1e-7)
