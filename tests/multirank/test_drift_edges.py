"""What ranks compare between windows, at its edges: whose settings, which weights, and who is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from multirank.harness import lockstep_only, run_ranks
from multirank.test_drift import NUM_STEPS, Model, Optimizer, net, sgd, told_after_an_update

pytestmark = [pytest.mark.multirank, lockstep_only]


def other_members(model: Model) -> list[Optimizer]:
    """All ranks have a slow and a fast group, but not of the same parameters."""
    slow, fast = list(model.parameters())[:2], list(model.parameters())[2:]
    if dist.get_rank() == 1:
        slow, fast = fast, slow
    return [torch.optim.SGD([{"params": slow, "lr": 1e-9}, {"params": fast, "lr": 2e-9}])]


def a_part(model: Model) -> list[Optimizer]:
    """What trains and is in no optimizer stays as it is, on all ranks."""
    return [torch.optim.SGD(list(model.parameters())[:3], lr=1e-9 * (1 + dist.get_rank()))]


class Compiled(torch.optim.SGD):
    """A rate that differs by too little to be seen in weights, in a step that is compiled."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), lr=1e-9 * (1 + dist.get_rank()))
        self.step = torch.compile(super().step, backend="aot_eager")  # type: ignore[method-assign]


def compiled(model: Model) -> list[Optimizer]:
    return [Compiled(model)]


UNLIKE = {f.__name__: f for f in (other_members, a_part, compiled)}


def update_unlike(name: str) -> str:
    import lockstep

    model = lockstep.DDP(net())
    return told_after_an_update(model, UNLIKE[name](model))


@pytest.mark.parametrize("name", UNLIKE)
def test_settings_of_the_same_parameters_differ(name: str) -> None:
    for text in run_ranks(2, update_unlike, name):
        assert "other settings" in text
        assert "lr=1e-09" in text
        assert "lr=2e-09" in text


def begin_orthogonal() -> None:
    import lockstep

    module = nn.Linear(16, 16, bias=False)
    nn.init.orthogonal_(module.weight)  # of the same norm on all ranks
    model = lockstep.DDP(module, init_sync=False)
    with pytest.raises(lockstep.errors.Disagreement, match="weights of ranks differ"):
        model(torch.randn(4, 16)).sum().backward()


def test_other_weights_of_the_same_norm() -> None:
    run_ranks(2, begin_orthogonal)


def lookup(hook: str) -> list[str]:
    """Ranks whose weights are meant to differ, or do with any data parallelism."""
    import lockstep

    module = nn.Sequential(nn.Embedding(20, 8, max_norm=0.5 if hook == "renormalised" else None), nn.Linear(8, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = lockstep.DDP(module)
    if hook == "noop":
        model.register_comm_hook(None, noop_hook)
    elif hook == "part of the ranks":
        alone, _ = dist.new_subgroups(1)
        model.register_comm_hook(alone, allreduce_hook)
    optimizer = sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randint(0, 20, (4,))).square().mean().backward()
        optimizer.step()
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, module[0].weight.detach())
    assert not torch.equal(*everyones)
    return [str(warning.message) for warning in caught if "max_norm" in str(warning.message)]


@pytest.mark.parametrize("hook", ["noop", "part of the ranks", "renormalised"])
def test_ranks_that_differ_as_with_torch(hook: str) -> None:
    for told in run_ranks(2, lookup, hook):
        assert [("0.weight" in text) for text in told] == ([True] if hook == "renormalised" else [])


