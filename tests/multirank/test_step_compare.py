"""Ranks compare their steps: what one of them does alone is an error on all, and what they may do alone is none.

The odd thing happens in step 3.  No rank may update its weights with what came out of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

from multirank.compare import assert_close
from multirank.harness import lockstep_only, run_ranks
from multirank.mixes import (
    COMPILE_THEN_WRAP,
    EAGER,
    PRELOAD,
    WRAP_THEN_COMPILE,
    Mix,
    Net,
    Side,
    average,
    loss_of,
    one_net,
    params_of,
    run_mix,
    train,
)

pytestmark = [pytest.mark.multirank, lockstep_only]

NUM_STEPS = 7
ODD = 3
WEIGHT = "blocks.1.linear.weight"


def usual(side: Side, t: int, num_passes: int = 1) -> None:
    side.optimizers[0].zero_grad()
    for index in range(num_passes):
        x = side.draw(t, index).to(side.modules[0].head.weight.dtype)
        loss_of(side.models[0](x), t).backward()
    side.optimizers[0].step()


def weight_of(side: Side) -> nn.Parameter:
    return side.modules[0].get_parameter(WEIGHT)


# ---------------------------------------------------------------- what one rank does alone


def freezes(side: Side, t: int) -> None:
    if t == ODD and side.rank == 1:
        weight_of(side).requires_grad_(False)
    usual(side, t)


def unfreezes(side: Side, t: int) -> None:
    if t == ODD and side.rank == 0:
        weight_of(side).requires_grad_(True)
    usual(side, t)


def passes_twice(side: Side, t: int) -> None:
    usual(side, t, num_passes=2 if t == ODD and side.rank == 0 else 1)


def does_not_synchronise(side: Side, t: int) -> None:
    with side.no_sync(t == ODD and side.rank == 1):
        usual(side, t)


def interrupted_pass(side: Side, t: int) -> None:
    """The hook runs when most or all buckets have left."""
    x = side.draw(t).requires_grad_()
    x.register_hook(lambda gradient: 1 / 0)
    side.optimizers[0].zero_grad()
    with pytest.raises(ZeroDivisionError):
        loss_of(side.models[0](x), t).backward()


def resets(side: Side, t: int) -> None:
    if t == ODD and side.rank == 1:
        interrupted_pass(side, t)
        side.wrappers[0].reset_sync_window()
    usual(side, t)


def resets_after_all_were_interrupted(side: Side, t: int) -> None:
    if t == ODD:
        interrupted_pass(side, t)
        if side.rank == 1:
            side.wrappers[0].reset_sync_window()
    usual(side, t)


def registers_a_hook(side: Side, t: int) -> None:
    if t == ODD and side.rank == 1:
        side.wrappers[0].register_comm_hook(None, default_hooks.allreduce_hook)
    usual(side, t)


def lowers_its_precision(side: Side, t: int) -> None:
    if t == ODD and side.rank == 1:
        side.modules[0].to(torch.bfloat16)
    usual(side, t)


def frozen_net() -> list[nn.Module]:
    net = Net()
    net.get_parameter(WEIGHT).requires_grad_(False)
    return [net]


@dataclass(frozen=True)
class Alone:
    step: Callable[[Side, int], None]
    build: Callable[[], list[nn.Module]] = one_net
    names_parameter: bool = False
    # Where it is the number of passes that differs, some ranks end their step before anyone can know.
    last_step: int = ODD
    makes_equal: Callable[[Side], Any] | None = None  # on all ranks, after which training goes on
    weights_differ: bool = False
    any_error: bool = False


def freeze(side: Side) -> None:
    weight_of(side).requires_grad_(False)


def unfreeze(side: Side) -> None:
    weight_of(side).requires_grad_(True)


def take_weights_of_rank_0(side: Side) -> None:
    """Without this it is an error on all ranks, again and again."""
    import lockstep

    for _ in range(2):
        with pytest.raises(lockstep.errors.Disagreement, match="take_weights_from=0"):
            side.wrappers[0].reset_sync_window()
    side.wrappers[0].reset_sync_window(take_weights_from=0)


ALONE = {
    "freezes": Alone(freezes, names_parameter=True, makes_equal=freeze),
    "unfreezes": Alone(unfreezes, frozen_net, names_parameter=True, makes_equal=unfreeze),
    "passes_twice": Alone(passes_twice, last_step=ODD + 1, makes_equal=take_weights_of_rank_0, weights_differ=True),
    "does_not_synchronise": Alone(
        does_not_synchronise, last_step=ODD + 1, makes_equal=take_weights_of_rank_0, weights_differ=True
    ),
    "resets": Alone(resets),
    "resets_after_all_were_interrupted": Alone(resets_after_all_were_interrupted, any_error=True),
    "registers_a_hook": Alone(registers_a_hook),
    "lowers_its_precision": Alone(lowers_its_precision, names_parameter=True),
}


@dataclass(frozen=True)
class Stop:
    """How a rank was stopped: by what, in which step, with how many updates made."""

    type_name: str
    text: str
    step: int
    digests: list[str]  # after each update


def train_until_stopped(name: str, mode: str, goes_on: bool = False) -> Stop:
    import lockstep

    alone = ALONE[name]
    mix = Mix(lambda side, t: None, alone.build)
    side = Side(mix, dist.get_rank(), mode)
    stop, step, digests = Stop("", "", -1, []), 0, []
    try:
        for step in range(NUM_STEPS):
            alone.step(side, step)
            digests.append(side.digest())
    except lockstep.errors.LockstepError as error:
        stop = Stop(type(error).__name__, str(error), step, digests)
    if goes_on:
        assert stop.type_name
        assert alone.makes_equal is not None
        if not alone.weights_differ:
            side.wrappers[0].reset_sync_window()
        alone.makes_equal(side)
        go_on(side, mix)
    return stop


def go_on(side: Side, mix: Mix) -> None:
    """With three steps, next to plain copies of all ranks."""
    copies = [Side(mix, rank, None) for rank in range(side.world)]
    for copy in copies:
        copy.modules[0].load_state_dict(side.modules[0].state_dict())
        for name, parameter in side.parameters.items():
            copy.parameters[name].requires_grad_(parameter.requires_grad)
    for step in range(10, 13):
        for each in (side, *copies):
            each.optimizers[0].zero_grad()
            each.loss(step).backward()
        assert_close(side.gradients(), average(copies), f"after the error, step {step}")
        for each in (side, *copies):
            each.optimizers[0].step()


def soak_unless(is_chosen: bool) -> list[pytest.MarkDecorator]:
    """What makes ranks differ is the same compiled: make test tries the first few of them so, make faults all."""
    return [] if is_chosen else [pytest.mark.soak]


def assert_has_table(text: str, world: int) -> None:
    """A line for each value, which begins with its ranks: ``rank 0, 2-3 | value``."""
    rows = re.findall(r"^ *ranks? ([\d, -]+?) *\|", text, re.MULTILINE)
    ranks: set[int] = set()
    for part in ",".join(rows).replace(" ", "").split(","):
        first, _, last = part.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1)) if first else set()
    assert ranks == set(range(world)), f"the message has no row for each rank:\n{text}"
    assert len(rows) > 1, f"the table has one value for all ranks:\n{text}"


@pytest.mark.parametrize(
    ("name", "mode", "world"),
    [
        pytest.param(name, mode, 3 if (index + number) % 3 == 0 else 2, marks=soak_unless(mode == EAGER or index < 5))
        for index, name in enumerate(ALONE)
        for number, mode in enumerate([EAGER, (WRAP_THEN_COMPILE, COMPILE_THEN_WRAP)[index % 2]])
    ],
)
def test_one_rank_alone(name: str, mode: str, world: int) -> None:
    alone = ALONE[name]
    stops = run_ranks(world, train_until_stopped, name, mode, preload=PRELOAD, limit_s=300)
    told = "\n".join(f"rank {rank}: step {s.step}: {s.type_name}: {s.text}" for rank, s in enumerate(stops))
    assert all(stop.type_name for stop in stops), f"not all ranks were told\n{told}"
    assert {stop.step for stop in stops} <= set(range(ODD, alone.last_step + 1)), told
    # Up to the odd step the weights are the same, and nobody updated them with what came out of it.
    for stop in stops:
        assert stop.digests[:ODD] == stops[0].digests[:ODD]
    if alone.any_error:
        return
    assert {stop.type_name for stop in stops} == {"Disagreement"}, told
    for stop in stops:
        assert_has_table(stop.text, world)
        assert WEIGHT in stop.text or not alone.names_parameter, f"the parameter is not named\n{told}"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=soak_unless(mode == EAGER or name in ("freezes", "passes_twice")))
        for name, alone in ALONE.items()
        if alone.makes_equal is not None
        for mode in (EAGER, WRAP_THEN_COMPILE)
    ],
)
def test_going_on_after_it(name: str, mode: str) -> None:
    run_ranks(2, train_until_stopped, name, mode, True, preload=PRELOAD, limit_s=300)


def reset_alone_then_all(mode: str) -> list[str]:
    """Rank 1 resets; the others hear of it where they wait, reset too, and repeat their step."""
    import lockstep

    side = Side(Mix(lambda side, t: None, one_net), dist.get_rank(), mode)
    digests = []
    for step in range(NUM_STEPS):
        try:
            resets(side, step)
        except lockstep.errors.Disagreement:
            assert (step, side.rank) == (ODD, 0)
            side.wrappers[0].reset_sync_window()
            usual(side, step)
        else:
            assert (step, side.rank) != (ODD, 0)
        digests.append(side.digest())
    go_on(side, Mix(lambda side, t: None, one_net))
    return digests


@pytest.mark.parametrize("mode", [EAGER, WRAP_THEN_COMPILE])
def test_a_reset_on_one_rank_is_joined_by_the_others(mode: str) -> None:
    first, second = run_ranks(2, reset_alone_then_all, mode, preload=PRELOAD, limit_s=300)
    assert first == second


# ---------------------------------------------------------------- a collective of the program's own


class Equal(nn.Module):
    """Every bucket is of the size of the program's own tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def equal() -> list[nn.Module]:
    return [Equal()]


