"""What a wrapper costs per parameter: time in autograd hooks, and time to wrap a model of many parameters."""

from __future__ import annotations

import gc
import time
from typing import Any

from ranks import run_ranks
from subjects import ALONE, BY_NAME, LOCKSTEP_DEFAULT, LOCKSTEP_VIEW, TORCH_DEFAULT, TORCH_VIEW, lockstep_is_here
from tables import print_table
from timing import Spread, spread_of, summarise

NUM_TINY = 2000
NUM_TO_WRAP = 10_000


# In each rank


def measure_backward(subjects: list[str], num_rounds: int) -> dict[str, list[float]]:
    import torch

    from models import WORKLOADS
    from timing import interleave

    what = WORKLOADS["tiny2000"]
    batch = what.batch()

    def measured(name: str) -> Any:
        module = what.build()
        model = BY_NAME[name].wrap(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

        def one() -> float:
            loss = model(batch)
            begin = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - begin
            optimizer.zero_grad()
            return seconds

        for _ in range(3):
            one()
        return one

    return interleave({name: measured(name) for name in subjects}, num_rounds)


def measure_wrap(subjects: list[str], num_rounds: int, num_parameters: int) -> dict[str, list[float]]:
    import torch.distributed as dist

    from models import ManyTiny
    from timing import interleave

    def measured(name: str) -> Any:
        def one() -> float:
            # A fresh model each time: one that was wrapped before still carries hooks.
            module = ManyTiny(num_parameters)
            dist.barrier()
            begin = time.perf_counter()
            model = BY_NAME[name].wrap(module)
            seconds = time.perf_counter() - begin
            del model
            gc.collect()
            return seconds

        return one

    runs = {name: measured(name) for name in subjects}
    for run in runs.values():
        run()
    return interleave(runs, num_rounds)


# In the parent


def _subjects(*others: Any) -> list[str]:
    missing = lockstep_is_here()
    if missing:
        print(f"lockstep is left out: {missing}")
    return [s.name for s in others] + ([] if missing else [LOCKSTEP_DEFAULT.name, LOCKSTEP_VIEW.name])


def hooks_per_parameter(quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for num_ranks in (1,) if quick else (1, 2):
        names = _subjects(ALONE, TORCH_DEFAULT, TORCH_VIEW)
        options = {"subjects": names, "num_rounds": 10 if quick else 60}
        times = run_ranks("per_parameter:measure_backward", options, num_ranks=num_ranks)[0]
        over = {
            name: [(mine - base) / NUM_TINY for mine, base in zip(times[name], times[ALONE.name], strict=True)]
            for name in names
            if name != ALONE.name
        }
        results[f"world{num_ranks}"] = {
            "num_parameters": NUM_TINY,
            "seconds_per_parameter": {name: Spread.of(values).json() for name, values in over.items()},
            "backward": summarise(times, TORCH_DEFAULT.name),
        }
        reference = Spread.of(over[TORCH_DEFAULT.name]).median
        rows = [
            [
                name,
                Spread.of([1e6 * v for v in values]).text(2),
                f"{Spread.of(values).median / reference:.2f}",
                spread_of(results[f"world{num_ranks}"]["backward"][name]["ratio"]).text(2),
            ]
            for name, values in over.items()
        ]
        print_table(
            f"hooks_per_parameter, world of {num_ranks}: backward with the wrapper less backward without, "
            f"over {NUM_TINY} parameters",
            ["subject", "us per parameter", "ratio of medians", "ratio of whole backward"],
            rows,
        )
    return results


def wrap_time(quick: bool) -> dict[str, Any]:
    names = _subjects(TORCH_DEFAULT)
    options = {"subjects": names, "num_rounds": 3 if quick else 9, "num_parameters": NUM_TO_WRAP}
    times = run_ranks("per_parameter:measure_wrap", options)[0]
    summary = summarise(times, TORCH_DEFAULT.name)
    rows = [
        [name, f"{1000 * entry['seconds']['median']:.0f}", spread_of(entry["ratio"]).text(2)]
        for name, entry in summary.items()
    ]
    print_table(f"wrap_time, {NUM_TO_WRAP} parameters, 2 ranks", ["subject", "ms", "ratio to torch default"], rows)
    return {"num_parameters": NUM_TO_WRAP, "summary": summary}
