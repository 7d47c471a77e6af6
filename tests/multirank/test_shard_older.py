"""The older class: its constructor's arguments, its state dicts and its contexts, on the same engine."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from lockstep import FullyShardedDataParallel as FSDP
from multirank.compare import assert_close, assert_identical
from multirank.harness import lockstep_only, run_ranks
from multirank.models import CASES, Block, shard
from multirank.shard_training import gradients, whole_gradients

pytestmark = lockstep_only
BLOCKS = ModuleWrapPolicy({Block})


def options_for_blocks(module: nn.Module) -> Any:
    """Some blocks stay whole until their backward."""
    if not isinstance(module, Block):
        return False
    return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "limit_all_gathers": True}


def compare(how: str = "eager", **options: Any) -> FSDP:
    case = CASES["gpt_tied"]
    module, reference = FSDP(case.module(torch.float64), **options), case.module(torch.float64)
    called = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.optim.SGD(module.parameters(), lr=0.05)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(2):
        mine.zero_grad()
        theirs.zero_grad()
        case.loss(called, shard(case.batch(step, torch.float64), rank, world)).backward()
        case.loss(reference, case.batch(step, torch.float64)).backward()
        assert_close(whole_gradients(module), gradients(reference), f"{options}, step {step}")
        mine.step()
        theirs.step()
    return module


def train_all(how: str) -> None:
    torch._dynamo.reset()
    hybrid = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for options in (
        {"auto_wrap_policy": BLOCKS, "use_orig_params": True},
        {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": hybrid},
        {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=1500)},
        {"auto_wrap_policy": CustomPolicy(lambda m: isinstance(m, Block)), "process_group": dist.group.WORLD},
        {"auto_wrap_policy": CustomPolicy(options_for_blocks)},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"sync_module_states": True, "limit_all_gathers": False},
    ):
        compare(how, **options)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_strategies_and_policies(how: str) -> None:
    run_ranks(2, train_all, how)


def states() -> None:
    case = CASES["gpt_tied"]
    plain = case.module(torch.float64)
    module = FSDP(case.module(torch.float64), auto_wrap_policy=BLOCKS)
    full = module.state_dict()
    assert_close(full, plain.state_dict(), "whole")
    assert list(full) == list(plain.state_dict())
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    with FSDP.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        assert all(isinstance(value, DTensor) for value in module.state_dict().values())
    with FSDP.state_dict_type(
        module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    ):
        assert bool(module.state_dict()) == (dist.get_rank() == 0)
    with pytest.raises(NotImplementedError, match="SHARDED_STATE_DICT"):
        FSDP.set_state_dict_type(module, StateDictType.LOCAL_STATE_DICT)
    module.load_state_dict({name: value * 2.0 for name, value in full.items()})
    assert_close(module.state_dict(), {n: v * 2.0 for n, v in plain.state_dict().items()}, "loaded")
    with FSDP.summon_full_params(module):
        assert not isinstance(module.blocks[0].up.weight, DTensor)
        with torch.no_grad():
            module.blocks[0].up.weight.fill_(7.0)
    assert module.state_dict()["blocks.0.up.weight"].unique().item() == 7.0
    with FSDP.summon_full_params(module, writeback=False), torch.no_grad():
        module.blocks[0].up.weight.fill_(8.0)
    assert module.state_dict()["blocks.0.up.weight"].unique().item() == 7.0
    assert len(FSDP.fsdp_modules(module)) == 3
    assert len(FSDP.fsdp_modules(module, root_only=True)) == 1
    assert module.check_is_root()
    around = nn.ModuleDict({"inner": module})
    assert [n for n, _ in around.named_parameters()] == [f"inner.{n}" for n, _ in plain.named_parameters()]
    assert list(around.state_dict()) == [f"inner.{n}" for n in full]
    around.load_state_dict({f"inner.{name}": value for name, value in full.items()})
    assert_close(module.state_dict(), plain.state_dict(), "loaded by a module around")


def options_of_one() -> None:
    policy = CustomPolicy(lambda m: isinstance(m, nn.Linear) and {"mixed_precision": MixedPrecision(torch.bfloat16)})
    module = FSDP(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), auto_wrap_policy=policy)
    assert module(torch.ones(1, 4)).dtype == torch.bfloat16
    kept = FSDP(nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=CustomPolicy(lambda m: {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}))  # fmt: skip
    assert not kept.module[0]._lockstep_unit.frees_after_forward
    with pytest.raises(NotImplementedError, match="gives process_group for Linear"):
        FSDP(nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=CustomPolicy(lambda m: {"process_group": None}))


def test_options_for_single_modules() -> None:
    run_ranks(2, options_of_one)


def optimizer_states() -> None:
    """Whole and sharded state goes into another model's optimizer, and both train on alike."""
    case = CASES["gpt_tied"]
    rank, world = dist.get_rank(), dist.get_world_size()

    def made() -> tuple[Any, torch.optim.Optimizer]:
        module = FSDP(case.module(torch.float64), auto_wrap_policy=BLOCKS)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)

    def step(module: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        case.loss(module, shard(case.batch(number, torch.float64), rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()

    module, optimizer = made()
    step(module, optimizer, 0)
    weights = module.state_dict()
    plain = case.module(torch.float64)
    full = FSDP.optim_state_dict(module, optimizer)
    assert set(full["state"]) == {name for name, _ in plain.named_parameters()}
    assert all(full["state"][name]["exp_avg"].shape == p.shape for name, p in plain.named_parameters())
    on_first = FSDP.full_optim_state_dict(module, optimizer)
    assert bool(on_first) == (rank == 0)
    sharded = copy.deepcopy(FSDP.sharded_optim_state_dict(module, optimizer))
    assert all(isinstance(values["exp_avg"], DTensor) for values in sharded["state"].values())
    step(module, optimizer, 1)
    config = FullOptimStateDictConfig(rank0_only=True)
    for state, only_first in ((full, False), (sharded, False), (on_first, True)):
        other, its = made()
        other.load_state_dict(weights)
        if only_first:
            FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT, None, config)
        its.load_state_dict(FSDP.optim_state_dict_to_load(other, its, state))
        FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
        step(other, its, 1)
        assert_identical(other.state_dict(), module.state_dict(), "resumed")
    with pytest.raises(ValueError, match="are not the model's"):
        FSDP.optim_state_dict(module, torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_optimizer_states() -> None:
    run_ranks(2, optimizer_states)


def test_states() -> None:
    run_ranks(2, states)


def clip_and_accumulate() -> None:
    case = CASES["mlp"]
    module = FSDP(case.module(torch.float64))
    reference = case.module(torch.float64)
    rank, world = dist.get_rank(), dist.get_world_size()
    with module.no_sync():
        case.loss(module, shard(case.batch(0, torch.float64), rank, world)).backward()
    case.loss(module, shard(case.batch(1, torch.float64), rank, world)).backward()
    for step in (0, 1):
        case.loss(reference, case.batch(step, torch.float64)).backward()
    torch.testing.assert_close(module.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    assert_close(whole_gradients(module), gradients(reference), "clipped")
    mixed = FSDP(case.module(torch.float32), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    output = mixed(case.batch(0)["x"])
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert next(mixed.parameters()).grad.dtype == torch.float32
    with pytest.raises(ValueError, match="2D device_mesh"):
        FSDP(case.module(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with torch.device("meta"):
        on_meta = case.build_module()
    FSDP(on_meta, param_init_fn=lambda m: (m.to_empty(device="cpu", recurse=False), m.reset_parameters()))
    on_meta(torch.randn(2, 8))


def test_clipping_accumulation_and_precision() -> None:
    run_ranks(2, clip_and_accumulate)


class WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.free, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.free(torch.tanh(self.first(x)))))


def clip_with_ignored() -> None:
    """Gradients of modules that are not sharded count, too, and are clipped with the rest."""
    torch.manual_seed(0)
    module = WithIgnored().double()
    reference = copy.deepcopy(module)
    wrapped = FSDP(module, ignored_modules=[module.free])
    assert wrapped.clip_grad_norm_(1.0).item() == 0.0
    for norm_type in (2.0, float("inf")):
        x = torch.ones(2, 8, dtype=torch.float64)
        for side in (wrapped, reference):
            loss = side(x).square().mean()
            side.zero_grad()  # while what is not sharded any more is whole
            loss.backward()
        norm = wrapped.clip_grad_norm_(0.01, norm_type)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type))
        assert_close(whole_gradients(wrapped), gradients(reference), f"clipped by norm {norm_type}")


def states_from_around() -> None:
    """A module around gives what was chosen, for it or for the default: whole tensors."""
    case = CASES["gpt_tied"]
    names = [f"inner.{name}" for name in case.module().state_dict()]
    inner = FSDP(case.module(), auto_wrap_policy=BLOCKS)
    around = nn.ModuleDict({"first": nn.Linear(2, 2), "inner": inner, "last": nn.Linear(2, 2)})
    whole = around.state_dict()
    assert list(whole) == ["first.weight", "first.bias", *names, "last.weight", "last.bias"]
    assert not any(isinstance(value, DTensor) for value in whole.values())
    for chosen in (around, torch.compile(around, backend="aot_eager")):
        with FSDP.state_dict_type(chosen, StateDictType.SHARDED_STATE_DICT):
            assert all(isinstance(value, DTensor) == (n in names) for n, value in around.state_dict().items())
    with FSDP.state_dict_type(around, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        assert (names[0] in around.state_dict()) == (dist.get_rank() == 0)
    assert not any(isinstance(value, DTensor) for value in around.state_dict().values())


def ignored_and_around() -> None:
    clip_with_ignored()
    states_from_around()


def test_ignored_modules_and_modules_around() -> None:
    run_ranks(2, ignored_and_around)
