"""Ranks compare what they update by and what their weights have become: what drifts apart is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

NUM_STEPS = 14
ODD = 3
NUM_PARAMETERS = 4

Model, Optimizer = Any, torch.optim.Optimizer


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrap(module: nn.Module, mode: str) -> Model:
    import lockstep

    if mode == "sharded":
        return lockstep.fully_shard(module)
    if mode == "compile, wrap":
        return lockstep.DDP(torch.compile(module, backend="aot_eager"))
    model = lockstep.DDP(module)
    return torch.compile(model, backend="aot_eager") if mode == "wrap, compile" else model


# ---------------------------------------------------------------- what makes ranks drift apart, on rank 1


def other_rate(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 1.001


def other_decay(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


def other_weight(module: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        module.get_parameter("2.weight").mul_(1.01)


def other_state(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


Change = Callable[[nn.Module, Optimizer], None]
CHANGES: dict[str, tuple[Change, str, int]] = {  # what, a word of the message, in how many steps it is seen
    "other_rate": (other_rate, "lr=0.05005", 1),
    "other_decay": (other_decay, "weight_decay=0.1", 1),
    "other_weight": (other_weight, "2.weight", NUM_PARAMETERS),
    "other_state": (other_state, "norm", NUM_PARAMETERS),
}


def drift(name: str, mode: str) -> tuple[str, int]:
    """What this rank is told, and in which step."""
    import lockstep

    change, _, _ = CHANGES[name]
    module = net()
    model = wrap(module, mode)
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        if step == ODD and dist.get_rank() == 1:
            change(module, optimizer)
        optimizer.zero_grad()
        try:
            model(torch.randn(4, 8)).square().mean().backward()
        except lockstep.errors.Disagreement as error:
            return str(error), step
        optimizer.step()
    return "", NUM_STEPS


# Ranks of a sharded model have different weights: there is nothing to compare but settings.
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in CHANGES for mode in ("eager", "wrap, compile", "compile, wrap")]
    + [("other_rate", "sharded"), ("other_decay", "sharded")],
)
def test_a_rank_that_drifts_is_an_error_on_all(name: str, mode: str) -> None:
    _, word, num_steps = CHANGES[name]
    told = run_ranks(3 if mode == "eager" else 2, drift, name, mode, limit_s=300)
    assert len(set(told)) == 1, told
    text, step = told[0]
    assert word in text, told
    assert "rank 1" in text, text
    assert ODD <= step <= ODD + num_steps, told


def begin_unequal() -> str:
    import lockstep

    model = lockstep.DDP(net(), init_sync=False)  # the harness gives each rank another seed
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        model(torch.randn(4, 8)).sum().backward()
    return str(caught.value)


def test_weights_that_were_never_equal() -> None:
    for text in run_ranks(2, begin_unequal):
        assert "init_sync=False" in text
        assert "0.weight" in text


def go_on_from_rank_0() -> list[float]:
    import lockstep

    module = net()
    model = lockstep.DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if dist.get_rank() == 1:
        other_rate(module, optimizer)
    for step in range(2):
        try:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        except lockstep.errors.Disagreement:
            assert step == 1
    with pytest.raises(lockstep.errors.Disagreement, match="take_weights_from"):
        model.reset_sync_window()
    model.reset_sync_window(take_weights_from=0)
    optimizer.param_groups[0]["lr"] = 0.05
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def test_going_on_with_equal_weights() -> None:
    first, second = run_ranks(2, go_on_from_rank_0)
    assert first == second


# ---------------------------------------------------------------- in a train step


def drift_in_a_program(name: str) -> tuple[str, int, int]:
    import lockstep

    change, _, _ = CHANGES[name]
    module = net()
    model = lockstep.DDP(module)
    optimizer = sgd(model)
    train = lockstep.TrainStep(model, optimizer, lambda model, x: model(x).square().mean(), mode="graph")
    for step in range(NUM_STEPS):
        if step == ODD and dist.get_rank() == 1:
            change(module, optimizer)
        try:
            train(torch.randn(4, 8))
        except lockstep.errors.Disagreement as error:
            return str(error), step, train.explain().num_program_calls
    return "", NUM_STEPS, 0


@pytest.mark.parametrize("name", ["other_rate", "other_weight", "other_state"])
def test_a_program_of_the_whole_step(name: str) -> None:
    _, word, num_steps = CHANGES[name]
    told = run_ranks(2, drift_in_a_program, name, limit_s=300)
    assert len(set(told)) == 1, told
    text, step, num_program_calls = told[0]
    assert word in text, text
    assert ODD <= step <= ODD + num_steps
    assert num_program_calls > 0
    if name == "other_rate":  # known before it is used
        assert step == ODD
        assert "No rank has updated its weights" in text


# ---------------------------------------------------------------- what ranks may do alone


def zero(model: Model, rank: int) -> list[Optimizer]:
    return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)]


def halves(model: Model, rank: int) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:], lr=0.01)]


def other_kernels(model: Model, rank: int) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, fused=rank == 1, foreach=False if rank == 1 else None)]


def rate_as_tensor(model: Model, rank: int) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))]


class OwnShare(torch.optim.SGD):
    """Each rank updates some of the parameters, by rates of their own, and is given the others."""

    def __init__(self, model: Model, rank: int) -> None:
        self.everything = list(model.parameters())
        mine = [{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(self.everything) if i % 2 == rank]
        super().__init__(mine)

    def step(self, closure: Any = None) -> None:
        super().step()
        for index, parameter in enumerate(self.everything):
            dist.broadcast(parameter.data, index % 2)


def own_share(model: Model, rank: int) -> list[Optimizer]:
    return [OwnShare(model, rank)]


def other_order(model: Model, rank: int) -> list[Optimizer]:
    """Each parameter has its own rate; the groups come out of a set, in an order of this process's own."""
    groups = [{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(model.parameters())]
    return [torch.optim.SGD(groups[::-1] if rank else groups)]


def zero_with_nothing_to_do(model: Model, rank: int) -> list[Optimizer]:
    """So few parameters that one rank has none of them to update."""
    first, *others = model.parameters()
    return [
        ZeroRedundancyOptimizer([first], torch.optim.AdamW, lr=0.01),
        ZeroRedundancyOptimizer(others, torch.optim.AdamW, lr=0.02),
    ]


ALLOWED = {
    f.__name__: f
    for f in (zero, halves, other_kernels, rate_as_tensor, own_share, other_order, zero_with_nothing_to_do)
}


def train_so(name: str) -> None:
    import lockstep

    model = lockstep.DDP(net())
    optimizers = ALLOWED[name](model, dist.get_rank())
    for _ in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("name", ALLOWED)
def test_what_ranks_may_do(name: str) -> None:
    run_ranks(2, train_so, name)


def told_after_an_update(model: Model, optimizers: list[Optimizer]) -> str:
    """What a rank is told in the backward that follows one update."""
    import lockstep

    model(torch.randn(4, 8)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        loss.backward()
    return str(caught.value)


def halves_with_another_rate() -> str:
    import lockstep

    model = lockstep.DDP(net())
    optimizers = halves(model, 0)
    if dist.get_rank() == 1:
        optimizers[1].param_groups[0]["lr"] = 0.02
    return told_after_an_update(model, optimizers)


def test_one_of_several_optimizers() -> None:
    for text in run_ranks(2, halves_with_another_rate):
        assert "lr=0.02" in text
        assert "lr=0.1" not in text  # the other optimizer is the same everywhere


def learn_locally() -> bool:
    """Ranks go their own ways on purpose, between averages of their weights."""
    import lockstep

    model = lockstep.DDP(net())
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, model.module[0].weight.detach())
    return torch.equal(*everyones)


def test_a_hook_that_lets_ranks_differ() -> None:
    assert run_ranks(2, learn_locally) == [False, False]


def train_unchecked() -> None:
    import lockstep

    module = net()
    model = lockstep.DDP(module, check="off")
    optimizer = sgd(model)
    if dist.get_rank() == 1:
        other_rate(module, optimizer)
        other_weight(module, optimizer)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def test_it_can_be_turned_off() -> None:
    run_ranks(2, train_unchecked)


def train_unevenly() -> list[float]:
    """A rank that has run out of data makes fewer updates, by rates of earlier steps."""
    import lockstep

    module = net()
    model = lockstep.DDP(module)
    optimizer = sgd(model)
    for _ in range(2):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with model.join():
            for _ in range(6 + 4 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                schedule.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        optimizer.state.clear()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def test_uneven_inputs() -> None:
    first, second = run_ranks(2, train_unevenly)
    assert first == second
