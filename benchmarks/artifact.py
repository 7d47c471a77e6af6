"""Time to the first compiled step: with an empty compiler cache, and from an artifact that was made beforehand.

The artifact is made by ``lockstep precompile`` in one process, for ranks that are not there. Every run is made of new
processes and has a new cache directory, which its ranks share. The time is that of the slowest rank, from making the
step to the end of the first call that runs compiled code: the second one in mode "graph", whose first call is the
plain loop, and the first one in mode "compiled". Reading and checking the artifact is in it; starting Python, importing
torch and its compiler, and wrapping the model are not.

As a script (``lockstep precompile artifact.py``) this file trains the workload, in the mode of ARTIFACT_MODE.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORLD = 2
MODES = {"graph": 2, "compiled": 1}  # and after how many calls something compiled has run
COLD, WARM = "cold", "from an artifact"
WORKLOADS = {True: "gpt_small", False: "gpt5m"}  # by whether it is to be quick


# In each rank


def loss_of(model: Any, batch: Any) -> Any:
    return model(batch)


def workload(name: str) -> Any:
    from models import GPT
    from models import WORKLOADS as KNOWN

    if name in KNOWN:
        return KNOWN[name]
    import torch

    from models import Workload

    return Workload(
        name,
        lambda: GPT(num_symbols=64, context=32, width=64, num_layers=2, num_heads=2),
        lambda: torch.randint(64, (4, 17)),
    )


def make_step(name: str, mode: str, path: str = "") -> tuple[Any, Any]:
    """The step, and a batch."""
    import torch

    import lockstep

    what = workload(name)
    torch.manual_seed(0)
    batch = what.batch()
    model = lockstep.DDP(what.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if path:
        return lockstep.load_step(path, model, optimizer, loss_of, mode=mode), batch
    return lockstep.TrainStep(model, optimizer, loss_of, mode=mode), batch


def measure_first_step(name: str, mode: str, path: str) -> dict[str, Any]:
    import torch._inductor.compile_fx  # noqa: F401 - importing the compiler is no part of compiling
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    dist.barrier()
    begin = time.perf_counter()
    step, batch = make_step(name, mode, path)
    for _ in range(MODES[mode]):
        step(batch)
    return {
        "first": time.perf_counter() - begin,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
    }


# In the parent


def _precompile(name: str, mode: str, folder: str) -> float:
    """Make the artifact; returns how long that took."""
    environment = {
        **os.environ,
        "ARTIFACT_MODE": mode,
        "ARTIFACT_WORKLOAD": name,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "lockstep.cli", "precompile", str(HERE / "artifact.py")]
    begin = time.perf_counter()
    subprocess.run([*command, "--world", str(WORLD), "--out", folder], env=environment, check=True)
    return time.perf_counter() - begin


def _run(name: str, mode: str, path: str, answers: list[Any]) -> float:
    from ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="artifact-") as cache:
        environments = [{"TORCHINDUCTOR_CACHE_DIR": cache}] * WORLD
        options = {"name": name, "mode": mode, "path": path}
        limits = {"time_limit": 1800, "group_timeout": 1200}
        ranks = run_ranks("artifact:measure_first_step", options, WORLD, environments=environments, **limits)
    answers.append(ranks)
    return max(float(rank["first"]) for rank in ranks)


def artifact(quick: bool) -> dict[str, Any]:
    from timing import interleave, summarise

    name = WORKLOADS[quick]
    result: dict[str, Any] = {"workload": name, "modes": {}}
    for mode in MODES:
        with tempfile.TemporaryDirectory(prefix="artifacts-") as folder:
            seconds = _precompile(name, mode, folder)
            paths = {COLD: "", WARM: str(Path(folder) / "step-0.lockstep")}
            answers: dict[str, list[Any]] = {case: [] for case in paths}

            def runner(case: str, mode: str = mode, paths: Any = paths, answers: Any = answers) -> Callable[[], float]:
                return lambda: _run(name, mode, paths[case], answers[case])

            times = interleave({case: runner(case) for case in paths}, 1 if quick else 3)
            result["modes"][mode] = {
                "to_cold": summarise(times, COLD),
                "times": times,
                "answers": answers,
                "precompile_seconds": seconds,
                "bytes": Path(paths[WARM]).stat().st_size,
            }
    _show(result)
    return result


def _show(result: dict[str, Any]) -> None:
    from tables import print_table
    from timing import spread_of

    rows = []
    for mode, entry in result["modes"].items():
        for case, summary in entry["to_cold"].items():
            compiled = ", ".join(f"{rank['misses']} + {rank['hits']}" for rank in entry["answers"][case][-1])
            rows.append(
                [mode, case, spread_of(summary["seconds"]).text(1), spread_of(summary["ratio"]).text(3), compiled]
            )
    print_table(
        f"artifact, {result['workload']}, {WORLD} ranks, empty compiler cache",
        ["mode", "", "first compiled step, s", "ratio to cold", "compiled + found"],
        rows,
        "median [quartiles] of the runs, ratios within a round; graphs compiled and found in the cache, by rank",
    )


def _train() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step, batch = make_step(os.environ["ARTIFACT_WORKLOAD"], os.environ["ARTIFACT_MODE"])
    while True:
        step(batch)


if __name__ == "__main__":
    _train()
