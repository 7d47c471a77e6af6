"""The judge: gradients, parameter by parameter, against one process on the whole batch.

For each model and each world of 1, 2, 3 and 4, over several optimizer steps, with several bucket caps (so
that there are one, a few, and many buckets) and each meaning of gradient_as_bucket_view:

- gradients equal one process on the concatenated batch (tolerances in compare.py, in float64 and float32).
  The exception is batch norm in training mode, which normalises by each shard's own statistics: there the
  reference is one process that runs the shards one after the other and averages their losses. The same
  network with fixed statistics is held to the whole batch like every other model;
- ranks are equal to each other bit by bit: gradients of every step, parameters and buffers at the end;
- a second run in new processes is equal to the first bit by bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.compare import assert_close, assert_identical, gradients_of, state_of
from multirank.harness import run_ranks, subject_class
from multirank.models import CASES, WORLDS_AND_DTYPES, Case, reference_backward, shard

NUM_STEPS = 3
# In MiB. The models hold 4 to 60 KiB: one bucket, a few, and nearly one per parameter.
BUCKET_CAPS_MB = (25.0, 0.01, 0.002)
BUCKET_VIEWS = (None, True, False)
TRANSFORMERS = ("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama")


def optimizer_for(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def train_wrapped(case: Case, dtype: torch.dtype, bucket_cap_mb: float, view: bool | None) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    module = case.module(dtype)
    if rank != 0:
        # Wrapping must bring every rank to rank 0's weights.
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(rank)
    ddp = subject_class()(module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view, **case.ddp_options)
    optimizer = optimizer_for(ddp)
    gradients = []
    for step in range(NUM_STEPS):
        # Both ways to clear gradients, since one of them keeps views of the bucket alive.
        optimizer.zero_grad(set_to_none=step != 1)
        case.loss(ddp, shard(case.batch(step, dtype), rank, world)).backward()
        gradients.append(gradients_of(ddp))
        optimizer.step()
    return {"gradients": gradients, "state": state_of(ddp)}


def train_all(dtype: torch.dtype) -> dict[tuple[str, float, bool | None], dict[str, Any]]:
    """Every model and option under one process group, since starting one costs more than a tiny model."""
    return {
        (name, cap, view): train_wrapped(case, dtype, cap, view)
        for name, case in CASES.items()
        for cap in BUCKET_CAPS_MB
        for view in BUCKET_VIEWS
    }


def train_reference(case: Case, world: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor | None]]:
    module = case.module(dtype)
    optimizer = optimizer_for(module)
    gradients = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=step != 1)
        reference_backward(case, module, case.batch(step, dtype), world)
        gradients.append(gradients_of(module))
        optimizer.step()
    return gradients


@pytest.fixture(scope="module")
def runs() -> dict[tuple[int, torch.dtype], list[Any]]:
    return {}


def run_of(runs: dict[tuple[int, torch.dtype], list[Any]], world: int, dtype: torch.dtype) -> list[Any]:
    if (world, dtype) not in runs:
        runs[world, dtype] = run_ranks(world, train_all, dtype, preload=TRANSFORMERS)
    return runs[world, dtype]


@pytest.mark.parametrize(("world", "dtype"), WORLDS_AND_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_process(runs: Any, world: int, name: str, dtype: torch.dtype) -> None:
    values = run_of(runs, world, dtype)
    expected = train_reference(CASES[name], world, dtype)
    tolerance = CASES[name].float64_tolerance if dtype == torch.float64 else None
    assert any(g is not None and g.abs().max() > 1e-3 for g in expected[-1].values()), "the reference is dead"
    for cap in BUCKET_CAPS_MB:
        for view in BUCKET_VIEWS:
            for step in range(NUM_STEPS):
                what = f"{name}, cap {cap} MiB, gradient_as_bucket_view={view}, step {step}"
                assert_close(values[0][name, cap, view]["gradients"][step], expected[step], what, tolerance)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float64), (3, torch.float64), (4, torch.float32)], ids=str)
def test_ranks_are_bitwise_equal(runs: Any, world: int, dtype: torch.dtype) -> None:
    values = run_of(runs, world, dtype)
    for rank in range(1, world):
        for key in values[0]:
            mine, first = dict(values[rank][key]), dict(values[0][key])
            # Running statistics follow each rank's own shard and are made equal by the next forward.
            mine["state"] = without_running_statistics(mine["state"])
            first["state"] = without_running_statistics(first["state"])
            assert_identical(mine, first, f"rank {rank} against rank 0, {key}")


def without_running_statistics(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if "running_" not in name}


@pytest.mark.parametrize("world", [1, 4])
def test_a_rerun_is_bitwise_equal(runs: Any, world: int) -> None:
    first = run_of(runs, world, torch.float32)
    second = run_ranks(world, train_all, torch.float32, preload=TRANSFORMERS)
    assert_identical(second, first, "second run against the first")


def train_with_buffers() -> list[dict[str, torch.Tensor]]:
    case = CASES["cnn_batch_statistics"]
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = subject_class()(case.module(torch.float64))
    states = []
    for step in range(NUM_STEPS):
        case.loss(ddp, shard(case.batch(step, torch.float64), rank, world)).backward()
        states.append(state_of(ddp))
    return states


def test_buffers_follow_rank_zero() -> None:
    """Each forward starts from rank 0's buffers: a rank's statistics are rank 0's plus its own last shard."""
    world = 3
    values = run_ranks(world, train_with_buffers)
    case = CASES["cnn_batch_statistics"]
    for rank in range(world):
        leader = case.module(torch.float64)
        for step in range(NUM_STEPS):
            batch = case.batch(step, torch.float64)
            follower = case.module(torch.float64)
            follower.load_state_dict(leader.state_dict())
            case.loss(follower, shard(batch, rank, world))
            case.loss(leader, shard(batch, 0, world))
            assert_close(values[rank][step], state_of(follower), f"buffers of rank {rank} after step {step}")
