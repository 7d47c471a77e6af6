"""What Python changes between two steps is seen by a program: another world, another program, or the loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.program.world import World

factor = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)
        self.register_buffer("shift", torch.zeros(1))
        self.config = SimpleNamespace(alpha=1.0)
        self.table = {"beta": 1.0}
        self.scales = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.act(self.first(x)))
        return y * self.config.alpha * self.table["beta"] * self.scales[0] + self.shift


class Loss:
    weight = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * self.weight * factor


class Scene(SimpleNamespace):
    model: Net
    loss: Loss
    optimizer: torch.optim.Optimizer


def set_global(scene: Scene) -> None:
    global factor
    factor = 3.0


def set_loss(scene: Scene) -> None:
    scene.loss.weight = 3.0


def set_config(scene: Scene) -> None:
    scene.model.config.alpha = 3.0


def set_table(scene: Scene) -> None:
    scene.model.table["beta"] = 3.0


def set_list(scene: Scene) -> None:
    scene.model.scales[0] = 3.0


def assign_buffer(scene: Scene) -> None:
    scene.model.shift = torch.ones(1)


def swap_module(scene: Scene) -> None:
    scene.model.act = nn.ReLU()


def replace_forward(scene: Scene) -> None:
    scene.model.forward = lambda x: scene.model.first(x).sum(1)  # type: ignore[method-assign]


def add_forward_hook(scene: Scene) -> None:
    scene.model.last.register_forward_hook(lambda module, given, out: out * 3)


def add_gradient_hook(scene: Scene) -> None:
    scene.model.last.weight.register_hook(lambda gradient: gradient * 3)


def add_optimizer_hook(scene: Scene) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in scene.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    scene.optimizer.register_step_pre_hook(halve)


def clear_state(scene: Scene) -> None:
    scene.optimizer.state.clear()


def replace_head(scene: Scene) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        scene.model.last = nn.Linear(6, 1)
    scene.optimizer.param_groups[0]["params"][2:] = list(scene.model.last.parameters())


EVENTS: list[Callable[[Scene], None]] = [
    *(set_global, set_loss, set_config, set_table, set_list, assign_buffer, swap_module, replace_forward),
    *(add_forward_hook, add_gradient_hook, add_optimizer_hook, clear_state, replace_head),
]


def by_hand(scene: Scene, x: Tensor) -> Tensor:
    scene.optimizer.zero_grad()
    loss = scene.loss(scene.model, x)
    loss.backward()
    scene.optimizer.step()
    return loss.detach()


def train(mode: str, event: Callable[[Scene], None]) -> list[Tensor]:
    global factor
    factor = 1.0
    torch.manual_seed(0)
    model = Net()
    scene = Scene(model=model, loss=Loss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.05))
    step = lockstep.TrainStep(model, scene.optimizer, scene.loss, mode=mode) if mode != "by hand" else None
    batches = torch.Generator().manual_seed(1)
    losses = []
    for index in range(8):
        if index == 4:
            event(scene)
        x = torch.randn(8, 4, generator=batches)
        losses.append(by_hand(scene, x) if step is None else step(x))
    factor = 1.0
    if mode == "graph":
        assert step is not None
        assert step.explain().num_program_calls >= 3  # it was a program before
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("mode", ["loop", "graph"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_change_between_steps_has_the_result_of_the_loop(
    event: Callable[[Scene], None], mode: str, uncompiled: None
) -> None:
    for found, right in zip(train(mode, event), train("by hand", event), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_world_that_stays_the_same_is_equal_to_itself() -> None:
    world = World(Net(), Loss())
    before = world.values()
    assert world.values() == before
    assert world.changed(before) == ""
