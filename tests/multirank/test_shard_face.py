"""What a sharded module offers, and what each option means: torch's names, checked against what they say."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import fully_shard
from lockstep.shard import register_forward_method, share_comm_ctx
from lockstep.shard.foresight import Meeting
from multirank.compare import assert_close
from multirank.harness import expect_errors, lockstep_only, run_ranks
from multirank.models import CASES, GPT, MLP, shard
from multirank.shard_training import (
    gradients,
    shard_by_blocks,
    train_and_compare,
    whole,
    whole_gradients,
    whole_parameters,
)

pytestmark = lockstep_only


# ---------------------------------------------------------------- what a module is


def look_at_a_module() -> None:
    module = MLP()
    plain = copy.deepcopy(module)
    assert fully_shard(module) is module
    assert isinstance(module, (FSDPModule, MLP))
    assert isinstance(module, FSDPModule)
    assert type(module).__name__ == "FSDPMLP"
    rank, world = dist.get_rank(), dist.get_world_size()
    for (name, mine), (_, theirs) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert mine.placements == (Shard(0),)
        assert mine.shape == theirs.shape
        chunks = theirs.detach().chunk(world)
        if rank < len(chunks):
            assert torch.equal(mine.to_local(), chunks[rank])
        else:
            assert mine.to_local().numel() == 0
    assert list(module.state_dict()) == list(plain.state_dict())
    assert "6 parameters" in str(module.plan)
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        fully_shard(module)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(module)
    sequence = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert not isinstance(sequence[:1], FSDPModule)
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="was sharded by torch's own fully_shard"):
        fully_shard(nn.Sequential(torchs_fully_shard(nn.Linear(2, 2))))
    scalar = nn.Module()
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Change temperature to a 1D tensor"):
        fully_shard(scalar)
    with pytest.raises(NotImplementedError, match="non-contiguous parameters"):
        fully_shard(nn.Linear(4, 4).to(memory_format=torch.contiguous_format).apply(_transpose))
    look_at_its_state()
    compare_with_allclose()


def look_at_its_state() -> None:
    """By torch's own names for it, which libraries and torch's pipelines use."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = shard_by_blocks(MLP(), mesh=mesh)
    state, inner = module._get_fsdp_state(), fully_shard.state(module.layers[2])
    assert torchs_fully_shard.state(module) == state
    assert state._is_root is None
    state._lazy_init()
    assert (state._is_root, inner._is_root) == (True, False)
    assert state._state_ctx.all_states[0] == state
    assert inner in state._state_ctx.all_states
    assert (state._fsdp_param_group, state._fsdp_param_groups) == (None, [])
    (group,) = inner._fsdp_param_groups
    assert group == inner._fsdp_param_group
    assert [p._param_fqn for p in group.fsdp_params] == ["layers.2.weight", "layers.2.bias"]
    assert group._module_fqn == "layers.2"
    assert group.modules == inner._modules == (module.layers[2],)
    weight = group.fsdp_params[0]
    assert weight.sharded_param is module.layers[2].weight
    assert torch.equal(weight._sharded_param_data, module.layers[2].weight.to_local().flatten())
    assert (group.mesh_info.mesh, group.mesh_info.shard_mesh_dim) == (mesh, 0)
    assert group.mesh_info.shard_process_group is mesh.get_group()
    assert (group.mesh_info.shard_mesh_size, group.mesh_info.shard_mesh_rank) == (mesh.size(), mesh.get_local_rank())
    group.unshard()
    group.wait_for_unshard()
    assert group.is_unsharded
    assert weight.unsharded_param is module.layers[2].weight
    group.reshard()
    assert group.is_sharded


