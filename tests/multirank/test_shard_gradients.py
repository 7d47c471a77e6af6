"""The judge of sharded models: gradients and updated parameters, one by one, against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from multirank.compare import assert_identical
from multirank.harness import lockstep_only, run_ranks
from multirank.models import CASES, WORLDS_AND_DTYPES, reference_backward, shard
from multirank.shard_training import OPTIMIZERS, shard_by_blocks, train_and_compare, whole

pytestmark = lockstep_only
TRANSFORMERS = ("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama")
# Dynamo itself breaks the graph of an LSTM, and of a model that looks at its data.
BREAKING = ("lstm", "branches")


def train_all(dtype: torch.dtype) -> None:
    for name in CASES:
        train_and_compare(name, dtype)


@pytest.mark.parametrize(("world", "dtype"), WORLDS_AND_DTYPES)
def test_eager(world: int, dtype: torch.dtype) -> None:
    run_ranks(world, train_all, dtype, preload=TRANSFORMERS)


def train_with_all_optimizers() -> None:
    # In float64: Adam makes a whole step of the rounding noise that is the gradient of an attention key's bias.
    for optimizer in OPTIMIZERS:
        train_and_compare("gpt_tied", torch.float64, optimizer=optimizer)


def test_optimizers() -> None:
    run_ranks(2, train_with_all_optimizers)


def compile_whole(module: nn.Module, backend: str = "aot_eager", mode: str | None = None) -> Any:
    torch._dynamo.reset()
    shard_by_blocks(module)
    return torch.compile(module, backend=backend, fullgraph=True, mode=mode)


def train_compiled(names: list[str], backend: str = "aot_eager", mode: str | None = None) -> list[int]:
    num_graphs = []
    for name in names:
        torch._dynamo.utils.counters.clear()
        train_and_compare(name, prepare=lambda module: compile_whole(module, backend, mode))
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return num_graphs


@pytest.mark.parametrize("world", [1, 3])
def test_one_graph(world: int) -> None:
    names = [name for name in CASES if name not in BREAKING]
    values = run_ranks(world, train_compiled, names, preload=TRANSFORMERS)
    assert values[0] == [1] * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(None, marks=pytest.mark.soak), "reduce-overhead"])
def test_one_graph_by_inductor(mode: str | None) -> None:
    assert run_ranks(2, train_compiled, ["gpt_tied"], "inductor", mode)[0] == [1]


def compile_blocks(module: nn.Module) -> None:
    torch._dynamo.reset()
    shard_by_blocks(module)
    for number in range(len(module.blocks)):
        module.blocks[number] = torch.compile(module.blocks[number], backend="aot_eager", fullgraph=True)


def compile_in_place_then_shard(module: nn.Module) -> None:
    torch._dynamo.reset()
    for block in module.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    shard_by_blocks(module)


def compile_then_shard(module: nn.Module) -> Any:
    """What is called was compiled before its module was sharded."""
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    shard_by_blocks(module)
    return compiled


def shard_then_compile_in_place(module: nn.Module) -> Any:
    shard_by_blocks(module)
    module.compile(backend="aot_eager")


def train_with_compiled_blocks() -> list[int]:
    num_graphs = []
    for prepare in (compile_blocks, compile_in_place_then_shard, compile_then_shard, shard_then_compile_in_place):
        torch._dynamo.utils.counters.clear()
        torch._dynamo.reset()
        num_graphs.append(_train_blocks(prepare))
    return num_graphs


def _train_blocks(prepare: Any) -> int:
    case = CASES["gpt_tied"]
    rank, world = dist.get_rank(), dist.get_world_size()
    module, reference = case.module(torch.float64), case.module(torch.float64)
    prepared = prepare(module)
    called = module if prepared is None else prepared
    for step in range(2):
        module.zero_grad()
        reference.zero_grad()
        case.loss(called, shard(case.batch(step, torch.float64), rank, world)).backward()
        reference_backward(case, reference, case.batch(step, torch.float64), world)
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_compiled_blocks() -> None:
    """One graph serves all blocks, whether it gathers itself or is gathered for, and one the whole model."""
    assert run_ranks(2, train_with_compiled_blocks)[0] == [1, 1, 1, 1]


def train_with_breaks() -> None:
    train_and_compare("lstm", prepare=_compile_with_breaks)


def _compile_with_breaks(module: nn.Module) -> Any:
    torch._dynamo.reset()
    shard_by_blocks(module)
    return torch.compile(module, backend="aot_eager")


def test_breaks_in_the_graph() -> None:
    run_ranks(2, train_with_breaks)


def train_bitwise() -> dict[str, Any]:
    """Everything that a rank has after a few steps, as it is."""
    case = CASES["gpt_tied"]
    module = shard_by_blocks(case.module(torch.float32))
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        optimizer.zero_grad()
        case.loss(module, shard(case.batch(step), rank, world)).backward()
        optimizer.step()
    return {name: p.to_local().detach().clone() for name, p in module.named_parameters()}


def test_a_second_run_is_the_same_bit_by_bit() -> None:
    assert_identical(run_ranks(3, train_bitwise), run_ranks(3, train_bitwise), "two runs")
