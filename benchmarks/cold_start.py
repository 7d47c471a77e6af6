"""Time of the first step of a compiled model, with nothing in the compiler's cache.

Every run is made of new processes and has a new cache directory, which its ranks share. The time is that of the
slowest rank, from the call of the compiled model to the end of the optimizer's step; starting Python and wrapping the
model are not in it.

The number of compile workers is left at its default (one per core): a rank alone then has all cores of the machine for
its kernels, as it has outside of a benchmark. With one worker it would leave a core idle, and two ranks would look
better next to it than they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from ranks import run_ranks
from subjects import ALONE, BY_NAME, LOCKSTEP_DEFAULT, TORCH_DEFAULT, lockstep_is_here
from tables import print_table
from timing import Spread, interleave, spread_of, summarise

WORKLOAD = "gpt5m"
BASELINE = "1 rank, compute alone"
CASES = {
    BASELINE: (1, ALONE.name),
    "1 rank, lockstep": (1, LOCKSTEP_DEFAULT.name),
    "2 ranks, lockstep": (2, LOCKSTEP_DEFAULT.name),
    "2 ranks, torch": (2, TORCH_DEFAULT.name),
}
# A rank of two can be compared with a rank of one through the same wrapper, too.
OTHER_BASELINE = "1 rank, lockstep"


# In each rank


def measure_first_step(workload: str, subject: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from models import WORKLOADS
    from rank_timing import one_step

    what = WORKLOADS[workload]
    torch.manual_seed(100 + dist.get_rank())
    batch = what.batch()
    module = what.build()
    model = torch.compile(BY_NAME[subject].wrap(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    first = one_step(model, batch, optimizer)
    return {
        "first": first,
        "second": one_step(model, batch, optimizer),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }


# In the parent


def _run(num_ranks: int, subject: str, answers: list[list[dict[str, Any]]]) -> float:
    with tempfile.TemporaryDirectory(prefix="cold-start-") as cache:
        environments = [{"TORCHINDUCTOR_CACHE_DIR": cache}] * num_ranks
        options = {"workload": WORKLOAD, "subject": subject}
        ranks = run_ranks("cold_start:measure_first_step", options, num_ranks, environments=environments)
    answers.append(ranks)
    return max(float(rank["first"]) for rank in ranks)


def cold_start(quick: bool) -> dict[str, Any]:
    missing = lockstep_is_here()
    if missing:
        print(f"cold_start skipped: {missing}")
        return {"skipped": missing}
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in CASES}

    def runner(name: str) -> Callable[[], float]:
        num_ranks, subject = CASES[name]
        return lambda: _run(num_ranks, subject, answers[name])

    times = interleave({name: runner(name) for name in CASES}, 1 if quick else 3)
    result = {
        "workload": WORKLOAD,
        "to_compute_alone": summarise(times, BASELINE),
        "to_one_rank_of_lockstep": summarise(times, OTHER_BASELINE),
        "times": times,
        "answers": answers,
    }
    _show(result)
    return result


def _show(result: dict[str, Any]) -> None:
    rows = []
    for name, entry in result["to_compute_alone"].items():
        runs = result["answers"][name]
        compiled = ", ".join(f"{rank['misses']} + {rank['hits']}" for rank in runs[-1])
        rows.append(
            [
                name,
                spread_of(entry["seconds"]).text(1),
                spread_of(entry["ratio"]).text(2),
                spread_of(result["to_one_rank_of_lockstep"][name]["ratio"]).text(2),
                compiled,
                f"{1000 * Spread.of([max(rank['second'] for rank in run) for run in runs]).median:.0f}",
            ]
        )
    columns = ["", "first step, s", "ratio to alone", "ratio to 1 rank lockstep", "compiled + cached", "second, ms"]
    print_table(
        f"cold_start, {result['workload']}, empty compiler cache",
        columns,
        rows,
        "median [quartiles] of the runs, ratios within a round; graphs compiled and found in the cache, by rank",
    )
