"""Hooks that do more than reduce: optimizers that run inside the backward, and buffers synchronised by a hook.

Parameters and buffers are compared with one process that steps after the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

# Private, but what users of optimizers in backward and of buffer hooks import.
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _BufferCommHookLocation

from multirank.compare import assert_close, assert_identical, gradients_of, state_of
from multirank.harness import run_ranks, torch_fails
from multirank.models import CASES
from multirank.steps import DTYPE, NUM_STEPS, WORLD, local_batch, seeded, wrapped

MLP_CASE = CASES["mlp"]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
# Adam divides by the root of the squared gradient, which makes rounding visible where gradients are tiny.
TOLERANCE = 1e-6


def reference_state(optimizer_name: str, chosen: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    module = MLP_CASE.module(DTYPE)
    kind, settings = OPTIMIZERS[optimizer_name]
    optimizer = kind([p for n, p in module.named_parameters() if chosen(n)], **settings)
    for step in range(NUM_STEPS):
        module.zero_grad()
        MLP_CASE.loss(module, MLP_CASE.batch(step, DTYPE)).backward()
        optimizer.step()
    return state_of(module)


def assert_states(values: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    for rank, state in enumerate(values):
        assert_identical(state, values[0], f"rank {rank} against rank 0")
    assert_close(values[0], expected, "parameters", TOLERANCE)


# Optimizers inside the backward


def train_with_fused_optimizer(optimizer_name: str, view: bool, only_weights: bool) -> dict[str, torch.Tensor]:
    module = MLP_CASE.module(DTYPE)
    ddp = wrapped(module, gradient_as_bucket_view=view)
    kind, settings = OPTIMIZERS[optimizer_name]
    chosen = [p for n, p in module.named_parameters() if n.endswith("weight")] if only_weights else None
    settings = dict(settings)
    ddp._register_fused_optim(kind, settings.pop("lr"), optim_params=chosen, **settings)
    for step in range(NUM_STEPS):
        ddp.zero_grad()
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, step)).backward()
    return state_of(ddp)


@pytest.mark.parametrize("only_weights", [False, True], ids=["all", "weights"])
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_fused_optimizer(optimizer_name: str, view: bool, only_weights: bool) -> None:
    values = run_ranks(WORLD, train_with_fused_optimizer, optimizer_name, view, only_weights)
    expected = reference_state(optimizer_name, lambda n: not only_weights or n.endswith("weight"))
    assert_states(values, expected)


def train_with_optimizer_in_backward(optimizer_name: str, view: bool) -> tuple[dict[str, torch.Tensor], bool]:
    module = MLP_CASE.module(DTYPE)
    kind, settings = OPTIMIZERS[optimizer_name]
    _apply_optimizer_in_backward(kind, module.parameters(), settings)
    ddp = wrapped(module, gradient_as_bucket_view=view)
    for step in range(NUM_STEPS):
        MLP_CASE.loss(ddp, local_batch(MLP_CASE, step)).backward()
    return state_of(ddp), all(g is None for g in gradients_of(ddp).values())


@torch_fails("asks for an accelerator's stream, so a CPU module cannot use it")
@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_optimizer_in_backward(optimizer_name: str, view: bool) -> None:
    values = run_ranks(WORLD, train_with_optimizer_in_backward, optimizer_name, view)
    assert_states([state for state, _ in values], reference_state(optimizer_name, lambda n: True))
    assert all(cleared for _, cleared in values), "gradients must be None after the backward"


# Buffers


class Counting(nn.Module):
    """Its buffer adds up the inputs this rank has seen, and scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum(0)
        self.steps += 1
        return self.layer(x * (1 + self.seen.clone().abs() / 10))


def average_blocking(state: list[list[str]], buffers: dict[str, torch.Tensor]) -> None:
    state.append(sorted(buffers))
    for buffer in buffers.values():
        dist.all_reduce(buffer)
        buffer.copy_(buffer // WORLD if buffer.dtype == torch.int64 else buffer / WORLD)


def sum_with_futures(state: list[list[str]], buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future]:
    """Futures are awaited by the end of the backward."""
    state.append(sorted(buffers))
    return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()]


