"""A train step that is reset on some ranks only: told on all of them, and nothing where ranks may differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import expect_errors, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch.fx.experimental.proxy_tensor",)
MICRO = 3


def made(mode: str, accumulate: int, sharded: bool = False) -> tuple[Any, Any, Any]:
    import lockstep
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = lockstep.fully_shard(module) if sharded else lockstep.DDP(module, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), accumulate=accumulate, mode=mode)
    return model, optimizer, step


def batch(index: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))


def run(step: Any, num: int) -> None:
    for index in range(num):
        step(batch(index))


def reset_alone(mode: str, sharded: bool = False) -> None:
    _, _, step = made(mode, MICRO, sharded)
    run(step, 2 * MICRO + 1)
    if dist.get_rank() == 1:
        step.reset()
    run(step, 2 * MICRO)


@pytest.mark.parametrize("mode", ["loop", "graph"])
def test_a_reset_on_one_rank_is_an_error_on_all(mode: str) -> None:
    errors = expect_errors(3, [0, 1, 2], reset_alone, mode, preload=PRELOAD, limit_s=300)
    for error in errors.values():
        assert error.type_name == "Disagreement"
        if mode == "loop":
            assert "micro-batches of the train step since the last update" in error.text
            assert "reset() of a lockstep.TrainStep on some ranks only" in error.text
            assert re.search(r"rank 1 +\| 4", error.text), error.text
            assert re.search(r"rank 0 +\| 3|ranks? 0, 2 +\| 3", error.text), error.text
        else:
            assert "micro-step 0" in error.text
            assert "micro-step 1" in error.text


@pytest.mark.parametrize("mode", ["loop", "graph"])
def test_a_reset_on_one_rank_of_a_sharded_model_is_an_error_on_all(mode: str) -> None:
    """Its ranks gather in every micro-batch: nobody may wait there for a rank that is in another one."""
    errors = expect_errors(2, [0, 1], reset_alone, mode, True, preload=PRELOAD, limit_s=300)
    for error in errors.values():
        assert error.type_name == "Disagreement", error.text
        assert "micro-step 0" in error.text
        assert "micro-step 1" in error.text


def go_on(mode: str) -> list[Tensor]:
    """An error on all ranks, then the documented way to go on, then a reset on all ranks."""
    from lockstep.errors import Disagreement

    rank = dist.get_rank()
    model, optimizer, step = made(mode, MICRO)
    run(step, MICRO + 1)
    if rank == 1:
        step.reset()
    with pytest.raises(Disagreement):
        run(step, MICRO)
    if rank == 0:  # in either order
        step.reset()
        model.reset_sync_window()
    else:
        model.reset_sync_window()
        step.reset()
    optimizer.zero_grad()
    run(step, 2 * MICRO)
    step(batch(0))
    step.reset()  # on all of them
    run(step, 2 * MICRO)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["loop", "graph"])
def test_ranks_are_level_again_after_a_reset_on_all(mode: str) -> None:
    ends = run_ranks(2, go_on, mode, preload=PRELOAD)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def differ_where_it_may_be() -> list[Tensor]:
    """A rank that leaves a bad batch out, and a loop by hand with another number of local passes on each rank."""
    rank = dist.get_rank()
    model, optimizer, step = made("loop", 1)
    for index in range(4):
        if index == 2 and rank == 1:
            with pytest.raises(RuntimeError):
                step(torch.ones(4, 9))
            step.reset()
        step(batch(index))
    for index in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(1 + rank):
                model(batch(index)).sum().backward()
        model(batch(index)).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_no_error_where_ranks_may_differ() -> None:
    ends = run_ranks(2, differ_where_it_may_be)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