def compare_with_allclose() -> None:
    whole = torch.arange(12.0).view(4, 3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.allclose(mine, distribute_tensor(whole, mesh, [Shard(1)]))
    assert torch.allclose(mine, DTensor.from_local(whole / mesh.size(), mesh, [Partial()]))
    assert torch.allclose(mine, distribute_tensor(whole[:1], mesh, [Shard(0)]), atol=10.0)
    other = whole.clone()
    other[0, 0] = 1.0  # which only the first rank has
    assert not torch.allclose(mine, distribute_tensor(other, mesh, [Shard(0)]))
    assert torch.allclose(mine, distribute_tensor(other, mesh, [Shard(0)]), atol=1.0)
    with pytest.raises(RuntimeError, match="Compare two DTensors on one mesh"):
        torch.allclose(mine, whole)


def _transpose(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().t())


@pytest.mark.parametrize("world", [1, 3])
def test_a_sharded_module(world: int) -> None:
    run_ranks(world, look_at_a_module)


def residence() -> None:
    for after_forward, stays in ((True, False), (False, True), (None, True)):
        module = shard_by_blocks(MLP(), reshard_after_forward=after_forward)
        x = torch.randn(2, 8)
        output = module(x)
        assert isinstance(module.layers[0].weight, DTensor) == (after_forward is not False)
        assert isinstance(module.layers[0].weight, DTensor) or stays
        output.sum().backward()
        assert all(isinstance(p, DTensor) for p in module.parameters())
    root_only = fully_shard(MLP())
    root_only(x)
    assert not isinstance(root_only.layers[0].weight, DTensor)
    root_only.reshard()
    assert isinstance(root_only.layers[0].weight, DTensor)
    handle = root_only.unshard(async_op=True)
    handle.wait()
    assert not isinstance(root_only.layers[0].weight, DTensor)
    assert root_only.unshard() is None
    root_only.state_dict()
    assert isinstance(root_only.layers[0].weight, DTensor)
    root_only.set_reshard_after_forward(True)
    root_only(x)
    assert isinstance(root_only.layers[0].weight, DTensor)
    root_only.set_reshard_after_backward(False)
    root_only(x).sum().backward()
    assert not isinstance(root_only.layers[0].weight, DTensor)
    with pytest.raises(ValueError, match="should be a bool"):
        root_only.set_reshard_after_forward(2)


class WithNames(nn.Module):
    """One that has names of ours for things of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.Linear(4, 4)
        self.plan = [2.0]
        self._root = 3.0
        self.layer = nn.Linear(4, 4)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.plan[0]

    def compile(self, times: int) -> int:  # type: ignore[override]
        return 2 * times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.timeline = self._root
        return self.join(self.metrics(self.layer(x))) * self.timeline


def keep_own_names(how: str) -> None:
    torch.manual_seed(0)
    module = WithNames()
    reference = copy.deepcopy(module)
    fully_shard(module.layer)
    fully_shard(module)
    x = torch.randn(3, 4)
    called: Any = torch.compile(module, backend="aot_eager") if how == "compiled" else module
    called(x).sum().backward()
    reference(x).sum().backward()
    assert_close(whole_gradients(module), gradients(reference), how)
    with module.no_sync():
        called(x).sum().backward()
    assert module.compile(times=3) == 6
    assert len(module.layer.plan.units) == 1  # a module that has no such name
    assert lockstep.explain(module) is not None


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_modules_own_names_go_first(how: str) -> None:
    run_ranks(2, keep_own_names, how)


def test_when_parameters_are_whole() -> None:
    run_ranks(2, residence)


def stale() -> None:
    """A unit that stayed whole is gathered again when its shards were changed."""
    module = fully_shard(MLP())
    x = torch.ones(2, 8)
    with torch.no_grad():
        module(x)  # stays whole
        for unit_parameter in module._lockstep_unit.parameters:
            unit_parameter.sharded.zero_()
        assert module(x).abs().max() == 0.0


def give_other_memory() -> list[int]:
    """One rank gives its shards other memory: it has the same values, and gathers no more often than others."""
    module = shard_by_blocks(MLP())
    unit = module.layers[2]._lockstep_unit
    totals = []
    for step in range(4):
        if step >= 2 and dist.get_rank() == 1:
            module.layers[2].weight.data = module.layers[2].weight.data.clone()
        module(torch.ones(2, 8)).sum().backward()
        totals.append(unit.last_gathers.total)
    return totals


def test_other_memory_of_the_same_values() -> None:
    assert run_ranks(2, give_other_memory) == [[2, 2, 2, 2]] * 2


def test_whole_parameters_are_not_stale() -> None:
    run_ranks(2, stale)


def memory_is_freed() -> None:
    module = shard_by_blocks(GPT().double())
    case = CASES["gpt_tied"]
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.residence.value != "sharded" for unit in module._lockstep_root.units))

    for block in module.blocks:
        block.up.register_forward_hook(count)
    for step in range(2):
        case.loss(module, case.batch(step, torch.float64)).backward()
    assert most <= 3  # the root, the block that runs, and the one that is on its way
    for unit in module._lockstep_root.units:
        assert unit.residence.value == "sharded"
        for store in unit.stores:
            assert store._buffer.untyped_storage().nbytes() == 0


def test_no_more_units_are_whole_than_are_needed() -> None:
    run_ranks(2, memory_is_freed)


def prefetch() -> list[str]:
    module = shard_by_blocks(GPT().double())
    case = CASES["gpt_tied"]
    module.blocks[0].set_modules_to_forward_prefetch([module.blocks[1]])
    module.blocks[1].set_modules_to_backward_prefetch([module.blocks[0]])
    seen = []
    module.blocks[0].up.register_forward_hook(lambda *_: seen.append(module.blocks[1]._lockstep_unit.residence.value))
    case.loss(module, case.batch(0, torch.float64)).backward()
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        module.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    return seen


def test_prefetching() -> None:
    assert run_ranks(2, prefetch)[0] == ["gathering"]


# ---------------------------------------------------------------- options


def uneven_dims(module: nn.Module) -> nn.Module:
    """Cut along the last dimension, which no number of ranks here divides everywhere."""
    return shard_by_blocks(module, shard_placement_fn=lambda p: Shard(p.ndim - 1))


def train_with_options() -> None:
    for prepare in (
        uneven_dims,
        lambda m: fully_shard(m, units="auto"),
        lambda m: fully_shard(m),
        lambda m: fully_shard([m]),
        lambda m: (fully_shard([m.token, m.norm, m.head]), fully_shard(m)),
        lambda m: shard_by_blocks(m, reshard_after_forward=False),
        lambda m: shard_by_blocks(m, reshard_after_forward=True),
        lambda m: shard_by_blocks(m, offload_policy=CPUOffloadPolicy()),
    ):
        train_and_compare("gpt_tied", prepare=lambda m, prepare=prepare: (prepare(m), None)[1], num_steps=2)


def train_among_keepers() -> None:
    """Freed down to two of four ranks: the backward gathers between those."""
    case = CASES["gpt_tied"]
    train_and_compare(case, prepare=lambda m: (shard_by_blocks(m, reshard_after_forward=2), None)[1])
    module = shard_by_blocks(case.module(torch.float64), reshard_after_forward=2)
    loss = case.loss(module, case.batch(0, torch.float64))
    store = module.blocks[0]._lockstep_unit.stores[0]
    assert store._kept is not None
    assert store._kept.numel() * 2 >= store.layout.full_elements
    loss.backward()
    assert store._kept is None


def test_freeing_down_to_fewer_ranks() -> None:
    run_ranks(4, train_among_keepers)


@pytest.mark.parametrize("world", [2, 3])
def test_options(world: int) -> None:
    run_ranks(world, train_with_options)


def automatic_units() -> str:
    module = fully_shard(GPT(num_blocks=3), units="auto")
    with pytest.raises(ValueError, match='units must be "auto" or None'):
        fully_shard(MLP(), units="some")
    return str(module.plan)


def test_automatic_units() -> None:
    table = run_ranks(2, automatic_units)[0]
    assert "4 units" in table


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.stem(x))))


def grouped(how: str) -> None:
    torch.manual_seed(1)
    module, reference = Pieces().double(), Pieces().double()
    reference.load_state_dict(module.state_dict())
    fully_shard([module.norm, module.head])
    assert module.norm._lockstep_unit is module.head._lockstep_unit
    fully_shard(module)
    called = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        batch = torch.randn(4 * world, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        module.zero_grad()
        reference.zero_grad()
        called(batch.chunk(world)[rank]).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_close(whole_gradients(module), gradients(reference), f"step {step}")
    # Once for the forward and once for the backward, of all its modules; a graph may keep what it is about to need.
    assert module.norm._lockstep_unit.last_gathers.total <= 2


def grouped_apart() -> None:
    """A unit of two modules that stand in no module, of which one runs more often than the other."""
    torch.manual_seed(1)
    norm, head = nn.LayerNorm(8).double(), nn.Linear(8, 3).double()
    plain_norm, plain_head = copy.deepcopy(norm), copy.deepcopy(head)
    fully_shard([norm, head])
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        batch = torch.randn(2 * world, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for module in (norm, head, plain_norm, plain_head):
            module.zero_grad()
        hidden = norm(batch.chunk(world)[rank])
        sum(head(part).square().mean() for part in hidden.chunk(2)).backward()
        sum(plain_head(plain_norm(part)).square().mean() for part in batch).mul(1 / world).backward()
        for mine, theirs in ((norm, plain_norm), (head, plain_head)):
            assert_close(whole_gradients(mine), gradients(theirs), f"step {step}")


def test_modules_of_a_unit_that_run_apart() -> None:
    run_ranks(2, grouped_apart)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_unit_of_several_modules(how: str) -> None:
    run_ranks(2, grouped, how)


def hybrid(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))

    def prepare(module: nn.Module) -> Any:
        shard_by_blocks(module, mesh=mesh)
        assert next(module.parameters()).placements == (Replicate(), Shard(0))
        return torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module

    train_and_compare("gpt_tied", prepare=prepare)
    if how == "compiled":
        return
    # Reduced over the shards only, then over the replicas too.
    case = CASES["mlp"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    shard_by_blocks(module, mesh=mesh)
    rank, world = dist.get_rank(), dist.get_world_size()
    module.set_requires_all_reduce(False)
    case.loss(module, shard(case.batch(0, torch.float64), rank, world)).backward()
    assert all(p.grad is None for p in module.parameters())
    module.set_requires_all_reduce(True)
    case.loss(module, shard(case.batch(1, torch.float64), rank, world)).backward()
    for step in (0, 1):
        case.loss(reference, case.batch(step, torch.float64)).backward()
    assert_close(whole_gradients(module), gradients(reference), "all-reduced once for two")


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_replicas_of_shards(how: str) -> None:
    run_ranks(4, hybrid, how)


def mixed(how: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    case = CASES["mlp"]
    module, reference = case.module(torch.float32), case.module(torch.float32)
    seen = []
    module.layers[2].register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype)))
    shard_by_blocks(module, mp_policy=policy)
    called = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        module.zero_grad()
        reference.zero_grad()
        mine = case.loss(called, shard(case.batch(step), rank, world))
        assert mine.dtype == torch.float32
        mine.backward()
        theirs = torch.stack([_in_bf16(case, reference, shard(case.batch(step), r, world)) for r in range(world)])
        theirs.mean().backward()
        for name, gradient in whole_gradients(module).items():
            expected = gradients(reference)[name]
            assert gradient is not None
            assert expected is not None
            assert gradient.dtype == torch.float32
            assert (gradient - expected).abs().max() < 0.05 * expected.abs().max() + 1e-3, name
    if how == "eager":
        assert (torch.bfloat16, torch.bfloat16) in seen


def _in_bf16(case: Any, module: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = module(batch["x"])
    return nn.functional.mse_loss(output.float(), batch["y"])


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_mixed_precision(how: str) -> None:
    run_ranks(2, mixed, how)


def kept_in_reduce_dtype() -> None:
    """Gradients of passes that do not synchronise add up in the dtype of the reduction."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = fully_shard(nn.Linear(4, 4, bias=False), mp_policy=policy)
    x = torch.ones(1, 4)
    with module.no_sync():
        for _ in range(300):  # 1 + 1 + ... stops at 256 in bfloat16
            module(x).sum().backward()
    module(x).sum().backward()
    assert whole(module.weight.grad).min() == 301.0


def test_accumulation_in_the_dtype_of_the_reduction() -> None:
    run_ranks(2, kept_in_reduce_dtype)


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def from_meta() -> None:
    with torch.device("meta"):
        module = OnMeta()
    for layer in (module.layers[0], module.layers[2]):
        fully_shard(layer)
    fully_shard(module)
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="materialized from meta device before training"):
        module(x)
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in (module.layers[0], module.layers[2]):
        layer.reset_parameters()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = whole(module.layers[0].weight)
    module(x).square().sum().backward()
    optimizer.step()
    assert module.layers[0].weight.grad is not None
    assert not torch.equal(before, whole(module.layers[0].weight))


