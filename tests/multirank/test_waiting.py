"""Stalled collectives: Ctrl-C works, the late rank is named, a lost peer is an error and not a silence."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multirank.harness import lockstep_only, run_outcomes, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]


class Late(nn.Module):
    """On the rank that is told to, the backward sleeps before the first gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, seconds: float) -> torch.Tensor:
        y = self.fc(x)
        if seconds:
            y.register_hook(lambda g: time.sleep(seconds))
        return y


def interrupt_while_waiting() -> bool:
    import lockstep

    store = dist.distributed_c10d._get_default_store()
    ddp = lockstep.DDP(Late())
    if dist.get_rank() == 1:
        store.wait(["interrupted"])  # arrives only after rank 0 came back from Ctrl-C
        ddp(torch.ones(1, 4), 0).sum().backward()
        return True
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    interrupted = False
    try:
        ddp(torch.ones(1, 4), 0).sum().backward()
    except KeyboardInterrupt:
        interrupted = True
    store.set("interrupted", "yes")
    dist.barrier()
    return interrupted


def rank_one_joins_the_barrier() -> bool:
    result = interrupt_while_waiting()
    if dist.get_rank() == 1:
        dist.barrier()
    return result


def test_control_c_works_while_a_peer_is_late() -> None:
    assert run_ranks(2, rank_one_joins_the_barrier) == [True, True]


def collect_warnings() -> list[str]:
    import lockstep

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    ddp = lockstep.DDP(Late())
    ddp(torch.ones(1, 4), 5.0 if dist.get_rank() == 2 else 0).sum().backward()
    return messages


def test_a_stalled_wait_names_the_bucket_and_the_late_rank() -> None:
    first, second, late = run_ranks(3, collect_warnings, env={"LOCKSTEP_STALL_SECONDS": "1"})
    for messages in (first, second):
        assert any("bucket 0" in m and "step 0" in m for m in messages), messages
        assert "[2]" in messages[-1], messages
    assert not late


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
    assert survivor.error.type_name == "PeerFailed"
    assert "bucket 0" in survivor.error.text
    assert "killed" in survivor.error.text
