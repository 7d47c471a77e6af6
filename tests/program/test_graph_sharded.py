"""Mode "graph" of a sharded model in a world of one: a program without a collective, close to the loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from program.loops import CASES, Mlp, assert_close, batch_of, by_hand, by_step, make_step, set_up


def shard(module: Any) -> Any:
    parts = (module.attention, module.network) if hasattr(module, "attention") else module.children()
    for child in parts:
        lockstep.fully_shard(child)
    return lockstep.fully_shard(module)


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_close_to_the_loop(name: str, world_of_one: None, uncompiled: None) -> None:
    case = CASES[name]
    right = by_hand(case, set_up(case, shard))
    setup = set_up(case, shard)
    step = make_step(case, setup, "graph")
    assert_close(right, by_step(case, setup, step))
    assert not step.explain().reasons
    assert step.explain().num_program_calls >= 19 * case.accumulate - 2
    (counted,) = setup.model._lockstep_root.steps
    assert (counted.num_windows, counted.num_updates) == (20, 20)


def test_a_compiled_program_is_close_to_the_loop(world_of_one: None) -> None:
    case = CASES["everything"]
    right = by_hand(case, set_up(case, shard))
    setup = set_up(case, shard)
    step = make_step(case, setup, "graph")
    assert_close(right, by_step(case, setup, step))
    assert len(step.explain().programs) == 2
    assert not step.explain().reasons


class Reading(Mlp):
    """Asks for facts of a parameter outside of its unit, which is no reading of it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.weight.shape == (16, 6)
        assert next(self.first.parameters()).dtype is x.dtype
        assert sum(p.numel() for p in self.parameters()) == 6 * 16 + 16 + 16 * 4 + 4
        return super().forward(x.to(self.first.weight.device)) * self.factor[0]


def test_facts_of_parameters_may_be_asked_and_what_a_sharded_module_holds_is_seen(
    world_of_one: None, uncompiled: None
) -> None:
    model = shard(Reading())
    step = lockstep.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda m, b: m(b["x"]).square().mean(), mode="graph"
    )
    first = [step(batch_of(0)) for _ in range(3)][-1]
    assert step.explain().num_program_calls == 2, step.explain()
    model.factor[0] = 2.0
    second = [step(batch_of(0)) for _ in range(2)][-1]
    assert step.explain().num_program_calls == 3
    torch.testing.assert_close(second, 4 * first)


def test_modules_have_their_shards_again_after_a_trace_that_broke(world_of_one: None, uncompiled: None) -> None:
    class Branching(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if y.sum() > 0 else y

    model = shard(Branching())
    before = dict(model.named_parameters())
    step = lockstep.TrainStep(
        model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b["x"]).square().mean(), mode="graph"
    )
    for index in range(3):
        step(batch_of(index))
    assert step.explain().num_program_calls == 0
    assert "it cannot be one program" in step.explain().reasons[0]
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(unit.traced_by is None for unit in model._lockstep_root.units)


def test_a_parameter_without_gradient_is_the_loops(world_of_one: None, uncompiled: None) -> None:
    class Unused(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(3, 3)

    model = shard(Unused())
    step = lockstep.TrainStep(
        model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b["x"]).square().mean(), mode="graph"
    )
    for index in range(3):
        step(batch_of(index))
    assert "never.weight, never.bias get no gradient" in step.explain().reasons[0]
    assert step.explain().num_loop_calls == 3


def fail(model: Any, step: Any) -> None:
    with pytest.raises(RuntimeError):
        step({"x": torch.ones(2, 3), "y": torch.zeros(2, 4)})


def reset(model: Any, step: Any) -> None:
    step.reset()


def drop(model: Any, step: Any) -> None:
    model.zero_grad()


# What is done after the first micro-batch of a window; the calls that end it; what counts then.
BETWEEN = {
    "fail": (fail, [101], [100, 101]),
    "reset": (reset, [101, 102], [101, 102]),
    "drop": (drop, [101], [101]),
}


@pytest.mark.parametrize("mode", ["loop", "graph"])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_happens_between_micro_batches(name: str, mode: str, world_of_one: None, uncompiled: None) -> None:
    """Nothing is counted twice, nor after it was dropped, whether a program or the loop ran it."""
    disturb, calls, counted = BETWEEN[name]
    torch.manual_seed(0)
    plain = Mlp()
    model = shard(copy.deepcopy(plain))

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean()

    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    step = lockstep.TrainStep(model, ours, loss, accumulate=2, mode=mode)
    for window in range(6):
        batches = [2 * window, 2 * window + 1]
        if window == 4:
            step(batch_of(100))
            disturb(model, step)
            for index in calls:
                step(batch_of(index))
            batches = counted
        else:
            for index in batches:
                step(batch_of(index))
        theirs.zero_grad()
        for index in batches:
            (loss(plain, batch_of(index)) / 2).backward()
        theirs.step()
    for parameter, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), right)
    assert mode == "loop" or step.explain().num_program_calls > 6


def test_a_parameter_that_joins_an_optimizer_later(world_of_one: None, uncompiled: None) -> None:
    model, late = shard(Mlp()), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(
        model, optimizer, lambda m, b: (m(b["x"]) * late).square().mean(), accumulate=2, mode="graph"
    )
    for index in range(12):
        if index == 6:
            optimizer.add_param_group({"params": [late]})
        step(batch_of(index))
    assert late.item() != 1


def test_units_that_stay_whole_for_a_while(world_of_one: None, uncompiled: None) -> None:
    model = shard(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, lambda m, b: m(b["x"]).square().mean(), mode="graph")
    for index in range(9):
        model.set_reshard_after_backward(index not in (3, 4))
        step(batch_of(index))
    assert step.explain().num_loop_calls <= 4, step.explain()
    assert len(step.explain().reasons) == 1
