"""Peak memory of one rank: a fresh process per subject, so that nobody inherits another's high-water mark.

What is shown is the process's peak resident memory over what it held before the wrapper and the first step:
gradients, buckets, activations, and whatever the wrapper keeps.
"""

from __future__ import annotations

from typing import Any

from ranks import run_ranks
from subjects import ALONE, BY_NAME, LOCKSTEP_DEFAULT, LOCKSTEP_VIEW, TORCH_DEFAULT, TORCH_VIEW, lockstep_is_here
from tables import print_table

MIB = 2**20


def measure_peak(workload: str, subject: str, num_steps: int = 3) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from models import WORKLOADS

    what = WORKLOADS[workload]
    torch.manual_seed(0)
    # A tiny pass first loads what a first pass loads (kernels, threads, gloo's pairs), whoever the subject
    # is.
    torch.nn.Linear(8, 8)(torch.ones(1, 8)).sum().backward()
    dist.all_reduce(torch.ones(1))
    subject_wrap = BY_NAME[subject].wrap
    module = what.build()
    batch = what.batch()
    before = _status("VmRSS")
    model = subject_wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(num_steps):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return {"peak_over_start": _status("VmHWM") - before, "gradients": gradient_bytes}


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(quick: bool) -> dict[str, Any]:
    subjects = [ALONE, TORCH_DEFAULT, TORCH_VIEW]
    missing = lockstep_is_here()
    if missing:
        print(f"lockstep is left out: {missing}")
    else:
        subjects += [LOCKSTEP_DEFAULT, LOCKSTEP_VIEW]
    results: dict[str, Any] = {}
    for workload in ("mlp67m_batch4",) if quick else ("mlp67m_batch4", "mlp67m_batch1024"):
        peaks: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        for _ in range(1 if quick else 3):
            for subject in subjects:
                ranks = run_ranks("memory:measure_peak", {"workload": workload, "subject": subject.name})
                peaks[subject.name].append(max(rank["peak_over_start"] for rank in ranks))
                gradients = ranks[0]["gradients"]
        results[workload] = {"gradients": gradients, "peak_over_start": peaks}
        reference = _middle(peaks[TORCH_VIEW.name])
        rows = [
            [
                name,
                f"{_middle(values) / MIB:.0f}",
                f"{min(values) / MIB:.0f} to {max(values) / MIB:.0f}",
                f"{_middle(values) / reference:.3f}",
            ]
            for name, values in peaks.items()
        ]
        print_table(
            f"memory, {workload}: peak over the start, MiB per rank (gradients {gradients / MIB:.0f} MiB)",
            ["subject", "median", "range", "ratio to torch view"],
            rows,
        )
    return results


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
