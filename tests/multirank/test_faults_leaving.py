"""Ranks that leave: with their own status, without waiting for peers, and with the true reason for those who stay."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launching import LOCKSTEP, TORCHRUN, Finished, Launch, free_port, write_script
from multirank.harness import lockstep_only
from multirank.test_faults_deaths import start_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

# Rank 1 never comes to the last step; rank 0 gives it up, catches the error, and leaves.
GIVE_UP = """
import atexit, ctypes, os, sys, time
import torch, torch.distributed as dist
from torch import nn
import lockstep

how = sys.argv[1]
atexit.register(lambda: print("AT EXIT", flush=True))
dist.init_process_group("gloo")
rank = dist.get_rank()
lockstep.DDP(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # imports what a step needs, in its own time
dist.barrier()
ddp = lockstep.DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), late_timeout=4, bucket_cap_mb=0.005)

def step():
    ddp(torch.ones(1, 64)).sum().backward()

step()
if rank == 1:
    print("ASLEEP", flush=True)
    time.sleep(100_000)
try:
    step()
except lockstep.errors.PeerLate as error:
    print("CAUGHT", error.ranks, flush=True)
    sys.stdout.write("not flushed\\n")
    ctypes.CDLL(None).printf(b"nor in C\\n")
    if how == "sys.exit":
        sys.exit(3)
    if how == "raise":
        raise
    if how == "destroy":
        del ddp
        dist.destroy_process_group()
        print("DESTROYED")
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [("sys.exit", 3), pytest.param("return", 0, marks=pytest.mark.soak), ("raise", 1), ("destroy", 0)],
)
def test_a_rank_that_gave_up_a_peer_leaves_with_its_status(how: str, status: int, tmp_path: Path) -> None:
    first, second = start_ranks(2, write_script(tmp_path / "train.py", GIVE_UP), how)
    try:
        done = first.finish(200)
    finally:
        second.kill()
        second.process.communicate()
    assert done.exit_code == status, done
    for text in ("CAUGHT (1,)", "not flushed", "nor in C", "AT EXIT"):
        assert text in done.output, done
    assert ("DESTROYED" in done.output) is (how == "destroy")


