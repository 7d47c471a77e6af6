"""TrainStep by the loop: the bits of a loop written by hand; what is refused, and what it says of itself."""

from __future__ import annotations

import collections
import gc
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from program.loops import CASES, Mlp, assert_close, assert_same, batch_of, by_hand, by_step, loss_of, make_step, set_up


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("name", CASES)
def test_the_loop_has_the_bits_of_a_loop_by_hand(name: str, wrapped: bool, world_of_one: None) -> None:
    case, wrap = CASES[name], lockstep.DDP if wrapped else None
    right = by_hand(case, set_up(case, wrap))
    setup = set_up(case, wrap)
    assert_same(right, by_step(case, setup, make_step(case, setup, "loop")))


def test_auto_on_a_cpu_is_the_loop_and_says_why(world_of_one: None) -> None:
    case = CASES["everything"]
    right = by_hand(case, set_up(case, lockstep.DDP))
    setup = set_up(case, lockstep.DDP)
    step = make_step(case, setup, "auto")
    assert "nothing yet" in step.explain().runs
    assert_same(right, by_step(case, setup, step))
    explanation = step.explain()
    assert explanation.runs == "the plain loop"
    assert explanation.num_program_calls == 0
    assert "CUDA devices only" in str(explanation)


def test_compiled_is_close_to_the_loop(world_of_one: None) -> None:
    case = CASES["mlp"]
    right = by_hand(case, set_up(case, lockstep.DDP))
    setup = set_up(case, lockstep.DDP)
    step = make_step(case, setup, "compiled")
    assert_close(right, by_step(case, setup, step))
    assert all(bucket.left_in_graph for bucket in setup.model.reducer.buckets)  # the reduction is in the graph
    assert "compiled" in step.explain().runs


def test_a_loss_alone_is_returned_as_it_is() -> None:
    model = Mlp()
    step = lockstep.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), mode="loop")
    loss = step(torch.ones(2, 6))
    assert isinstance(loss, Tensor)
    assert not loss.requires_grad
    assert model.first.weight.grad is not None  # the gradients of the last update can be looked at


def test_several_outputs_and_containers_are_detached() -> None:
    @dataclass
    class Output:
        logits: Tensor
        name: str

    pair = collections.namedtuple("pair", "loss rest")
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: Any, batch: Any) -> Any:
        output = m(batch.x)
        return pair(output.mean(), {"out": Output(output, "last"), "list": [output * 2]})

    given = collections.namedtuple("given", "x")
    result = lockstep.TrainStep(model, optimizer, loss, mode="loop")(given(torch.ones(2, 6)))
    assert type(result) is pair
    assert not result.loss.requires_grad
    assert not result.rest["out"].logits.requires_grad
    assert result.rest["out"].name == "last"
    assert not result.rest["list"][0].requires_grad


def test_the_norm_before_clipping_can_be_read() -> None:
    model = Mlp()
    step = lockstep.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda m, x: m(x).sum(), clip_norm=1e-3, mode="loop"
    )
    assert step.grad_norm is None
    step(torch.ones(2, 6))
    assert step.grad_norm > 1
    gradients = [p.grad for p in model.parameters()]
    assert torch.nn.utils.get_total_norm(gradients) == pytest.approx(1e-3, rel=1e-3)


def test_an_averaged_model_of_torchs_is_updated() -> None:
    model = Mlp()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    step = lockstep.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).sum(), average=averaged, mode="loop"
    )
    for _ in range(3):
        step(torch.ones(2, 6))
    assert averaged.n_averaged == 3
    with pytest.raises(ValueError, match="no average here"):
        step.averaged_state_dict()


def test_micro_batches_update_at_the_last_and_say_so() -> None:
    model = Mlp()
    step = lockstep.TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), accumulate=3, mode="loop"
    )
    before = model.first.weight.clone()
    seen = []
    for _ in range(3):
        seen.append(step.is_last)
        step(torch.ones(2, 6))
        seen.append(torch.equal(before, model.first.weight))
    assert seen == [False, True, False, True, True, False]
    assert step.num_updates == 1


def test_after_an_error_a_window_begins_anew() -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).mean(), accumulate=2, mode="loop")
    step(torch.ones(2, 6))
    with pytest.raises(RuntimeError):
        step(torch.ones(2, 7))
    step.reset()
    assert not step.is_last
    assert model.first.weight.grad is None


def test_state_goes_into_a_checkpoint_and_back() -> None:
    case = CASES["average"]
    right = by_hand(case, set_up(case), num_updates=6)
    setup = set_up(case)
    step = make_step(case, setup, "loop")
    by_step(case, setup, step, num_updates=3)
    state = {name: value.clone() for name, value in step.state_dict()["averages"].items()}
    resumed = make_step(case, setup, "loop")
    resumed.load_state_dict({"num_updates": 3, "averages": state})
    for index in range(3, 6):
        resumed(batch_of(index))
    averaged = resumed.averaged_state_dict()
    for name in averaged:
        assert torch.equal(averaged[name], right[f"average of {name}"])
    with pytest.raises(KeyError, match="first"):
        resumed.load_state_dict({"num_updates": 3, "averages": {}})


