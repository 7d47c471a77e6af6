"""What watching costs over time: nothing that grows with steps or with wrapped models, and no false alarm."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.harness import lockstep_only, run_ranks
from multirank.test_faults_hangs import step
from multirank.test_waiting import Listener

pytestmark = [pytest.mark.multirank, lockstep_only]


def counts(store: dist.Store) -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "keys": store.num_keys(),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def wrap_and_train(num_wraps: int, num_steps: int) -> tuple[dict[str, int], dict[str, int]]:
    import lockstep

    store = dist.distributed_c10d._get_default_store()

    def wrap() -> None:
        ddp = lockstep.DDP(nn.Linear(4, 2))
        for _ in range(num_steps):
            step(ddp)

    for _ in range(3):
        wrap()
    dist.barrier()
    before = counts(store)
    dist.barrier()
    for _ in range(num_wraps):
        wrap()
    gc.collect()
    dist.barrier()
    deadline = monotonic() + 120
    while (after := counts(store)) and monotonic() < deadline:
        if after["keys"] <= before["keys"] and after["threads"] <= before["threads"]:
            break
        sleep(0.2)  # the last to let go of a board takes its keys away, in its own time; so do threads end
    dist.barrier()
    return before, after


@pytest.mark.parametrize("num_wraps", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_nothing_grows_with_wrapped_models(num_wraps: int) -> None:
    for before, after in run_ranks(3, wrap_and_train, num_wraps, 3):
        assert after["keys"] <= before["keys"], (before, after)
        assert after["threads"] <= before["threads"]
        assert after["descriptors"] <= before["descriptors"] + 2
        assert after["MiB"] <= before["MiB"] + 60


def train_on_busy_cores(num_steps: int) -> dict[str, Any]:
    import lockstep

    store = dist.distributed_c10d._get_default_store()
    listener = Listener(lambda message: None)
    ddp = lockstep.DDP(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            torch.ones(200, 200) @ torch.ones(200, 200)

    burners = [threading.Thread(target=burn, daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
    before: dict[str, int] = {}
    for number in range(num_steps):
        ddp(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == min(100, num_steps // 2):
            before = counts(store)
    after = counts(store)
    stop.set()
    for burner in burners:
        burner.join()
    dist.barrier()
    return {"messages": listener.messages, "before": before, "after": after}


@pytest.mark.parametrize("num_steps", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_healthy_steps_on_busy_cores_raise_nothing_and_leave_nothing(num_steps: int) -> None:
    limit = 300.0 if num_steps < 1000 else 3000.0
    # A rank that gets no core for ten seconds is late, and to say so is right; thirty are no busy machine.
    env = {"LOCKSTEP_STALL_SECONDS": "30"}
    for found in run_ranks(3, train_on_busy_cores, num_steps, limit_s=limit, env=env):
        assert not found["messages"], found["messages"]
        before, after = found["before"], found["after"]
        # A sign of life of each rank may still have been to come.
        assert after["keys"] <= before["keys"] + 3, (before, after)
        assert after["threads"] <= before["threads"]
        assert after["descriptors"] <= before["descriptors"] + 2
        assert after["MiB"] <= before["MiB"] + 60
