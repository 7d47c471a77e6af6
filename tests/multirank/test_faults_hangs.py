"""Ranks that are stopped, frozen or late: named, with where they are, and an error on every rank at the deadline."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.agree.pulse import pulse_of_this_process
from multirank.harness import lockstep_only, run_outcomes, run_ranks
from multirank.signs import know_the_others
from multirank.test_waiting import Listener

pytestmark = [pytest.mark.multirank, lockstep_only]

SOON = {"LOCKSTEP_STALL_SECONDS": "1", "LOCKSTEP_HEARTBEAT_TIMEOUT": "4"}
NEVER = {"LOCKSTEP_STALL_SECONDS": "1", "LOCKSTEP_HEARTBEAT_TIMEOUT": "0"}


def caught(function: Callable[[], object]) -> dict[str, Any]:
    """What a function raised, as far as these tests look at it."""
    try:
        function()
    except RuntimeError as error:
        return {
            "type": type(error).__name__,
            "bases": [base.__name__ for base in type(error).__mro__],
            "ranks": getattr(error, "ranks", None),
            "text": str(error),
        }
    return {"type": "", "bases": [], "ranks": None, "text": ""}


def step(ddp: nn.Module) -> None:
    ddp(torch.ones(1, 4)).sum().backward()


def warm_up(ddp: nn.Module) -> None:
    """The first steps, in which ranks compare more than later."""
    for _ in range(2):
        step(ddp)


def shared_pids() -> list[int]:
    """The process of each rank."""
    mine = torch.tensor([os.getpid()])
    everyones = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return [int(pid) for pid in everyones]


def store_of_the_harness() -> dist.Store:
    """One that no rank hosts."""
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def group_on_a_store_of_rank_zero() -> None:
    """A group whose store ends, or stands still, with rank 0, as with plain torchrun."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = store_of_the_harness()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port of rank 0", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port of rank 0")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=200))


def train_and_stop_rank_zero(*, after_signs_of_life: bool = True) -> tuple[Any, int, list[int]]:
    """A model in its third step, the rank, all processes; rank 0, which hosts the store, stands still."""
    import lockstep

    group_on_a_store_of_rank_zero()
    rank, pids = dist.get_rank(), shared_pids()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    if after_signs_of_life:
        know_the_others(leaves_last=rank == 0)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return ddp, rank, pids


def stop_the_host_of_the_store() -> dict[str, Any]:
    ddp, rank, pids = train_and_stop_rank_zero()
    found = caught(lambda: step(ddp))
    if rank == 1:
        os.kill(pids[0], signal.SIGKILL)
    return found


def test_a_stopped_host_of_the_store_is_an_error_at_the_deadline() -> None:
    host, *others = run_outcomes(3, stop_the_host_of_the_store, env=SOON, init_process_group=False)
    assert host.exit_status != 0
    assert any("store is silent" in outcome.value["text"] for outcome in others)
    for outcome in others:
        found = outcome.value
        # The second of them may already see that rank 0 is gone, since the first one has ended it.
        assert found["type"] in ("StoreSilent", "PeerLost"), found
        assert "bucket 0" in found["text"]
        if found["type"] == "StoreSilent":
            assert "PeerLate" in found["bases"]
            assert found["ranks"] == (0,)
            assert "rank 0" in found["text"]
            assert "is stopped" in found["text"]


def stop_the_host_for_a_while() -> dict[str, Any]:
    ddp, rank, pids = train_and_stop_rank_zero()
    found = caught(lambda: step(ddp))
    if rank == 1:
        store_of_the_harness().wait(["given up by 2"])  # the other one has come to its own deadline
        os.kill(pids[0], signal.SIGCONT)
    if rank == 2:
        store_of_the_harness().set("given up by 2", "")
    go_on(ddp, rank)
    return found


def go_on(ddp: Any, rank: int) -> None:
    """All ranks have raised: level again, in the same process."""
    ddp.reset_sync_window()
    ddp.zero_grad()
    ddp(torch.full((1, 4), rank + 1.0)).sum().backward()
    weight = next(ddp.parameters())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 4), 2.0))