def reduce_its_own(mode: str, is_misplaced: bool, is_async: bool) -> Stop:
    import lockstep

    side = Side(Mix(lambda side, t: None, equal, options={"check": "collective"}), dist.get_rank(), mode)
    assert len(side.wrappers[0].plan.buckets) == 4
    stop, step, digests = Stop("", "", -1, []), 0, []
    try:
        for step in range(5):
            side.optimizers[0].zero_grad()
            loss = loss_of(side.models[0](side.draw(step, shape=(4, 16))), step)
            own = torch.ones(256, dtype=torch.float64)
            comes_first = side.rank == 0 or step < ODD or not is_misplaced
            work = dist.all_reduce(own, async_op=is_async) if comes_first else None
            loss.backward()
            if not comes_first:
                work = dist.all_reduce(own, async_op=is_async)
            if work is not None:
                work.wait()
            assert own.eq(side.world).all()
            side.optimizers[0].step()
            digests.append(side.digest())
    except lockstep.errors.LockstepError as error:
        stop = Stop(type(error).__name__, str(error), step, digests)
    return stop if stop.type_name else Stop("", "", -1, digests)


@pytest.mark.parametrize("is_async", [False, True], ids=["waits", "async"])
@pytest.mark.parametrize("mode", [EAGER, WRAP_THEN_COMPILE])
def test_a_collective_at_another_place(mode: str, is_async: bool) -> None:
    stops = run_ranks(2, reduce_its_own, mode, True, is_async, preload=PRELOAD, limit_s=300)
    for stop in stops:
        assert (stop.type_name, stop.step) == ("Disagreement", ODD), stop.text
        assert_has_table(stop.text, 2)
        assert "all_reduce" in stop.text.lower() or "allreduce" in stop.text.lower()
        assert "test_step_compare.py" in stop.text, "where the collective of its own was issued is not said"
        assert stop.digests == stops[0].digests


