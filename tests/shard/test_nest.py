"""Tensors in whatever a forward takes and returns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lockstep.shard.nest import cast_floats, map_tensors


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass
class Record:
    value: torch.Tensor
    name: str


def test_every_kind_of_nesting_is_kept() -> None:
    x = torch.ones(2)
    value = {
        "list": [x, 1],
        "pair": Pair(x, (x, None)),
        "record": Record(x, "a"),
        "ordered": OrderedDict(inner=x),
        "text": "unchanged",
    }
    changed = map_tensors(lambda t: t + 1, value)
    assert changed["list"][0].tolist() == [2.0, 2.0]
    assert isinstance(changed["pair"], Pair)
    assert changed["pair"].second[0].tolist() == [2.0, 2.0]
    assert changed["record"].name == "a"
    assert changed["record"].value.tolist() == [2.0, 2.0]
    assert isinstance(changed["ordered"], OrderedDict)
    assert changed["text"] == "unchanged"
    assert value["list"][0] is x  # what was given is left alone


def test_what_has_nothing_to_change_comes_back_itself() -> None:
    value = {"a": [torch.ones(1), 2], "b": Pair(torch.ones(1), 3)}
    assert map_tensors(lambda t: t, value) is value


def test_only_floating_point_is_cast() -> None:
    floats, whole = torch.ones(1), torch.ones(1, dtype=torch.int64)
    cast = cast_floats(torch.bfloat16, (floats, whole))
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.int64]
