"""Cases in which a plausible reducer gives wrong gradients, hangs, or stays silent; one test each."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import expect_errors, lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]


def assert_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}")


class Positions(nn.Module):
    """At batch 1, autograd hands the gradient of ``sum`` to both embeddings in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(10, 8)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(ids) + self.places.unsqueeze(0)))


def shared_gradient_memory(ownership: bool | None) -> None:
    import lockstep

    module, reference = Positions(), Positions()
    ddp = lockstep.DDP(module, bucket_cap_mb=0.00001, gradient_as_bucket_view=ownership)
    ids = [torch.randint(10, (1, 5), generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    for _ in range(3):
        module.zero_grad()
        reference.zero_grad()
        ddp(ids[dist.get_rank()]).pow(2).mean().backward()
        torch.stack([reference(x).pow(2).mean() for x in ids]).mean().backward()
        assert_same_gradients(module, reference)


@pytest.mark.parametrize("ownership", [None, True, False], ids=["alias", "persistent", "own"])
def test_gradients_that_share_memory_are_not_reduced_where_they_lie(ownership: bool | None) -> None:
    run_ranks(2, shared_gradient_memory, ownership)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def batch(step: int) -> Tensor:
    return torch.randn(2 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(step))


def mine(x: Tensor) -> Tensor:
    return x[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def swap_what_is_frozen() -> None:
    import lockstep

    module, reference = Halves(), Halves()
    module.body.requires_grad_(False)
    ddp = lockstep.DDP(module)
    for step, trains_body in enumerate([False, True, False, True]):
        for m in (module, reference):
            m.body.requires_grad_(trains_body)
            m.head.requires_grad_(not trains_body)
            m.zero_grad()
        ddp(mine(batch(step))).pow(2).mean().backward()
        reference(batch(step)).pow(2).mean().backward()
        assert_same_gradients(module, reference)


def test_freezing_one_part_and_unfreezing_another() -> None:
    run_ranks(2, swap_what_is_frozen)


class Sometimes(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 6)

    def forward(self, x: Tensor, use_extra: bool = False) -> Tensor:  # type: ignore[override]
        h = self.body(x) + self.extra(x) if use_extra else self.body(x)
        return self.head(torch.tanh(h))


def follow_up_hook_with_unused() -> list[Tensor]:
    """PowerSGD starts more collectives from a backend thread, while the used parameters are exchanged.

    With ``check="collective"``, whoever of the group asks for it, which thread starts them makes no difference either.
    """
    return [
        *_follow_up_hook_with_unused(check="step", beside="step"),
        *_follow_up_hook_with_unused(check="step", beside="collective"),
        *_follow_up_hook_with_unused(check="collective", beside="collective"),
    ]


def _follow_up_hook_with_unused(*, check: str, beside: str) -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    import lockstep

    torch.manual_seed(0)
    other = lockstep.DDP(nn.Linear(1, 1), check=beside)
    ddp = lockstep.DDP(Sometimes(), find_unused_parameters=True, bucket_cap_mb=0.00005, check=check)
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
    ddp.register_comm_hook(state, power.powerSGD_hook)
    for step in range(8):
        ddp.zero_grad()
        ddp(mine(batch(step)), use_extra=step % 2 == 0).pow(2).mean().backward()
    assert other.module.weight.grad is None
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def test_a_hook_with_follow_up_collectives_and_unused_parameters() -> None:
    first, *others = run_ranks(3, follow_up_hook_with_unused)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


def zero_columns() -> None:
    import lockstep

    module = nn.Sequential(nn.Linear(0, 5), nn.Linear(5, 2))
    ddp = lockstep.DDP(module)
    ddp(torch.ones(3, 0)).sum().backward()
    assert module[0].weight.grad.shape == (5, 0)


def test_a_layer_without_inputs() -> None:
    run_ranks(2, zero_columns)


def two_backwards_under_join() -> None:
    import lockstep

    ddp = lockstep.DDP(Halves())
    with ddp.join():
        output = ddp(mine(batch(0))).pow(2).mean()
        output.backward(retain_graph=True)
        output.backward()


def test_a_second_synchronised_backward_under_join_is_refused() -> None:
    errors = expect_errors(2, [0, 1], two_backwards_under_join)
    assert "no_sync()" in errors[0].text


def copy_on_one_rank() -> None:
    import lockstep

    module, reference = Halves(), Halves()
    ddp = lockstep.DDP(module)
    if dist.get_rank() == 0:
        copy.deepcopy(ddp)  # an average of the weights, say
    second = lockstep.DDP(module)
    del ddp
    second(mine(batch(0))).pow(2).mean().backward()
    reference(batch(0)).pow(2).mean().backward()
    assert_same_gradients(module, reference)


def test_a_copy_made_on_one_rank_does_not_disturb_the_next_wrap() -> None:
    run_ranks(2, copy_on_one_rank, env={"LOCKSTEP_AGREEMENT_TIMEOUT": "60"})


def error_inside_no_sync() -> None:
    import lockstep

    module, reference = Halves(), Halves()
    ddp = lockstep.DDP(module)

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    with ddp.no_sync():
        hidden = module.body(mine(batch(0)))
        hidden.register_hook(fail)
        with contextlib.suppress(ArithmeticError):
            module.head(hidden).sum().backward()  # the head has its gradient, then the backward breaks
        module.zero_grad()
        output = ddp(mine(batch(1)))
    output.pow(2).mean().backward()  # outside: synchronises
    reference(batch(1)).pow(2).mean().backward()
    assert_same_gradients(module, reference)


def test_a_backward_that_raised_inside_no_sync_leaves_no_trace() -> None:
    run_ranks(2, error_inside_no_sync)


def gradient_of_the_input() -> list[bool]:
    import lockstep

    module = Sometimes()
    ddp = lockstep.DDP(module, find_unused_parameters=True)
    x = mine(batch(0)).requires_grad_()
    output = ddp(x)
    (penalty,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.pow(2).mean() + penalty.pow(2).mean()).backward()
    return [p.grad is None for p in module.extra.parameters()]


def test_a_gradient_penalty_with_unused_parameters() -> None:
    assert run_ranks(2, gradient_of_the_input) == [[True, True], [True, True]]


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint as third-party libraries write them."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class ThirdParty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor, checkpointed: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        x = OwnCheckpoint.apply(self.middle, x) if checkpointed else self.middle(x)
        return self.last(torch.tanh(x))


def third_party_checkpoint(bucket_cap_mb: float) -> None:
    import lockstep

    module, reference = ThirdParty(), ThirdParty()
    ddp = lockstep.DDP(module, bucket_cap_mb=bucket_cap_mb)
    for window in range(2):
        module.zero_grad()
        reference.zero_grad()
        for micro_step in range(3):
            x = batch(10 * window + micro_step)
            with ddp.no_sync() if micro_step < 2 else contextlib.nullcontext():
                ddp(mine(x)).pow(2).mean().backward()
            reference(x, checkpointed=False).pow(2).mean().backward()
        assert_same_gradients(module, reference)


@pytest.mark.parametrize("bucket_cap_mb", [0.00001, 25], ids=["many buckets", "one bucket"])
def test_a_third_party_reentrant_checkpoint_with_accumulation(bucket_cap_mb: float) -> None:
    run_ranks(2, third_party_checkpoint, bucket_cap_mb)


def wrap_fails_on_one_rank(late: int | None) -> None:
    import lockstep

    if dist.get_rank() == late:
        time.sleep(4)  # by now the one that failed has ended, and the others have looked around
    module = nn.Linear(3, 3)
    lockstep.DDP(module.requires_grad_(False) if dist.get_rank() == 1 else module)


@pytest.mark.parametrize("late", [None, 0, 2], ids=["together", "rank 0 late", "rank 2 late"])
def test_a_rank_that_cannot_wrap_is_quoted_on_the_others(late: int | None) -> None:
    errors = expect_errors(3, [0, 1, 2], wrap_fails_on_one_rank, late)
    assert errors[1].type_name == "RuntimeError"
    for rank in (0, 2):
        assert errors[rank].type_name == "PeerFailed"
        assert "Rank 1 could not wrap its model" in errors[rank].text
        assert "any parameter that requires a gradient" in errors[rank].text


def names_people_call() -> None:
    import lockstep

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = lockstep.DDP(Halves(), check_reduction=True)
    assert any("check_reduction" in str(w.message) for w in caught)
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="single element"):
        lockstep.DDP(Halves(), device_ids=[0, 1])
    with pytest.raises(ValueError, match="output_device"):
        lockstep.DDP(Halves(), device_ids=[0], output_device=0)
    with pytest.raises(ValueError, match="sample rate"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    ddp._set_ddp_runtime_logging_sample_rate(5)
    ddp._set_ddp_sink_clone(False)
    assert lockstep.DDP._get_active_ddp_module() is None
    with ddp._inside_ddp_forward():
        assert lockstep.DDP._get_active_ddp_module() is ddp
    seen = []
    ddp.module.register_forward_hook(lambda *_: seen.append(lockstep.DDP._get_active_ddp_module()))
    ddp(mine(batch(0))).sum().backward()
    assert seen == [ddp]
    ddp._check_reducer_finalized()
    assert ddp._check_sync_bufs_pre_fwd() is False
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    local = mine(batch(0))
    ddp(local).sum().backward()  # no hooks: this rank's own gradients
    expected = copy.deepcopy(ddp.module)
    expected.zero_grad()
    expected(local).sum().backward()
    assert_same_gradients(ddp.module, expected)


def test_names_that_people_call_on_the_wrapper() -> None:
    run_ranks(2, names_people_call)
