"""How long a checkpoint keeps a training run waiting, and how long it takes: beside torch.save and DCP.

    python benchmarks/checkpoint.py --mib 64 --rounds 3

One process; the state is a model of that size and the two moments of AdamW. The ways alternate, and each number is the
median of the rounds. ``torch.save`` and DCP neither sync nor verify.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lockstep


def build(num_mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(num_mib)))  # 1 MiB each
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def ours(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
    """Seconds that training waits, until the checkpoint counts, and to load it."""
    began = time.perf_counter()
    handle = lockstep.checkpoint.save(folder, model, optimizer, step=0)
    waits = time.perf_counter() - began
    handle.wait()
    total = time.perf_counter() - began
    return waits, total, timed(lambda: lockstep.checkpoint.load(folder, model, optimizer))


def with_torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    total = timed(lambda: torch.save(state, folder / "state.pt"))

    def load() -> None:
        read = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])

    return total, total, timed(load)


def with_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    total = timed(lambda: dcp.save(state, checkpoint_id=str(folder), no_dist=True))
    return total, total, timed(lambda: dcp.load(state, checkpoint_id=str(folder), no_dist=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure checkpoints.")
    parser.add_argument("--mib", type=int, default=64, help="size of the model; the state is three times that")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, optimizer = build(options.mib)
    ways = {"lockstep": ours, "torch.save": with_torch, "dcp": with_dcp}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            folder = Path(tempfile.mkdtemp(prefix="lockstep-checkpoint-"))
            try:
                found[name].append(way(folder, model, optimizer))
            finally:
                shutil.rmtree(folder)
    print(f"{3 * options.mib} MiB of state, median of {options.rounds} rounds, seconds")
    print(f"{'':12}{'training waits':>16}{'until it counts':>17}{'load':>8}")
    for name, rounds in found.items():
        waits, total, load = (median(column) for column in zip(*rounds, strict=True))
        print(f"{name:12}{waits:16.2f}{total:17.2f}{load:8.2f}")


if __name__ == "__main__":
    main()