def test_state_inside_a_window_is_refused() -> None:
    case = CASES["accumulate"]
    setup = set_up(case)
    step = make_step(case, setup, "loop")
    step(batch_of(0))
    with pytest.raises(RuntimeError, match="1 of 4 micro-batches"):
        step.state_dict()


def test_tied_averages_have_both_names() -> None:
    case = CASES["everything"]
    setup = set_up(case)
    step = make_step(case, setup, "loop")
    averaged = step.averaged_state_dict()
    assert set(averaged) == set(setup.module.state_dict())
    assert torch.equal(averaged["head.weight"], averaged["symbols.weight"])


# ---------------------------------------------------------------- what is refused


MODEL = Mlp()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def made(**options: Any) -> lockstep.TrainStep:
    given = {"model": MODEL, "optimizer": SGD, "loss": lambda m, b: m(b).mean(), "mode": "loop", **options}
    return lockstep.TrainStep(given.pop("model"), given.pop("optimizer"), given.pop("loss"), **given)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": lambda x: x}, TypeError, "model must be a torch.nn.Module, got function"),
        ({"loss": None}, TypeError, "loss must be a function of the model and a batch, got NoneType"),
        ({"mode": "fast"}, ValueError, "auto, loop, compiled, graph, captured, got 'fast'"),
        ({"optimizer": []}, ValueError, "at least one optimizer"),
        ({"optimizer": "adam"}, TypeError, "must be a torch.optim.Optimizer"),
        ({"optimizer": [SGD, SGD.__class__(MODEL.parameters(), lr=1.0)]}, ValueError, "first.weight belongs to two"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)}, ValueError, "None of the 2 parameters"),
        ({"optimizer": torch.optim.LBFGS(MODEL.parameters())}, ValueError, "LBFGS"),
        ({"clip_norm": 0}, ValueError, "clip_norm must be a number above 0 or None, got 0"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm must be a number above 0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, ValueError, "both given"),
        ({"accumulate": 0}, ValueError, "accumulate must be a whole number of at least 1, got 0"),
        ({"accumulate": True}, ValueError, "accumulate must be a whole number"),
        ({"accumulate": 1.5}, ValueError, "got 1.5"),
        ({"max_programs": 0}, ValueError, "max_programs"),
        ({"scaler": 2.0}, TypeError, "scaler must be a torch.amp.GradScaler, got float"),
        ({"scheduler": 3}, TypeError, "scheduler must be a torch.optim.lr_scheduler"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)}, ValueError, "call its step\\(\\) yourself"),
        ({"average": 1.0}, ValueError, "between 0 and 1"),
    ],
)
def test_a_bad_argument_is_refused_with_a_reason(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(**options)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="not one of this step's"):
        made(scheduler=torch.optim.lr_scheduler.ConstantLR(other))


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda m, b: 1.0, TypeError, "returned float"),
        (lambda m, b: ("no", m(b)), TypeError, "returned str first"),
        (lambda m, b: m(b), ValueError, r"a tensor of shape \[2, 4\]"),
        (lambda m, b: m(b).mean().detach(), ValueError, "does not depend on any parameter"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        made(loss=loss)(torch.ones(2, 6))


@pytest.mark.parametrize("mode", ["loop", "graph"])
def test_a_step_in_the_middle_of_anothers_micro_batches_is_an_error(mode: str, uncompiled: None) -> None:
    model, other = Mlp(), Mlp()
    first, second, apart = (
        lockstep.TrainStep(m, torch.optim.SGD(m.parameters(), lr=0.1), loss_of, accumulate=2, mode=mode)
        for m in (model, model, other)
    )
    for index in range(8):  # in turns
        for step in (first, second, apart):
            step(batch_of(index)), step(batch_of(index + 1))
    first(batch_of(0))
    apart(batch_of(0))  # nothing of it is the first one's
    with pytest.raises(RuntimeError, match=r"1 of 2 are in the gradients of first\.weight and others"):
        second(batch_of(0))
    first(batch_of(1))
    second(batch_of(0))
    with pytest.raises(RuntimeError, match="in the middle"):
        first(batch_of(0))
    second.reset()
    assert not first(batch_of(0))[0].requires_grad
    del first  # one that is gone is in nobody's way
    gc.collect()
    second(batch_of(0))


def test_a_step_that_nobody_has_any_more_is_in_nobodys_way() -> None:
    model = nn.Linear(6, 4)

    def made(accumulate: int) -> lockstep.TrainStep:
        return lockstep.TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, accumulate=accumulate, mode="loop"
        )

    gc.disable()
    try:
        first = made(2)
        first(batch_of(0))
        first.itself = first  # type: ignore[attr-defined]  # not freed before it is collected
        del first
        made(1)(batch_of(1))
    finally:
        gc.enable()


def test_steps_that_share_what_is_frozen_may_take_turns() -> None:
    frozen = nn.Linear(6, 4).requires_grad_(False)
    steps = []
    for _ in range(2):
        model = nn.Sequential(frozen, nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps.append(lockstep.TrainStep(model, optimizer, loss_of, accumulate=2, mode="loop"))
    for index in range(4):
        steps[index % 2](batch_of(index))
    assert [step.num_updates for step in steps] == [1, 1]
    frozen.requires_grad_(True)
    steps[0](batch_of(0))
    with pytest.raises(RuntimeError, match=r"the gradients of 0\.weight and others"):
        steps[1](batch_of(0))