class SumInBackward(torch.autograd.Function):
    """Adds its gradient up over all ranks, as norms over all ranks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class EqualWithSums(Equal):
    """As above, and sums of the same size in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(SumInBackward.apply(x)))
        return x


def equal_with_sums() -> list[nn.Module]:
    return [EqualWithSums()]


def sum_in_backward(mode: str, odd_rank: int) -> Stop:
    """From step 2 on, one rank has a hook on a parameter, which a compiled backward leaves to the hooks."""
    import lockstep

    side = Side(Mix(lambda side, t: None, equal_with_sums), dist.get_rank(), mode)
    stop, step, digests = Stop("", "", -1, []), 0, []
    try:
        for step in range(4):
            if step == ODD and side.rank == odd_rank:
                for layer in side.modules[0].layers:
                    layer.weight.register_hook(lambda gradient: None)
            side.optimizers[0].zero_grad()
            x = side.draw(step, shape=(16, 16)).requires_grad_()
            loss_of(side.models[0](x), step).backward()
            side.optimizers[0].step()
            digests.append(side.digest())
    except lockstep.errors.LockstepError as error:
        stop = Stop(type(error).__name__, str(error), step, digests)
    return stop if stop.type_name else Stop("", "", -1, digests)


@pytest.mark.parametrize(("mode", "odd_rank"), [(EAGER, 1), (WRAP_THEN_COMPILE, -1), (WRAP_THEN_COMPILE, 1)])
def test_collectives_in_the_backward(mode: str, odd_rank: int) -> None:
    """They are paired up with buckets where ranks compute in different ways; nothing is updated with that."""
    stops = run_ranks(2, sum_in_backward, mode, odd_rank, preload=PRELOAD, limit_s=300)
    for stop in stops:
        assert stop.digests == stops[0].digests
        if mode == EAGER or odd_rank < 0:
            assert (stop.type_name, len(stop.digests)) == ("", 4), stop.text
        else:
            assert (stop.type_name, stop.step) == ("Disagreement", ODD), stop.text
            assert_has_table(stop.text, 2)
            assert "before bucket" in stop.text
            assert "dist.new_group()" in stop.text


