"""Sharded training on two CPU ranks next to FSDP2: steps behind a slow link, and the first step of a compiled model.

A round of ``shard_link`` runs every subject once, in this process group, and a round of ``shard_cold`` starts new
processes with an empty compiler cache for every subject; ratios are formed within a round, so that other work on the
machine, which comes and goes, meets all subjects alike.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from link import LinkNotAllowed, link_between_two_hosts
from ranks import run_ranks
from tables import print_table
from timing import Spread, interleave, spread_of, summarise

WORKLOAD = "gpt5m_batch16"
SUBJECTS: dict[str, dict[str, Any]] = {
    "FSDP2 eager": {"subject": "torch"},
    "FSDP2, blocks compiled": {"subject": "torch", "compiled": "blocks"},
    "lockstep eager": {"subject": "lockstep"},
    "lockstep, blocks compiled": {"subject": "lockstep", "compiled": "blocks"},
    "lockstep, one graph": {"subject": "lockstep", "compiled": "model"},
}
BASELINE = "FSDP2 eager"
COLD_BASELINE = "FSDP2, blocks compiled"


# In each rank


def measure(num_rounds: int, steps_per_block: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from models import WORKLOADS

    what = WORKLOADS[WORKLOAD]
    torch.manual_seed(100 + dist.get_rank())
    batch = what.batch()

    def timed(subject: str, compiled: str | None = None) -> Any:
        model, optimizer = _sharded(what.build(), subject, compiled)

        def block() -> float:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps_per_block):
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            return (time.perf_counter() - begin) / steps_per_block

        block()  # compiles
        block()
        return block

    return {"times": interleave({name: timed(**options) for name, options in SUBJECTS.items()}, num_rounds)}


def _sharded(module: Any, subject: str, compiled: str | None) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from models import give_own_code

    if subject == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from lockstep import fully_shard
    give_own_code(module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        if compiled == "blocks":
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    return torch.compile(module) if compiled == "model" else module, optimizer


def measure_first_step(subject: str, compiled: str) -> dict[str, float]:
    """Seconds of the first step and of the second, the first of which compiles."""
    import torch
    import torch.distributed as dist

    from models import WORKLOADS
    from rank_timing import one_step

    what = WORKLOADS[WORKLOAD]
    torch.manual_seed(100 + dist.get_rank())
    batch = what.batch()
    model, optimizer = _sharded(what.build(), subject, compiled)

    return {name: one_step(model, batch, optimizer) for name in ("first", "second")}


# In the parent


def shard_link(quick: bool) -> dict[str, Any]:
    rate = "1gbit"
    try:
        with link_between_two_hosts(rate) as link:
            answer = run_ranks(
                "shard:measure",
                {"num_rounds": 3 if quick else 15, "steps_per_block": 1 if quick else 2},
                time_limit=1200,
                **link.where,
            )[0]
    except LinkNotAllowed as reason:
        print(f"shard_link skipped: {reason}")
        return {"skipped": str(reason)}
    times = answer["times"]
    best = min((name for name in SUBJECTS if name.startswith("FSDP2")), key=lambda n: Spread.of(times[n]).median)
    to_eager, to_best = summarise(times, BASELINE), summarise(times, best)
    rows = [
        [
            name,
            f"{1000 * Spread.of(values).median:.1f}",
            spread_of(to_eager[name]["ratio"]).text(),
            spread_of(to_best[name]["ratio"]).text(),
        ]
        for name, values in times.items()
    ]
    columns = ["subject", "ms per step", "ratio to FSDP2 eager", f"ratio to FSDP2's best ({best})"]
    title = f"shard_link, {WORKLOAD} in one unit per block, 2 hosts behind {rate}"
    print_table(title, columns, rows, "median [quartiles] of the ratios within a round; below 1 is faster")
    return {"rate": rate, "best": best, "to_fsdp2_eager": to_eager, "to_fsdp2_best": to_best, "times": times}


def _cold(name: str) -> float:
    with tempfile.TemporaryDirectory(prefix="shard-cold-") as cache:
        environments = [{"TORCHINDUCTOR_CACHE_DIR": cache}] * 2
        ranks = run_ranks("shard:measure_first_step", SUBJECTS[name], environments=environments, time_limit=900)
    return max(float(rank["first"]) for rank in ranks)


def shard_cold(quick: bool) -> dict[str, Any]:
    names = [name for name, options in SUBJECTS.items() if "compiled" in options]

    def runner(name: str) -> Callable[[], float]:
        return lambda: _cold(name)

    times = interleave({name: runner(name) for name in names}, 1 if quick else 3)
    to_blocks = summarise(times, COLD_BASELINE)
    rows = [[name, Spread.of(times[name]).text(1), spread_of(to_blocks[name]["ratio"]).text(2)] for name in names]
    columns = ["subject", "first step, s", f"ratio to {COLD_BASELINE}"]
    title = f"shard_cold, {WORKLOAD} in one unit per block, 2 ranks on this machine, empty compiler cache"
    print_table(title, columns, rows, "median [quartiles] of the runs, ratios within a round")
    return {"workload": WORKLOAD, "to_fsdp2_blocks": to_blocks, "times": times}
