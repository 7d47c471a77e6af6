"""Tensors: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_foreach_add() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    private.foreach_add(tensors, [torch.ones(2), torch.ones(3)])
    assert [t.sum().item() for t in tensors] == [4.0, 6.0]


def test_dtensor_like() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameter = distribute_tensor(torch.zeros(2), mesh, [Replicate()])
    made = private.dtensor_like(parameter, torch.ones(2))
    assert made.to_local().tolist() == [1.0, 1.0]


def test_shard_of() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    for placement in (Replicate(), Shard(0)):
        found = private.shard_of(distribute_tensor(torch.arange(4.0), mesh, [placement]))
        assert found is not None
        assert (found.local.tolist(), found.offsets, found.is_first) == ([0.0, 1.0, 2.0, 3.0], (0,), True)
    assert private.shard_of(torch.ones(1)) is None


def test_storage_of() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        flat, other = torch.empty(6), torch.empty(6)
        assert private.storage_of(flat[2:].view(2, 2).t().detach()) == private.storage_of(flat)
        assert private.storage_of(other) != private.storage_of(flat)


def test_alias() -> None:
    flat = torch.arange(6.0)
    part = private.alias(flat, (2, 2), (1, 2), 1)
    assert part.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    part.zero_()
    assert flat.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 5.0]  # the same memory
    assert not part._is_view()


def test_flatten_dense() -> None:
    assert private.flatten_dense([torch.ones(2, 2), torch.zeros(1)]).tolist() == [1.0] * 4 + [0.0]


def test_chunk_cat() -> None:
    """Two ranks' chunks of a tensor of three rows (padded with zeros) and of one of two, cast on the way."""
    flat = torch.ones(2, 3, dtype=torch.float64)
    private.chunk_cat([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], 0, 2, out=flat)
    assert flat.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]]


def test_unflatten_dense() -> None:
    flat = torch.arange(5.0)
    first, second = private.unflatten_dense(flat, [torch.empty(2, 2), torch.empty(1)])
    first.zero_()
    assert flat.tolist() == [0.0, 0.0, 0.0, 0.0, 4.0]  # views, not copies
    assert second.tolist() == [4.0]


def test_foreach_copy() -> None:
    target = [torch.zeros(2), torch.zeros(1)]
    private.foreach_copy(target, [torch.ones(2), torch.ones(1)])
    assert [t.sum().item() for t in target] == [2.0, 1.0]


def test_foreach_mul() -> None:
    tensors = [torch.ones(2), torch.ones(1)]
    private.foreach_mul(tensors, 0.5)
    assert [t.sum().item() for t in tensors] == [1.0, 0.5]


def test_foreach_lerp() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    private.foreach_lerp(tensors, [torch.ones(2), torch.ones(3)], 0.25)
    assert [t.sum().item() for t in tensors] == [0.5, 0.75]


def test_foreach_zero() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    private.foreach_zero(tensors)
    assert [t.sum().item() for t in tensors] == [0.0, 0.0]
