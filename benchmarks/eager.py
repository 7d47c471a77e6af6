"""Step time of two ranks in eager mode: on this machine, and as two hosts behind a slow link.

First a grid finds the best setting of each side in a few rounds, then the default and the best of both are
measured against each other in many. Choosing torch's best from the same machine's grid favours torch.
"""

from __future__ import annotations

from typing import Any

from link import LinkNotAllowed, link_between_two_hosts
from ranks import run_ranks
from subjects import (
    ALONE,
    BY_NAME,
    COMMUNICATION_ALONE,
    LOCKSTEP_DEFAULT,
    LOCKSTEP_GRID,
    TORCH_DEFAULT,
    TORCH_GRID,
    Subject,
    lockstep_is_here,
)
from tables import print_table
from timing import spread_of, summarise

# In each rank


def measure_steps(
    workload: str,
    subjects: list[str],
    num_rounds: int,
    steps_per_block: int,
    with_communication: bool = False,
) -> dict[str, Any]:
    """Seconds per step of each subject in each round: that of the slowest rank."""
    import torch
    import torch.distributed as dist

    from models import WORKLOADS
    from rank_timing import reducing, seconds_per_step, training
    from timing import interleave

    what = WORKLOADS[workload]
    torch.manual_seed(100 + dist.get_rank())
    batches = [what.batch() for _ in range(4)]

    def measured(subject_name: str) -> Any:
        torch.manual_seed(0)
        steps = training(BY_NAME[subject_name].wrap(what.build()), batches)
        steps(3)  # torch lays out its buckets anew after the first step
        return seconds_per_step(steps, steps_per_block)

    runs = {name: measured(name) for name in subjects}
    num_parameters = sum(p.numel() for p in what.build().parameters())
    if with_communication:
        runs[COMMUNICATION_ALONE] = seconds_per_step(reducing(num_parameters), steps_per_block)
    return {"times": interleave(runs, num_rounds), "num_parameters": num_parameters}


# In the parent


def _grid_then_duel(workload: str, quick: bool, **where: Any) -> dict[str, Any]:
    torch_side, lockstep_side = [TORCH_DEFAULT, *TORCH_GRID], [LOCKSTEP_DEFAULT, *LOCKSTEP_GRID]
    missing = lockstep_is_here()
    if missing:
        print(f"lockstep is left out: {missing}")
        lockstep_side = []
    if quick:
        torch_side, lockstep_side = torch_side[:3], lockstep_side[:2]
    job = "eager:measure_steps"
    options = {"workload": workload, "steps_per_block": 2}
    names = [subject.name for subject in [*torch_side, *lockstep_side]]
    grid = run_ranks(job, {**options, "subjects": names, "num_rounds": 3 if quick else 7}, **where)[0]
    grid_summary = summarise(grid["times"], TORCH_DEFAULT.name)

    def best(side: list[Subject]) -> list[str]:
        ranked = sorted((s.name for s in side), key=lambda name: grid_summary[name]["ratio"]["median"])
        return ranked[:1]

    torch_best, lockstep_best = best(torch_side), best(lockstep_side)
    duel_names = [ALONE.name, TORCH_DEFAULT.name, *torch_best]
    duel_names += [LOCKSTEP_DEFAULT.name] * bool(lockstep_side) + lockstep_best
    duel = run_ranks(
        job,
        {
            **options,
            "subjects": list(dict.fromkeys(duel_names)),
            "num_rounds": 5 if quick else 25,
            "with_communication": True,
        },
        **where,
    )[0]
    return {
        "workload": workload,
        "num_parameters": duel["num_parameters"],
        "torch_best": torch_best[0],
        "lockstep_best": lockstep_best[0] if lockstep_best else None,
        "grid": grid_summary,
        "to_torch_default": summarise(duel["times"], TORCH_DEFAULT.name),
        "to_torch_best": summarise(duel["times"], torch_best[0]),
        "times": {"grid": grid["times"], "duel": duel["times"]},
    }


def _show(title: str, result: dict[str, Any]) -> None:
    compute = result["to_torch_default"][ALONE.name]["seconds"]["median"]
    rows = []
    for name, entry in result["to_torch_default"].items():
        marks = {result["torch_best"]: " (torch's best)", result["lockstep_best"]: " (lockstep's best)"}
        seconds = spread_of(entry["seconds"])
        is_step = name not in (ALONE.name, COMMUNICATION_ALONE)
        rows.append(
            [
                name + marks.get(name, ""),
                f"{1000 * seconds.median:.1f}",
                f"{1000 * (seconds.median - compute):.1f}" if is_step else "",
                spread_of(entry["ratio"]).text() if is_step else "",
                spread_of(result["to_torch_best"][name]["ratio"]).text() if is_step else "",
            ]
        )
    columns = ["subject", "ms per step", "over compute, ms", "ratio to torch default", "ratio to torch best"]
    print_table(title, columns, rows, "median [quartiles] of the ratios within a round; below 1 is faster")
    grid_rows = [
        [name, f"{1000 * entry['seconds']['median']:.1f}", spread_of(entry["ratio"]).text()]
        for name, entry in result["grid"].items()
    ]
    print_table(f"{title}: the grid", ["setting", "ms per step", "ratio to torch default"], grid_rows)


def eager_step(quick: bool) -> dict[str, Any]:
    results = {}
    for workload in ("gpt5m", "cnn_small"):
        results[workload] = _grid_then_duel(workload, quick)
        _show(f"eager_step, {workload}, 2 ranks on this machine", results[workload])
    return results


def eager_link(quick: bool) -> dict[str, Any]:
    rate = "1gbit"
    results: dict[str, Any] = {"rate": rate}
    try:
        with link_between_two_hosts(rate) as link:
            for workload in ("gpt5m", "cnn_small"):
                results[workload] = _grid_then_duel(workload, quick, **link.where)
                _show(f"eager_link, {workload}, 2 hosts behind {rate}", results[workload])
    except LinkNotAllowed as reason:
        print(f"eager_link skipped: {reason}")
        return {"skipped": str(reason)}
    return results
