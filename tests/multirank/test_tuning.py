"""Candidates are timed once per job, by whichever rank comes first, and all ranks choose alike.

The cache of the compiler that is asked is torch's; what is timed are stand-ins, since kernels of which a CPU has
several take minutes to compile.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.harness import lockstep_only, run_outcomes, run_ranks
from multirank.signs import know_the_others

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._inductor.codecache",)
NAMES = ("aten", "small tiles", "large tiles")
OPERATORS = ("mm", "bmm", "addmm")


class Choice:
    def __init__(self, name: str) -> None:
        self.name = name

    def hash_key(self) -> str:
        return self.name


def look_up(op: str, measure: Any, names: tuple[str, ...] = NAMES) -> dict[str, float]:
    from torch._inductor.codecache import PersistentCache

    choices = [Choice(name) for name in names]
    found = PersistentCache().lookup(choices, op, "[4, 4]", measure)
    return {choice.name: seconds for choice, seconds in found.items()}


def wrapped() -> None:
    """What a program does before anything is compiled."""
    import lockstep
    from lockstep.graph import tuning

    lockstep.DDP(torch.nn.Linear(2, 2))
    tuning.start()


def tune(directory: str) -> dict[str, Any]:
    """Each rank has a cache of its own, as on hosts of their own, and would measure something else."""
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/{rank}"
    wrapped()
    timed: list[str] = []
    generator = random.Random(rank)

    def measure(choices: Any) -> dict[Any, float]:
        timed.extend(choice.name for choice in choices)
        time.sleep(0.2 * generator.random())
        return {choice: generator.random() for choice in choices}

    order = OPERATORS if rank != 1 else OPERATORS[::-1]  # ranks need not come to them in one order
    names = NAMES if rank != 2 else NAMES[::-1]
    found = {op: look_up(op, measure, names) for op in order}
    return {"timed": timed, "found": found, "best": {op: min(t, key=t.__getitem__) for op, t in found.items()}}


def test_each_candidate_is_timed_once_and_all_ranks_choose_alike(tmp_path: Path) -> None:
    ranks = run_ranks(3, tune, str(tmp_path), preload=PRELOAD)
    timed = [name for rank in ranks for name in rank["timed"]]
    assert len(timed) == len(NAMES) * len(OPERATORS)
    assert all(rank["found"] == ranks[0]["found"] for rank in ranks)
    assert all(rank["best"] == ranks[0]["best"] for rank in ranks)


def tune_with_a_slow_rank(directory: str) -> dict[str, float]:
    """Rank 0 comes first and takes too long; the others go on by themselves, and it takes their timings."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/{rank}"
    wrapped()
    if rank != 0:
        store.wait(["rank 0 is timing"])

    def measure(choices: Any) -> dict[Any, float]:
        if rank == 0:
            store.set("rank 0 is timing", "")
            store.wait(["found by 1", "found by 2"])
        return {choice: float(rank + index) for index, choice in enumerate(choices)}

    found = look_up("mm", measure)
    store.set(f"found by {rank}", "")
    return found


def test_a_rank_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    env = {"LOCKSTEP_COMPILE_TIMEOUT": "3"}
    ranks = run_ranks(3, tune_with_a_slow_rank, str(tmp_path), env=env, preload=PRELOAD)
    assert all(rank == ranks[0] for rank in ranks)


def end_while_timing(directory: str) -> dict[str, float]:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/{rank}"
    wrapped()
    know_the_others()
    dist.barrier()
    if rank != 0:
        store.wait(["rank 0 is timing"])

    def measure(choices: Any) -> dict[Any, float]:
        if rank == 0:
            store.set("rank 0 is timing", "")
            raise SystemExit(3)
        return {choice: float(index) for index, choice in enumerate(choices)}

    return look_up("mm", measure)


def test_a_rank_that_ends_while_it_times_is_not_waited_for(tmp_path: Path) -> None:
    env = {"LOCKSTEP_COMPILE_TIMEOUT": "1000"}  # above the limit of a run
    outcomes = run_outcomes(2, end_while_timing, str(tmp_path), env=env, preload=PRELOAD)
    assert outcomes[1].error is None, outcomes[1].report()
    assert outcomes[1].value == {name: float(index) for index, name in enumerate(NAMES)}


# ---------------------------------------------------------------- with kernels


def tune_an_operator(directory: str) -> dict[str, Any]:
    """Compile a model with an operator of which there are three kernels, in a cache of its own."""
    from torch._inductor import select_algorithm
    from torch._inductor.codecache import PersistentCache
    from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

    import lockstep

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/{dist.get_rank()}"

    @torch.library.custom_op("lockstep_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    configs = [CustomOpConfig(lambda x: x + x), CustomOpConfig(lambda x: (x * 4.0) * 0.5)]
    register_custom_op_autotuning(twice, configs=configs, input_gen_fns={"x": lambda fake: torch.ones(*fake.shape)})
    timed: list[str] = []
    kept = select_algorithm.AlgorithmSelectorCache.__dict__["benchmark_choice"]

    def benchmark_choice(*args: Any, **kwargs: Any) -> Any:
        timed.append("one")
        return kept.__func__(*args, **kwargs)

    select_algorithm.AlgorithmSelectorCache.benchmark_choice = type(kept)(benchmark_choice)
    module = torch.nn.Linear(6, 3)
    torch.nn.init.ones_(module.weight)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(twice(x))

    model = torch.compile(lockstep.DDP(Model()), options={"max_autotune": True})
    model(torch.ones(4, 6)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((3, 6), 8.0))
    return {"timed": len(timed), "timings": PersistentCache().get_local_cache()}


def test_kernels_are_timed_by_one_rank_and_chosen_by_all(tmp_path: Path) -> None:
    pytest.importorskip("torch._inductor.kernel.custom_op", reason="this torch has no such operators")
    preload = ("torch._inductor.compile_fx", "torch._inductor.kernel.custom_op")
    ranks = run_ranks(2, tune_an_operator, str(tmp_path), preload=preload, limit_s=600.0)
    assert sorted(rank["timed"] for rank in ranks) == [0, 3]
    assert ranks[0]["timings"] == ranks[1]["timings"]
    assert ranks[0]["timings"]
