"""Ordinary training in which buckets must leave inside a compiled backward, with the right gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.mixes import (
    BLOCKS,
    COMPILE_THEN_WRAP,
    PRELOAD,
    WRAP_THEN_COMPILE,
    Mix,
    Net,
    Side,
    average,
    loss_of,
    one_net,
)
from multirank.test_step_windows import checkpointed, reentrant

pytestmark = [pytest.mark.multirank, lockstep_only]


def usual(side: Side, t: int) -> None:
    side.loss(t).backward()


def around_the_model(side: Side, t: int) -> None:
    loss_of(checkpoint(side.models[0], side.draw(t), use_reentrant=False), t).backward()


def contrastive(side: Side, t: int) -> None:
    first, second = (side.models[0](side.draw(t, index)) for index in range(2))
    (first * second.tanh()).pow(2).sum().backward()


def discriminator(side: Side, t: int) -> None:
    fake = side.draw(t, 2).tanh()
    (loss_of(side.models[0](side.draw(t, 1)), 1) + loss_of(side.models[0](fake), 2)).backward()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, 4, 3, padding=1) for a in (2, 4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 2, 2)
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return self.head(x.mean((2, 3)))


def images() -> list[nn.Module]:
    return [Images()]


def channels_last(side: Side) -> None:
    side.modules[0].to(memory_format=torch.channels_last)


WHOLE = (WRAP_THEN_COMPILE, COMPILE_THEN_WRAP)
SCENARIOS: dict[str, tuple[Mix, tuple[str, ...]]] = {
    "blocks_in_checkpoints": (Mix(usual, checkpointed), (BLOCKS,)),
    "blocks_in_reentrant_checkpoints": (Mix(usual, reentrant), (BLOCKS,)),
    "a_checkpoint_around_the_model": (Mix(around_the_model, one_net), WHOLE),
    "contrastive": (Mix(contrastive, one_net), (*WHOLE, BLOCKS)),
    "discriminator": (Mix(discriminator, lambda: [Net(8, 1)]), (*WHOLE, BLOCKS)),
    "channels_last_after_wrapping": (Mix(usual, images, after_wrapping=channels_last), WHOLE),
}


def count_launches(name: str, mode: str) -> tuple[int, int, list[str]]:
    """How many buckets left inside a backward in the last step, how many had to, and what was left to hooks."""
    import lockstep

    mix = SCENARIOS[name][0]
    ours = Side(mix, torch.distributed.get_rank(), mode)
    copies = [Side(mix, rank, None) for rank in range(ours.world)]
    step: Callable[[Side, int], object] = mix.step
    for t in range(4):
        for side in (ours, *copies):
            side.optimizers[0].zero_grad()
            step(side, t)
        assert_close(ours.gradients(), average(copies), f"{name}, {mode}, step {t}")
        for side in (ours, *copies):
            side.optimizers[0].step()
    ddp = ours.wrappers[0]
    explained = lockstep.explain(ddp)
    due = [bucket for bucket in ddp.plan if not any(name in explained.left_to_hooks for name in bucket.names)]
    assert explained.num_launches > 0
    return int(ddp.metrics()["lockstep/launched_in_graph"]), len(due), list(explained.left_to_hooks)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, modes) in SCENARIOS.items() for mode in modes])
def test_buckets_leave_inside_the_backward(name: str, mode: str) -> None:
    for in_graph, due, left_to_hooks in run_ranks(3, count_launches, name, mode, preload=PRELOAD):
        assert in_graph >= due > 0
        # Of blocks compiled one by one, the head is in none.
        assert all("head" in parameter and mode == BLOCKS for parameter in left_to_hooks), left_to_hooks
