"""Training steps shared by the surface tests: the same loop for a rank's shard and for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from multirank.compare import Tensors, assert_close, assert_identical, gradients_of
from multirank.harness import subject_class
from multirank.models import Batch, Case, reference_backward, shard

WORLD = 3
DTYPE = torch.float64
NUM_STEPS = 3
# Small enough that these models have several buckets.
BUCKET_CAP_MB = 0.001


def wrapped(module: nn.Module, **options: Any) -> Any:
    return subject_class()(module, **{"bucket_cap_mb": BUCKET_CAP_MB, **options})


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype | None = DTYPE) -> nn.Module:
    """The same weights in every process, whatever its own random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = build()
    return module if dtype is None else module.to(dtype)


def local_batch(case: Case, step: int, dtype: torch.dtype = DTYPE) -> Batch:
    return shard(case.batch(step, dtype), dist.get_rank(), dist.get_world_size())


def descend(module: nn.Module) -> None:
    """A plain update, so that steps start from other weights and an unsynced one shows later too."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad.to_dense()


def rank_steps(ddp: Any, case: Case, dtype: torch.dtype = DTYPE, num_steps: int = NUM_STEPS) -> list[Tensors]:
    """Gradients of each step of this rank, on its shard."""
    steps: list[Tensors] = []
    for step in range(num_steps):
        ddp.zero_grad()
        case.loss(ddp, local_batch(case, step, dtype)).backward()
        steps.append(gradients_of(ddp))
        descend(ddp)
    return steps


def reference_steps(
    module: nn.Module, case: Case, world: int, dtype: torch.dtype = DTYPE, num_steps: int = NUM_STEPS
) -> list[Tensors]:
    steps: list[Tensors] = []
    for step in range(num_steps):
        module.zero_grad()
        reference_backward(case, module, case.batch(step, dtype), world)
        steps.append(gradients_of(module))
        descend(module)
    return steps


def assert_steps(
    values: list[list[Tensors]], expected: list[Tensors], what: str, tolerance: float | None = None
) -> None:
    """Ranks equal bit by bit, and rank 0 equal to the reference within the tolerance, step by step."""
    for rank, steps in enumerate(values):
        assert_identical(steps, values[0], f"{what}: rank {rank} against rank 0")
    assert len(values[0]) == len(expected)
    for step, gradients in enumerate(expected):
        assert_close(values[0][step], gradients, f"{what}, step {step}", tolerance)
