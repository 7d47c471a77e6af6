"""What it costs that ranks compare their steps: ``check="step"`` against ``check="off"``.

Two wrappers around equal models live in the same ranks and take turns in blocks of a few steps, each round in the
reverse order of the last. The model has about 150 parameters and a step of about 20 ms, so that a comparison per step
shows. What is given is the difference within a round: per step, of the slowest rank; and of the time this rank's own
thread was busy, which is what the comparison costs the host.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

from ranks import run_ranks
from subjects import lockstep_ddp, lockstep_is_here
from tables import print_table
from timing import Spread, summarise

NUM_LAYERS, WIDTH, BATCH = 75, 96, 256
MODES = ("off", "step")


def keyword_is_here() -> str | None:
    """None where the wrapper can be told what to compare, otherwise why it cannot be measured."""
    missing = lockstep_is_here()
    if missing:
        return missing
    if "check" not in inspect.signature(lockstep_ddp()).parameters:
        return "this version of lockstep has no keyword check=, so there is nothing to turn off"
    return None


# In each rank


def measure(num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from rank_timing import seconds_per_step
    from timing import interleave

    host_seconds: dict[str, list[float]] = {mode: [] for mode in MODES}

    def measured(mode: str) -> Any:
        torch.manual_seed(0)
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = lockstep_ddp()(nn.Sequential(*layers), check=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)

        def steps(num_steps: int) -> None:
            begin = time.thread_time()
            for _ in range(num_steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            host_seconds[mode].append((time.thread_time() - begin) / num_steps)

        steps(5)
        host_seconds[mode].clear()
        return seconds_per_step(steps, steps_per_block)

    runs = {mode: measured(mode) for mode in MODES}
    times = interleave(runs, num_rounds)
    return {"times": times, "host_seconds": host_seconds, "num_parameters": 2 * NUM_LAYERS}


# In the parent


def stamp(quick: bool) -> dict[str, Any]:
    missing = keyword_is_here()
    if missing:
        print(f"stamp skipped: {missing}")
        return {"skipped": missing}
    results: dict[str, Any] = {}
    rows = []
    for num_ranks in (1, 2, 3):
        options = {"num_rounds": 10 if quick else 60, "steps_per_block": 5}
        ranks = run_ranks("stamp:measure", options, num_ranks=num_ranks, time_limit=900)
        # The step's time is that of the slowest rank, the same number on each; the host's time is each rank's own.
        times, host = ranks[0]["times"], ranks[0]["host_seconds"]
        more = _over_off(times)
        more_host = _over_off(host)
        results[f"world{num_ranks}"] = {
            "to_off": summarise(times, "off"),
            "more_seconds_per_step": more.json(),
            "more_host_seconds_per_step": more_host.json(),
            "ranks": ranks,
        }
        rows.append(
            [
                str(num_ranks),
                Spread.of([1000 * t for t in times["off"]]).text(2),
                Spread.of([1000 * t for t in times["step"]]).text(2),
                _milliseconds(more),
                f"{100 * more.median / Spread.of(times['off']).median:+.2f} %",
                _milliseconds(more_host),
            ]
        )
    print_table(
        f"stamp, eager, gloo, {2 * NUM_LAYERS} parameters: what comparing each step costs",
        ["ranks", 'ms per step, check="off"', 'check="step"', "more, ms", "share", "more on rank 0's thread, ms"],
        rows,
        "median [quartiles]; differences are taken within a round; a rank alone has nobody to compare with",
    )
    return results


def _over_off(times: dict[str, list[float]]) -> Spread:
    return Spread.of([mine - base for mine, base in zip(times["step"], times["off"], strict=True)])


def _milliseconds(spread: Spread) -> str:
    return Spread(1000 * spread.median, 1000 * spread.low, 1000 * spread.high).text()