def test_meta_device() -> None:
    run_ranks(2, from_meta)


def cast_after_sharding(how: str) -> None:
    module = shard_by_blocks(MLP())
    torch._dynamo.reset()
    called = torch.compile(module, backend="aot_eager", fullgraph=True) if how == "compiled" else module
    called(torch.randn(2, 8)).sum().backward()
    module.double()
    module.zero_grad()
    called(torch.randn(2, 8, dtype=torch.float64)).sum().backward()
    assert module.layers[0].weight.grad.dtype == torch.float64
    plain = MLP().double()
    for (_, mine), (_, theirs) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        theirs.data.copy_(whole(mine))
    x = torch.ones(2, 8, dtype=torch.float64)
    torch.testing.assert_close(called(x), plain(x))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_cast_after_sharding(how: str) -> None:
    run_ranks(2, cast_after_sharding, how)


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight)


def other_methods() -> None:
    module = fully_shard(Methods())
    register_forward_method(module, "encode")
    register_forward_method(nn.Linear(2, 2), "extra_repr")  # nothing happens
    with pytest.raises(ValueError, match="does not have a method nothing"):
        register_forward_method(module, "nothing")
    module.encode(torch.ones(1, 4)).sum().backward()
    assert module.inner.weight.grad is not None
    assert module.inner.bias.grad is None


