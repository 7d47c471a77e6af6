"""What it costs that ranks watch each other: looking for NaN in each step, and a sign of life each second.

    python3 benchmarks/watching.py [--quick]

The model and the method are those of ``stamp.py``: two wrappers in the same ranks take turns, and differences are taken
within a round.  A sign of life is made many times in a row by the thread that makes it once a second.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ranks import run_ranks
from stamp import BATCH, NUM_LAYERS, WIDTH
from subjects import lockstep_ddp
from tables import print_table
from timing import Spread, summarise

POLICIES = ("ignore", "warn")
NUM_SIGNS = 200


def measure(num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    """In each rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from rank_timing import seconds_per_step
    from timing import interleave

    models: dict[str, Any] = {}
    host_seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}

    def measured(policy: str) -> Any:
        torch.manual_seed(0)
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = models[policy] = lockstep_ddp()(nn.Sequential(*layers), nonfinite=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        batch = torch.randn(BATCH, WIDTH)

        def steps(num_steps: int) -> None:
            begin = time.thread_time()
            for _ in range(num_steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            host_seconds[policy].append((time.thread_time() - begin) / num_steps)

        steps(5)
        host_seconds[policy].clear()
        return seconds_per_step(steps, steps_per_block)

    times = interleave({policy: measured(policy) for policy in POLICIES}, num_rounds)
    pulse = models["warn"].step.reducer.transport.watch.pulse

    def many_signs(store: Any) -> float:
        begin = time.thread_time()
        for _ in range(NUM_SIGNS):
            pulse._self.take_turn(store)
        return (time.thread_time() - begin) / NUM_SIGNS

    return {"times": times, "host_seconds": host_seconds, "sign_seconds": pulse.line.ask(many_signs, 120.0)}


def watching(quick: bool) -> dict[str, Any]:
    """In the parent."""
    results: dict[str, Any] = {}
    rows = []
    for num_ranks in (2, 3):
        options = {"num_rounds": 10 if quick else 60, "steps_per_block": 5}
        ranks = run_ranks("watching:measure", options, num_ranks=num_ranks, time_limit=900)
        times, host = ranks[0]["times"], ranks[0]["host_seconds"]
        usual = Spread.of(times["ignore"]).median
        more = Spread.of([m - b for m, b in zip(host["warn"], host["ignore"], strict=True)])
        sign = max(rank["sign_seconds"] for rank in ranks)
        results[f"world{num_ranks}"] = {"to_ignore": summarise(times, "ignore"), "ranks": ranks}
        rows.append(
            [
                str(num_ranks),
                Spread.of([1000 * t for t in times["ignore"]]).text(2),
                Spread.of([w / i for w, i in zip(times["warn"], times["ignore"], strict=True)]).text(3),
                Spread(1e6 * more.median, 1e6 * more.low, 1e6 * more.high).text(0),
                f"{100 * more.median / usual:.2f} %",
                f"{1e6 * sign:.0f} ({100 * sign:.3f} %)",
            ]
        )
    print_table(
        f"watching, eager, gloo, {2 * NUM_LAYERS} parameters: what it costs",
        [
            "ranks",
            'ms per step, nonfinite="ignore"',
            'step, "warn" over "ignore"',
            "more on rank 0's thread, us",
            "share",
            "us of a thread per sign of life (share of its second)",
        ],
        rows,
        "median [quartiles]; differences and ratios are taken within a round",
    )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    print(json.dumps({key: value["to_ignore"] for key, value in watching(parser.parse_args().quick).items()}))
