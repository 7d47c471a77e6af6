"""The end of a program while its last checkpoint is still being written: it is written to its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launching import Launch, free_port, write_script
from lockstep.checkpoint import latest, verify
from multirank.harness import lockstep_only
from multirank.test_faults_deaths import start_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]

# Asks for the plan of an earlier run before anything else, as the documentation does, and never waits for a save.
PROGRAM = """
import contextlib, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import lockstep
from lockstep.testing import inject

slow = contextlib.ExitStack()

def run(rank, how, folder):
    dist.init_process_group("gloo", rank=rank)
    ddp = lockstep.DDP(torch.nn.Linear(64, 64), plan=lockstep.checkpoint.plan_of(folder))
    for _ in range(2):
        ddp(torch.ones(1, 64)).sum().backward()
    slow.enter_context(inject.fault(inject.Moment.FILE_SYNCED, inject.delay(1.5), rank=1))
    assert not lockstep.checkpoint.save(folder, ddp, step=2).done()
    if how == "destroy":
        dist.destroy_process_group()
    if how == "raise":
        raise ValueError("after all")

if __name__ == "__main__":
    how, folder = sys.argv[1:]
    if how == "fork":
        processes = [mp.get_context("fork").Process(target=run, args=(rank, how, folder)) for rank in range(2)]
        for p in processes: p.start()
        for p in processes: p.join()
        sys.exit(max(p.exitcode for p in processes))
    run(int(os.environ["RANK"]), how, folder)
"""


@pytest.mark.parametrize("how", ["return", pytest.param("destroy", marks=pytest.mark.soak), "raise", "fork"])
def test_the_last_checkpoint_of_a_program_is_written(how: str, tmp_path: Path) -> None:
    script, folder = write_script(tmp_path / "train.py", PROGRAM), tmp_path / "checkpoints"
    if how == "fork":
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        env["GLOO_SOCKET_IFNAME"] = "lo"
        launches = [Launch([sys.executable, script, how, folder], env=env)]
    else:
        launches = start_ranks(2, script, how, str(folder))
    for launch in launches:
        done = launch.finish(200)
        assert done.exit_code == (1 if how == "raise" else 0), done
        assert "lockstep: " not in done.errors, done
    place = latest(folder)
    assert place is not None
    assert place.name == "step-00000002"
    verify(folder)