def test_methods_other_than_forward() -> None:
    run_ranks(2, other_methods)


def setters() -> None:
    module = shard_by_blocks(MLP().double())
    module.set_is_last_backward(False)
    module.set_unshard_in_backward(True)
    module.set_reduce_scatter_unused_params(True)
    module.set_reduce_scatter_max_input_buffers(2)
    module.set_separate_reduce_scatter_group(False)
    module.set_separate_reduce_scatter_group(True)
    module.set_post_optim_event(None)
    with pytest.raises(TypeError, match="must be an int"):
        module.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="positive"):
        module.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(NotImplementedError, match="Symmetric memory"):
        module.set_symm_mem_for_comm()
    with pytest.raises(RuntimeError, match="must be called on the root"):
        module.layers[0].reset_iter_state()
    layer = module.layers[0]
    layer.set_allocate_memory_from_process_group_for_comm(True)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    hooked = []
    layer.set_all_reduce_hook(lambda shard: hooked.append(shard.numel()))
    x = torch.ones(2, 8, dtype=torch.float64)
    module(x).sum().backward()
    summed = whole(layer.weight.grad)
    layer.set_gradient_divide_factor(2.0)
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(whole(layer.weight.grad) * 2.0, summed)
    assert len(hooked) == 2


def test_setters() -> None:
    run_ranks(2, setters)


