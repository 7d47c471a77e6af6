"""Ranks that are killed, raise or end: named by the others, with process and step, and in their own words."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launching import Launch, free_port, write_script
from multirank.harness import lockstep_only, run_outcomes, run_ranks
from multirank.signs import know_the_others
from multirank.test_faults_hangs import shared_pids, step, warm_up

pytestmark = [pytest.mark.multirank, lockstep_only]


def lost(function: Any) -> dict[str, Any]:
    """What a function raised about a peer that is gone."""
    try:
        function()
    except RuntimeError as error:
        names = ("rank", "pid", "host")
        return {"type": type(error).__name__, "text": str(error), **{n: getattr(error, n, None) for n in names}}
    return {"type": ""}


def slow_hook(state: object, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def lose_rank_one(how: str) -> dict[str, Any]:
    import lockstep

    rank, pids = dist.get_rank(), shared_pids()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(how != "unfreezing")
    ddp = lockstep.DDP(model)
    if how == "hook":
        ddp.register_comm_hook(None, slow_hook)
    warm_up(ddp)
    know_the_others(leaves_last=rank == 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model[0].weight.requires_grad_(True)
    if how == "wrapping":
        found = lost(lambda: lockstep.DDP(nn.Linear(2, 2)))
    else:
        found = lost(lambda: step(ddp))
    return {**found, "expected pid": pids[1]}


@pytest.mark.parametrize("how", ["backward", "hook", "unfreezing", "wrapping"])
def test_a_killed_rank_is_named_with_its_process(how: str) -> None:
    first, killed, third = run_outcomes(3, lose_rank_one, how)
    assert killed.exit_status == -signal.SIGKILL
    for outcome in (first, third):
        found = outcome.value
        assert found is not None, outcome.report()
        assert found["type"] == "PeerLost", found
        assert (found["rank"], found["pid"]) == (1, found["expected pid"])
        assert found["host"]
        assert f"Rank 1 (process {found['pid']} on " in found["text"]
        assert "was killed" in found["text"]
        if how in ("backward", "hook"):
            assert "in step 2" in found["text"]


def lose_rank_one_in_join(divides: bool) -> dict[str, Any]:
    """Rank 0 runs out of data first; then rank 1 is killed, and rank 2 trains on."""
    import lockstep

    rank, pids = dist.get_rank(), shared_pids()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    know_the_others(leaves_last=rank == 1)

    def train() -> None:
        with ddp.join(divide_by_initial_world_size=divides):
            for number in range([2, 9, 9][rank]):
                if rank == 1 and number == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(ddp)

    return {**lost(train), "expected pid": pids[1]}


@pytest.mark.parametrize("divides", [True, False])
def test_a_rank_that_is_killed_under_join_is_named_by_those_without_data_too(divides: bool) -> None:
    without_data, killed, with_data = run_outcomes(3, lose_rank_one_in_join, divides)
    assert killed.exit_status == -signal.SIGKILL
    for outcome in (without_data, with_data):
        found = outcome.value
        assert found is not None, outcome.report()
        assert (found["type"], found["rank"], found["pid"]) == ("PeerLost", 1, found["expected pid"]), found


class Fatal(nn.Module):
    """A model in which rank 1 dies at a moment of step 3."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)
        self.moment, self.step = moment, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_time = dist.get_rank() == 1 and self.step == 3
        self.step += 1
        if is_time and self.moment == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        y = self.first(x)
        if is_time and self.moment == "backward":
            y.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        return self.second(y)


