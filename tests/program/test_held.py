"""Tensors that a step comes to by other ways than its model and its batch: the result is that of the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from program.loops import Cnn, batch_of

NUM_STEPS = 9


class Setting:
    """A model, and what a loss function holds of it, or beside it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Cnn()
        self.parameters = list(self.model.parameters())
        self.head = nn.ModuleList([self.model.last])  # a module of the model that others hold, too
        self.buffer = self.model.norm.running_mean
        self.view = self.model.last.weight.detach()[0]
        self.weights = torch.ones(4)
        self.scale = torch.tensor(2.0)
        self.cache: Tensor | None = None
        self.num_calls = 0

    def change(self, index: int) -> None:
        if index == 3:
            self.weights.mul_(2.0)
            self.scale.add_(1.0)
        elif index == 6:
            self.weights.data = torch.arange(1.0)  # of another shape


def listed(setting: Setting, model: Any, batch: Any) -> Any:
    penalty = (
        sum(p.square().sum() for p in setting.parameters) + torch.stack(torch._foreach_norm(setting.parameters)).sum()
    )
    return F.mse_loss(model(batch["x"]), batch["y"]) + 0.1 * penalty


def gradients(setting: Setting, model: Any, batch: Any) -> Any:
    loss = F.mse_loss(model(batch["x"]), batch["y"])
    slopes = torch.autograd.grad(loss, setting.parameters, create_graph=True)
    return loss + 0.1 * sum(slope.square().sum() for slope in slopes)


def shared_head(setting: Setting, model: Any, batch: Any) -> Any:
    hidden = torch.ones(5, setting.head[0].in_features)
    return F.mse_loss(model(batch["x"]), batch["y"]) + 0.1 * setting.head[0](hidden).square().sum()


def buffer(setting: Setting, model: Any, batch: Any) -> Any:
    output = model(batch["x"])
    assert setting.buffer is not None
    return F.mse_loss(output, batch["y"]) * (1 + setting.buffer.abs().sum())  # after the forward has changed it


def beside(setting: Setting, model: Any, batch: Any) -> Any:
    return (F.mse_loss(model(batch["x"]), batch["y"], reduction="none") * setting.weights).mean() * setting.scale


def view(setting: Setting, model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch["x"]), batch["y"]) * (1 + setting.view.sum())


class Caching(Cnn):
    """Has nothing in the beginning, and a tensor after its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(4.0)
        return super().forward(x) * self.cache


def cached(setting: Setting, model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch["x"]), batch["y"])


def train(mode: str, loss: Callable[..., Any]) -> tuple[list[Tensor], Any]:
    setting = Setting()
    if loss is cached:
        torch.manual_seed(0)
        setting.model = Caching()
    model = setting.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = lockstep.TrainStep(model, optimizer, functools.partial(loss, setting), mode=mode)
    found = []
    for index in range(NUM_STEPS):
        found.append(step(batch_of(index)))
        setting.change(index)
    return [*found, *(t.detach() for t in model.state_dict().values())], step.explain()


@pytest.mark.parametrize(
    ("loss", "num_programs"),
    [(listed, 8), (gradients, 8), (shared_head, 8), (buffer, 8), (cached, 7), (view, 0)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_step_that_reads_tensors_in_its_own_way(loss: Any, num_programs: int, uncompiled: None) -> None:
    right, _ = train("loop", loss)
    found, explained = train("graph", loss)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert explained.num_program_calls == num_programs, explained
    if loss is view:
        assert "a tensor in the memory of last.weight is read in another way than through the model" in str(explained)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_written_to_a_tensor_of_the_loss_is_seen(is_compiled: bool, request: pytest.FixtureRequest) -> None:
    if not is_compiled:
        request.getfixturevalue("uncompiled")
    right, _ = train("loop", beside)
    found, explained = train("graph", beside)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert explained.num_program_calls == NUM_STEPS - 1, explained