@pytest.mark.parametrize("how", ["sys.exit", pytest.param("raise", marks=pytest.mark.soak)])
def test_a_launcher_names_the_rank_that_was_given_up(how: str, tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", GIVE_UP)
    words = [*LOCKSTEP, "run", "--nproc", "2", "--report-dir", tmp_path / "reports", script, how]
    done = Launch(words).finish(200)
    assert done.exit_code == (3 if how == "sys.exit" else 1), done
    assert "FAILED: rank 1 (pid" in done.errors, done
    assert "missed by rank(s) 0" in done.errors


def test_torchrun_ends_too(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", GIVE_UP)
    done = Launch([*TORCHRUN, "--nproc-per-node", "2", "--standalone", script, "sys.exit"]).finish(250)
    assert done.exit_code != 0, done
    assert "CAUGHT (1,)" in done.output


# ---------------------------------------------------------------- what peers are told

# Rank 1 fails in a way that its program catches, and ends; rank 0 says what it was told.
SWALLOW = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
import lockstep

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.broken = nn.Linear(4, 4), nn.Linear(4, 2), ""
    def forward(self, x):
        if self.broken == "forward":
            raise ValueError("my own words")
        y = self.inner(x)
        if self.broken == "backward":
            def fail(gradient):
                raise ValueError("my own words")
            y.register_hook(fail)
        return self.outer(y)

def run(rank, how):
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank)
    model = Model()
    ddp = lockstep.DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)

    def train(steps, optimizer):
        for _ in range(steps):
            ddp(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    train(3, optimizer)
    if rank == 0:
        try:
            train(20, optimizer)
        except lockstep.errors.LockstepError as error:
            text = str(error).replace("\\n", " | ")
            print("CAUGHT", type(error).__name__, getattr(error, "rank", None), text, flush=True)
        return
    if how == "handled":
        try:
            raise KeyError("an early one")
        except KeyError:
            pass
        model.broken = "forward"
        try:
            train(1, optimizer)
        except ValueError:
            model.broken = ""
        train(2, optimizer)
        return
    if how == "mp":
        raise ValueError("my own words")
    model.broken = "backward" if how == "backward" else "forward"
    try:
        if how == "beside":
            raise ValueError("my own words")
        train(1, optimizer)
    except ValueError as error:
        print("swallowed", error)
        if how in ("beside", "exit"):
            sys.exit(7)

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "mp":
        method = sys.argv[2]
        processes = [mp.get_context(method).Process(target=run, args=(rank, how)) for rank in range(2)]
        for p in processes: p.start()
        for p in processes: p.join()
        print("STATUS", [p.exitcode for p in processes])
    elif how == "spawn":
        mp.spawn(run, args=("mp",), nprocs=2)
    else:
        run(int(os.environ["RANK"]), how)
"""


def told(how: str, tmp_path: Path) -> tuple[str, Finished]:
    """What rank 0 caught, and the end of rank 1."""
    launches = start_ranks(2, write_script(tmp_path / "train.py", SWALLOW), how)
    first, second = (launch.finish(200) for launch in launches)
    assert first.exit_code == 0, first
    (line,) = [line for line in first.lines if line.startswith("CAUGHT")]
    return line, second


@pytest.mark.parametrize("how", ["forward", "beside", pytest.param("exit", marks=pytest.mark.soak)])
def test_an_error_that_was_caught_before_the_end_is_quoted(how: str, tmp_path: Path) -> None:
    line, second = told(how, tmp_path)
    assert second.exit_code == (0 if how == "forward" else 7), second
    assert line.startswith("CAUGHT PeerFailed 1")
    assert "ValueError: my own words" in line
    assert "Its program caught this error, and ended" in line
    assert "join()" not in line
    assert ("by sys.exit(7)" in line) is (how != "forward")


def test_an_end_in_the_middle_of_a_backward_is_told_as_that(tmp_path: Path) -> None:
    line, second = told("backward", tmp_path)
    assert second.exit_code == 0, second
    assert line.startswith("CAUGHT PeerLost 1")
    assert "in the middle of a backward" in line
    assert "caught by the program" in line
    assert "join()" not in line


def test_errors_that_were_handled_are_not_the_reason_for_a_later_end(tmp_path: Path) -> None:
    line, _ = told("handled", tmp_path)
    assert line.startswith("CAUGHT PeerLost 1")
    assert "ended its program after 5 steps" in line
    assert "my own words" not in line
    assert "an early one" not in line
    assert "join()" in line


@pytest.mark.parametrize(
    "how", [["mp", "fork"], ["mp", "spawn"], pytest.param(["spawn"], marks=pytest.mark.soak)], ids=" ".join
)
def test_processes_of_multiprocessing_have_last_words_too(how: list[str], tmp_path: Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    script = write_script(tmp_path / "train.py", SWALLOW)
    done = Launch([sys.executable, script, *how], env=env).finish(200)
    if how[0] == "mp":
        assert "STATUS [0, 1]" in done.output, done
    else:
        assert done.exit_code != 0
        assert "ValueError: my own words" in done.errors
    lines = [line for line in done.lines if line.startswith("CAUGHT")]
    # torch's spawn ends the others at once when one has failed, so there may be nobody left to say it.
    assert lines or how[0] == "spawn", done
    for line in lines:
        assert line.startswith("CAUGHT PeerFailed 1"), done
        assert "ValueError: my own words" in line


# Rank 1 loses a worker of its data loader in the middle of an epoch.
LOADER = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
import lockstep

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 8 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)

dist.init_process_group("gloo")
ddp = lockstep.DDP(torch.nn.Linear(4, 2))
try:
    for batch in DataLoader(Data(), batch_size=2, num_workers=1):
        ddp(batch).sum().backward()
except lockstep.errors.LockstepError as error:
    print("CAUGHT", type(error).__name__, error.rank, str(error).replace("\\n", " | "), flush=True)
"""


def test_a_worker_of_a_data_loader_that_dies_is_an_error_of_its_rank(tmp_path: Path) -> None:
    launches = start_ranks(2, write_script(tmp_path / "train.py", LOADER))
    first, second = (launch.finish(200) for launch in launches)
    assert second.exit_code == 1, second
    # A loader sees it as a worker that was killed, or as a connection that broke.
    (words,) = re.findall(r"(RuntimeError: DataLoader worker|ConnectionResetError: |EOFError)", second.errors)[-1:]
    assert "CAUGHT PeerFailed 1" in first.output, first
    assert words in first.output


# ---------------------------------------------------------------- a group that one rank destroys

DESTROY = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
import lockstep

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([1, 2]) if how == "a part of the ranks" else None
if rank == 0 and group is not None:
    ddp = None
if rank > 0 or group is None:
    ddp = lockstep.DDP(nn.Linear(4, 2), process_group=group)

def train(steps):
    for _ in range(steps):
        ddp(torch.ones(1, 4)).sum().backward()

if ddp is not None:
    train(3)
    if rank == 1:
        time.sleep(2.5)
        if how == "the model is let go":
            del ddp
        dist.destroy_process_group(group)
    else:
        try:
            train(20)
        except lockstep.errors.LockstepError as error:
            text = str(error).replace("\\n", " | ")
            print("CAUGHT", type(error).__name__, getattr(error, "rank", None), text, flush=True)
if rank == 1 or group is not None:
    print("STAYS", flush=True)
    time.sleep(100_000)
"""


@pytest.mark.parametrize(
    "how", ["the model is kept", pytest.param("the model is let go", marks=pytest.mark.soak), "a part of the ranks"]
)
def test_a_rank_that_destroys_its_group_is_named(how: str, tmp_path: Path) -> None:
    launches = start_ranks(3, write_script(tmp_path / "train.py", DESTROY), how)
    speaking = launches[2]
    try:
        assert speaking.process.stdout is not None
        line = ""
        while not line.startswith("CAUGHT"):
            line = speaking.process.stdout.readline()
            assert line, speaking.process.communicate()[1]
    finally:
        for launch in launches:
            launch.kill()
            launch.process.communicate()
    assert line.startswith("CAUGHT PeerLost 1"), line
    assert "has destroyed its process group after 3 steps" in line