def slower(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def heavier(module: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


def frozen(module: nn.Module, optimizer: Optimizer) -> None:
    module.get_parameter("2.bias").requires_grad_(False)


UNEVEN = {"slower": (slower, "lr=0.01"), "heavier": (heavier, "weighted norm"), "frozen": (frozen, "2.bias")}


def differ_while_one_has_joined(name: str) -> str:
    """Rank 0 has run out of data when rank 2 begins to do something else than rank 1."""
    import lockstep

    module = net()
    model = lockstep.DDP(module)
    optimizer = sgd(model)
    rank = dist.get_rank()

    def train() -> None:
        with model.join():
            for step in range(2 if rank == 0 else NUM_STEPS):
                if step == 5 and rank == 2:
                    UNEVEN[name][0](module, optimizer)
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()

    with pytest.raises(lockstep.errors.Disagreement) as caught:
        train()
    return str(caught.value)


@pytest.mark.parametrize("name", UNEVEN)
def test_a_rank_without_data_is_told_too(name: str) -> None:
    told = run_ranks(3, differ_while_one_has_joined, name, limit_s=300)
    assert len(set(told)) == 1, told
    assert UNEVEN[name][1] in told[0], told
    assert "rank 2" in told[0]
    assert not any(line.strip().startswith("rank 0") for line in told[0].splitlines())


def along_local_gradients(model: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Sharpness-aware: each rank moves its weights along its own gradient."""
    with model.no_sync():
        model(x).square().mean().backward()
    moved = [0.5 * p.grad / p.grad.norm() for p in module.parameters()]
    module.zero_grad()
    return moved


def along_zeroed_gradients(model: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The same, where .grad stays and is zero."""
    with model.no_sync():
        model(x).square().mean().backward()
    moved = [0.5 * p.grad / p.grad.norm() for p in module.parameters()]
    module.zero_grad(set_to_none=False)
    return moved


def along_asked_gradients(model: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The same, by a backward that puts nothing into .grad."""
    gradients = torch.autograd.grad(model(x).square().mean(), list(module.parameters()))
    return [0.5 * gradient / gradient.norm() for gradient in gradients]


def by_chance(model: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Noise, another on each rank."""
    return [0.1 * torch.randn_like(p) for p in module.parameters()]


def by_chance_after_a_reduction(model: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The same in the middle of a step: a reduction came before, and no optimizer has stepped yet."""
    model(x).square().mean().backward()
    return by_chance(model, module, x)


NOISE = (by_chance, by_chance_after_a_reduction)
MOVES = {f.__name__: f for f in (along_local_gradients, along_zeroed_gradients, along_asked_gradients, *NOISE)}


def perturb(move: str, *, by_hand: bool) -> list[float]:
    """Each rank moves its weights for a while, and puts them back before the update."""
    import lockstep

    module = net()
    model = lockstep.DDP(module)
    optimizer = sgd(model)
    for _ in range(NUM_STEPS):
        x = torch.randn(4, 8)
        before = [p.detach().clone() for p in module.parameters()]
        moved = MOVES[move](model, module, x)
        with torch.no_grad():
            torch._foreach_add_(list(module.parameters()), moved)
        model(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_copy_(list(module.parameters()), before)
            if by_hand:
                torch._foreach_sub_(list(module.parameters()), [0.05 * p.grad for p in module.parameters()])
        if not by_hand:
            optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


# What moves before any forward cannot be told from an update by hand.
CASES = [(name, by_hand) for name in MOVES for by_hand in (False, True) if not by_hand or MOVES[name] not in NOISE]


@pytest.mark.parametrize(("move", "by_hand"), CASES)
def test_weights_that_differ_on_purpose_within_a_step(move: str, by_hand: bool) -> None:
    first, second = run_ranks(2, perturb, move, by_hand=by_hand)
    assert first == second


def update_by_hand() -> str:
    """No optimizer: weights are looked at as a forward begins."""
    import lockstep

    module = net()
    model = lockstep.DDP(module)
    for _ in range(NUM_STEPS):
        model.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        try:
            loss.backward()
        except lockstep.errors.Disagreement as error:
            return str(error)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * (1 + dist.get_rank()) * parameter.grad
    return ""


def test_updates_by_hand() -> None:
    for text in run_ranks(2, update_by_hand):
        assert "weights of ranks differ" in text


def grow_nothing() -> int:
    import lockstep

    model = lockstep.DDP(net(), check="off")
    optimizer = sgd(model)
    for step in range(40):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return len(model.step.drift._updates)


def test_nothing_is_remembered_where_nothing_is_compared() -> None:
    assert run_ranks(2, grow_nothing) == [0, 0]
