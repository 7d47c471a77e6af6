"""A process that a rank has forked, as the workers of a data loader are, may run the wrapped model."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from multirank.harness import lockstep_only, run_ranks
from multirank.mixes import EAGER, PRELOAD, WHOLE, Mix, Net, Side

pytestmark = [pytest.mark.multirank, lockstep_only]


def run_in_children(mode: str) -> tuple[list[int], str]:
    """Run the model in children before and after a step; returns how those ended, and a digest of the weights."""
    side = Side(Mix(lambda side, t: None, lambda: [Net()]), dist.get_rank(), mode)
    ends = []
    for step in range(2):
        for records in (True, False) if mode == EAGER else (False,):
            child = os.fork()
            if child == 0:
                try:
                    with torch.set_grad_enabled(records):
                        side.models[0](side.draw(step))
                    os._exit(0)
                finally:
                    os._exit(1)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        side.optimizers[0].zero_grad()
        side.loss(step).backward()
        side.optimizers[0].step()
    return ends, side.digest()


@pytest.mark.parametrize("mode", WHOLE)
def test_a_forked_child_runs_the_model(mode: str) -> None:
    values = run_ranks(2, run_in_children, mode, preload=PRELOAD, limit_s=300)
    assert len({digest for _, digest in values}) == 1
    for ends, _ in values:
        assert not any(ends), f"children ended with {ends}"
