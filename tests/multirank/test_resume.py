"""A run saved at step k and resumed in fresh processes equals an uninterrupted one, bit by bit.

Three ranks, because with two a sum has only one order and any bucket layout gives the same bits. Small
buckets, so that there are many layouts to get wrong: a layout that changes after the first step of a process
(torch rebuilds its buckets in the order it observed) sums in another order in the resumed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.compare import assert_identical, state_of
from multirank.harness import run_ranks, subject_class, torch_fails
from multirank.models import CASES, shard

WORLD = 3
NUM_STEPS = 8
OPTIMIZERS = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def train(
    name: str, optimizer_name: str, view: bool, first_step: int, last_step: int, path: Path, resume: bool
) -> dict[str, Any]:
    """Steps first_step to last_step - 1. Rank 0 saves at the end; a resuming run loads before it wraps."""
    case, rank = CASES[name], dist.get_rank()
    module = case.module()
    saved = torch.load(path, weights_only=True) if resume else None
    if saved is not None:
        module.load_state_dict(saved["module"])
    ddp = subject_class()(module, bucket_cap_mb=0.002, gradient_as_bucket_view=view, **case.ddp_options)
    optimizer = OPTIMIZERS[optimizer_name](ddp.parameters())
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first_step, last_step):
        optimizer.zero_grad()
        case.loss(ddp, shard(case.batch(step), rank, WORLD)).backward()
        optimizer.step()
    result = {"module": state_of(ddp), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(result, path)
    return result


@pytest.fixture(scope="module")
def straight_runs() -> dict[Any, list[Any]]:
    """Runs from the first step to the last, which do not depend on where another one was saved."""
    return {}


@torch_fails("rebuilds its buckets after the first step of each process, so a resumed run sums differently")
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt_tied", "mlp"])
@pytest.mark.parametrize("saved_at", [1, 4])
def test_resumed_run_is_bitwise_equal(
    straight_runs: dict[Any, list[Any]], tmp_path: Path, name: str, optimizer_name: str, view: bool, saved_at: int
) -> None:
    key = (name, optimizer_name, view)
    if key not in straight_runs:
        straight_runs[key] = run_ranks(WORLD, train, *key, 0, NUM_STEPS, tmp_path / "straight.pt", resume=False)
    straight = straight_runs[key]
    run_ranks(WORLD, train, name, optimizer_name, view, 0, saved_at, tmp_path / "saved.pt", resume=False)
    resumed = run_ranks(
        WORLD, train, name, optimizer_name, view, saved_at, NUM_STEPS, tmp_path / "saved.pt", resume=True
    )
    for rank in range(WORLD):
        assert_identical(resumed[rank], straight[rank], f"rank {rank}, saved at step {saved_at}")
