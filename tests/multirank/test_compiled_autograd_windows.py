"""Compiled autograd in the cases where a window is more than one plain backward, and next to ranks without it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

WORLD = 2
BOTH, FIRST = (0, 1), (0,)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(4, 6)
        self.head_a = nn.Linear(6, 6)
        self.head_b = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.head_a(x), self.head_b(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def compiled(on_ranks: tuple[int, ...]) -> Any:
    if dist.get_rank() not in on_ranks:
        return nullcontext()
    return compiled_autograd._enable(lambda gm: torch.compile(gm, backend="aot_eager", fullgraph=True))


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for m in modules for p in m.parameters()]


def assert_equal(seen: list[list[list[Tensor]]], expected: list[list[Tensor]]) -> None:
    for by_step in seen:
        for got, want in zip(by_step, expected, strict=True):
            for position, (g, w) in enumerate(zip(got, want, strict=True)):
                torch.testing.assert_close(g, w, msg=lambda m, p=position: f"parameter {p}: {m}")


# ---------------------------------------------------------------- one backward for each loss


def two_losses(on_ranks: tuple[int, ...], second_too: bool) -> list[list[Tensor]]:
    import lockstep

    ddp = lockstep.DDP(TwoHeads(), bucket_cap_mb=0.0001)
    seen = []
    for step in range(3):
        a, b = ddp(batch(step, dist.get_rank()))
        with compiled(on_ranks):
            a.pow(2).mean().backward(retain_graph=True)
        with compiled(on_ranks if second_too else ()):
            b.abs().mean().backward()
        seen.append(gradients(ddp))
        ddp.zero_grad()
    return seen


@pytest.mark.parametrize(("on_ranks", "second_too"), [(BOTH, True), (BOTH, False), (FIRST, True)])
def test_one_backward_for_each_loss(on_ranks: tuple[int, ...], second_too: bool) -> None:
    module, expected = TwoHeads(), []
    for step in range(3):
        for rank in range(WORLD):
            a, b = module(batch(step, rank))
            ((a.pow(2).mean() + b.abs().mean()) / WORLD).backward()
        expected.append(gradients(module))
        module.zero_grad()
    assert_equal(run_ranks(WORLD, two_losses, on_ranks, second_too), expected)


# ---------------------------------------------------------------- two models, and backwards without a forward


def two_models(on_ranks: tuple[int, ...]) -> tuple[list[list[Tensor]], list[str]]:
    import lockstep

    first = lockstep.DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=0.00001)
    second = lockstep.DDP(TwoHeads(), bucket_cap_mb=0.00001)
    sent: list[str] = []
    for name, ddp in (("first", first), ("second", second)):

        def note(bucket: Any, *args: Any, name: str = name, launch: Any = ddp.step.reducer.launch, **kw: Any) -> None:
            sent.append(f"{name} {bucket.index}")
            launch(bucket, *args, **kw)

        ddp.step.reducer.launch = note
    seen = []
    for step in range(3):
        x = batch(step, dist.get_rank())
        # The other way round than they were wrapped.
        a, b = second(x)
        loss = first(torch.cat([a, b], 1)[:, :4]).pow(2).mean() + b.sum()
        with compiled(on_ranks):
            loss.backward()
        penalty = sum(p.pow(3).sum() for p in first.parameters()) * (dist.get_rank() + 1)
        with compiled(on_ranks):
            penalty.backward()
        seen.append(gradients(first, second))
        first.zero_grad()
        second.zero_grad()
    return seen, sent


@pytest.mark.parametrize("on_ranks", [BOTH, FIRST])
def test_two_models_and_a_penalty(on_ranks: tuple[int, ...]) -> None:
    results = run_ranks(WORLD, two_models, on_ranks)
    plain = run_ranks(WORLD, two_models, ())
    assert_equal([seen for seen, _ in results], plain[0][0])
    assert all(sent == plain[0][1] for _, sent in results)


# ---------------------------------------------------------------- an earlier output again


def same_output_twice(on_ranks: tuple[int, ...]) -> list[list[Tensor]]:
    import lockstep

    ddp = lockstep.DDP(TwoHeads(), bucket_cap_mb=0.0001)
    seen = []
    for step in range(2):
        a, b = ddp(batch(step, dist.get_rank()))
        loss = a.pow(2).mean() + b.sum()
        for again in (True, False):
            with compiled(on_ranks):
                loss.backward(retain_graph=again)
            seen.append(gradients(ddp))
        (ddp.module.trunk.weight.pow(2).sum() * dist.get_rank()).backward()
        with compiled(on_ranks):
            (ddp.module.trunk.weight.pow(2).sum() * dist.get_rank()).backward()
        seen.append(gradients(ddp))
        ddp.zero_grad()
    return seen


@pytest.mark.parametrize("on_ranks", [BOTH, pytest.param(FIRST, marks=pytest.mark.soak)])
def test_a_second_backward_from_the_same_output(on_ranks: tuple[int, ...]) -> None:
    assert_equal(run_ranks(WORLD, same_output_twice, on_ranks), run_ranks(WORLD, same_output_twice, ())[0])


# ---------------------------------------------------------------- what others do with gradients


def hooks_of_others(on_ranks: tuple[int, ...]) -> list[list[Tensor]]:
    import lockstep

    ddp = lockstep.DDP(TwoHeads(), bucket_cap_mb=0.0001)

    def double(p: Tensor) -> None:
        p.grad.mul_(2)

    ddp.module.trunk.weight.register_post_accumulate_grad_hook(double)
    ddp.module.head_a.weight.register_hook(lambda g: g * 3)
    seen = []
    for step in range(3):
        a, b = ddp(batch(step, dist.get_rank()))
        with compiled(on_ranks):
            (a.pow(2).mean() + b.sum()).backward()
        seen.append(gradients(ddp))
        ddp.zero_grad()
    return seen


@pytest.mark.parametrize("on_ranks", [BOTH, FIRST])
def test_hooks_of_others(on_ranks: tuple[int, ...]) -> None:
    assert_equal(run_ranks(WORLD, hooks_of_others, on_ranks), run_ranks(WORLD, hooks_of_others, ())[0])


def broken_graph(on_ranks: tuple[int, ...]) -> list[list[Tensor]]:
    import lockstep

    ddp = lockstep.DDP(TwoHeads(), bucket_cap_mb=0.0001)

    def print_it(p: Tensor) -> None:
        torch._dynamo.graph_break()

    ddp.module.head_a.weight.register_post_accumulate_grad_hook(print_it)
    ddp.module.trunk.bias.register_post_accumulate_grad_hook(print_it)
    seen = []
    for step in range(4):
        a, b = ddp(batch(step, dist.get_rank()))
        loss = a.pow(2).mean() + b.sum()
        if dist.get_rank() in on_ranks:
            with compiled_autograd._enable(lambda gm: torch.compile(gm, backend="aot_eager", fullgraph=False)):
                loss.backward()
        else:
            loss.backward()
        seen.append(gradients(ddp))
        ddp.zero_grad(set_to_none=step % 2 == 0)
    return seen


def test_hooks_that_break_the_graph() -> None:
    assert_equal(run_ranks(WORLD, broken_graph, FIRST), run_ranks(WORLD, broken_graph, ())[0])


def optimizer_in_backward(on_ranks: tuple[int, ...]) -> list[list[Tensor]]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    import lockstep

    module = TwoHeads()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = lockstep.DDP(module, bucket_cap_mb=0.0001)
    seen = []
    for step in range(3):
        a, b = ddp(batch(step, dist.get_rank()))
        with compiled(on_ranks):
            (a.pow(2).mean() + b.sum()).backward()
        seen.append([p.detach().clone() for p in module.parameters()])
    return seen


def test_optimizer_in_backward() -> None:
    assert_equal(run_ranks(WORLD, optimizer_in_backward, BOTH), run_ranks(WORLD, optimizer_in_backward, ())[0])


def fewer_used(on_ranks: tuple[int, ...], skips: bool) -> list[list[Tensor]]:
    import lockstep

    ddp = lockstep.DDP(
        TwoHeads(), bucket_cap_mb=0.0001, find_unused_parameters=True, skip_all_reduce_unused_params=skips
    )
    seen = []
    for step in range(4):
        a, b = ddp(batch(step, dist.get_rank()))
        uses_b = step == 1 or (step == 2 and dist.get_rank() == 1 and not skips)
        with compiled(on_ranks):
            (a.pow(2).mean() + b.sum() if uses_b else a.pow(2).mean()).backward()
        seen.append([torch.empty(0) if p.grad is None else p.grad.clone() for p in ddp.parameters()])
        ddp.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("on_ranks", "skips"),
    [(BOTH, False), (BOTH, True), (FIRST, True), pytest.param(FIRST, False, marks=pytest.mark.soak)],
)
def test_unused_parameters(on_ranks: tuple[int, ...], skips: bool) -> None:
    assert_equal(run_ranks(WORLD, fewer_used, on_ranks, skips), run_ranks(WORLD, fewer_used, (), skips)[0])