def die_at(moment: str) -> dict[str, Any]:
    import lockstep

    model = Fatal(moment)
    ddp = lockstep.DDP(model, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def train() -> None:
        for number in range(6):
            ddp(torch.ones(4, 64)).sum().backward()
            if dist.get_rank() == 1 and number == 3 and moment == "optimizer":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()

    return lost(train)


MOMENTS = [(moment, turn) for moment in ("forward", "backward", "optimizer") for turn in range(7)]


@pytest.mark.parametrize(("moment", "turn"), [pytest.param(*m, marks=[pytest.mark.soak] * (m[1] > 0)) for m in MOMENTS])
def test_a_rank_killed_at_any_moment_is_the_one_that_is_named(moment: str, turn: int) -> None:
    first, killed, third = run_outcomes(3, die_at, moment)
    assert killed.exit_status == -signal.SIGKILL
    for outcome in (first, third):
        assert outcome.value is not None, outcome.report()
        assert (outcome.value["type"], outcome.value["rank"]) == ("PeerLost", 1), outcome.value
        assert outcome.value["pid"]
        assert f"step {3 + (moment == 'optimizer')}" in outcome.value["text"]


def handle_errors_and_go_on() -> bool:
    """Nothing of this ends the process, so nothing of it may end the job."""
    import lockstep

    rank = dist.get_rank()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    board = ddp._peers.board
    if rank == 1:
        try:
            raise ValueError("handled")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)  # as loggers do
        child = os.fork()
        if child == 0:
            try:
                ddp.step.reducer.transport.watch.post_failure(ValueError("of a child"))
                sys.excepthook(ValueError, ValueError("of a child"), None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        raising = threading.Thread(target=lambda: 1 / 0)
        raising.start()
        raising.join()
        for key in ("failure", "nonsense"):
            for text in ("{", "[]", '{"rank": 99, "type": 1}', "\x01\x02"):
                board.post(key, text)
        store = dist.distributed_c10d._get_default_store()
        for name in ("final", "question", "beat/0", "beat/2"):
            store.set(f"lockstep/0/processes/{name}", '{"number": "x", "waits": 3, "rank": -1, "meets": [1]}')
        sleep(4)  # others wait, and look
    step(ddp)
    return True


def test_errors_that_were_handled_and_malformed_words_end_nothing() -> None:
    assert run_ranks(3, handle_errors_and_go_on, env={"LOCKSTEP_STALL_SECONDS": "1"}) == [True] * 3


# ---------------------------------------------------------------- processes of their own, to their very end

TRAIN = """
import os, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from lockstep import DDP

rank, how = int(os.environ["RANK"]), sys.argv[1]
WHO = int(sys.argv[2])
dist.init_process_group("gloo")
if rank == WHO and how == "before wrapping":
    raise ValueError("no such file")
ddp = DDP(nn.Linear(4, 2))

def train(steps):
    for _ in range(steps):
        ddp(torch.ones(1, 4)).sum().backward()

try:
    train(3)
    if rank == WHO:
        if how == "raise":
            raise ValueError("my own words")
        if how == "exit":
            sys.exit(3)
        if how == "abrupt":
            os._exit(4)
        if how == "fewer batches":
            sys.exit(0)
    train(20)
except Exception as error:
    print("CAUGHT", type(error).__name__, getattr(error, "rank", None), str(error).replace("\\n", " | "), flush=True)
    raise
"""


def start_ranks(world: int, script: Path, *words: str) -> list[Launch]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    common["GLOO_SOCKET_IFNAME"] = "lo"
    return [
        Launch([sys.executable, script, *words], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]


def end_of(how: str, who: int, tmp_path: Path) -> tuple[list[int], list[str]]:
    """Exit codes, and what each other rank caught."""
    launches = start_ranks(2, write_script(tmp_path / "train.py", TRAIN), how, str(who))
    done = [launch.finish(280) for launch in launches]
    texts = ["".join(line for line in d.lines if line.startswith("CAUGHT")) for d in done]
    assert texts[1 - who], "\n".join(map(str, done))
    return [d.exit_code for d in done], texts


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_words_of_a_rank_that_raised_are_quoted_also_if_it_hosts_the_store(who: int, tmp_path: Path) -> None:
    _, texts = end_of("raise", who, tmp_path)
    assert f"CAUGHT PeerFailed {who}" in texts[1 - who]
    assert "ValueError: my own words" in texts[1 - who]


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_leaves_is_named_with_its_step(who: int, tmp_path: Path) -> None:
    codes, texts = end_of("exit", who, tmp_path)
    assert codes[who] == 3
    assert f"CAUGHT PeerLost {who}" in texts[1 - who]
    assert "ended its program after 3 steps by sys.exit(3)" in texts[1 - who]
    assert "join()" not in texts[1 - who]


def test_a_rank_with_fewer_batches_is_told_about_join(tmp_path: Path) -> None:
    codes, texts = end_of("fewer batches", 1, tmp_path)
    assert codes[1] in (0, -signal.SIGABRT)  # torch aborts at times where a process leaves with its groups open
    assert "CAUGHT PeerLost 1" in texts[0]
    assert "ended its program after 3 steps" in texts[0]
    assert "join()" in texts[0]


def test_a_rank_that_leaves_without_a_word_is_named(tmp_path: Path) -> None:
    codes, texts = end_of("abrupt", 1, tmp_path)
    assert codes[1] == 4
    assert "CAUGHT PeerLost 1" in texts[0]
    assert "os._exit" in texts[0]


def test_a_raise_before_wrapping_is_told(tmp_path: Path) -> None:
    launches = start_ranks(2, write_script(tmp_path / "train.py", TRAIN), "before wrapping", "1")
    first, second = (launch.finish(280) for launch in launches)
    assert second.exit_code == 1
    assert first.exit_code == 1
    assert "PeerFailed: Rank 1 failed" in first.errors
    assert "ValueError: no such file" in first.errors
