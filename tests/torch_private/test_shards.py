"""DTensors from inside: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def dtensor() -> DTensor:
    return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])


def test_local_of() -> None:
    assert private.local_of(dtensor()).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_spec_of() -> None:
    spec = private.spec_of(dtensor())
    assert spec.placements == (Shard(0),)
    assert tuple(spec.shape) == (4,)


def test_dtensor_around() -> None:
    made = private.dtensor_around(torch.ones(4), private.spec_of(dtensor()))
    assert isinstance(made, DTensor)
    assert made.full_tensor().tolist() == [1.0] * 4
    assert made.placements == (Shard(0),)


def test_set_local() -> None:
    parameter = torch.nn.Parameter(dtensor())
    memory = torch.zeros(4)
    private.set_local(parameter, memory)
    with torch.no_grad():
        parameter.add_(1.0)
    assert memory.tolist() == [1.0] * 4


def test_joined_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert private.joined_mesh([mesh["dp"], mesh["tp"]]).mesh_dim_names == ("dp", "tp")


def test_strided_shard() -> None:
    placement = private.strided_shard(0, 2)
    assert (placement.dim, placement.split_factor) == (0, 2)


def test_mark_as_sharded() -> None:
    from torch.distributed._composable.replicate import _is_fully_sharded

    module = torch.nn.Linear(2, 2)
    private.mark_as_sharded(module, "a state")
    assert _is_fully_sharded(module)
    assert torch_fsdp.fully_shard.state(module) == "a state"  # type: ignore[attr-defined]


def test_torch_fully_shard() -> None:
    assert private.torch_fully_shard().__name__ == "fully_shard"
    assert private.torch_fully_shard() is not torch_fsdp.fully_shard  # but what that is around


def test_group_memory() -> None:
    group = private.default_group()
    assert private.group_memory(group, 3, torch.float64, torch.device("cpu")).shape == (3,)


def test_dtensor_handlers() -> None:
    handlers = private.dtensor_handlers()
    operator = torch.ops.aten._fused_sgd_.default
    seen = []
    before = handlers.get(operator)
    handlers[operator] = lambda *call: seen.append(call[0])
    try:
        parameter = torch.nn.Parameter(dtensor())
        parameter.grad = dtensor()
        torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    finally:
        del handlers[operator]
        if before is not None:
            handlers[operator] = before
    assert seen == [operator]