@pytest.mark.parametrize("mode", [EAGER, WRAP_THEN_COMPILE])
def test_collectives_at_the_same_place(mode: str) -> None:
    first, second = run_ranks(2, reduce_its_own, mode, False, True, preload=PRELOAD, limit_s=300)
    assert first.type_name == second.type_name == ""
    assert first.digests == second.digests
    assert len(first.digests) == 5


# ---------------------------------------------------------------- models in another order


def two_equal() -> list[nn.Module]:
    return [Equal(), Equal()]


def in_another_order(check: str, way: str) -> Stop:
    """Rank 1 comes to the models the other way round: in passes of their own, or where a checkpoint repeats one."""
    import lockstep

    mix = Mix(lambda side, t: None, two_equal, options={"check": check}, is_built_backwards=way == "checkpoint")
    side = Side(mix, dist.get_rank(), EAGER)
    step = 0
    try:
        for step in range(ODD + 2):
            side.optimizers[0].zero_grad()
            x = side.draw(step, shape=(4, 16))
            is_odd = side.rank == 1 and step == ODD
            if way == "passes":
                for model in reversed(side.models) if is_odd else side.models:
                    loss_of(model(x), step).backward()
            else:
                x = x.requires_grad_(is_odd)
                outputs = [checkpoint(m, x, use_reentrant=True) if is_odd else m(x) for m in side.models]
                torch.stack([loss_of(output, step) for output in outputs]).sum().backward()
            side.optimizers[0].step()
    except lockstep.errors.LockstepError as error:
        return Stop(type(error).__name__, str(error), step, [])
    return Stop("", "", step, [])


@pytest.mark.parametrize("way", ["passes", "checkpoint"])
@pytest.mark.parametrize("check", ["step", "collective"])
def test_models_in_another_order_are_named(check: str, way: str) -> None:
    for stop in run_ranks(2, in_another_order, check, way, preload=PRELOAD, limit_s=300):
        assert (stop.type_name, stop.step) == ("Disagreement", ODD), stop.text
        assert_has_table(stop.text, 2)
        assert "wrappers/0" in stop.text
        assert "wrappers/1" in stop.text


# ---------------------------------------------------------------- what ranks may do


def simple(side: Side, t: int) -> None:
    side.loss(t).backward()


def uneven_micro_batches(side: Side, t: int) -> None:
    num = [1, 4, 2][(side.rank + t) % 3]
    for index in range(num):
        with side.no_sync(index < num - 1):
            (side.loss(t, index) / num).backward()


def scaled(side: Side, t: int) -> Iterator[None]:
    """In steps 2 and 3 gradients are infinite, and the scaler skips the update."""
    scaler = side.memory.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
    (optimizer,) = side.optimizers
    optimizer.zero_grad()
    is_lost = t in (2, 3)
    scaler.scale(side.loss(t) * (float("inf") if is_lost else 1.0)).backward()
    if not is_lost:  # an infinite gradient cannot be compared
        yield
    before = side.digest()
    scaler.step(optimizer)
    scaler.update()
    assert (side.digest() == before) == is_lost
    if is_lost:
        optimizer.zero_grad()


def two_optimizers(side: Side, t: int) -> Iterator[None]:
    parameters = list(side.parameters.values())
    optimizers = side.memory.setdefault(
        "optimizers", [torch.optim.SGD(parameters[:3], lr=0.05), torch.optim.Adam(parameters[3:], lr=0.01)]
    )
    for optimizer in optimizers:
        optimizer.zero_grad()
    side.loss(t).backward()
    yield
    for optimizer in optimizers:
        optimizer.step()


def every_second_window(side: Side, t: int) -> Iterator[None]:
    """What was reduced stays in .grad, and the next window adds to it."""
    (optimizer,) = side.optimizers
    side.loss(t).backward()
    yield
    if t % 2:
        optimizer.step()
        optimizer.zero_grad()


