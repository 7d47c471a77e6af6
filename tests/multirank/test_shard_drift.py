"""Ranks of a sharded model hold different weights, so they compare what was done to them, and on what gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from multirank.harness import lockstep_only, run_ranks
from multirank.models import MLP
from multirank.shard_training import shard_by_blocks

pytestmark = [pytest.mark.multirank, lockstep_only]

NUM_STEPS, ODD = 5, 2
Optimizer = torch.optim.Optimizer


def step_twice(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


def clear_before(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


def clear_some_before(model: nn.Module, optimizer: Optimizer) -> None:
    next(model.parameters()).grad = None
    optimizer.step()
    optimizer.zero_grad()


def zero_before(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    optimizer.zero_grad()


def skip(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def keep(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()


def keep_some(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    for parameter in list(model.parameters())[1:]:
        parameter.grad = None


def as_all(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# What one rank does once, a word of the error, and whether weights differ by then.
CHANGES: dict[Callable[[nn.Module, Optimizer], None], tuple[str, bool]] = {
    step_twice: ("2 times", True),
    clear_before: ("optimizer steps so far", True),
    clear_some_before: ("have updated the shards differently", True),
    zero_before: ("gradients=changed by the program", True),
    skip: ("optimizer steps so far", True),
    keep: ("of all parameters", False),
    keep_some: ("zero_grad() was called on some ranks only", False),
}


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))


def do_otherwise(mode: str) -> dict[str, str]:
    """What this rank is told, for each of them; then all go on."""
    told = {}
    for change in CHANGES:
        torch.manual_seed(0)
        module = shard_by_blocks(MLP())
        called: Any = torch.compile(module, backend="aot_eager") if mode == "compiled" else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(ODD + 1):
            called(batch(step)).square().mean().backward()
            is_odd = step == ODD and dist.get_rank() == 1
            (change if is_odd else as_all)(module, optimizer)
        with pytest.raises(lockstep.errors.Disagreement) as caught:
            called(batch(step)).square().mean().backward()
        told[change.__name__] = str(caught.value)
        if CHANGES[change][1]:
            with pytest.raises(lockstep.errors.Disagreement, match=r"weights_are_equal=True"):
                module.reset_sync_window()
        module.reset_sync_window(weights_are_equal=True)
        module.zero_grad()
        for step in range(2):
            called(batch(step)).square().mean().backward()
            as_all(module, optimizer)
    return told


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_what_one_rank_does_to_its_shards_alone_is_an_error_on_all(mode: str) -> None:
    first, *others = run_ranks(2, do_otherwise, mode)
    assert all(other == first for other in others)
    for change, (word, _) in CHANGES.items():
        assert word in first[change.__name__], first[change.__name__]
        assert "rank 1" in first[change.__name__]


def do_the_same() -> None:
    """What programs do alike on all ranks, whose shards are of different sizes: some have none of a parameter."""
    torch.manual_seed(0)
    module = MLP()
    module.unused = nn.Parameter(torch.ones(1))  # only the first rank has any of it
    shard_by_blocks(module)
    halves = list(module.parameters())
    optimizers = [torch.optim.AdamW(halves[:2], lr=0.01, fused=True), torch.optim.SGD(halves[2:], lr=0.05)]
    for step in range(4):
        for _ in range(1 + step % 2):
            module(batch(step)).square().mean().backward()  # on top
        if step == 3:
            (module(batch(step)).square().mean() + module.unused.sum()).backward()
        if step != 1:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        for optimizer in optimizers:
            for _ in range(1 + step % 3):
                optimizer.step()
        if step != 2:
            module.zero_grad(set_to_none=step == 0)
    module.zero_grad()
    made = [torch.optim.SGD([parameter], lr=0.01) for parameter in module.parameters()]
    for parameter, optimizer in zip(module.parameters(), made, strict=True):
        parameter.register_post_accumulate_grad_hook(update_with(optimizer))
    for step in range(3):
        module(batch(step)).square().mean().backward()


def update_with(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def update(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def test_ranks_that_do_the_same_may_do_anything() -> None:
    run_ranks(3, do_the_same)
