"""Errors of a group that is a part of the world name ranks by their global numbers, as the launcher does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]


def caught(function: Any) -> dict[str, Any]:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        names = ("values", "ranks", "rank")
        return {"type": type(error).__name__, "text": str(error), **{n: getattr(error, n, None) for n in names}}
    return {"type": ""}


def differ(how: str, folder: str) -> dict[str, Any] | None:
    """Ranks 1 and 2 are a group, in which rank 2 differs; rank 0 has no part in it."""
    import lockstep

    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        return None
    is_other = rank == 2
    if how == "wrap":
        return caught(lambda: lockstep.DDP(nn.Linear(4, 2 + is_other), process_group=group))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(how != "unfreeze")
    model[0].bias.requires_grad_(how != "unfreeze")
    ddp = lockstep.DDP(model, process_group=group, nonfinite="raise" if how == "nan" else "warn")
    ddp(torch.ones(1, 4)).sum().backward()
    if how == "save":
        return caught(lambda: lockstep.checkpoint.save(folder, ddp, step=rank, process_group=group).wait())
    if how == "save values":
        with torch.no_grad():
            model[1].bias[0] += rank
        return caught(lambda: lockstep.checkpoint.save(folder, ddp, step=1, process_group=group).wait())
    if how == "save nowhere":
        return caught(lambda: lockstep.checkpoint.save("/proc/nowhere", ddp, step=1, process_group=group).wait())
    if how in ("settings", "weights"):
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.mul_(rank if how == "weights" else 1)
        torch.optim.SGD(ddp.parameters(), lr=0.1 * rank if how == "settings" else 0.1).step()
    if how == "unfreeze":
        (model[0].weight if is_other else model[0].bias).requires_grad_(True)
    if how == "freeze" and is_other:
        model[0].weight.requires_grad_(False)
    if how == "replace":
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    factor = float("nan") if how == "nan" and is_other else 1.0
    return caught(lambda: ddp(torch.full((1, 4), factor)).sum().backward())


@pytest.mark.parametrize("how", ["wrap", "freeze", "unfreeze", "settings", "weights"])
def test_a_table_of_what_differs(how: str, tmp_path: Path) -> None:
    nobody, first, second = run_ranks(3, differ, how, str(tmp_path))
    assert nobody is None
    for found in (first, second):
        assert found["type"] == "Disagreement", found
        assert sorted(found["values"]) == [1, 2], found
        assert "rank 1 " in found["text"]
        assert "rank 2 " in found["text"]
        assert "rank 0 " not in found["text"]


def test_a_parameter_that_was_replaced(tmp_path: Path) -> None:
    _, *found = run_ranks(3, differ, "replace", str(tmp_path))
    for rank, error in enumerate(found, 1):
        assert error["text"].startswith(f"Rank {rank}: the wrapped module was changed"), error


def test_a_rank_with_nan(tmp_path: Path) -> None:
    _, *found = run_ranks(3, differ, "nan", str(tmp_path))
    for error in found:
        assert (error["type"], error["ranks"]) == ("NonFinite", (2,)), error
        assert "rank(s) [2]" in error["text"]


def test_values_of_a_checkpoint(tmp_path: Path) -> None:
    _, *found = run_ranks(3, differ, "save values", str(tmp_path))
    for error in found:
        assert (error["type"], error["rank"]) == ("CheckpointFailed", 2), error
        assert "Rank 2 holds other values than rank 1 in" in error["text"]


def test_a_folder_that_the_first_rank_cannot_make(tmp_path: Path) -> None:
    _, *found = run_ranks(3, differ, "save nowhere", str(tmp_path))
    for error in found:
        assert (error["type"], error["rank"]) == ("CheckpointFailed", 1), error
        assert "Rank 1: " in error["text"]


def test_steps_of_a_checkpoint(tmp_path: Path) -> None:
    _, *found = run_ranks(3, differ, "save", str(tmp_path))
    for error in found:
        assert error["type"] == "CheckpointFailed", error
        assert "rank 1 | step 1" in error["text"]
        assert "rank 2 | step 2" in error["text"]