BUFFER_HOOKS = {"average_blocking": average_blocking, "sum_with_futures": sum_with_futures}
LOCATIONS = {"pre": _BufferCommHookLocation.PRE_FORWARD, "post": _BufferCommHookLocation.POST_FORWARD}


def train_with_buffer_hook(name: str | None, location: str) -> tuple[list[Any], list[Any], list[list[str]]]:
    ddp = wrapped(seeded(Counting))
    calls: list[list[str]] = []
    if name is not None:
        ddp._register_buffer_comm_hook(calls, BUFFER_HOOKS[name], LOCATIONS[location])
    gradients, states = [], []
    for step in range(NUM_STEPS):
        ddp.zero_grad()
        ddp(local_batch(MLP_CASE, step)["x"]).square().mean().backward()
        gradients.append(gradients_of(ddp))
        states.append(state_of(ddp))
    return gradients, states, calls


def expected_with_buffer_hook(name: str | None, location: str) -> tuple[list[Any], list[list[Any]]]:
    """One process plays all ranks: a module each, weights equal, buffers synchronised by hand."""
    replicas = [seeded(Counting) for _ in range(WORLD)]

    def synchronise() -> None:
        for buffer_name in ("seen", "steps"):
            stacked = torch.stack([replica.get_buffer(buffer_name) for replica in replicas])
            for replica in replicas:
                if name is None:
                    value = stacked[0]
                elif name == "sum_with_futures":
                    value = stacked.sum(0)
                else:
                    value = stacked.sum(0) // WORLD if buffer_name == "steps" else stacked.mean(0)
                replica.get_buffer(buffer_name).copy_(value)

    gradients: list[Any] = []
    states: list[list[Any]] = []
    for step in range(NUM_STEPS):
        if location == "pre":
            synchronise()
        shards = MLP_CASE.batch(step, DTYPE)["x"].chunk(WORLD)
        for replica, x in zip(replicas, shards, strict=True):
            replica.zero_grad()
            replica(x).square().mean().backward()
        if location == "post":
            synchronise()
        own = [gradients_of(replica) for replica in replicas]
        gradients.append({n: torch.stack([g[n] for g in own]).mean(0) for n in own[0]})
        states.append([state_of(replica) for replica in replicas])
    return gradients, states


@pytest.mark.parametrize(
    ("name", "location"),
    [
        (None, "pre"),
        ("average_blocking", "pre"),
        ("average_blocking", "post"),
        ("sum_with_futures", "post"),
    ],
    ids=["broadcast", "blocking_before", "blocking_after", "futures_after"],
)
def test_buffer_hook(name: str | None, location: str) -> None:
    values = run_ranks(WORLD, train_with_buffer_hook, name, location)
    gradients, states = expected_with_buffer_hook(name, location)
    for rank in range(WORLD):
        for step in range(NUM_STEPS):
            assert_close(values[rank][0][step], gradients[step], f"gradients, rank {rank}, step {step}")
            assert_close(values[rank][1][step], states[step][rank], f"state, rank {rank}, step {step}")
        expected_calls = [["seen", "steps"]] * NUM_STEPS if name is not None else []
        assert values[rank][2] == expected_calls, "the hook was not called once per forward with all buffers"


def evaluate_with_buffer_hook() -> int:
    """In evaluation no buffer travels, so ranks may run different numbers of forwards."""
    ddp = wrapped(seeded(Counting), forward_sync_buffers=False)
    for _ in range(1 + dist.get_rank()):
        ddp(MLP_CASE.batch(0, DTYPE)["x"])
    return int(ddp.module.steps)


def test_buffers_stay_local_without_forward_sync() -> None:
    assert run_ranks(WORLD, evaluate_with_buffer_hook) == [1, 2, 3]