def test_a_host_of_the_store_that_comes_back_has_failed_too_and_all_go_on() -> None:
    for found in run_ranks(3, stop_the_host_for_a_while, env=SOON, init_process_group=False, limit_s=300):
        assert "PeerLate" in found["bases"], found
        assert found["ranks"] == (0,)
        assert "store is silent" in found["text"]


def go_on_without_the_store() -> dict[str, Any]:
    import lockstep

    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpgrp(), signal.SIGKILL)  # the process that hosts it
    for _ in range(8):
        step(ddp)
        sleep(0.3)  # signs of life are due meanwhile
    weight = next(ddp.parameters())
    assert weight.grad is not None
    return {"grad": weight.grad[0, 0].item(), **caught(lambda: lockstep.DDP(nn.Linear(4, 2)))}


def test_training_goes_on_when_the_store_has_died_until_ranks_must_agree() -> None:
    for found in run_ranks(3, go_on_without_the_store, env=SOON):
        assert found["grad"] == 10.0  # of every step
        assert "PeerLate" in found["bases"], found
        assert "store" in found["text"]


def interrupt_while_the_store_is_silent() -> bool:
    ddp, _, pids = train_and_stop_rank_zero(after_signs_of_life=False)
    pressed = []

    def press_control_c(message: str) -> None:
        if "store is silent" in message and not pressed:
            pressed.append(message)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    Listener(press_control_c)
    try:
        step(ddp)
    except KeyboardInterrupt:
        return True
    finally:
        os.kill(pids[0], signal.SIGKILL)
    return False


def test_control_c_works_while_the_store_is_silent() -> None:
    _, other = run_outcomes(2, interrupt_while_the_store_is_silent, env=NEVER, init_process_group=False)
    assert other.value is True, other.report()


def stop_one_rank() -> dict[str, Any]:
    import lockstep

    rank, pids = dist.get_rank(), shared_pids()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = caught(lambda: step(ddp))
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return found


def test_a_stopped_rank_is_an_error_on_every_rank() -> None:
    for found in run_ranks(3, stop_one_rank, env=SOON):
        assert found["type"] == "PeerLate", found
        assert found["ranks"] == (1,)
        assert "bucket 0" in found["text"]
        assert "step 2" in found["text"]
        assert "no sign of life for 4 s" in found["text"]
        assert "is stopped, by SIGSTOP" in found["text"]


def hold_the_interpreter(path: str) -> dict[str, Any]:
    """Rank 1 opens a pipe, without letting go of the lock, until rank 0 has given it up and opens its other end."""
    import lockstep

    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)
    found = caught(lambda: step(ddp))
    if dist.get_rank() == 0:
        os.close(os.open(path, os.O_WRONLY))
    return found


