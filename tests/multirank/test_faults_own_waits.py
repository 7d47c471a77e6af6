"""A rank that gives no sign of life while the others stand in a collective of the program's own."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from launching import LOCKSTEP, Launch, write_script
from multirank.harness import lockstep_only
from multirank.test_faults_deaths import start_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

SOON = {"LOCKSTEP_STALL_SECONDS": "1", "LOCKSTEP_HEARTBEAT_TIMEOUT": "8"}

# The silent rank is given first, and what happens to it; the others stand in a wait of torch's.
TRAIN = """
import ctypes, logging, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import lockstep
from lockstep.agree.pulse import pulse_of_this_process

logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
who, how = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = lockstep.DDP(nn.Linear(4, 2))
for _ in range(3):
    ddp(torch.ones(1, 4)).sum().backward()
pulse = pulse_of_this_process()
while any(pulse.last_seen(r) is None for r in range(pulse.world) if r != rank):
    time.sleep(0.05)  # until signs of life have been read
dist.barrier()

def stand_there():
    if how == "barrier":
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1), async_op=True).wait()

print("STANDS", os.getpid(), flush=True)
if rank == who:
    if how == "lock":
        ctypes.PyDLL(None).sleep(100_000)
    os.kill(os.getpid(), signal.SIGSTOP)
stand_there()
print("WENT ON", flush=True)
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)


def finish(launches: list[Launch], silent: int) -> list[tuple[int, str]]:
    """What became of the ranks that were not silent."""
    try:
        done = [launch.finish(280) for rank, launch in enumerate(launches) if rank != silent]
    finally:
        for launch in launches:
            launch.kill()
    return [(d.exit_code, d.output + d.errors) for d in done]


@pytest.mark.usefixtures("soon")
def test_a_silent_rank_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    who = 1
    found = finish(start_ranks(3, write_script(tmp_path / "train.py", TRAIN), str(who), "barrier"), who)
    for status, text in found:
        assert status not in (0, -signal.SIGKILL), text
        assert "WENT ON" not in text
    texts = [text for _, text in found if "this process ends" in text]
    assert texts, found  # the other one may see its connection break first
    for text in texts:
        assert re.search(
            rf"WARNING Rank \d has been at .*train.py:\d+ in stand_there for .* rank {who} gives no sign", text
        )
        assert f"Rank(s) [{who}] gave no sign of life for 8 s" in text
        assert "is stopped, by SIGSTOP" in text
        assert "in stand_there" in text


@pytest.mark.usefixtures("soon")
def test_a_silent_host_of_the_store_is_one_too(tmp_path: Path) -> None:
    found = finish(start_ranks(2, write_script(tmp_path / "train.py", TRAIN), "0", "reduce"), 0)
    ((status, text),) = found
    assert status == 1, text
    assert "store has not answered rank 1 for" in text
    assert "Rank 0, which hosts it" in text
    assert "is stopped, by SIGSTOP" in text


def test_the_launcher_names_the_silent_rank(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", TRAIN)
    # With a grace this long, only a kill that does not wait for it ends the job before the test's limit.
    words = ["--nproc", "2", "--stop-grace", "100000", "--report-dir", tmp_path / "reports"]
    done = Launch([*LOCKSTEP, "run", *words, script, "1", "lock"], env=SOON).finish(280)
    assert done.exit_code == 1, done
    (line,) = [line for line in done.errors.splitlines() if "FAILED: " in line]
    assert "FAILED: rank 1 (pid" in line, done
    assert "did not take part; missed by rank(s) 0" in line


def test_the_launcher_ends_a_job_with_a_stopped_rank_that_uses_no_model(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, signal
        import torch.distributed as dist
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        """,
    )
    words = ["--nproc", "2", "--report-dir", tmp_path / "reports"]
    done = Launch([*LOCKSTEP, "run", *words, script], env={"LOCKSTEP_HEARTBEAT_TIMEOUT": "1"}).finish(280)
    assert done.exit_code == 1, done
    assert re.search(r"FAILED: rank 1 \(pid \d+\) is stopped \(SIGSTOP.*, and the others wait for it", done.errors), (
        done
    )
