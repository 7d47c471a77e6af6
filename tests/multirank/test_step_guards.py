"""What goes round the step: compiled optimizers, hooks that get lost, buckets left out, models in another order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch._functorch.aot_autograd")
ONE_EACH = 1e-5


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, goes_left: bool = True) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return self.left(x) if goes_left else self.right(x)


def batch(step: int = 0) -> Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def built(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def assert_ranks_equal(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        found = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(found, parameter.detach())
        for other in found:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


# ---------------------------------------------------------------- buckets left out as unused


def skip_what_is_unused(cap: float) -> str:
    import lockstep

    module = built(Branches)
    plain = copy.deepcopy(module)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = lockstep.DDP(module, bucket_cap_mb=cap, **options)
    goes_left = dist.get_rank() == 0
    try:
        ddp(batch(), goes_left).square().sum().backward()
    except lockstep.errors.Disagreement as error:
        return str(error)
    plain(batch(), goes_left).square().sum().backward()
    for parameter, alone in zip(module.parameters(), plain.parameters(), strict=True):
        mean = torch.zeros_like(alone) if alone.grad is None else alone.grad
        dist.all_reduce(mean)
        torch.testing.assert_close(parameter.grad, mean / dist.get_world_size())
    return ""


def test_unused_parameters_in_a_bucket_that_is_reduced() -> None:
    assert run_ranks(2, skip_what_is_unused, 25.0) == ["", ""]


def test_ranks_that_leave_out_different_buckets() -> None:
    first, second = run_ranks(2, skip_what_is_unused, ONE_EACH)
    assert first == second
    assert "buckets left out as unused" in first
    assert "right.weight" in first


# ---------------------------------------------------------------- parameters whose content is swapped


def swap_after_wrapping(how: str) -> None:
    import lockstep

    module = built(Branches)
    ddp = lockstep.DDP(module, find_unused_parameters=True)
    heard: list[str] = []
    module.left.bias.register_post_accumulate_grad_hook(lambda p: heard.append("left.bias"))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        target = ddp if how != "inner module" else module
        if how == "to":
            target.to(torch.float64)
            target.to(torch.float32)
        else:
            target.load_state_dict({k: v.clone() for k, v in target.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        ddp(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_ranks_equal(module)
    assert len(heard) == 3


@pytest.mark.parametrize("how", ["to", "load_state_dict", "inner module"])
def test_swapped_parameters_keep_their_hooks(how: str) -> None:
    run_ranks(2, swap_after_wrapping, how)


def swap_between_steps() -> str:
    """Where nothing tells of it: the module is looked at only now and then."""
    import lockstep

    module = built(lambda: nn.Linear(4, 3))
    ddp = lockstep.DDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(12):
        if step == 10:
            for parameter in module.parameters():
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        ddp(batch(step)).sum().backward()
        try:
            optimizer.step()
        except lockstep.errors.LockstepError as error:
            assert step == 10
            return str(error)
        optimizer.zero_grad()
    return ""


def test_lost_hooks_stop_the_optimizer() -> None:
    for text in run_ranks(2, swap_between_steps):
        assert "lost their hooks" in text
        assert "weight (Linear)" in text


# ---------------------------------------------------------------- optimizers


def step_compiled(rank_1_compiles: bool) -> None:
    import lockstep

    module = built(lambda: nn.Linear(4, 3))
    ddp = lockstep.DDP(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    compiles = dist.get_rank() == 0 or rank_1_compiles
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager") if compiles else optimizer.step
    for number in range(4):
        ddp(batch(number)).square().sum().backward()
        step()
        optimizer.zero_grad(set_to_none=False)
    assert ddp.step.num_updates == 4
    if rank_1_compiles:
        assert_ranks_equal(module)  # what a compiler makes of an optimizer has other bits


@pytest.mark.parametrize("rank_1_compiles", [True, False])
def test_a_compiled_optimizer_is_counted(rank_1_compiles: bool) -> None:
    run_ranks(2, step_compiled, rank_1_compiles, preload=PRELOAD)


def step_compiled_too_early() -> str:
    import lockstep

    module = built(Branches)
    ddp = lockstep.DDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    ddp(batch()).square().sum().backward()
    with pytest.raises(lockstep.errors.LockstepError) as caught:
        step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    return str(caught.value)


def test_a_compiled_optimizer_is_stopped() -> None:
    for text in run_ranks(2, step_compiled_too_early, preload=PRELOAD):
        assert "right.weight" in text


def only_rank_0_has_an_optimizer() -> None:
    import lockstep

    module = built(lambda: nn.Linear(4, 3))
    ddp = lockstep.DDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if dist.get_rank() == 0 else None
    for step in range(4):
        ddp(batch(step)).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
        module.zero_grad()
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
    assert_ranks_equal(module)


def test_ranks_that_are_given_their_weights() -> None:
    run_ranks(2, only_rank_0_has_an_optimizer)


def skip_an_update(sharded: bool) -> None:
    """Rank 1 misses an optimizer step: an error on all ranks, until the weights are equal again."""
    import lockstep

    module, start = built(lambda: nn.Linear(4, 4)), built(lambda: nn.Linear(4, 4)).state_dict()
    model = lockstep.fully_shard(module) if sharded else lockstep.DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()

    backward(0)
    if dist.get_rank() == 0:
        optimizer.step()
    with pytest.raises(lockstep.errors.Disagreement, match="optimizer steps so far"):
        backward(1)
    with pytest.raises(lockstep.errors.Disagreement, match="weights_are_equal=True"):
        model.reset_sync_window()
    plain = built(lambda: nn.Linear(4, 4))
    with torch.no_grad():
        for mine, value in zip(module.parameters(), start.values(), strict=True):
            whole = torch.distributed.tensor.distribute_tensor(value, mine.device_mesh) if sharded else value
            mine.copy_(whole.redistribute(placements=mine.placements) if sharded else whole)
    model.reset_sync_window(weights_are_equal=True)
    for step in range(2, 4):
        backward(step)
        plain.zero_grad()
        plain(batch(step)).square().sum().backward()
        for mine, alone in zip(module.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(alone.grad)
            alone.grad /= dist.get_world_size()
            torch.testing.assert_close(mine.grad.full_tensor() if sharded else mine.grad, alone.grad)
        optimizer.step()
        with torch.no_grad():
            for alone in plain.parameters():
                alone -= 0.1 * alone.grad


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_missed_update_is_an_error_until_weights_are_equal(sharded: bool) -> None:
    run_ranks(2, skip_an_update, sharded, limit_s=300)


def join_and_skip() -> None:
    import lockstep

    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    ddp = lockstep.DDP(built(Branches), **options)
    with pytest.raises(RuntimeError, match="does not go with join"), ddp.join():
        ddp(batch())


def test_join_does_not_go_with_left_out_buckets() -> None:
    run_ranks(2, join_and_skip, limit_s=300)


# ---------------------------------------------------------------- two models on one group


def backwards_in_another_order() -> str:
    import lockstep

    wrapped = [lockstep.DDP(built(lambda: nn.Linear(4, 3))) for _ in range(2)]
    for step in range(2):
        for ddp in wrapped:
            ddp(batch(step)).sum().backward()
    first = wrapped[0] if dist.get_rank() == 0 else wrapped[1]
    with pytest.raises(lockstep.errors.Disagreement) as caught:
        first(batch(2)).sum().backward()
    return str(caught.value)


def test_models_in_another_order() -> None:
    first, second = run_ranks(2, backwards_in_another_order)
    assert first == second
    assert "the model that is reduced" in first


def two_models_with_hooks_that_follow_up() -> None:
    """A hook that starts a second collective when its first is done, as PowerSGD does."""
    import lockstep

    def hook(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer, async_op=True)

        def again(future: Any) -> Tensor:
            summed = future.value()[0]
            return dist.all_reduce(summed, async_op=True).get_future().wait()[0] / 4

        return work.get_future().then(again)

    modules = [built(Branches) for _ in range(2)]
    plain = copy.deepcopy(modules)
    wrapped = [lockstep.DDP(m, bucket_cap_mb=ONE_EACH, find_unused_parameters=True) for m in modules]
    for ddp in wrapped:
        ddp.register_comm_hook(None, hook)
    for step in range(4):
        for group in (modules, plain):
            for module in group:
                module.zero_grad()
        sum(ddp(batch(step)).square().sum() for ddp in wrapped).backward()
        sum(module(batch(step)).square().sum() for module in plain).backward()
        for ours, alone in zip(modules, plain, strict=True):
            for parameter, local in zip(ours.parameters(), alone.parameters(), strict=True):
                if local.grad is not None:
                    dist.all_reduce(local.grad)
                    torch.testing.assert_close(parameter.grad, local.grad / 2)


def test_two_models_with_hooks_that_follow_up() -> None:
    run_ranks(2, two_models_with_hooks_that_follow_up, limit_s=300)
