"""Runs ``hook_checks.py`` as real ranks and brings back what each rank saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def run_checks(num_ranks: int, folder: Path, time_limit: float = 400) -> list[dict[str, Any]]:
    """One result per rank, in rank order; every rank is killed when one fails or the time is over."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}"}
    command = [sys.executable, str(HERE / "hook_checks.py"), str(num_ranks), str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=time_limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0] * num_ranks, "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]
