"""Gradients that a compiled backward delivers, in a world of one: what must hold around the usual step."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lockstep
from lockstep import errors
from lockstep.engine.grad_memory import GradMemory

ONE_EACH = 1e-5  # MiB: every parameter is a bucket


pytestmark = pytest.mark.usefixtures("world_of_one")


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def compiled(module: nn.Module, **options: Any) -> tuple[lockstep.DDP, Any]:
    ddp = lockstep.DDP(module, **{"bucket_cap_mb": ONE_EACH, **options})
    return ddp, torch.compile(ddp, backend="aot_eager")


def steps(ddp: lockstep.DDP, model: Any, num: int = 4) -> None:
    for _ in range(num):
        ddp.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)


def test_buckets_leave_inside_the_graph_from_the_first_step_on() -> None:
    ddp, model = compiled(two_layers())
    came = []
    for _ in range(3):
        ddp.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        came.append(all(bucket.left_in_graph for bucket in ddp.reducer.buckets))
    assert came == [True, True, True]


def test_a_graph_that_ends_in_the_loss_launches_too() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().sum()

    ddp, model = compiled(Loss())
    for _ in range(2):
        ddp.zero_grad()
        model(torch.ones(2, 4)).backward()
        assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)


def test_two_forwards_and_one_backward_leave_inside_the_graph() -> None:
    module = two_layers()
    reference = copy.deepcopy(module)
    ddp, model = compiled(module)
    for step in range(3):
        x, y = torch.randn(2, 4), torch.randn(2, 4)
        for owner, run in ((ddp, model), (reference, reference)):
            owner.zero_grad(set_to_none=step != 1)
            (run(x).square().sum() + run(y).sum()).backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()])
        assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)


def test_a_forward_whose_backward_never_comes_holds_nothing_back() -> None:
    ddp, model = compiled(two_layers())
    for _ in range(3):
        ddp.zero_grad()
        unused = model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)
        assert unused.grad_fn is not None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_blocks_compiled_one_by_one_inside_a_checkpoint(use_reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    module = Blocks()
    reference = copy.deepcopy(module)
    for block in module.blocks:
        block.compile(backend="aot_eager")
    ddp = lockstep.DDP(module, bucket_cap_mb=ONE_EACH)
    for _ in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        for owner in (ddp, reference):
            owner.zero_grad()
            owner(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()])
        assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)


def test_a_backward_without_a_forward_is_reduced_by_itself() -> None:
    ddp, model = compiled(two_layers())
    steps(ddp, model)
    ddp.zero_grad()
    ddp.module[1](torch.ones(2, 4)).sum().backward()
    assert ddp.step.state.value == "idle"
    assert ddp.module[0].weight.grad is None
    assert ddp.module[1].weight.grad is not None
    steps(ddp, model)


def test_a_forward_whose_backward_misses_parameters_stops_the_next_one_and_the_optimizer() -> None:
    module = two_layers()
    ddp, model = compiled(module)
    steps(ddp, model)
    ddp.zero_grad()
    model(torch.ones(2, 4))
    ddp.module[1](torch.ones(2, 4)).sum().backward()
    assert ddp.step.state.value == "open"
    with pytest.raises(errors.UnfinishedReduction, match=r"0\.weight"):
        model(torch.ones(2, 4))
    with pytest.raises(errors.UnreducedGradients):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    ddp.reset_sync_window()
    steps(ddp, model)


def test_an_unrelated_optimizer_may_step_in_the_middle_of_the_backward() -> None:
    ddp, model = compiled(two_layers(), bucket_cap_mb=25)
    other = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([other], lr=0.1)
    other.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    for _ in range(4):
        ddp.zero_grad()
        model(torch.ones(2, 4) * other).sum().backward()
    assert not torch.equal(other.detach(), torch.ones(4))


def test_memory_order_changed_after_wrapping() -> None:
    conv = nn.Conv2d(3, 4, 3)
    reference = copy.deepcopy(conv).to(memory_format=torch.channels_last)
    ddp, model = compiled(conv)
    ddp.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    expected = torch.autograd.grad(reference(x).square().sum(), list(reference.parameters()))
    for synchronises in (True, True, False):
        ddp.zero_grad()
        ddp.require_backward_grad_sync = synchronises
        model(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in conv.parameters()], list(expected))
    local = torch.autograd.grad(model(x).square().sum(), list(conv.parameters()))
    torch.testing.assert_close(list(local), list(expected))


def test_owned_gradients_stay_where_they_are() -> None:
    module = two_layers()
    ddp, model = compiled(module, gradient_as_bucket_view=False)
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    offset = 0
    for parameter in module.parameters():
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    for _ in range(4):
        ddp.zero_grad(set_to_none=False)
        model(torch.ones(2, 4)).sum().backward()
        found = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        assert torch.equal(flat, found)
        assert flat.abs().sum() > 0


def test_accumulated_gradients_survive_an_error() -> None:
    module = two_layers()
    ddp, model = compiled(module, gradient_as_bucket_view=True)
    steps(ddp, model)
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x).sum()
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    ddp.reset_sync_window()
    torch.testing.assert_close([p.grad for p in module.parameters()], before)
    steps(ddp, model)


def test_a_backward_for_some_inputs_leaves_the_others_alone() -> None:
    module = two_layers()
    ddp, model = compiled(module, bucket_cap_mb=25)
    steps(ddp, model)
    first = ddp.reducer.buckets[0].slots[0].parameter
    others = {name: p.grad.clone() for name, p in module.named_parameters() if p is not first and p.grad is not None}
    model(torch.ones(2, 4)).sum().backward(inputs=[first])
    for name, gradient in others.items():
        torch.testing.assert_close(module.get_parameter(name).grad, gradient)


def test_what_comes_from_outside_of_the_graph_is_added_and_the_bucket_is_held_the_next_time() -> None:
    module = two_layers()
    ddp, model = compiled(module, bucket_cap_mb=25)
    steps(ddp, model)
    reference = copy.deepcopy(module)
    waits = []
    for has_penalty in (True, True, False, False):
        for owner, run in ((module, model), (reference, reference)):
            owner.zero_grad()
            penalty = sum(p.square().sum() for p in owner.parameters()) if has_penalty else 0.0
            (run(torch.ones(2, 4)).sum() + penalty).backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()])
        waits.append(ddp.reducer.buckets[0].waits_for_end)
    assert waits == [True, True, False, False]


def test_a_use_before_the_graph_is_part_of_what_a_hook_sees() -> None:
    """A parameter used eagerly before the compiled part: its two gradients are added where they meet."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.trunk = nn.Linear(4, 4)
            self.trunk.compile(backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.trunk(x @ self.weight + self.trunk.weight.sum())

    module = Tied()
    ddp = lockstep.DDP(module, bucket_cap_mb=ONE_EACH)
    seen: list[Tensor] = []

    def hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        seen.append(bucket.buffer().clone())
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
    reference = Tied()
    reference.load_state_dict(module.state_dict())
    reference.trunk._compiled_call_impl = None
    reference(torch.ones(2, 4)).sum().backward()
    (index,) = [bucket.index for bucket in ddp.reducer.buckets if bucket.spec.names == ("trunk.weight",)]
    for step in range(4):
        flat = seen[step * len(ddp.reducer.buckets) + index]
        torch.testing.assert_close(flat.view(4, 4), reference.trunk.weight.grad)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_second_wrapper_around_the_same_parameters_is_known(is_compiled: bool) -> None:
    module = two_layers()
    ddp, model = compiled(module, bucket_cap_mb=25)
    if is_compiled:
        steps(ddp, model)
    second = lockstep.DDP(module[0])
    assert ddp.step.memory_is_shared
    assert second.step.memory_is_shared
    second._remove_autograd_hooks()
    assert not ddp.step.memory_is_shared


def test_a_second_wrapper_that_is_gone_leaves_the_first_as_it_was() -> None:
    module = two_layers()
    ddp, model = compiled(module, bucket_cap_mb=25)
    steps(ddp, model)
    lockstep.DDP(module)
    for _ in range(3):
        ddp.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert ddp.step.state.value == "idle"
        assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_keeps_its_layout_when_it_is_compiled(duplicate: Any) -> None:
    ddp = lockstep.DDP(two_layers())
    twin = duplicate(ddp)
    before = twin.plan.digest
    steps(twin, torch.compile(twin, backend="aot_eager"))
    assert twin.plan.digest == before


def test_an_optimizer_in_the_backward_waits_for_what_the_graph_delivered() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    module, reference = Blocks(), Blocks()
    reference.load_state_dict(module.state_dict())
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    module.blocks[2].compile(backend="aot_eager")
    ddp = lockstep.DDP(module, bucket_cap_mb=ONE_EACH)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(4):
        ddp(torch.ones(2, 4)).square().mean().backward()
        reference(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(list(module.parameters()), list(reference.parameters()))


def test_a_dispatch_mode_around_the_first_backward() -> None:
    """Inside an operator that such a mode called autograd cannot be asked; the hooks reduce then."""
    ddp, model = compiled(two_layers())
    loss = model(torch.ones(2, 4)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() > 0
    assert all(p.grad is not None for p in ddp.parameters())
    steps(ddp, model)
    assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)


@pytest.mark.parametrize("is_view", [None, False])
def test_buckets_that_one_call_packs(monkeypatch: pytest.MonkeyPatch, is_view: bool | None) -> None:
    """As on a GPU, where no buffer is kept."""
    monkeypatch.setattr(
        GradMemory, "_one_call_packs", lambda self, bucket, slots, dtypes, dtype: len(slots) == len(bucket.slots) > 1
    )
    reference = two_layers()
    ddp, model = compiled(copy.deepcopy(reference), bucket_cap_mb=25, gradient_as_bucket_view=is_view)
    for _ in range(4):
        x = torch.randn(2, 4)
        for module, run in ((ddp, model), (reference, reference)):
            module.zero_grad()
            run(x).square().sum().backward()
        for mine, right in zip(ddp.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad)
    assert all(bucket.left_in_graph for bucket in ddp.reducer.buckets)
