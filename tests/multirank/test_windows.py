"""Windows that span several backward passes, and wrappers that come and go."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

ROWS = 3


class TwoHeads(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(4, width)
        self.head_a = nn.Linear(width, width)
        self.head_b = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.head_a(x), self.head_b(x)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(step))


def mine(x: Tensor) -> Tensor:
    return x[dist.get_rank() * ROWS : (dist.get_rank() + 1) * ROWS]


def losses(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    a, b = outputs
    return a.pow(2).mean(), b.abs().mean()


def assert_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q[1].grad, msg=lambda m, n=name: f"{n}: {m}")


def one_backward_per_loss(bucket_cap_mb: float, ownership: bool | None, width: int) -> None:
    """Two backward passes share the trunk: the first misses one head, the second adds to what has left already."""
    import lockstep

    module, reference = TwoHeads(width), TwoHeads(width)
    ddp = lockstep.DDP(module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=ownership)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    for step in range(3):
        x = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        first, second = losses(ddp(mine(x)))
        second.backward(retain_graph=True)
        first.backward()
        sum(losses(reference(x))).backward()
        assert_same_gradients(module, reference)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("ownership", [None, True, False], ids=["alias", "persistent", "own"])
@pytest.mark.parametrize("bucket_cap_mb", [0.00001, 25], ids=["one parameter per bucket", "one bucket"])
@pytest.mark.parametrize("width", [6, 150], ids=["small", "staged"])  # 150 x 150 floats are staged one by one
def test_two_partial_backward_passes_make_one_window(bucket_cap_mb: float, ownership: bool | None, width: int) -> None:
    run_ranks(3, one_backward_per_loss, bucket_cap_mb, ownership, width)


def rewrap() -> None:
    """A wrapper that is gone leaves no hooks: no second reduction, no warning about its gradients."""
    import lockstep

    module, reference = TwoHeads(), TwoHeads()
    first = lockstep.DDP(module)
    sum(losses(first(mine(batch(0))))).backward()
    del first
    gc.collect()
    module.zero_grad()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    second = lockstep.DDP(module)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum(losses(second(mine(batch(1))))).backward()
        optimizer.step()
    sum(losses(reference(batch(1)))).backward()
    assert_same_gradients(module, reference)


def test_a_module_can_be_wrapped_again() -> None:
    run_ranks(2, rewrap)


class Checkpointed(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def reentrant_checkpoints(times: int, options: dict[str, bool]) -> None:
    """A layer in two reentrant checkpoints gets its gradient in two passes inside the backward."""
    import lockstep

    module, reference = Checkpointed(times), Checkpointed(times)
    ddp = lockstep.DDP(module, bucket_cap_mb=0.00001, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    for step in range(3):
        x = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(mine(x)).pow(2).mean().backward()
        reference(x).pow(2).mean().backward()
        assert_same_gradients(module, reference)
        for optimizer in optimizers:
            optimizer.step()
    if times > 1:
        return  # each of the passes adds by itself
    local, seen = copy.deepcopy(module), []
    ddp.zero_grad()
    local.zero_grad()
    module.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with ddp.no_sync():
        ddp(mine(batch(3))).pow(2).mean().backward()
    ddp(mine(batch(4))).pow(2).mean().backward()
    for step in (3, 4):
        local(mine(batch(step))).pow(2).mean().backward()
    torch.testing.assert_close(seen[-1], local.layer.weight.grad)  # hooks see all that is added up here


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_reentrant_checkpoints(times: int, options: dict[str, bool]) -> None:
    run_ranks(3, reentrant_checkpoints, times, options)


def unfreeze_between_micro_batches(finds_unused: bool) -> None:
    """A plan that is extended in the middle of an accumulation knows what was added up before it."""
    import lockstep

    module, reference = TwoHeads(), TwoHeads()
    for m in (module, reference):
        m.head_b.bias.requires_grad_(False)
    ddp = lockstep.DDP(module, bucket_cap_mb=0.00001, find_unused_parameters=finds_unused)
    with ddp.no_sync():
        losses(ddp(mine(batch(0))))[0].backward()
    losses(reference(batch(0)))[0].backward()
    for m in (module, reference):
        m.head_b.bias.requires_grad_(True)
    losses(ddp(mine(batch(1))))[1].backward()
    losses(reference(batch(1)))[1].backward()
    assert_same_gradients(module, reference)


def unfreeze_in_both_ways() -> None:
    unfreeze_between_micro_batches(False)
    unfreeze_between_micro_batches(True)


def test_what_was_added_up_before_a_parameter_was_unfrozen_is_reduced() -> None:
    run_ranks(2, unfreeze_in_both_ways)


def unfreeze_on_one_rank() -> str:
    import lockstep

    module = TwoHeads()
    module.head_b.requires_grad_(False)
    ddp = lockstep.DDP(module)
    sum(losses(ddp(mine(batch(0))))).backward()
    module.head_b.requires_grad_(True)
    if dist.get_rank() == 1:
        module.head_b.bias.requires_grad_(False)
    try:
        ddp(mine(batch(1)))
    except lockstep.errors.Disagreement as error:
        return str(error)
    return ""


def test_ranks_that_unfreeze_different_parameters_are_told() -> None:
    first, second = run_ranks(2, unfreeze_on_one_rank)
    assert first == second
    assert "unfroze different parameters" in first
    assert "rank 1" in first
