"""Process groups and collectives: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

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
