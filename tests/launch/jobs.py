"""Programs for tests of the launcher, and looks at the processes of one that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from launching import LOCKSTEP, Finished, Launch, write_script
from lockstep.agree.alive import is_standing_still

RUN = [*LOCKSTEP, "run"]

# Trains until the step given first, at a pace; each rank leaves a file when it has done its first step.
TRAIN = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    num_steps, pause, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(rank + 1))).sum().backward()
        optimizer.step()
        if step == 0:
            open(f"{folder}/first-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}", "w").close()
        time.sleep(pause)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)
    sys.stdout.write(f"rank {rank} done\\n")
"""
LONG = "100000"


def train_script(folder: Path) -> Path:
    return write_script(folder / "train.py", TRAIN)


def train(folder: Path, *options: str, num_steps: str = LONG, pause: str = "0.01", nproc: int = 2) -> Launch:
    """Start a job that trains; its report goes to ``folder / "reports"``."""
    words = [*RUN, "--nproc", str(nproc), "--report-dir", folder / "reports", *options]
    return Launch([*words, train_script(folder), num_steps, pause, folder])


def wait_until(condition: Callable[[], object], launch: Launch | None = None, limit_s: float = 240) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if launch is not None and launch.process.poll() is not None and not condition():
            raise AssertionError(f"the launcher has ended\n{launch.finish()}")
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def wait_for_first_step(folder: Path, launch: Launch, nproc: int = 2, attempt: int = 0) -> None:
    wait_until(lambda: all((folder / f"first-{attempt}-{rank}").exists() for rank in range(nproc)), launch)


def process_of_rank(launch: Launch, rank: int) -> int:
    """The process of a rank: the one that has the launcher as its parent."""
    for pid in launch._marked():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and parent == launch.process.pid:
            return pid
    raise AssertionError(f"rank {rank} is not there")


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def summary(done: Finished) -> str:
    """The line of the launcher that names the cause."""
    (line,) = [line for line in done.errors.splitlines() if re.match(r"lockstep run: .* (FAILED|STOPPED): ", line)]
    return line


def report(folder: Path) -> dict:
    (path,) = (folder / "reports").glob("*.json")
    assert path.with_suffix(".html").exists()
    return json.loads(path.read_text())


def signal_rank(launch: Launch, rank: int, number: int) -> int:
    pid = process_of_rank(launch, rank)
    os.kill(pid, number)
    if number == signal.SIGSTOP:  # it takes its time to reach all threads
        wait_until(lambda: is_standing_still(pid), launch)
    return pid
