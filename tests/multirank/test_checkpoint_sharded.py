"""Sharded state (DTensors): written where the shards are, read by any number of ranks, sharded or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import lockstep
from multirank.checkpoint_runs import whole_state
from multirank.compare import assert_identical
from multirank.harness import lockstep_only, run_ranks

pytestmark = lockstep_only


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Odd sizes, so that shards are uneven and some are empty."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))
    world = dist.get_world_size()
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "older":
        wraps = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module is model[1])
        model = lockstep.FullyShardedDataParallel(model, auto_wrap_policy=wraps)
    elif kind == "older inside":
        model[1] = lockstep.FullyShardedDataParallel(model[1])
        model = lockstep.FullyShardedDataParallel(model)
    elif kind == "replicated":
        model = lockstep.DDP(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def save(folder: Path, kind: str) -> dict[str, Any]:
    model, optimizer = build(kind, seed=0)
    for number in range(2):
        step(model, optimizer, number)
    lockstep.checkpoint.save(folder, model, optimizer, step=2).wait()
    saved = whole_state(model, optimizer)
    step(model, optimizer, 2)
    return {"saved": saved, "next": whole_state(model, optimizer)}


def load(folder: Path, kind: str) -> dict[str, Any]:
    model, optimizer = build(kind, seed=4)
    loaded = lockstep.checkpoint.load(folder, model, optimizer)
    assert loaded is not None
    saved = whole_state(model, optimizer)
    step(model, optimizer, 2)
    return {"saved": saved, "next": whole_state(model, optimizer), "is_bitwise": loaded.is_bitwise}


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        ((3, "sharded"), (3, "sharded")),
        ((2, "sharded"), (3, "sharded")),
        ((3, "sharded"), (2, "sharded")),
        ((3, "sharded"), (1, "plain")),
        ((2, "sharded"), (2, "replicated")),
        ((2, "replicated"), (3, "sharded")),
        ((4, "hybrid"), (2, "sharded")),
        ((3, "older"), (3, "older inside")),
        ((3, "older inside"), (2, "sharded")),
    ],
    ids=lambda case: f"{case[1]} {case[0]}",
)
def test_from_one_layout_to_another(tmp_path: Path, saved_as: tuple[int, str], loaded_as: tuple[int, str]) -> None:
    before = run_ranks(saved_as[0], save, tmp_path, saved_as[1])
    after = run_ranks(loaded_as[0], load, tmp_path, loaded_as[1])
    for rank, result in enumerate(after):
        assert_identical(result["saved"], before[0]["saved"], f"rank {rank}")
        assert result["is_bitwise"] == (saved_as[0] == loaded_as[0])
        if saved_as == loaded_as or saved_as[1] == "older":
            assert_identical(result["next"], before[0]["next"], f"a step after, on rank {rank}")


def test_each_rank_writes_its_own_shards(tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path, "sharded")
    manifest = lockstep.checkpoint.reading.Reader(tmp_path / "step-00000002").manifest
    weight = manifest.tensors["model/1.weight"]
    assert weight.shape == (7, 5)
    assert [(piece.rank, piece.offsets, piece.sizes) for piece in weight.pieces] == [
        (0, (0, 0), (3, 5)),
        (1, (3, 0), (3, 5)),
        (2, (6, 0), (1, 5)),
    ]
    assert len(manifest.tensors["model/3.weight"].pieces) == 1  # one row: the other ranks have nothing of it


def build_parallel(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two copies of a model that is spread over two ranks each."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = lockstep.DDP(model, process_group=mesh["dp"].get_group())
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01, foreach=False)


def save_and_load_parallel(folder: Path) -> dict[str, Any]:
    model, optimizer = build_parallel(0)
    step(model, optimizer, 0)
    lockstep.checkpoint.save(folder, model, optimizer, step=1).wait()
    other, other_optimizer = build_parallel(4)
    lockstep.checkpoint.load(folder, other, other_optimizer)
    return {"saved": whole_state(model, optimizer), "loaded": whole_state(other, other_optimizer)}


def test_copies_of_a_model_that_is_spread_over_ranks(tmp_path: Path) -> None:
    results = run_ranks(4, save_and_load_parallel, tmp_path)
    for rank, result in enumerate(results):
        assert_identical(result["loaded"], result["saved"], f"rank {rank}")
        assert_identical(result["saved"], results[0]["saved"], f"rank {rank}")
    manifest = lockstep.checkpoint.reading.Reader(tmp_path / "step-00000001").manifest
    assert [piece.rank for piece in manifest.tensors["model/0.weight"].pieces] == [0, 1]
    assert [piece.sizes for piece in manifest.tensors["model/2.weight"].pieces] == [(3, 4), (3, 4)]
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    lockstep.checkpoint.load(tmp_path, plain)
    assert torch.equal(plain[2].weight, results[0]["saved"]["model.2.weight"])


def with_two_optimizers(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    model, _ = build(kind, seed)
    later = [p for name, p in model.named_parameters() if "1." in name]
    others = [p for name, p in model.named_parameters() if "1." not in name]
    return model, torch.optim.AdamW(others, lr=0.01), torch.optim.SGD(later, lr=0.01, momentum=0.9)


def train_with_two(model: nn.Module, *optimizers: torch.optim.Optimizer, first: int) -> dict[str, Any]:
    for number in range(first, first + 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return whole_state(model, optimizers[1])


def save_and_load_two_optimizers(folder: Path, kind: str) -> list[dict[str, Any]]:
    model, one, two = with_two_optimizers(kind, seed=0)
    train_with_two(model, one, two, first=0)
    lockstep.checkpoint.save(folder, model, one, step=2, extra={"two": two}).wait()
    again, new_one, new_two = with_two_optimizers(kind, seed=4)
    lockstep.checkpoint.load(folder, again, new_one, extra={"two": new_two})
    return [train_with_two(model, one, two, first=2), train_with_two(again, new_one, new_two, first=2)]


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_several_optimizers(tmp_path: Path, kind: str) -> None:
    for goes_on, resumed in run_ranks(2, save_and_load_two_optimizers, tmp_path, kind):
        assert_identical(resumed, goes_on, kind)


class OwnMean(nn.Module):
    """A buffer that each rank moves by what it has seen, and that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * inputs.mean(0)
        return inputs - self.mean


