"""What a user does to ``.grad`` between the micro-batches of a window is done in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from program.fakes import captured_on_a_stand_in
from program.loops import RATE, Setup, assert_close, assert_same, batch_of

NUM_WINDOWS = 10
MICRO = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def drop_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.grad = None


def scale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.25)


def replace(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5 + 0.01


EDITS = (drop, drop_in_place, drop_one, scale, replace)


def train(mode: str, wrap: bool, edit: Any, at: int) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    module = Model()
    model: Any = lockstep.DDP(module) if wrap else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=mode != "graph")
    step = lockstep.TrainStep(
        model, optimizer, lambda m, b: (m(b["x"]) - b["y"]).square().mean(), accumulate=MICRO, clip_norm=0.3, mode=mode
    )
    if mode == "captured":
        captured_on_a_stand_in(step, Setup(module, model, [optimizer], [], None))
    for index in range(NUM_WINDOWS * MICRO):
        window, micro = divmod(index, MICRO)
        step(batch_of(index))
        if micro == at and window in (0, 1, 4, 6, 7):
            edit(module, optimizer)
    return dict(module.state_dict()), step


@pytest.mark.parametrize("mode", ["graph", "captured"])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_are_the_users_between_micro_batches(
    edit: Any, at: int, wrap: bool, mode: str, world_of_one: None, uncompiled: None
) -> None:
    right, _ = train("loop", wrap, edit, at)
    found, step = train(mode, wrap, edit, at)
    assert not step.explain().reasons
    assert step.explain().num_program_calls >= 10
    (assert_close if mode == "graph" else assert_same)(right, found)


def test_what_is_added_up_can_be_looked_at(uncompiled: None) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).sum(), accumulate=2, mode="graph")
    for _ in range(3):
        step(torch.ones(2, 6))
        assert model.last.bias.grad is not None
        assert torch.equal(model.last.bias.grad, torch.full((4,), 1.0))
        step(torch.ones(2, 6))


def test_a_micro_batch_that_failed_is_repeated(uncompiled: None) -> None:
    """What was added up before stays where it is."""
    ends = []
    for breaks in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), accumulate=2, mode="graph")
        for index in range(12):
            if breaks and index in (3, 6, 9):
                with pytest.raises(RuntimeError):
                    step(torch.ones(2, 7))
            step(batch_of(index)["x"])
        ends.append(dict(model.state_dict()))
    assert step.explain().num_program_calls > 4
    assert_same(*ends)