def sharded_optimizer(side: Side, t: int) -> Iterator[None]:
    if "optimizer" not in side.memory:
        parameters = list(side.parameters.values())
        side.memory["optimizer"] = (
            torch.optim.SGD(parameters, lr=0.05)
            if side.is_reference
            else ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=0.05)
        )
    optimizer = side.memory["optimizer"]
    optimizer.zero_grad()
    side.loss(t).backward()
    yield
    optimizer.step()


def no_optimizer(side: Side, t: int) -> Iterator[None]:
    for parameter in side.parameters.values():
        parameter.grad = None
    side.loss(t).backward()
    yield
    with torch.no_grad():
        for parameter in side.parameters.values():
            parameter -= 0.05 * parameter.grad


def closure(side: Side, t: int) -> Iterator[None]:
    """The optimizer itself calls for the gradients; it cannot for the copies, which are averaged in between."""

    def evaluate() -> Tensor:
        side.optimizers[0].zero_grad()
        loss = side.loss(t)
        loss.backward()
        return loss

    if side.is_reference:
        evaluate()
        yield
        side.optimizers[0].step()
    else:
        side.optimizers[0].step(evaluate)
        yield


def rank_0_has_more_to_do(side: Side, t: int) -> None:
    """A model of its own, which is not wrapped, with an optimizer; evaluation; a look at gradients."""
    side.loss(t).backward()
    if side.rank == 0 and t >= 2:
        own = side.memory.setdefault("own", nn.Linear(8, 2).double())
        optimizer = side.memory.setdefault("optimizer", torch.optim.Adam(own.parameters()))
        own(side.draw(t)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            side.models[0](side.draw(t, 5))
        assert all(p.grad.isfinite().all() for p in side.parameters.values())


def harmless(step: Any, **options: Any) -> Mix:
    return Mix(step, one_net, **{"modes": (EAGER, WRAP_THEN_COMPILE), **options})


MAY = {
    "uneven_micro_batches": harmless(uneven_micro_batches, worlds=(3,), modes=(EAGER, COMPILE_THEN_WRAP)),
    "scaled": harmless(scaled, one_optimizer=False),
    "two_optimizers": harmless(two_optimizers, one_optimizer=False, soaks=(WRAP_THEN_COMPILE,)),
    "every_second_window": harmless(every_second_window, one_optimizer=False, modes=(EAGER, COMPILE_THEN_WRAP)),
    "sharded_optimizer": harmless(sharded_optimizer, one_optimizer=False),
    "no_optimizer": harmless(no_optimizer, one_optimizer=False, soaks=(WRAP_THEN_COMPILE,)),
    "closure": harmless(closure, one_optimizer=False, soaks=(WRAP_THEN_COMPILE,)),
    "rank_0_has_more_to_do": harmless(rank_0_has_more_to_do),
    "check_off": harmless(simple, options={"check": "off"}, modes=(EAGER, WRAP_THEN_COMPILE, COMPILE_THEN_WRAP)),
    "check_collective": harmless(uneven_micro_batches, options={"check": "collective"}, worlds=(3,)),
}


def run(name: str, mode: str, backend: str) -> list[str]:
    return train(MAY[name], mode, backend)


@pytest.mark.parametrize(("name", "mode", "backend", "world"), params_of(MAY))
def test_what_ranks_may_do(name: str, mode: str, backend: str, world: int) -> None:
    run_mix(run, MAY, name, mode, backend, world)


def join(mode: str) -> str:
    mix = Mix(simple, one_net)
    num_steps = [3, 6, 5]
    ours = Side(mix, dist.get_rank(), mode)
    copies = [Side(mix, rank, None) for rank in range(ours.world)]
    with ours.wrappers[0].join():
        for step in range(num_steps[ours.rank]):
            for side in (ours, *copies):
                side.optimizers[0].zero_grad()
                if step < num_steps[side.rank]:
                    side.loss(step).backward()
            assert_close(ours.gradients(), average(copies), f"rank {ours.rank}, step {step}")
            for side in (ours, *copies):
                side.optimizers[0].step()
    return ours.digest()


@pytest.mark.parametrize("mode", [EAGER, WRAP_THEN_COMPILE])
def test_uneven_inputs(mode: str) -> None:
    assert len(set(run_ranks(3, join, mode, preload=PRELOAD, limit_s=300))) == 1


def test_check_is_one_of_three() -> None:
    for error in run_ranks(2, wrap_with_another_check):
        assert "collective" in error


def wrap_with_another_check() -> str:
    import lockstep

    with pytest.raises(ValueError, match="check") as caught:
        lockstep.DDP(Net(), check="always")
    return str(caught.value)