def train_with_what_ranks_keep(folder: Path, stop: int | None = None) -> dict[str, Any]:
    """Its communication hook and its buffer differ between ranks, and the next steps depend on both."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(OwnMean(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    lockstep.fully_shard(model[3])
    lockstep.fully_shard(model)
    state = lockstep.hooks.TopKState(ratio=0.2)
    model.register_comm_hook(state, lockstep.hooks.topk_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaded = lockstep.checkpoint.load(folder, model, optimizer, missing_ok=True)
    assert loaded is None or loaded.is_bitwise

    def backward(number: int) -> None:
        seed = 10 * number + dist.get_rank()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()

    for number in range(loaded.step if loaded else 0, stop or 6):
        backward(number)
        optimizer.step()
        optimizer.zero_grad()
    if stop is not None:
        mean = model[0].mean
        with model.no_sync():
            backward(stop)
        with pytest.raises(ValueError, match="gradients of no_sync"):
            lockstep.checkpoint.save(folder, model, optimizer, step=stop)
        model.zero_grad()
        model[0].mean = mean
        lockstep.checkpoint.save(folder, model, optimizer, step=stop).wait()
    return whole_state(model, optimizer)


def resume_with_what_ranks_keep(folder: Path) -> list[dict[str, Any]]:
    straight = train_with_what_ranks_keep(folder / "none")
    train_with_what_ranks_keep(folder, stop=3)
    return [straight, train_with_what_ranks_keep(folder)]


def test_what_each_rank_of_a_sharded_model_keeps_for_itself(tmp_path: Path) -> None:
    for rank, (straight, resumed) in enumerate(run_ranks(3, resume_with_what_ranks_keep, tmp_path)):
        assert_identical(resumed, straight, f"rank {rank}")
