"""Norms that exchange statistics between ranks, inside sharded units.

torch's ``SyncBatchNorm`` is for GPUs only; here is what it does, in forward and backward, written for any device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import fully_shard
from multirank.compare import assert_close
from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.shard_training import gradients, parameters, whole_gradients, whole_parameters

pytestmark = lockstep_only
WIDTH, BATCH = 6, 5


class Summed(torch.autograd.Function):
    """The sum over ranks, in the forward of values and in the backward of gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        summed = value.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        summed: Tensor = gradients[0].clone()
        dist.all_reduce(summed)
        return summed


class SyncedNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        num = x.shape[0] * dist.get_world_size()
        mean = Summed.apply(x.sum(0)) / num
        variance = Summed.apply((x - mean).square().sum(0)) / num
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            self.running_mean.lerp_(mean, self.momentum or 0.0)
            self.running_var.lerp_(variance * num / (num - 1), self.momentum or 0.0)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def built(norm: type[nn.BatchNorm1d]) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2)).double()


def train(how: str, again: bool) -> None:
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    module, plain = built(SyncedNorm), built(nn.BatchNorm1d)
    for block in module[:3]:
        fully_shard(block, reshard_after_forward=again)
    fully_shard(module)
    model = torch.compile(module, backend="aot_eager") if how == "compiled" else module
    mine = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(world * BATCH, WIDTH, dtype=torch.float64, generator=generator)
        mine.zero_grad()
        theirs.zero_grad()
        model(x[rank * BATCH : (rank + 1) * BATCH]).square().mean().backward()
        plain(x).square().mean().backward()
        assert_close(whole_gradients(module), gradients(plain), f"step {step}")
        mine.step()
        theirs.step()
    assert_close(whole_parameters(module), parameters(plain), "parameters")
    assert_close(dict(module.named_buffers()), dict(plain.named_buffers()) | _batches(module), "running statistics")


def _batches(module: nn.Module) -> dict[str, Tensor]:
    """The counter of batches, which the norm above does not keep."""
    return {name: b for name, b in module.named_buffers() if name.endswith("num_batches_tracked")}


@pytest.mark.parametrize("again", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_statistics_over_all_ranks(how: str, again: bool) -> None:
    run_ranks(3 if again and how == "eager" else 2, train, how, again)


def torchs_own() -> None:
    module: Any = fully_shard(nn.SyncBatchNorm.convert_sync_batchnorm(built(nn.BatchNorm1d)))
    module(torch.randn(BATCH, WIDTH, dtype=torch.float64))


def test_torchs_own_says_that_it_needs_a_gpu() -> None:
    for error in expect_errors(2, [0, 1], torchs_own).values():
        assert "SyncBatchNorm expected input tensor to be on GPU" in str(error)