def test_a_rank_that_holds_the_interpreters_lock_gives_no_sign_of_life(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for found in run_ranks(2, hold_the_interpreter, str(tmp_path / "pipe"), env=SOON):
        assert found["type"] == "PeerLate", found
        assert found["ranks"] == (1,)
        assert "no sign of life" in found["text"]


def evaluate_for_long(store: dist.Store) -> None:
    store.wait(["seen by 0"])


def evaluate_on_rank_two() -> list[str]:
    import lockstep

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def heard(message: str) -> None:
        if "which others wait for, is here" in message:
            store.set("seen by 0", "yes")

    listener = Listener(heard)
    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    if rank == 2:
        evaluate_for_long(store)
    step(ddp)
    return listener.messages


def test_a_rank_that_is_alive_but_late_is_a_warning_with_its_stack() -> None:
    first, second, late = run_ranks(3, evaluate_on_rank_two, env=NEVER)
    waits = [m for m in first + second if "still waiting" in m]
    assert any("[2]" in m and "rank 2: alive" in m and "evaluate_for_long" in m for m in waits), waits
    stacks = [m for m in first + second if "Rank 2, which others wait for, is here" in m]
    # One rank asks for all; a second one only where it has found the first one late too, on a machine that is busy.
    assert len(stacks) == 1 or (len(stacks) == 2 and "[0, 2]" in str(second)), stacks
    assert all("evaluate_on_rank_two" in stack for stack in stacks)
    assert not any("in step 2" in m and "none is known" not in m for m in late), late  # all others had come


def come_too_late() -> dict[str, Any]:
    import lockstep

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    ddp = lockstep.DDP(nn.Linear(4, 2), late_timeout=8)
    warm_up(ddp)
    if rank == 1:
        store.wait(["given up by 0", "given up by 2"])
    found = caught(lambda: step(ddp))
    store.set(f"given up by {rank}", "yes")
    go_on(ddp, rank)
    return found


def test_a_late_rank_is_an_error_on_every_rank_at_the_limit_and_all_can_go_on() -> None:
    for found in run_ranks(3, come_too_late, env=NEVER):
        assert found["type"] == "PeerLate", found
        assert found["ranks"] == (1,)
        assert "did not arrive within 8 s" in found["text"]
        assert "bucket 0" in found["text"]
        assert "in step 2" in found["text"]
        assert "come_too_late" in found["text"]  # where the late one was seen


def suspend_all() -> bool:
    import lockstep

    rank, pids = dist.get_rank(), shared_pids()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    warm_up(ddp)
    if rank == 0:  # in the middle of a wait of the others
        numbers = " ".join(map(str, pids))
        script = f"kill -STOP {numbers}; sleep 9; kill -CONT {numbers}"
        sleep(2)
        subprocess.run(["/bin/sh", "-c", script], check=True)
    for _ in range(5):
        step(ddp)
        sleep(0.3)
    return True


def test_ranks_that_are_suspended_together_go_on() -> None:
    assert run_ranks(3, suspend_all, env={**SOON, "LOCKSTEP_LATE_TIMEOUT": "8"}) == [True] * 3


def take_turns_at_being_late() -> list[tuple[str, bool]]:
    """What this rank said while it waited, and whether the other one was known to wait too by then."""
    import lockstep

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    turn, num_heard = [-1], [0]
    said: list[tuple[str, bool]] = []

    def heard(message: str) -> None:
        if "still waiting" not in message:
            return
        is_after = turn[0] >= 0 and store.check([f"turn {turn[0]}, all others wait"])
        said.append((message, is_after))
        num_heard[0] += is_after
        # What the second one says was seen after the first one, so after all others had come.
        if num_heard[0] >= 2 and named_in(message) == f"[{turn[0]}]":
            store.set(f"turn {turn[0]}, told by {rank}", "yes")

    Listener(heard)
    for number in range(3):
        turn[0], num_heard[0] = number, 0
        if rank == number:
            see_the_others_wait(rank)
            store.set(f"turn {number}, all others wait", "yes")
            store.wait([f"turn {number}, told by {r}" for r in range(3) if r != rank])
        step(ddp)
        turn[0] = -1
        for _ in range(2):
            step(ddp)
    return said


def see_the_others_wait(rank: int) -> None:
    """Wait until the store has that both others wait, and that this rank is in this step, for all to read."""
    pulse = pulse_of_this_process()
    assert pulse is not None
    number = pulse._self.number
    others = [r for r in range(3) if r != rank]
    while pulse._self.number < number + 2 or not all(
        (beat := (pulse.look(others) or {}).get(r)) is not None and beat.waits for r in others
    ):
        sleep(0.05)


def named_in(message: str) -> str:
    """The ranks that a warning says have not arrived."""
    return message.partition("not arrived there: ")[2].partition(";")[0].rstrip(".")


def test_nobody_else_is_named_and_no_stale_place_is_quoted() -> None:
    often = {**NEVER, "LOCKSTEP_STALL_SECONDS": "0.0001"}  # at every look, of which there is one a second
    for rank, said in enumerate(run_ranks(3, take_turns_at_being_late, env=often)):
        for turn in {0, 1, 2} - {rank}:
            here = [s for s in said if f"in step {3 * turn}" in s[0].partition(", for ")[0]]
            # Who had come before one message was there to be seen for the next, however busy the machine is.
            certain = [message for (_, is_after), (message, _) in itertools.pairwise(here) if is_after]
            assert certain, said
            for message in certain:
                assert named_in(message).startswith((f"[{turn}]", "none is known", "not known")), (rank, message)
                assert message.count("in step ") == message.count(f"in step {3 * turn}"), message
