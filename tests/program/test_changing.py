"""What changes from step to step: settings become inputs of the program where they can, and are a reason elsewhere."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import lockstep
from lockstep.program.changing import NotTaken, Setting, _Reading
from lockstep.program.restless import MOST_NEW
from program.fakes import captured_on_a_stand_in
from program.loops import Mlp, Setup, assert_close, assert_same, batch_of

NUM_STEPS = 20
VARIABLE = "LOCKSTEP_TEST_CHANGING"


def loss_of(model: Any, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    schedule = OneCycleLR(optimizer, max_lr=0.05, total_steps=NUM_STEPS + 1)
    return lambda index: schedule.step()


def cyclic(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    schedule = CyclicLR(optimizer, base_lr=0.001, max_lr=0.05, step_size_up=4)
    return lambda index: schedule.step()


def decay(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """The weight decay follows a cosine, by hand; one group has none."""

    def change(index: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.3 * (1 - math.cos(math.pi * index / NUM_STEPS))
        optimizer.param_groups[0]["of mine"] = [index]  # nobody reads that

    return change


def second_beta(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    def change(index: int) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 1 - 0.5 / (index + 2))
            group["eps"] = 1e-8 * (index + 1)

    return change


def alpha(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    def change(index: int) -> None:
        for group in optimizer.param_groups:
            group["alpha"], group["momentum"] = 1 - 0.5 / (index + 2), 0.5 + 0.02 * index

    return change


def train(mode: str, kind: type[Any], follow: Any, options: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Mlp()
    groups = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "weight_decay": 0.0}]
    optimizer = kind(groups, lr=0.01, **options)
    change = follow(optimizer)
    step = lockstep.TrainStep(model, optimizer, loss_of, mode=mode, **more)
    for index in range(NUM_STEPS * more.get("accumulate", 1)):
        step(batch_of(index))
        if step.is_last or "accumulate" not in more:
            change(step.num_updates)
    return {name: value.clone() for name, value in model.state_dict().items()}, step


@pytest.mark.parametrize(
    ("kind", "follow", "options"),
    [
        (torch.optim.AdamW, one_cycle, {}),
        (torch.optim.Adam, one_cycle, {"weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.Adam, cyclic, {"maximize": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, decay, {}),
        (torch.optim.Adam, decay, {}),
        (torch.optim.AdamW, second_beta, {}),
        (torch.optim.SGD, one_cycle, {"momentum": 0.9}),
        (torch.optim.SGD, cyclic, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, decay, {"momentum": 0.9, "dampening": 0.2}),
        (torch.optim.RMSprop, alpha, {"momentum": 0.5, "centered": True}),
        (torch.optim.RMSprop, decay, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_settings_that_change_are_read_by_one_program(
    kind: type[Any], follow: Any, options: dict[str, Any], uncompiled: None
) -> None:
    right, _ = train("loop", kind, follow, options)
    found, step = train("graph", kind, follow, options)
    explanation = step.explain()
    assert not explanation.reasons
    assert len(explanation.programs) == 1
    assert explanation.num_program_calls >= NUM_STEPS - 5
    assert_close(right, found)


def test_only_the_program_that_updates_holds_settings(uncompiled: None) -> None:
    options = {"accumulate": 3, "clip_norm": 0.5}
    right, _ = train("loop", torch.optim.AdamW, second_beta, {}, **options)
    found, step = train("graph", torch.optim.AdamW, second_beta, {}, **options)
    assert not step.explain().reasons
    assert len(step.explain().programs) == 3
    assert_close(right, found)


def test_a_compiled_program_reads_settings(world_of_one: None) -> None:
    right, _ = train("loop", torch.optim.AdamW, one_cycle, {})
    found, step = train("graph", torch.optim.AdamW, one_cycle, {})
    assert step.explain().num_program_calls >= NUM_STEPS - 5
    assert_close(right, found)


def test_what_an_optimizer_does_not_take_as_a_tensor_is_a_reason(uncompiled: None) -> None:
    right, _ = train("loop", torch.optim.NAdam, second_beta, {})
    found, step = train("graph", torch.optim.NAdam, second_beta, {})
    (reason,) = step.explain().reasons
    assert "this changes from step to step: betas of NAdam, eps of NAdam; " in reason
    assert_same(right, found)


def test_a_captured_program_says_what_changes() -> None:
    right, _ = train("loop", torch.optim.AdamW, one_cycle, {"fused": True})
    torch.manual_seed(0)
    model = Mlp()
    groups = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    change = one_cycle(optimizer)
    step = lockstep.TrainStep(model, optimizer, loss_of, mode="captured")
    captured_on_a_stand_in(step, Setup(model, model, [optimizer], [], None))
    for index in range(NUM_STEPS):
        step(batch_of(index))
        change(index)
    (reason,) = step.explain().reasons
    assert "this changes from step to step: betas of AdamW; " in reason
    assert_same(right, dict(model.state_dict()))


# ---------------------------------------------------------------- what else may change in every step


class Scaled(Mlp):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def changing_number(model: nn.Module, index: int) -> dict[str, Any]:
    model.temperature = 1.0 + 0.01 * index  # type: ignore[assignment]
    return batch_of(index)


def changing_batch(model: nn.Module, index: int) -> dict[str, Any]:
    return {**batch_of(index), "index": index}


def changing_shape(model: nn.Module, index: int) -> dict[str, Any]:
    return batch_of(index, size=2 + index)


def changing_variable(model: nn.Module, index: int) -> dict[str, Any]:
    os.environ[VARIABLE] = str(index)
    return batch_of(index)


@pytest.mark.parametrize(
    ("batch_for", "words"),
    [
        (changing_number, "this changes from step to step: temperature (of the model); "),
        (changing_batch, "this changes from step to step: a number or word in the batch; "),
        (changing_shape, "the shape of batches ([9, 6] float32, [9, 4] float32, then [10, 6] float32"),
        (changing_variable, f"this changes from step to step: {VARIABLE} (of the environment); "),
    ],
)
def test_what_is_another_in_every_step_is_named(
    batch_for: Any, words: str, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        model = Scaled()
        step = lockstep.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_of, mode=mode)
        for index in range(NUM_STEPS):
            step(batch_for(model, index))
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    (reason,) = step.explain().reasons
    assert words in reason
    assert step.explain().num_program_calls == 0
    assert_same(*ends)


def test_fewer_than_too_many_are_no_reason(uncompiled: None) -> None:
    model = Scaled()
    step = lockstep.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_of, mode="graph")
    for index in range(MOST_NEW):
        step(changing_number(model, index))
    assert not step.explain().reasons
    assert "the last two differ in temperature (of the model)" in " ".join(step.explain().notes)  # and it is told
    for index in range(3):
        step(batch_of(index))
    assert not step.explain().reasons
    assert not step.explain().notes
    assert step.explain().num_program_calls > 0


def test_beyond_the_bound_what_differs_is_named(uncompiled: None) -> None:
    model = Scaled()
    step = lockstep.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_of, mode="graph", max_programs=2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(12):
            changing_number(model, index // 2)
            step(batch_of(index))
    (text,) = {str(warning.message) for warning in caught if "max_programs=2" in str(warning.message)}
    assert "this has changed since: temperature (of the model)" in text


def test_what_is_remembered_is_bounded(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.program import whole

    monkeypatch.setattr(whole, "_MAX_KINDS", 10)
    model = Scaled()
    step = lockstep.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_of, mode="graph", max_programs=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for index in range(120):
            model.temperature = 1.0 + index // 2
            step(batch_of(index % 5))
            runner: Any = step._runner
            assert len(runner._seen) <= 11
            assert len(runner._refused) <= 11
            assert len(runner._programs) <= 2
    assert len(step.explain().reasons) < 5


# ---------------------------------------------------------------- rates of groups that come or are replaced


def test_the_rate_of_a_loaded_optimizer_is_followed(uncompiled: None) -> None:
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = lockstep.TrainStep(model, optimizer, loss_of, mode=mode)
        for index in range(4):
            step(batch_of(index))
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.1
        optimizer.load_state_dict(state)  # the groups are other objects now
        for index in range(4):
            step(batch_of(index))
            optimizer.param_groups[0]["lr"] *= 0.5
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert step.explain().num_program_calls > 4
    assert_close(*ends)


def test_a_group_that_is_added_is_trained_with_its_rate(uncompiled: None) -> None:
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = torch.optim.AdamW(model.first.parameters(), lr=0.01)
        step = lockstep.TrainStep(model, optimizer, loss_of, mode=mode)
        for index in range(4):
            step(batch_of(index))
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
        for index in range(6):
            step(batch_of(index))
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert not step.explain().reasons
    assert step.explain().num_program_calls == 7
    assert_close(*ends)


# ---------------------------------------------------------------- settings themselves


def test_a_setting_computes_as_its_tensor() -> None:
    setting = Setting(0.25, torch.tensor(0.5))
    assert setting != 0
    assert (1 - setting).tensor == 0.5
    assert (-setting * 2 + 3).tensor == 2
    assert (1 / setting).tensor == 2
    assert (2**setting).tensor == pytest.approx(2**0.5)
    assert setting**2 == 0.0625
    assert setting * torch.tensor(4.0) == 2
    with _Reading():
        assert torch.tensor(4.0) * setting == 2
        assert torch.tensor(4.0) - setting == 3.5
        with pytest.raises(NotTaken, match=r"clamp\(\), as a number"):
            torch.ones(2).clamp(max=setting)