class Comm:
    """A gather or scatter of the program's own."""

    def __init__(self) -> None:
        self.num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Comm):
    def __call__(self, output: torch.Tensor, mine: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        self.num_calls += 1
        return dist.all_gather_into_tensor(output, mine, group=group, async_op=async_op)


class Scatter(Comm):
    def __call__(self, mine: torch.Tensor, whole: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.num_calls += 1
        return dist.reduce_scatter_tensor(mine, whole, op=op, group=group, async_op=async_op)


def own_collectives() -> None:
    gather, scatter = Gather(), Scatter()

    def prepare(module: nn.Module) -> None:
        shard_by_blocks(module)
        module.layers[0].set_custom_all_gather(gather)
        module.layers[0].set_custom_reduce_scatter(scatter)

    train_and_compare("mlp", prepare=prepare)
    assert gather.num_calls >= 3
    assert scatter.num_calls == 3


def test_collectives_of_the_programs_own() -> None:
    run_ranks(2, own_collectives)


# ---------------------------------------------------------------- with others


class Checkpointed(GPT):
    """Blocks under activation checkpointing, with the checkpoint outside or inside of the unit."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


def train_checkpointed() -> None:
    from dataclasses import replace

    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    for kind in (Checkpointed, Reentrant):
        module = train_and_compare(replace(CASES["gpt_tied"], build_module=kind))
        # The forward that runs again in the backward gathers, and its own backward finds that.
        assert [block._lockstep_unit.last_gathers.total for block in module.blocks] == [2, 2]

    def wrap(module: nn.Module) -> None:
        blocks = set(module.blocks)
        apply_activation_checkpointing(module, check_fn=lambda m: m in blocks)
        shard_by_blocks(module)

    def prepare(module: nn.Module) -> None:
        wrap(module)

    case = CASES["gpt_tied"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    prepare(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        module.zero_grad()
        reference.zero_grad()
        case.loss(module, shard(case.batch(step, torch.float64), rank, world)).backward()
        case.loss(reference, case.batch(step, torch.float64)).backward()
        mine = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in whole_gradients(module).items()}
        assert_close(mine, gradients(reference), f"wrapped, step {step}")


def test_activation_checkpointing() -> None:
    run_ranks(2, train_checkpointed)


def train_checkpointed_compiled() -> None:
    from dataclasses import replace

    def prepare(module: nn.Module) -> Any:
        shard_by_blocks(module)
        return torch.compile(module, backend="aot_eager", fullgraph=True)

    train_and_compare(replace(CASES["gpt_tied"], build_module=Checkpointed), prepare=prepare)


def test_activation_checkpointing_in_a_graph() -> None:
    run_ranks(2, train_checkpointed_compiled)


def clip_and_scale() -> None:
    case = CASES["mlp"]
    module, reference = case.module(torch.float64), case.module(torch.float64)
    shard_by_blocks(module)
    rank, world = dist.get_rank(), dist.get_world_size()
    case.loss(module, shard(case.batch(0, torch.float64), rank, world)).backward()
    case.loss(reference, case.batch(0, torch.float64)).backward()
    mine = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(whole(mine), theirs)
    assert_close(whole_gradients(module), gradients(reference), "clipped")


def test_clipping() -> None:
    run_ranks(2, clip_and_scale)


def step_in_hooks(how: str) -> None:
    """One optimizer per parameter, stepped by a hook on the shard; against one that steps after the backward."""
    torch.manual_seed(0)
    plain = GPT()
    models = [shard_by_blocks(copy.deepcopy(plain)) for _ in range(2)]
    late = torch.optim.AdamW(models[0].parameters(), lr=1e-2, foreach=False)
    own = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in models[1].parameters()}

    def hook(parameter: nn.Parameter) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(hook)
    run = torch.compile(models[1], backend="aot_eager") if how == "compiled" else models[1]
    case = CASES["gpt_tied"]
    for seed in range(4):
        batch = shard(case.batch(seed), dist.get_rank(), dist.get_world_size())
        case.loss(models[0], batch).backward()
        late.step()
        late.zero_grad()
        case.loss(run, batch).backward()
        assert all(p.grad is None for p in own)
        assert_close(whole_parameters(models[1]), whole_parameters(models[0]), "parameters")


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_optimizers_in_the_backward(how: str) -> None:
    run_ranks(2, step_in_hooks, how)


def save_and_load(folder: str) -> None:
    case = CASES["gpt_tied"]

    def trained(shard_it: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = case.module(torch.float32)
        for block in module.blocks:
            shard_it(block)
        shard_it(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return module, optimizer

    for source, target in ((fully_shard, torchs_fully_shard), (torchs_fully_shard, fully_shard)):
        module, optimizer = trained(source)
        case.loss(module, case.batch(0)).backward()
        optimizer.step()
        state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
        where = f"{folder}/{source.__module__}"
        dcp.save(state, checkpoint_id=where)
        other, other_optimizer = trained(target)
        case.loss(other, case.batch(1)).backward()
        other_optimizer.step()
        loaded = {
            "model": get_model_state_dict(other),
            "optimizer": get_optimizer_state_dict(other, other_optimizer),
        }
        dcp.load(loaded, checkpoint_id=where)
        torch.distributed.checkpoint.state_dict.set_model_state_dict(other, loaded["model"])
        assert_close(whole_parameters(other), whole_parameters(module), "loaded")
        plain = case.module(torch.float32)
        plain_state = {"model": plain.state_dict()}
        dcp.load(plain_state, checkpoint_id=where)
        plain.load_state_dict(plain_state["model"])
        assert_close(dict(plain.named_parameters()), whole_parameters(module), "into the plain model")
        case.loss(other, case.batch(2)).backward()


def test_checkpoints_with_torch(tmp_path: Path) -> None:
    run_ranks(2, save_and_load, str(tmp_path))


def reload(folder: str, world_before: int) -> None:
    case = CASES["gpt_tied"]
    module = shard_by_blocks(case.module(torch.float32))
    if world_before == 0:
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
        dcp.save({"model": module.state_dict()}, checkpoint_id=folder)
        return
    state = {"model": module.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    reference = case.module(torch.float32)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.detach() * 1.5)
    case.loss(module, case.batch(0)).backward()


def test_checkpoints_of_another_world(tmp_path: Path) -> None:
    run_ranks(3, reload, str(tmp_path), 0)
    run_ranks(2, reload, str(tmp_path), 3)


# ---------------------------------------------------------------- bad use


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))


def share_across() -> None:
    module = Tied()
    fully_shard(module.embed)
    fully_shard(module.out)
    fully_shard(module)
    module(torch.tensor([1]))


def test_sharing_between_units_is_refused() -> None:
    for error in expect_errors(2, [0, 1], share_across).values():
        assert "already managed by another unit" in error.text
        assert "embed.weight" in error.text


class Reads(MLP):
    """A module that takes the weight of another one, which is a unit of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.layers[0].weight)


def use_outside() -> None:
    shard_by_blocks(Reads())(torch.randn(2, 8))


def test_a_parameter_that_is_used_while_it_is_sharded() -> None:
    for error in expect_errors(2, [0, 1], use_outside).values():
        assert "layers.0.weight" in error.traceback
        assert "unshard()" in error.traceback


def old_optimizer() -> None:
    module = MLP()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module)
    module(torch.randn(2, 8)).sum().backward()
    optimizer.step()


