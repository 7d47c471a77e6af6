"""One model under several settings of the wrapper, in the same ranks, which take turns in blocks of a few steps.

The model has about 150 parameters and a step of about 20 ms, so that what costs something per step shows.  Settings are
compared within a round: per step, of the slowest rank; and by the time that a rank's own thread was busy, which other
work on the machine makes little longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subjects import lockstep_ddp
from timing import Spread, interleave

NUM_LAYERS, WIDTH, BATCH = 75, 96, 256
NUM_PARAMETERS = 2 * NUM_LAYERS


def measure_variants(
    variants: Mapping[str, Mapping[str, Any]], num_rounds: int, steps_per_block: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Callable[[int], None]]]:
    """In each rank: seconds per step and of this thread, by variant and round; the wrapped models; how each steps."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from rank_timing import seconds_per_step

    models: dict[str, Any] = {}
    steps_of: dict[str, Callable[[int], None]] = {}
    host_seconds: dict[str, list[float]] = {name: [] for name in variants}

    def measured(name: str) -> Any:
        torch.manual_seed(0)
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = models[name] = lockstep_ddp()(nn.Sequential(*layers), **variants[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)

        def steps(num_steps: int) -> None:
            begin = time.thread_time()
            for _ in range(num_steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            host_seconds[name].append((time.thread_time() - begin) / num_steps)

        steps_of[name] = steps
        steps(5)
        host_seconds[name].clear()
        return seconds_per_step(steps, steps_per_block)

    times = interleave({name: measured(name) for name in variants}, num_rounds)
    found = {name: list(seconds) for name, seconds in host_seconds.items()}
    return {"times": times, "host_seconds": found}, models, steps_of


def more(times: Mapping[str, Sequence[float]], name: str, base: str) -> Spread:
    """What ``name`` takes more than ``base``, round by round."""
    return Spread.of([mine - other for mine, other in zip(times[name], times[base], strict=True)])


def least_more(times: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """The difference of the shortest rounds: other work on the machine only ever makes a round longer."""
    return min(times[name]) - min(times[base])


def scaled(spread: Spread, factor: float) -> Spread:
    return Spread(factor * spread.median, factor * spread.low, factor * spread.high)
