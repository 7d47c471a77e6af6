"""Parameters that only some ranks use, in the middle of many units: nobody waits for a rank that waits for it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.shard_training import gradients, parameters, shard_by_blocks, whole_gradients, whole_parameters

pytestmark = lockstep_only


class Block(nn.Module):
    """A branch that a batch may leave out; ``skips``: all of the block but its input."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, takes: bool, skips: bool = False) -> Tensor:
        if skips:
            return x * 2
        y = torch.tanh(self.always(x))
        return y + self.sometimes(x) if takes else y


class Branches(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.kind = kind
        self.register_buffer("fixed", torch.ones(3, 6))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            takes = (number + rank) % 3 == 0
            skips = self.kind == "skipped" and number == 5 and rank % 2 == 0
            if self.kind in ("reentrant", "checkpoint"):
                x = checkpoint(block, x, takes, skips, use_reentrant=self.kind == "reentrant")
            elif self.kind == "dropped" and number == 4:
                y = block(x, takes)  # on all ranks, and used on some
                x = x + y if rank % 2 == 0 else x * 2
            elif self.kind == "towers" and number > 0:
                x = x + block(self.fixed, takes)  # of what needs no gradient
            else:
                x = block(x, takes, skips)
            if self.kind == "twice" and number == 3:
                x = block(x, not takes)
            if self.kind == "penalty" and number == 2:
                x = x + block(x, True).detach()
        return x


def train(kind: str, how: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = Branches(kind).double()
    reference = copy.deepcopy(module)
    shard_by_blocks(module)
    torch._dynamo.reset()
    called: Any = torch.compile(module, backend="aot_eager") if how == "compiled" else module
    mine = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    shift = int(how == "eager")  # compiled, other branches are other graphs
    for step in range(4):
        batches = [
            torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + r))
            for r in range(world)
        ]
        for batch in batches if kind in ("inputs", "reentrant") else ():
            batch.requires_grad_()
        for micro in range(2 if kind == "accumulated" else 1):
            last = kind != "accumulated" or micro == 1
            with nullcontext() if last else module.no_sync():
                called(batches[rank], rank + shift * (step + micro)).square().mean().backward()
            for other in range(world):
                (reference(batches[other], other + shift * (step + micro)).square().mean() / world).backward()
        assert_close(whole_gradients(module), gradients(reference), f"{kind}, {how}, step {step}")
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole_parameters(module), parameters(reference), f"{kind}, {how}", 1e-7)


EAGER = (
    "plain",
    "dropped",
    "towers",
    "skipped",
    "twice",
    "inputs",
    "penalty",
    "accumulated",
    "checkpoint",
    "reentrant",
)
COMPILED = ("plain", "twice")


def train_all(how: str) -> None:
    for kind in EAGER if how == "eager" else COMPILED:
        train(kind, how)


@pytest.mark.parametrize(("world", "how"), [(2, "eager"), (3, "eager"), (2, "compiled")])
def test_branches_of_some_ranks(world: int, how: str) -> None:
    run_ranks(world, train_all, how)