def test_an_optimizer_that_was_built_before() -> None:
    for error in expect_errors(2, [0, 1], old_optimizer).values():
        assert "built before fully_shard, or while they were gathered" in error.text
        assert "layers.0.weight" in error.text


def load_into_a_part() -> None:
    """Loading through a module around sharded ones finds the shards, though some are gathered."""
    outer = nn.Sequential(fully_shard(MLP()), nn.Linear(3, 3))
    outer[0](torch.randn(2, 8))
    assert not isinstance(outer[0].layers[0].weight, DTensor)
    state = outer.state_dict()
    assert isinstance(state["0.layers.0.weight"], DTensor)
    outer[0](torch.randn(2, 8))
    outer.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert whole(outer[0].layers[0].weight).abs().max() == 0.0
    with torch.no_grad():
        assert outer[0](torch.ones(2, 8)).abs().max() == 0.0
    outer.load_state_dict({name: torch.ones_like(value) for name, value in state.items()}, assign=True)
    assert outer[0](torch.ones(2, 8)).abs().max() > 0.0


def test_loading_through_a_module_around() -> None:
    run_ranks(2, load_into_a_part)


def finalize_by_hand() -> None:
    module = shard_by_blocks(MLP())
    x = torch.randn(2, 8)
    module.set_manual_backward_finalization(True)
    for async_op in (False, True):
        module.zero_grad()
        module(x).sum().backward()
        assert all(p.grad is None for p in module.parameters())
        handle = module.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        assert all(p.grad is not None for p in module.parameters())
    module.register_buffer("seen", torch.tensor(float(dist.get_rank())))
    module.set_sync_buffers()
    met = []
    for _ in range(4):
        with mock.patch.object(Meeting, "compare") as meeting:
            module(x).sum().backward()
            module.layers[2].unshard()  # before the window ends
            module.layers[2].reshard()
            module.finalize_backward()
        met.append(meeting.call_count)
        assert module.seen == 0.0
        assert module.layers[2]._lockstep_unit.last_gathers.total == 3
    assert met[1:] == [0, 0, 0]  # windows end, so what comes next is foreseen
    module.set_sync_buffers(False)
    module.set_keep_unsharded_storage(True)
    module(x).sum().backward()
    module.finalize_backward()
    assert module.layers[0]._lockstep_unit.stores[0]._buffer.untyped_storage().nbytes() > 0
    share_comm_ctx([module])
    with pytest.raises(ValueError, match="Expects list of FSDPModules"):
        share_comm_ctx([nn.Linear(2, 2)])


