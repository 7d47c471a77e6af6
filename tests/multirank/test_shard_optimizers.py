"""Optimizers over shards: whatever kind updates them, the next forward runs on what they wrote, and it is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep import fully_shard
from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.shard_training import parameters, whole_parameters

pytestmark = lockstep_only

KINDS: dict[str, Any] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "compiled": lambda p: torch.optim.AdamW(p, lr=0.1),
}


class Net(nn.Module):
    """Blocks with something of the root's own before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def built() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def stepping(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    return torch.compile(optimizer.step, backend="aot_eager") if kind == "compiled" else optimizer.step


def evaluate_before_the_update(kind: str, compiles: bool) -> None:
    """Evaluation between a backward and its update leaves the root whole, and a gather begun ahead."""
    torch._dynamo.reset()
    module, plain = built(), built()
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    model = torch.compile(module, backend="aot_eager", fullgraph=True) if compiles else module
    mine, theirs = KINDS[kind](module.parameters()), KINDS[kind](plain.parameters())
    step, reference_step = stepping(mine, kind), stepping(theirs, kind)
    for number in range(3):
        for called in (model, plain):
            called(batch(number)).square().mean().backward()
            with torch.no_grad():
                called(batch(10))
                called(batch(11))
        step()
        reference_step()
        mine.zero_grad()
        theirs.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(batch(12)), plain(batch(12)), msg=f"{kind}, step {number}")
    assert_close(whole_parameters(module), parameters(plain), kind, 1e-9)
    assert module._lockstep_root.steps[0].num_updates == 3


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "one_graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_after_an_update_runs_on_what_was_written(kind: str, compiles: bool) -> None:
    run_ranks(2, evaluate_before_the_update, kind, compiles)


def only_rank_0_compiles() -> None:
    module = fully_shard(built())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = stepping(optimizer, "compiled" if dist.get_rank() == 0 else "plain")
    for number in range(3):
        module(batch(number)).square().mean().backward()
        step()
        optimizer.zero_grad()
    assert module._lockstep_root.steps[0].num_updates == 3
    plain = built()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        plain(batch(number)).square().mean().backward()
        reference.step()
        reference.zero_grad()
    assert_close(whole_parameters(module), parameters(plain), "parameters", 1e-9)


def test_a_compiled_update_counts_as_one_that_is_not() -> None:
    run_ranks(2, only_rank_0_compiles)


def rank_1_misses_a_compiled_update() -> str:
    module = fully_shard(built())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = stepping(optimizer, "compiled")
    module(batch(0)).square().mean().backward()
    if dist.get_rank() == 0:
        step()
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        module(batch(1)).square().mean().backward()
    return str(caught.value)


def test_a_compiled_update_that_a_rank_misses_is_an_error() -> None:
    for text in run_ranks(2, rank_1_misses_a_compiled_update):
        assert "optimizer steps so far" in text
