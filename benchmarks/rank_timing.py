"""Timing in each rank of a group: training steps, and the communication alone, as long as the slowest rank takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def seconds_per_step(
    run: Callable[[int], None], num_steps: int, note_cpu_seconds: Callable[[float], None] | None = None
) -> Callable[[], float]:
    """A measurement: ``run(num_steps)`` on all ranks, and the time of the slowest of them per step.

    ``note_cpu_seconds`` is told how long this process kept a core busy per step, with the threads of its backend.
    """

    def measure() -> float:
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        run(num_steps)
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        if note_cpu_seconds is not None:
            note_cpu_seconds((time.process_time() - begin_cpu) / num_steps)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds) / num_steps

    return measure


def one_step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Train ``model``, which gives the loss, for a step that all ranks begin together; return its seconds here."""
    dist.barrier()
    begin = time.perf_counter()
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def training(model: nn.Module, batches: Sequence[Tensor]) -> Callable[[int], None]:
    """Train ``model``, which gives the loss, for a number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def steps(num_steps: int) -> None:
        for index in range(num_steps):
            model(batches[index % len(batches)]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return steps


def reducing(num_elements: int) -> Callable[[int], None]:
    """All gradients in one all-reduce, for a number of steps."""
    flat = torch.ones(num_elements)

    def steps(num_steps: int) -> None:
        for _ in range(num_steps):
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())

    return steps
