"""Compiled training on two CPU ranks: behind a slow link, and what was compiled.

The step of a compiled model is set against max(compute, communication): what a perfect overlap would take. Compute is
the same model compiled without data parallel, communication the all-reduce of all gradients at once, both measured
in the same rounds. Lockstep chooses its bucket sizes itself, after measuring the link; torch runs at its default and
at the sizes that suit this link.
"""

from __future__ import annotations

from typing import Any

from link import LinkNotAllowed, link_between_two_hosts
from ranks import run_ranks
from subjects import ALONE, COMMUNICATION_ALONE, LOCKSTEP_DEFAULT, TORCH_DEFAULT, Subject
from tables import print_table
from timing import Spread, spread_of, summarise

LINK_SUBJECTS = [
    ALONE,
    TORCH_DEFAULT,
    *(Subject(f"torch {cap} MiB", "torch", {"bucket_cap_mb": cap}) for cap in (1, 2)),
    LOCKSTEP_DEFAULT,
    Subject("lockstep 25 MiB", "lockstep", {"bucket_cap_mb": 25}),
]
BY_NAME = {subject.name: subject for subject in LINK_SUBJECTS}


# In each rank


def measure_compiled(workload: str, subjects: list[str], num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    """Seconds per step of each compiled subject in each round: that of the slowest rank."""
    import torch
    import torch.distributed as dist

    from models import WORKLOADS, give_own_code
    from rank_timing import reducing, seconds_per_step, training
    from timing import interleave

    what = WORKLOADS[workload]
    torch.manual_seed(100 + dist.get_rank())
    batches = [what.batch() for _ in range(4)]
    notes: dict[str, Any] = {}

    def measured(name: str) -> Any:
        torch.manual_seed(0)
        module = what.build()
        give_own_code(module)
        wrapped = BY_NAME[name].wrap(module)
        steps = training(torch.compile(wrapped), batches)
        steps(4)
        if hasattr(wrapped, "explain_compilation"):
            notes[name] = {"explanation": wrapped.explain_compilation, "plan": str(wrapped.plan)}
        return seconds_per_step(steps, steps_per_block, cpu_seconds[name].append)

    cpu_seconds: dict[str, list[float]] = {name: [] for name in [*subjects, COMMUNICATION_ALONE]}
    runs = {name: measured(name) for name in subjects}
    num_parameters = sum(p.numel() for p in what.build().parameters())
    runs[COMMUNICATION_ALONE] = seconds_per_step(
        reducing(num_parameters), steps_per_block, cpu_seconds[COMMUNICATION_ALONE].append
    )
    times = interleave(runs, num_rounds)
    for note in notes.values():
        note["explanation"] = str(note["explanation"]())
    return {"times": times, "cpu_seconds": cpu_seconds, "notes": notes, "num_parameters": num_parameters}


def count_graphs(wrapper: str, num_steps: int) -> dict[str, Any]:
    """Graphs, breaks and recompiles of a GPT whose every fourth step synchronises."""
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from models import WORKLOADS

    what = WORKLOADS["gpt5m"]
    torch.manual_seed(0)
    module = what.build()
    model = {"torch": TORCH_DEFAULT, "lockstep": LOCKSTEP_DEFAULT}[wrapper].wrap(module)
    compiled = torch.compile(model, backend="aot_eager")
    counters.clear()
    compiles = []
    for step in range(num_steps):
        before = counters["stats"]["unique_graphs"]
        with nullcontext() if step % 4 == 3 else model.no_sync():
            compiled(what.batch()).backward()
        if step % 4 == 3:
            module.zero_grad()
        compiles.append(counters["stats"]["unique_graphs"] - before)
    return {
        "rank": dist.get_rank(),
        "dynamo_graphs": counters["stats"]["unique_graphs"],
        "compiled_forward_and_backward_pairs": counters["aot_autograd"]["total"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles_after_first_step": sum(compiles[1:]),
    }


# In the parent


def compiled_link(quick: bool) -> dict[str, Any]:
    rate = "1gbit"
    try:
        with link_between_two_hosts(rate) as link:
            answer = run_ranks(
                "compiled:measure_compiled",
                {
                    "workload": "gpt5m_batch16",
                    "subjects": [subject.name for subject in LINK_SUBJECTS],
                    "num_rounds": 5 if quick else 21,
                    "steps_per_block": 2,
                },
                time_limit=900,
                **link.where,
            )[0]
    except LinkNotAllowed as reason:
        print(f"compiled_link skipped: {reason}")
        return {"skipped": str(reason)}
    times = answer["times"]
    ideal = [max(pair) for pair in zip(times[ALONE.name], times[COMMUNICATION_ALONE], strict=True)]
    over_ideal = {
        name: Spread.of([mine / best for mine, best in zip(values, ideal, strict=True)])
        for name, values in times.items()
    }
    to_torch = summarise(times, TORCH_DEFAULT.name)
    rows = [
        [
            name,
            f"{1000 * Spread.of(values).median:.1f}",
            f"{1000 * Spread.of(answer['cpu_seconds'][name]).median:.1f}",
            over_ideal[name].text(),
            spread_of(to_torch[name]["ratio"]).text(),
        ]
        for name, values in times.items()
    ]
    print_table(
        f"compiled_link, gpt5m_batch16 compiled, 2 hosts behind {rate}",
        ["subject", "ms per step", "CPU ms", "over max(compute, communication)", "ratio to torch default"],
        rows,
        "median [quartiles] of the ratios within a round",
    )
    for name, note in answer["notes"].items():
        print(f"{name}:\n{note['plan']}\n{note['explanation']}\n")
    return {
        "rate": rate,
        "over_ideal": {name: spread.json() for name, spread in over_ideal.items()},
        "to_torch_default": to_torch,
        "times": times,
        "cpu_seconds": answer["cpu_seconds"],
        "notes": answer["notes"],
    }


def compiled_graphs(quick: bool) -> dict[str, Any]:
    results = {
        wrapper: run_ranks("compiled:count_graphs", {"wrapper": wrapper, "num_steps": 12}, time_limit=300)[0]
        for wrapper in ("torch", "lockstep")
    }
    columns = ["graphs", "forward and backward pairs", "breaks", "recompiles later"]
    rows = [
        [
            wrapper,
            str(found["dynamo_graphs"]),
            str(found["compiled_forward_and_backward_pairs"]),
            str(found["graph_breaks"]),
            str(found["recompiles_after_first_step"]),
        ]
        for wrapper, found in results.items()
    ]
    print_table("compiled_graphs, gpt5m, no_sync but every 4th step", ["wrapper", *columns], rows)
    return results
