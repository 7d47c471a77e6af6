"""Process groups and collectives: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_all_reduce() -> None:
    tensor = torch.full((3,), 2.0)
    private.all_reduce(dist.group.WORLD, tensor, dist.ReduceOp.AVG).wait()
    assert tensor.tolist() == [2.0] * 3


def test_backend_name() -> None:
    assert private.backend_name(dist.group.WORLD, torch.device("cpu")) == "gloo"


def test_default_group() -> None:
    assert private.default_group() is dist.group.WORLD


def test_default_store() -> None:
    private.default_store().set("probe", "yes")
    assert private.default_store().get("probe") == b"yes"


def test_rank_not_in_group() -> None:
    assert not private.rank_not_in_group(dist.group.WORLD)


def test_has_host_groups() -> None:
    assert private.has_host_groups()


def test_num_operations() -> None:
    before = private.num_operations(dist.group.WORLD)
    dist.all_reduce(torch.ones(2))
    assert before is not None
    assert private.num_operations(dist.group.WORLD) == before + 1
    assert private.num_operations(object()) is None


def test_group_timeout() -> None:
    assert private.group_timeout(dist.group.WORLD) == timedelta(seconds=300)  # as in conftest.py


def test_host_group() -> None:
    group = private.host_group(private.default_store(), "probe", 0, 1, timedelta(seconds=5))
    assert (group.rank(), group.size()) == (0, 1)


def test_registered_groups() -> None:
    group = dist.new_group([0])
    registered = private.registered_groups()
    assert group in registered
    dist.destroy_process_group(group)
    assert group not in registered


def test_living_groups() -> None:
    group = private.host_group(private.default_store(), "probe", 0, 1, timedelta(seconds=5))
    assert any(known is dist.group.WORLD for known in private.living_groups())
    assert any(known is group for known in private.living_groups())


def test_host_all_gather() -> None:
    group = private.host_group(private.default_store(), "probe", 0, 1, timedelta(seconds=5))
    everyones = torch.zeros(2, dtype=torch.int64)
    private.host_all_gather(group, torch.tensor([1, 6]), everyones).wait()
    assert everyones.tolist() == [1, 6]


def test_watch_collectives() -> None:
    seen: list[str] = []
    private.watch_collectives(dist.group.WORLD, seen.append)
    private.watch_collectives(dist.group.WORLD, seen.append)  # twice is once
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    private.all_reduce(dist.group.WORLD, torch.ones(1), dist.ReduceOp.SUM).wait()
    assert seen == ["allreduce", "broadcast", "allreduce"]


def test_is_pretended() -> None:
    assert not private.is_pretended(dist.group.WORLD)
    # A group that does pretend is in test_artifacts.py, where there is no other.


def test_new_group_of() -> None:
    names = set()
    for _ in range(2):
        before = private.new_group_of([0], "a test")
        names.add(before.group_name)
        assert before.size() == 1
    assert len(names) == 2
    one = private.new_group_of([0], "another").group_name
    assert one == hashlib.sha1(b"another/[0]/1", usedforsecurity=False).hexdigest()
