"""torch's settings that let ranks meet while they compile: they work on a CPU, and wait for nobody in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.harness import lockstep_only, run_ranks
from multirank.words import Words

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._functorch.aot_autograd",)
# Above the limit of a run: who waits until the deadline fails the test.
NEVER = {"LOCKSTEP_COMPILE_TIMEOUT": "1000"}


class Training:
    """A wrapped model beside the plain one, which sees the batches of all ranks; every gradient is checked."""

    def __init__(self, compiles: bool = True) -> None:
        import lockstep

        torch.manual_seed(5)
        self.module, self.reference = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2))
        self.reference.load_state_dict(self.module.state_dict())
        wrapped = lockstep.DDP(self.module)
        self.model = torch.compile(wrapped, backend="aot_eager") if compiles else wrapped

    def step(self, rows: list[int]) -> None:
        batches = [torch.randn(n, 6, generator=torch.Generator().manual_seed(r)) for r, n in enumerate(rows)]
        self.module.zero_grad()
        self.reference.zero_grad()
        self.model(batches[dist.get_rank()]).pow(2).mean().backward()
        torch.stack([self.reference(batch).pow(2).mean() for batch in batches]).mean().backward()
        for p, q in zip(self.module.parameters(), self.reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def settings_on() -> None:
    torch.compiler.set_enable_guard_collectives(True)
    torch._dynamo.config.enable_compiler_collectives = True


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def see_other_sizes(rows: list[list[int]]) -> dict[str, Any]:
    words = Words("to meet for")
    settings_on()
    training, graphs = Training(), []
    for sizes in rows:
        training.step(sizes)
        graphs.append(num_graphs())
    return {"graphs": graphs, "warnings": words.warnings}


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_see_other_sizes_become_dynamic_together(world: int) -> None:
    rows = [[4 + rank for rank in range(world)], [9 - rank for rank in range(world)], [11] * world]
    for rank in run_ranks(world, see_other_sizes, rows, env=NEVER, preload=PRELOAD):
        assert rank == {"graphs": [1, 1, 1], "warnings": []}


def test_a_guard_that_fails_on_one_rank_makes_all_compile() -> None:
    rows = [[4, 4], [4, 4], [4, 7], [8, 4]]
    for rank in run_ranks(2, see_other_sizes, rows, env=NEVER, preload=PRELOAD):
        assert rank == {"graphs": [1, 1, 2, 2], "warnings": []}


def one_does_not_compile(world: int) -> dict[str, Any]:
    words = Words("to meet for")
    settings_on()
    training = Training(compiles=dist.get_rank() != world - 1)
    for sizes in ([4] * world, [5] * world, [6] * world):
        training.step(sizes)
    return {
        "warnings": words.warnings,
        "still on": torch._dynamo.config.enable_compiler_collectives,
        "graphs": num_graphs(),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_not_compile_holds_nobody_up(world: int) -> None:
    *compiling, eager = run_ranks(world, one_does_not_compile, world, env=NEVER, preload=PRELOAD)
    assert eager["warnings"] == []
    for rank in compiling:
        assert rank["graphs"] >= 1
        assert not rank["still on"]
        assert f"rank(s) [{world - 1}] did not come" in rank["warnings"][0]
        assert "the compilation of" in rank["warnings"][0]


def guards_on_one_rank_only() -> dict[str, Any]:
    """All ranks compile, then one goes on eagerly: the guards of the others have nobody to ask."""
    words = Words("to meet for")
    settings_on()
    training = Training()
    training.step([4, 4])
    if dist.get_rank() == 1:
        training.model = training.model._orig_mod
    for _ in range(2):
        training.step([4, 4])
    return {"warnings": words.warnings, "graphs": num_graphs()}


def test_a_rank_that_goes_on_eagerly_holds_nobody_up() -> None:
    compiled, eager = run_ranks(2, guards_on_one_rank_only, env=NEVER, preload=PRELOAD)
    assert eager == {"warnings": [], "graphs": 1}
    assert compiled["graphs"] == 1
    (warning,) = compiled["warnings"]
    assert "the guards of a compiled frame" in warning
    assert "rank(s) [1] did not come" in warning