def test_the_end_of_a_backward_by_hand() -> None:
    run_ranks(2, finalize_by_hand)


class Halves(torch.Tensor):
    """A parameter that travels as two parts, high and low, and a note; of each element, and padded itself."""

    notes: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is made of one is one, unless it is of another class already (a collective's result)."""
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        if isinstance(made, (list, tuple)):
            return type(made)(part.as_subclass(cls) if type(part) is torch.Tensor else part for part in made)
        return made.as_subclass(cls) if type(made) is torch.Tensor else made

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        plain = self.detach().as_subclass(torch.Tensor)
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros(rows, *outer_size[1:], dtype=plain.dtype)
        padded[: plain.shape[0]] = plain
        high = padded.bfloat16()
        Halves.notes.append((mesh.ndim, type(module).__name__, mp_policy.param_dtype))
        return (high, padded - high), "a note"

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], note: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        assert note == "a note"
        high, low = outputs
        if out is not None:
            out.copy_(high + low)  # of the whole parameter's shape
            return None
        whole = (high + low).to(param_dtype)
        return whole, (whole,)


def own_gather(how: str) -> None:
    def prepare(module: nn.Module) -> Any:
        for layer in module.layers:
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Halves))
        shard_by_blocks(module)
        if how == "eager":
            return module
        torch._dynamo.reset()
        return torch.compile(module, backend="aot_eager")

    Halves.notes = []
    module = train_and_compare("mlp", prepare=prepare)
    assert type(module.layers[0].weight._local_tensor) is Halves
    assert set(Halves.notes) == {(1, "FSDPLinear", None)}
    assert module.layers[0]._lockstep_unit.has_own_gathers
    module = fully_shard(nn.Linear(4, 4))
    module._lockstep_unit.parameters[0].local.fsdp_pre_all_gather = lambda *_: None
    with pytest.raises(AssertionError, match="weight: both fsdp_pre_all_gather and fsdp_post_all_gather"):
        module(torch.ones(1, 4))


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("world", [1, 3])
def test_tensors_with_their_own_gather(world: int, how: str) -> None:
    run_ranks(world, own_gather, how)


def wrong_meshes() -> None:
    for mesh in (init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")),):
        with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
            fully_shard(MLP(), mesh=mesh)
    with pytest.raises(NotImplementedError, match="weight has sparse gradients"):
        fully_shard(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(ValueError, match="a factor of 2, not 3"):
        fully_shard(MLP(), reshard_after_forward=3)
    module = fully_shard(MLP(), reshard_after_forward=2)
    assert module._lockstep_unit.reshard_after_forward is True
    chosen = SimpleNamespace(placement=Shard(1), mesh_info=module._get_fsdp_state()._fsdp_param_group.mesh_info)
    same = fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda parameter: chosen)
    assert same.weight.placements == (Shard(1),)
    chosen.mesh_info = SimpleNamespace(mesh=init_device_mesh("cpu", (1, 2)), shard_mesh_dim=1)
    with pytest.raises(NotImplementedError, match="a mesh for single parameters is not"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: chosen)


def test_bad_arguments() -> None:
    run_ranks(2, wrong_meshes)
