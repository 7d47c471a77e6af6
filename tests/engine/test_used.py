"""Tensors in any nesting, and the parameters behind them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.engine.used import find_tensors, parameters_reached_from


@dataclass
class Output:
    loss: torch.Tensor
    extra: Any


Pair = namedtuple("Pair", ["first", "second"])


def test_tensors_are_found_in_any_nesting() -> None:
    tensors = [torch.full((1,), float(i)) for i in range(6)]
    nested = {
        "a": [tensors[0], (tensors[1], "text")],
        "b": Output(tensors[2], {"deep": Pair(tensors[3], [tensors[4]])}),
        "c": None,
        "d": {5: tensors[5]},
    }
    assert [t.item() for t in find_tensors(nested)] == [0, 1, 2, 3, 4, 5]
    assert list(find_tensors("text")) == list(find_tensors(Output)) == []


def test_parameters_behind_the_outputs_and_no_others() -> None:
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    returned = nn.Parameter(torch.ones(1))
    reached = parameters_reached_from([used(torch.ones(1, 2)), returned, torch.ones(1)])
    assert reached == {id(used.weight), id(used.bias), id(returned)}
    assert not reached & {id(p) for p in unused.parameters()}


def test_a_long_chain_is_walked_without_recursion() -> None:
    parameter = nn.Parameter(torch.ones(1))
    x = parameter * 1
    for _ in range(5000):
        x = x + 1
    assert parameters_reached_from([x]) == {id(parameter)}
