"""State as JSON: what goes in comes out, of the same types; what cannot be stored is named."""

from __future__ import annotations

import json
import math
from collections import Counter
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.tree import decode, encode, tensor_names

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(st.integers()),
    max_leaves=20,
)


def through_json(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def take(place: str, tensor: torch.Tensor) -> str:
        kept[place] = tensor
        return place

    tree = json.loads(json.dumps(encode(value, "root", take)))
    assert sorted(tensor_names(tree)) == sorted(kept)
    return decode(tree, kept.__getitem__)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert same(through_json(value), value)


def test_other_types() -> None:
    value = {"$": 1, "c": Counter({2: 3}), "d": torch.bfloat16, "s": torch.Size([1, 2]), "t": [torch.ones(2)], "i": 1j}
    back = through_json(value)
    assert back.pop("t")[0].tolist() == [1, 1]
    value.pop("t")
    assert back == value
    assert type(back["c"]) is Counter
    assert type(back["s"]) is torch.Size
    assert math.isnan(through_json(math.nan))
    assert through_json((math.inf, -math.inf)) == (math.inf, -math.inf)


class Word(str, Enum):  # noqa: UP042 (one whose str() is not its text)
    A = "a"


def test_values_that_are_told_apart_by_little() -> None:
    for value in ({frozenset([1, 2]): {3}}, frozenset(["a"]), {1, "a", (2,)}, 10**5000, -(10**5000), {"n": 2**70}):
        assert same(through_json(value), value)
    assert through_json({Word.A: Word.A}) == {"a": "a"}  # and not "Word.A"


def contains_itself() -> list[Any]:
    value: list[Any] = []
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, {"a": [print]}, torch.nn.Linear(1, 1), Fraction(1, 3), numpy.longdouble("0.1")]
)
def test_what_cannot_be_stored_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"root.*cannot be stored"):
        through_json(value)


def test_what_contains_itself_is_named() -> None:
    with pytest.raises(TypeError, match="root contains itself"):
        through_json(contains_itself())


@pytest.mark.parametrize(
    "tree",
    [{"$": "object", "v": 1}, {"$": "tensor"}, {"$": "float", "v": "1"}, {"$": "pickle", "v": "gASV"}, {"$": "dict"}],
)
def test_what_was_never_encoded_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="unknown"):
        decode(tree, lambda name: name)
