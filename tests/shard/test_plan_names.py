"""The plan of a sharded model before anything has run: units and parameters have their names in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep


@pytest.mark.usefixtures("world_of_one")
def test_a_plan_has_full_names_before_the_first_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    lockstep.fully_shard(model[0])
    assert model[0].plan.units[0].names == ("weight", "bias")  # so far it is a model of its own
    lockstep.fully_shard(model[2])
    lockstep.fully_shard(model)
    plan = model.plan
    assert [(unit.name, unit.names) for unit in plan.units] == [
        ("0", ("0.weight", "0.bias")),
        ("2", ("2.weight", "2.bias")),
    ]
    model(torch.ones(1, 4)).sum().backward()
    assert model.plan.digest == plan.digest
