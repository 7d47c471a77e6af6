"""The whole step as one program on two CPU ranks, over the compiled loop; peak memory of updates bucket by bucket.

The subjects take turns in one process per rank: ``mode="compiled"`` (the loop with a compiled forward and backward)
and ``mode="graph"`` (forward, backward, reduction and optimizer as one compiled program), with the same optimizer; of
a replicated model, and of a sharded one.
"""

from __future__ import annotations

from typing import Any

from ranks import run_ranks
from tables import print_table
from timing import spread_of, summarise

MODES = ("compiled", "graph")


# In each rank


def measure_modes(workload: str, num_rounds: int, steps_per_block: int, sharded: bool = False) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import lockstep
    from models import WORKLOADS, give_own_code
    from rank_timing import seconds_per_step
    from timing import interleave

    what = WORKLOADS[workload]
    torch.manual_seed(100 + dist.get_rank())
    batches = [what.batch() for _ in range(4)]
    steps: dict[str, Any] = {}

    def subject(mode: str) -> Any:
        torch.manual_seed(0)
        module = what.build()
        give_own_code(module)
        model = lockstep.fully_shard(module, units="auto") if sharded else lockstep.DDP(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        steps[mode] = step = lockstep.TrainStep(model, optimizer, lambda m, batch: m(batch), mode=mode)

        def run(num_steps: int) -> None:
            for index in range(num_steps):
                step(batches[index % len(batches)])

        run(6)
        return seconds_per_step(run, steps_per_block)

    times = interleave({mode: subject(mode) for mode in MODES}, num_rounds)
    return {"times": times, "notes": {mode: str(step.explain()) for mode, step in steps.items()}}


def measure_peak(by_bucket: bool, num_layers: int = 16, width: int = 1024) -> dict[str, int]:
    """The most bytes of tensors alive at once in three steps, counted operator by operator."""
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import lockstep

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.program.live_bytes import LiveBytes

    torch.manual_seed(0)
    model = lockstep.DDP(nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)]), bucket_cap_mb=8)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = lockstep.TrainStep(
        model, optimizer, lambda m, x: m(x).square().mean(), mode="loop", update_by_bucket=by_bucket
    )
    x = torch.randn(64, width)
    with LiveBytes() as live:
        for _ in range(3):
            step(x)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"peak": live.peak + parameters, "parameters": parameters}


def measure_program_peak(mode: str, num_layers: int = 8, width: int = 1024) -> dict[str, int]:
    """The most bytes of tensors alive in a step: of the model, its optimizer and its buckets, and what it makes."""
    import torch
    from torch import nn

    import lockstep

    torch.manual_seed(0)
    model = lockstep.DDP(nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)]), bucket_cap_mb=8)
    optimizer = torch.optim.AdamW(model.parameters())
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), mode=mode)
    x = torch.randn(64, width)
    for _ in range(4):
        step(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(x)
    assert profile.profiler is not None
    events: Any = profile.profiler.kineto_results.events()
    made = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        made += event.nbytes()
        peak = max(peak, made)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    buckets = sum(b.spare.numel() * b.spare.element_size() for b in model.step.reducer.buckets if b.spare is not None)
    return {"peak": 3 * parameters + buckets + peak, "in the step": peak, "buckets": buckets}


# In the parent


def whole_step(quick: bool) -> dict[str, Any]:
    workload = "gpt5m"
    found = {}
    for kind, sharded in (("replicated", False), ("sharded", True)):
        ranks = run_ranks(
            "whole_step:measure_modes",
            {
                "workload": workload,
                "num_rounds": 4 if quick else 16,
                "steps_per_block": 2 if quick else 6,
                "sharded": sharded,
            },
        )
        answer = ranks[0]
        summary: Any = summarise(answer["times"], "compiled")
        ratios = {mode: spread_of(summary[mode]["ratio"]).text() for mode in MODES}
        rows = [[f'mode="{m}"', f"{1e3 * summary[m]['seconds']['median']:.1f}", ratios[m]] for m in MODES]
        title = f"whole step on 2 CPU ranks, {workload}, {kind}"
        print_table(title, ["subject", "ms per step", "over the compiled loop"], rows)
        found[kind] = {"summary": summary, "times": answer["times"], "notes": answer["notes"]}
    peaks = {
        name: max(rank["peak"] for rank in run_ranks("whole_step:measure_peak", {"by_bucket": by_bucket}))
        for name, by_bucket in (("all at once", False), ("bucket by bucket", True))
    }
    first = peaks["all at once"]
    print_table(
        "peak memory of the loop on 2 CPU ranks, 16 linear layers, AdamW",
        ["updates", "MiB of tensors", "ratio"],
        [[name, f"{peak / 2**20:.0f}", f"{peak / first:.3f}"] for name, peak in peaks.items()],
    )
    by_mode = {mode: run_ranks("whole_step:measure_program_peak", {"mode": mode})[0] for mode in MODES}
    print_table(
        "peak memory on 2 CPU ranks, 8 linear layers, AdamW",
        ["mode", "MiB of tensors", "over the compiled loop"],
        [
            [mode, f"{told['peak'] / 2**20:.0f}", f"{told['peak'] / by_mode['compiled']['peak']:.3f}"]
            for mode, told in by_mode.items()
        ],
    )
    return {**found["replicated"], "sharded": found["sharded"], "peaks": peaks, "program_peaks": by_mode}
