"""Operators of our own: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import traceback

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import torch_private as private


def test_call_directly() -> None:
    library = torch.library.Library("lockstep_tests", "FRAGMENT")
    library.define("first_of(Tensor?[] values, Tensor key) -> Tensor")
    calls = []

    def first_of(values: list[Tensor | None], key: Tensor) -> Tensor:
        calls.append("".join(traceback.format_stack(limit=2)))
        return key + 1

    library.impl("first_of", first_of, "CompositeExplicitAutograd")
    torch.library.register_fake("lockstep_tests::first_of", lambda values, key: torch.empty_like(key), lib=library)
    operator = torch.ops.lockstep_tests.first_of.default
    key = torch.ones(2)
    private.call_directly(operator, first_of)
    assert operator([key, None], key).tolist() == [2.0, 2.0]
    assert "return function(" in calls[-1]  # nobody was between
    with torch.profiler.profile() as profile:
        operator([key, None], key)
    assert "return dispatch(" in calls[-1]
    assert "lockstep_tests::first_of" in {event.name for event in profile.events()}
    with FakeTensorMode() as mode:  # by its fake
        fake = mode.from_tensor(key)
        assert operator([fake, None], fake).shape == (2,)
    assert len(calls) == 2
    compiled = torch.compile(lambda key: torch.ops.lockstep_tests.first_of([key], key) * 2, backend="aot_eager")
    assert compiled(key).tolist() == [4.0, 4.0]
    assert "return function(" in calls[-1]
