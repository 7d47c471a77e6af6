"""Ranks of a host take turns to compile: one compiles, the others find the result; and no rank waits for nothing.

The limit of a wait is set far above that of the run: a rank that waited for nothing would end the test.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks
from multirank.words import Words

pytestmark = [pytest.mark.multirank, lockstep_only]

ROWS = 4
PRELOAD = ("torch._inductor.compile_fx",)
LIMIT_S = 500.0  # several cold starts of a compiler, on a machine that may be busy
NEVER = {"LOCKSTEP_COMPILE_TIMEOUT": "1000", "LOCKSTEP_STALL_SECONDS": "1000"}  # nor are late ranks told of


def build() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


class Training:
    """A compiled wrapper next to the plain module, which sees the batches of all ranks."""

    def __init__(self, **options: Any) -> None:
        import lockstep

        self.module, self.reference = build(), build()
        self.model = torch.compile(lockstep.DDP(self.module), **options)

    def step(self, rows_of_rank: list[int]) -> None:
        """One step, in which each rank has as many rows as it says here; checks every gradient."""
        batches = [
            torch.randn(rows, 6, generator=torch.Generator().manual_seed(rank))
            for rank, rows in enumerate(rows_of_rank)
        ]
        self.module.zero_grad()
        self.reference.zero_grad()
        loss(self.model(batches[dist.get_rank()])).backward()
        torch.stack([loss(self.reference(batch)) for batch in batches]).mean().backward()
        for (name, p), q in zip(self.module.named_parameters(), self.reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def loss(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def cache_counts() -> tuple[int, int]:
    """How many graphs this rank found in Inductor's cache, and how many it did not."""
    counts = torch._dynamo.utils.counters["inductor"]
    assert not counts["fxgraph_cache_bypass"]
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]


def share_then_recompile_alone() -> dict[str, Any]:
    words, training = Words(), Training()
    training.step([ROWS, ROWS])
    first = cache_counts()
    training.step([ROWS, ROWS + 3])  # a guard fails on rank 1 only
    training.step([ROWS, ROWS])
    return {"first": first, "later": cache_counts(), "warnings": words.warnings}


def compiled_once(both: list[tuple[int, int]], num_graphs: int) -> bool:
    """Whether each graph was compiled by one of two ranks, whichever came first, and found by the other."""
    hits, misses = zip(*both, strict=True)
    return sum(misses) == sum(hits) == num_graphs and all(sum(rank) == num_graphs for rank in both)


def test_one_rank_loads_what_the_other_compiled_and_a_rank_recompiles_alone(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **NEVER}
    both = run_ranks(2, share_then_recompile_alone, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert compiled_once([rank["first"] for rank in both], 2)
    assert both[0]["later"] == both[0]["first"]
    assert both[1]["later"] == (both[1]["first"][0], both[1]["first"][1] + 2)
    assert both[0]["warnings"] == both[1]["warnings"] == []


def test_of_three_ranks_one_compiles(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **NEVER}
    counts = run_ranks(3, train_once, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert [sum(values) for values in zip(*counts, strict=True)] == [4, 2]


def train_once() -> tuple[int, int]:
    Training().step([ROWS] * dist.get_world_size())
    return cache_counts()


def train_on_other_shapes() -> dict[str, Any]:
    words, training = Words(), Training()
    for _ in range(2):
        training.step([ROWS, ROWS + 1])
    return {"counts": cache_counts(), "warnings": words.warnings}


def test_a_rank_with_another_shape_compiles_its_own_and_is_named(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **NEVER}
    both = run_ranks(2, train_on_other_shapes, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert [rank["counts"] for rank in both] == [(0, 2), (0, 2)]
    (warning,) = [warning for rank in both for warning in rank["warnings"]]
    assert "  rank 0 | [4, 6] float32\n  rank 1 | [5, 6] float32" in warning


def train_with_own_caches(directory: str) -> tuple[int, int]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/{dist.get_rank()}"
    Training().step([ROWS, ROWS])
    return cache_counts()


def test_ranks_with_other_cache_directories_do_not_wait(tmp_path: Path) -> None:
    assert run_ranks(2, train_with_own_caches, str(tmp_path), env=NEVER, preload=PRELOAD, limit_s=LIMIT_S) == [
        (0, 2),
        (0, 2),
    ]


def train_after_a_failure() -> str:
    from torch._inductor import compile_fx

    training = Training()
    original = compile_fx.compile_fx_inner
    failure = ""
    if dist.get_rank() == 0:

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("no compiler today")

        compile_fx.compile_fx_inner = fail
        try:
            training.model(torch.ones(ROWS, 6))
        except Exception as error:
            failure = str(error)
        compile_fx.compile_fx_inner = original
    training.step([ROWS, ROWS])
    return failure


def test_a_rank_that_cannot_compile_holds_nobody_up(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **NEVER}
    failure, none = run_ranks(2, train_after_a_failure, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert "no compiler today" in failure
    assert none == ""


def train_with_collectives_of_the_compiler() -> tuple[int, int]:
    torch.compiler.set_enable_guard_collectives(True)
    with torch._dynamo.config.patch(enable_compiler_collectives=True):
        training = Training()
        training.step([ROWS, ROWS + 1])  # told of each other's size, both make it dynamic
        training.step([ROWS, ROWS + 2])
    return cache_counts()


def test_collectives_of_the_compiler_keep_working(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **NEVER}
    counts = run_ranks(2, train_with_collectives_of_the_compiler, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert compiled_once(counts, 2)


def train_where_inductor_meets_ranks() -> int:
    """Every lowering waits for that of the other rank, as it does under some settings of Inductor."""
    from torch._inductor import compile_fx

    original, meetings = compile_fx.compile_fx_inner, []

    def meet(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        meetings.append(1)
        return original(*args, **kwargs)

    compile_fx.compile_fx_inner = meet
    Training(options={"aten_distributed_optimizations.enable_overlap_scheduling": True}).step([ROWS, ROWS])
    return len(meetings)


def test_ranks_take_no_turns_where_inductor_runs_collectives(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **NEVER}
    meetings = run_ranks(2, train_where_inductor_meets_ranks, env=env, preload=PRELOAD, limit_s=LIMIT_S)
    assert meetings == [2, 2]


def with_backends_that_differ() -> None:
    import lockstep

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    inputs = [torch.randn(5, 3) for _ in range(2)]
    ddp = lockstep.DDP(model, bucket_cap_mb=1)  # sizes are given: only a rank that cuts its graph asks for a plan
    run = torch.compile(ddp, backend=["eager", "aot_eager"][dist.get_rank()])
    run(inputs[dist.get_rank()]).square().sum().backward()
    sum(plain(x).square().sum() / 2 for x in inputs).backward()
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad)


def test_a_rank_that_cuts_its_graph_does_not_wait_for_one_that_has_no_plan_to_tell() -> None:
    run_ranks(2, with_backends_that_differ, preload=PRELOAD, limit_s=LIMIT_S)
