"""Mode ``"compiled"``: hooks and methods that are replaced between steps are those that run."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.program import unguarded
from program.loops import batch_of, loss_of


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 16), Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()  # what comes after it is compiled by itself
        return self.inner(torch.tanh(x))  # type: ignore[no-any-return]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def change(model: Model, index: int, patch: pytest.MonkeyPatch) -> None:
    if index == 2:
        model.inner.register_forward_hook(lambda *given: given[-1] * 2)
    if index == 3:
        patch.setattr(Inner, "forward", lambda self, x: 3 * self.linear(x))


def train(mode: str, *, changes: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = Model()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, mode=mode)
    found: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for index in range(5):
            if changes:
                change(model, index, patch)
            found.append(step(batch_of(index))[0])
    return [*found, *(p.detach() for p in model.parameters())], step.explain()


def test_what_a_compiled_function_does_not_look_at(eager: None) -> None:
    right, _ = train("loop", changes=True)
    found, explained = train("compiled", changes=True)
    torch.testing.assert_close(found, right)
    assert any("compiled anew" in note for note in explained.notes)
    # The method is what it was, and so is what was compiled of it.
    again, _ = train("compiled", changes=False)
    torch.testing.assert_close(again, train("loop", changes=False)[0])


def test_what_changes_in_every_step_is_not_compiled_for_ever(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unguarded, "_MOST_CHANGES", 1)
    model = Model()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, mode="compiled")
    calls: list[int] = []
    for index in range(4):
        handle = model.register_forward_hook(lambda *_, i=index: calls.append(i))  # type: ignore[misc]
        step(batch_of(index))
        handle.remove()
    assert calls == [0, 1, 2, 3]
    assert "change from step to step" in " ".join(step.explain().reasons)


def test_changes_that_lie_far_apart_are_none_from_step_to_step(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unguarded, "_MOST_CHANGES", 1)
    monkeypatch.setattr(unguarded, "_QUIET_STEPS", 2)
    model = Model()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, mode="compiled")
    calls: list[int] = []
    for index in range(9):
        if index % 3 == 0:
            model.register_forward_hook(lambda *_, i=index: calls.append(i))  # type: ignore[misc]
        step(batch_of(index))
    assert len(calls) == 3 + 6 + 9
    assert not step.explain().reasons


def test_a_module_that_came_later_is_looked_at_too() -> None:
    model = Model()
    found = unguarded.Unguarded(model)
    model.inner = Inner()
    found.has_changed()
    assert not found.has_changed()
    model.inner.register_forward_hook(lambda *given: given[-1] * 2)
    assert found.has_changed()
    assert not found.has_changed()


def test_classes_that_were_looked_at_are_freed() -> None:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            super().extra_repr()
            return x

    model = Local()
    unguarded.Unguarded(model).has_changed()
    assert Local in unguarded._methods
    gone = weakref.ref(Local)
    del Local, model
    gc.collect()
    assert gone() is None
