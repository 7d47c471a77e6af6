"""Ranks with different numbers of batches, and buffers, in sharded models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from lockstep import fully_shard
from multirank.compare import assert_close
from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.models import CASES, shard
from multirank.shard_training import parameters, shard_by_blocks, whole_parameters

pytestmark = lockstep_only

MODES = ("eager", "compiled")
NUM_BATCHES = (3, 1, 2)  # of each rank


def compiled(module: nn.Module, how: str) -> Any:
    if how == "eager":
        return module
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def train_unevenly(how: str, by_all: bool) -> None:
    """Against one process that adds up the losses of the ranks that have data."""
    case = CASES["mlp"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    called = compiled(shard_by_blocks(module), how)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    steps = range(NUM_BATCHES[rank])
    num_counted = 0
    batches = module.join((shard(case.batch(step, torch.float64), rank, world) for step in steps),
                          divide_by_initial_world_size=by_all)  # fmt: skip
    for number, batch in enumerate(batches):
        case.loss(called, batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)  # takes a collective, which all ranks must come to
        mine.step()
        mine.zero_grad()
        assert module.has_data == (number < NUM_BATCHES[rank])
        num_counted += module.has_data
    assert num_counted == NUM_BATCHES[rank]
    assert number + 1 == max(NUM_BATCHES)
    assert module.has_data
    for step in range(max(NUM_BATCHES)):
        active = [r for r in range(world) if step < NUM_BATCHES[r]]
        for other in active:
            loss = case.loss(reference, shard(case.batch(step, torch.float64), other, world))
            (loss / (world if by_all else len(active))).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    assert_close(whole_parameters(module), parameters(reference), "uneven inputs", 1e-7)


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("how", MODES)
def test_uneven_inputs(how: str, by_all: bool) -> None:
    run_ranks(3, train_unevenly, how, by_all)


def accumulate_unevenly(how: str) -> None:
    """Two batches to a step; a rank that runs out in the middle of one still counts with its first."""
    case = CASES["mlp"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    called = compiled(shard_by_blocks(module), how)
    rank, world = dist.get_rank(), dist.get_world_size()
    num_batches = (4, 3)
    for number, batch in enumerate(
        module.join(shard(case.batch(n, torch.float64), rank, world) for n in range(num_batches[rank]))
    ):
        module.set_requires_gradient_sync(number % 2 == 1)
        case.loss(called, batch).backward()
    for number in range(max(num_batches)):
        for other in range(world):
            if number < num_batches[other]:
                (case.loss(reference, shard(case.batch(number, torch.float64), other, world)) / world).backward()
    assert_close(
        {n: p.grad.full_tensor() for n, p in module.named_parameters()},
        {n: p.grad for n, p in reference.named_parameters()},
        "accumulated over uneven inputs",
    )


@pytest.mark.parametrize("how", MODES)
def test_uneven_inputs_with_accumulation(how: str) -> None:
    run_ranks(2, accumulate_unevenly, how)


def one_without_any() -> None:
    module = fully_shard(nn.Linear(2, 2))
    batches = [torch.ones(1, 2)] * (2 if dist.get_rank() == 0 else 0)
    for batch in module.join(batches):
        module(batch).sum().backward()


def test_a_rank_without_any_batch() -> None:
    for error in expect_errors(2, [0, 1], one_without_any).values():
        assert "ranks 1 had not a single batch" in str(error)


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def synchronise_buffers(how: str) -> None:
    torch.manual_seed(0)
    module = WithStatistics()
    fully_shard(module.first)
    fully_shard(module)
    called = compiled(module, how)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, 4) + dist.get_rank()
    called(x).sum().backward()
    own = module.norm.running_mean.clone()
    means = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(means, own)
    assert not torch.equal(means[0], means[1])
    module.set_sync_buffers()
    called(x).sum().backward()
    dist.all_gather(means, module.norm.running_mean)
    assert torch.equal(means[0], means[1])
    with module.no_sync():
        called(x).sum().backward()
    dist.all_gather(means, module.norm.running_mean)
    assert not torch.equal(means[0], means[1])
    called(x).sum().backward()
    dist.all_gather(means, module.norm.running_mean)
    assert torch.equal(means[0], means[1])


@pytest.mark.parametrize("how", MODES)
def test_buffers(how: str) -> None:
    run_ranks(2, synchronise_buffers, how)
