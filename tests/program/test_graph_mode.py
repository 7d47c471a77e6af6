"""Mode "graph": the whole step as one program, close to the loop; where it cannot be, the loop, with the reason."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from program.loops import CASES, Mlp, assert_close, batch_of, by_hand, by_step, make_step, set_up


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("name", CASES)
def test_a_program_is_close_to_the_loop(name: str, wrapped: bool, world_of_one: None, uncompiled: None) -> None:
    case, wrap = CASES[name], lockstep.DDP if wrapped else None
    right = by_hand(case, set_up(case, wrap))
    setup = set_up(case, wrap)
    step = make_step(case, setup, "graph")
    found = by_step(case, setup, step)
    explanation = step.explain()
    assert not explanation.reasons
    assert explanation.num_program_calls >= 19 * case.accumulate - 2
    assert_close(right, found)
    if wrapped:
        assert setup.model.step.num_windows == 20
        assert setup.model.step.num_updates == 20


@pytest.mark.parametrize("name", ["everything", "dropout"])
def test_a_compiled_program_is_close_to_the_loop(name: str, world_of_one: None) -> None:
    case = CASES[name]
    right = by_hand(case, set_up(case, lockstep.DDP))
    setup = set_up(case, lockstep.DDP)
    step = make_step(case, setup, "graph")
    assert_close(right, by_step(case, setup, step))
    assert len(step.explain().programs) == (2 if case.accumulate > 1 else 1)
    assert not step.explain().reasons


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
def test_other_optimizers_of_torchs(kind: Any, uncompiled: None) -> None:
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        model = Mlp()
        step = lockstep.TrainStep(
            model, kind(model.parameters(), lr=0.01), lambda m, b: (m(b["x"]) - b["y"]).square().mean(), mode=mode
        )
        for index in range(10):
            step(batch_of(index))
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert step.explain().num_program_calls == 9
    assert_close(*ends)


def test_a_compiled_model_is_traced_as_it_was_written(world_of_one: None, uncompiled: None) -> None:
    case = CASES["mlp"]
    right = by_hand(case, set_up(case, lockstep.DDP))
    setup = set_up(case, lockstep.DDP)
    setup.model = torch.compile(setup.model, backend="eager")
    step = make_step(case, setup, "graph")
    assert_close(right, by_step(case, setup, step))
    assert step.explain().num_program_calls == 19


def test_frozen_parameters_stay_and_unfreezing_makes_a_program(uncompiled: None) -> None:
    torch.manual_seed(0)
    model = Mlp()
    model.first.requires_grad_(False)
    step = lockstep.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), lambda m, b: m(b["x"]).square().mean(), mode="graph"
    )
    before = model.first.weight.clone()
    for index in range(4):
        step(batch_of(index))
    assert torch.equal(before, model.first.weight)
    assert step.explain().num_program_calls == 3
    model.first.requires_grad_(True)
    for index in range(4):
        step(batch_of(index))
    assert not torch.equal(before, model.first.weight)
    assert len(step.explain().programs) == 1  # state came for what is not frozen any more: made anew


def test_a_rate_changes_without_a_new_program(uncompiled: None) -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = lockstep.TrainStep(model, optimizer, lambda m, b: m(b["x"]).square().mean(), mode="graph")
    for index in range(3):
        step(batch_of(index))
    before = model.first.weight.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    step(batch_of(3))
    assert torch.equal(before, model.first.weight)
    assert len(step.explain().programs) == 1


# ---------------------------------------------------------------- falling back


class Branching(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


class Asking(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + x.max().item())


class Counting(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) * (1 + 0.1 * self.num_calls)


class Drawing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Hooked(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.last.register_full_backward_hook(lambda module, given, out: self.seen.append(float(out[0].sum())))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Branching, "(at test_graph_mode.py:"),
        (Asking, "asks for a number at test_graph_mode.py:"),
        (Counting, "changes a number in Python: num_calls"),
        (Drawing, "random numbers of the host (Python's random)"),
        (Hooked, "changes what Python holds (Hooked: list)"),
    ],
)
def test_what_no_program_can_do_runs_by_the_loop(model: type[nn.Module], words: str, uncompiled: None) -> None:
    ends = []
    for mode in ("loop", "graph"):
        torch.manual_seed(0)
        random.seed(5)
        module = model()
        step = lockstep.TrainStep(
            module,
            torch.optim.AdamW(module.parameters(), lr=0.01),
            lambda m, b: (m(b["x"]) - b["y"]).square().mean(),
            mode=mode,
        )
        losses = torch.stack([step(batch_of(index)) for index in range(8)])
        ends.append({"losses": losses, **module.state_dict()})
    (reason,) = step.explain().reasons
    assert words in reason
    assert step.explain().num_program_calls == 0
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_reasons_that_are_known_before(world_of_one: None) -> None:
    module = Mlp()
    module.first.weight.register_hook(lambda gradient: gradient * 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    step = lockstep.TrainStep(module, optimizer, lambda m, b: m(b["x"]).mean(), mode="graph")
    step(batch_of(0))
    assert step.explain().reasons == ("a hook looks at the gradient of first.weight",)
    assert step.explain().runs == "the plain loop"

    optimizer.register_step_post_hook(lambda *_: None)
    module.first.weight._backward_hooks.clear()
    step = lockstep.TrainStep(module, optimizer, lambda m, b: m(b["x"]).mean(), mode="graph")
    step(batch_of(0))
    assert step.explain().reasons == ("hooks look at the steps of AdamW",)

    class Own(torch.optim.AdamW):
        pass

    step = lockstep.TrainStep(module, Own(module.parameters(), lr=0.01), lambda m, b: m(b["x"]).mean(), mode="graph")
    step(batch_of(0))
    assert "Own is not one of torch's optimizers" in step.explain().reasons[0]


def test_join_runs_by_the_loop(world_of_one: None, uncompiled: None) -> None:
    case = CASES["mlp"]
    setup = set_up(case, lockstep.DDP)
    step = make_step(case, setup, "graph")
    with setup.model.join():
        for index in range(4):
            step(batch_of(index))
    assert "join()" in step.explain().reasons[0]
    assert step.explain().num_loop_calls == 4


def test_beyond_the_bound_a_warning_names_the_shapes(uncompiled: None) -> None:
    case = CASES["mlp"]
    setup = set_up(case)
    step = make_step(case, setup, "graph", max_programs=1)
    for index in range(3):
        step(batch_of(index, size=5))
    step(batch_of(3, size=3))
    with pytest.warns(UserWarning, match=r"\[5, 6\] float32.*the loop runs batches of \[3, 6\]"):
        step(batch_of(4, size=3))
