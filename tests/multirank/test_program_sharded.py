"""TrainStep of a sharded model: the bits of a loop by hand; compiled close to it; a reason where it is no program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
NAMES = ("mlp", "accumulate", "clip_norm", "clip_value", "scaler that skips", "average", "schedule")


def shard(module: Any) -> Any:
    import lockstep

    for child in module.children():
        lockstep.fully_shard(child)
    return lockstep.fully_shard(module)


def train(names: tuple[str, ...], mode: str) -> None:
    from program.loops import CASES, assert_close, assert_same, by_hand, by_step, make_step, set_up

    rank = dist.get_rank()
    for name in names:
        case = CASES[name]
        right = by_hand(case, set_up(case, shard), rank)
        setup = set_up(case, shard)
        step = make_step(case, setup, mode)
        found = by_step(case, setup, step, rank)
        (assert_close if mode == "compiled" else assert_same)(right, found)
        if mode in ("graph", "auto"):
            assert step.explain().num_program_calls == 0
            assert step.explain().runs == "the plain loop"
        if mode == "graph":
            assert "sharded models" in step.explain().reasons[0]


@pytest.mark.parametrize("world", [2, 3])
def test_the_loop_has_the_bits_of_a_loop_by_hand(world: int) -> None:
    run_ranks(world, train, NAMES, "loop")


@pytest.mark.parametrize("mode", ["graph", "auto"])
def test_where_it_is_no_program_the_loop_runs(mode: str) -> None:
    run_ranks(2, train, ("accumulate",), mode)


def compile_eagerly() -> None:
    compiled = torch.compile
    torch.compile = lambda *args, **kwargs: compiled(*args, **{**kwargs, "backend": "aot_eager"})  # type: ignore[assignment]
    train(("mlp", "accumulate"), "compiled")


def test_compiled_is_close_to_the_loop() -> None:
    run_ranks(2, compile_eagerly, preload=("torch._dynamo", "torch._functorch.aot_autograd"))
