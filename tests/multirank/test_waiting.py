"""Stalled collectives: Ctrl-C works, the late rank is named, a lost peer is an error and not a silence."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from multirank.harness import lockstep_only, run_outcomes, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]


class Listener(logging.Handler):
    """Keeps what the project logs, and calls ``heard`` with it: these tests go by what was said, not by a clock."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.heard = heard
        logging.getLogger("lockstep").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.heard(self.messages[-1])


def interrupt_while_waiting() -> bool:
    import lockstep

    store = dist.distributed_c10d._get_default_store()
    ddp = lockstep.DDP(nn.Linear(4, 2))
    ddp(torch.ones(1, 4)).sum().backward()  # plans travel with the first one, which the barrier would be paired with
    if dist.get_rank() == 1:
        store.wait(["interrupted"])  # arrives only after rank 0 came back from Ctrl-C
        ddp(torch.ones(1, 4)).sum().backward()
        dist.barrier()
        return True

    def press_control_c(message: str) -> None:
        if len(listener.messages) == 1:  # rank 0 says that it waits; a moment later it waits again
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    listener = Listener(press_control_c)
    interrupted = False
    try:
        ddp(torch.ones(1, 4)).sum().backward()
    except KeyboardInterrupt:
        interrupted = True
    store.set("interrupted", "yes")
    dist.barrier()
    return interrupted


def test_control_c_works_while_a_peer_is_late() -> None:
    assert run_ranks(2, interrupt_while_waiting, env={"LOCKSTEP_STALL_SECONDS": "1"}) == [True, True]


class Late(nn.Module):
    """On rank 2 the backward waits before the first gradient until both others have named it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if dist.get_rank() == 2:
            y.register_hook(lambda g: self.store.wait(["named by 0", "named by 1"]))
        return y


def collect_warnings() -> list[str]:
    import lockstep

    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    listener = Listener(lambda message: store.set(f"named by {rank}", "yes") if "[2]" in message else None)
    ddp = lockstep.DDP(Late(store))
    ddp(torch.ones(1, 4)).sum().backward()
    return listener.messages


def test_a_stalled_wait_names_the_bucket_and_the_late_rank() -> None:
    first, second, late = run_ranks(3, collect_warnings, env={"LOCKSTEP_STALL_SECONDS": "1"})
    for messages in (first, second):
        assert any("bucket 0" in m and "step 0" in m and "[2]" in m for m in messages), messages
    assert not any("[2]" in m for m in late), late


def lose_a_peer() -> None:
    import lockstep

    ddp = lockstep.DDP(nn.Linear(4, 2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ddp(torch.ones(1, 4)).sum().backward()


def test_a_killed_peer_is_an_error_on_the_survivor() -> None:
    survivor, killed = run_outcomes(2, lose_a_peer)
    assert killed.exit_status != 0
    assert survivor.error is not None
    assert survivor.error.type_name == "PeerLost"
    assert "bucket 0" in survivor.error.text
    assert "killed" in survivor.error.text
