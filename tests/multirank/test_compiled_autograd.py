"""Compiled autograd: the hooks are traced into one graph with the backward, and every feature stays what it was."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

STEPS = 4
WORLD = 2


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))


def batch(step: int, rank: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(5, 6, generator=generator)


def compiler(backend: str, fullgraph: bool) -> Any:
    if backend == "none":
        return lambda gm: gm
    return lambda gm: torch.compile(gm, backend=backend, fullgraph=fullgraph)


def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def alone(parts: int, keep: bool) -> list[list[torch.Tensor]]:
    """What one process gets for the batches of all ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        for part in range(parts):
            for rank in range(WORLD):
                (model(batch(step, rank, part)).pow(2).mean() / WORLD).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)
    return seen


def train(
    *,
    way: str,
    backend: str = "aot_eager",
    fullgraph: bool = True,
    forward: str | None = None,
    parts: int = 1,
    comm_hook: bool = False,
    optimize_ddp: Any = True,
    on_ranks: tuple[int, ...] = (0, 1),
    keep: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    import lockstep

    rank = dist.get_rank()
    sent: list[int] = []
    ddp = lockstep.DDP(make_model(), bucket_cap_mb=0.001, **options)
    called: list[int] = []
    if comm_hook:
        ddp.register_comm_hook(called, hook)
    launch = ddp.step.reducer.launch

    def note(bucket: Any, *args: Any, **kwargs: Any) -> None:
        sent.append(bucket.index)
        launch(bucket, *args, **kwargs)

    ddp.step.reducer.launch = note
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model = ddp if forward is None else torch.compile(ddp, backend=forward)
    is_on = rank in on_ranks
    torch._dynamo.config.optimize_ddp = optimize_ddp

    def one_backward(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()

    if way == "config" and is_on:
        torch._dynamo.config.compiled_autograd = True
        one_backward = torch.compile(one_backward, backend=backend)
    seen = []
    for step in range(STEPS):
        for part in range(parts):
            with ExitStack() as stack:
                if part < parts - 1:
                    stack.enter_context(ddp.no_sync())
                if way == "context" and is_on:
                    stack.enter_context(compiled_autograd._enable(compiler(backend, fullgraph)))
                one_backward(batch(step, rank, part))
        seen.append([p.grad.clone() for p in ddp.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    return seen, sent, called, captures, str(lockstep.explain(ddp))


def check(
    results: list[tuple[Any, ...]], *, parts: int = 1, keep: bool = False, on_ranks: tuple[int, ...] = (0, 1)
) -> None:
    expected = alone(parts, keep)
    for rank, (seen, sent, _, captures, explained) in enumerate(results):
        for step in range(STEPS):
            for got, want in zip(seen[step], expected[step], strict=True):
                torch.testing.assert_close(got, want)
        num_buckets = len(sent) // STEPS
        assert num_buckets > 2
        assert sent == list(range(num_buckets)) * STEPS
        assert bool(captures) == (rank in on_ranks)
        if rank in on_ranks:
            assert "compiled autograd" in explained
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_around_a_backward(fullgraph: bool) -> None:
    check(run_ranks(WORLD, train, way="context", fullgraph=fullgraph))


def test_in_a_compiled_step() -> None:
    check(run_ranks(WORLD, train, way="config"))


@pytest.mark.parametrize("forward", ["aot_eager", "inductor"])
def test_with_a_compiled_forward(forward: str) -> None:
    check(run_ranks(WORLD, train, way="context", forward=forward, backend=forward))


def test_inductor() -> None:
    check(run_ranks(WORLD, train, way="context", backend="inductor", parts=2), parts=2)


@pytest.mark.parametrize(
    ("view", "keep"),
    [
        (None, False),
        (True, True),
        (False, True),
        pytest.param(None, True, marks=pytest.mark.soak),
        pytest.param(True, False, marks=pytest.mark.soak),
        pytest.param(False, False, marks=pytest.mark.soak),
    ],
)
def test_accumulation(view: bool | None, keep: bool) -> None:
    results = run_ranks(WORLD, train, way="context", parts=3, keep=keep, gradient_as_bucket_view=view)
    check(results, parts=3, keep=keep)


def test_comm_hook() -> None:
    results = run_ranks(WORLD, train, way="context", comm_hook=True)
    check(results)
    assert all(called == sent for _, sent, called, _, _ in results)


@pytest.mark.parametrize("way", ["context", "config"])
def test_python_reducer(way: str) -> None:
    check(run_ranks(WORLD, train, way=way, optimize_ddp="python_reducer", forward="aot_eager", fullgraph=False))


@pytest.mark.parametrize("forward", [None, "aot_eager"])
def test_on_one_rank_only(forward: str | None) -> None:
    check(run_ranks(WORLD, train, way="context", on_ranks=(0,), forward=forward), on_ranks=(0,))


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options(option: str) -> None:
    check(run_ranks(WORLD, train, way="context", **{option: True}))


def test_a_graph_that_is_left_to_python() -> None:
    results = run_ranks(WORLD, train, way="context", backend="none", parts=2)
    expected = alone(2, False)
    for seen, *_ in results:
        for got, want in zip(seen[-1], expected[-1], strict=True):
            torch.testing.assert_close(got, want)
