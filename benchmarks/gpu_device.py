"""The GPU as the benchmarks see it; without one a CPU stands in with a tiny model, which shows only that they run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
BACKEND = "nccl" if IS_GPU else "gloo"


def prepare() -> None:
    if IS_GPU:
        torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def device_seconds(run: Callable[[], None]) -> float:
    """From the moment the idle device begins until it has done what ``run`` issued."""
    synchronize()
    if not IS_GPU:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def reset_peak() -> None:
    synchronize()
    if IS_GPU:
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    synchronize()
    return torch.cuda.max_memory_allocated() if IS_GPU else 1
