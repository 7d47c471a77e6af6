"""Ranks that others wait for in vain: named by the launcher, killed without grace, with a stack where there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.jobs import RUN, report, summary, train_script
from launching import Finished, run_command, write_script

pytestmark = pytest.mark.multirank


def wait_in_vain(folder: Path, fault: str) -> Finished:
    # With a grace this long, only a kill that does not wait for it ends the job before the test's limit.
    words = [*RUN, "--nproc", "2", "--stop-grace", "100000", "--report-dir", folder / "reports", "--inject", fault]
    env = {"LOCKSTEP_AGREEMENT_TIMEOUT": "4"}
    return run_command([*words, train_script(folder), "5", "0.01", folder], env=env)


def test_a_stopped_rank_is_the_cause(tmp_path: Path) -> None:
    done = wait_in_vain(tmp_path, "stop:rank=1,moment=joined")
    assert done.exit_code == 1, done
    assert "FAILED: rank 1 (pid" in summary(done)
    assert "was stopped (SIGSTOP" in summary(done)
    assert "missed by rank(s) 0" in summary(done)
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["ranks"][0]["errors"][0]["type"] == "PeerLate"


def test_a_sleeping_rank_is_the_cause_and_shows_its_stack(tmp_path: Path) -> None:
    done = wait_in_vain(tmp_path, "sleep:rank=0,moment=joined,seconds=600")
    assert done.exit_code == 1, done
    assert "FAILED: rank 0 (pid" in summary(done)
    assert "did not take part; missed by rank(s) 1" in summary(done)
    (attempt,) = report(tmp_path)["attempts"]
    assert "in sleep\n" in attempt["ranks"][0]["stack"]
    assert "train.py" in attempt["ranks"][0]["stack"]


@pytest.mark.soak
def test_a_rank_that_holds_the_interpreters_lock_shows_its_stack_too(tmp_path: Path) -> None:
    done = wait_in_vain(tmp_path, "freeze:rank=1,moment=joined,seconds=600")
    assert "FAILED: rank 1 (pid" in summary(done)
    (attempt,) = report(tmp_path)["attempts"]
    assert "in hold\n" in attempt["ranks"][1]["stack"]


def test_a_rank_that_is_stopped_when_all_others_have_ended_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, signal
        import torch.distributed as dist
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    words = [*RUN, "--nproc", "2", "--report-dir", tmp_path / "reports", script]
    done = run_command(words, env={"LOCKSTEP_HEARTBEAT_TIMEOUT": "3"})
    assert done.exit_code == 1, done
    assert re.search(r"FAILED: rank 1 \(pid \d+\) is stopped .*, and all others have ended", summary(done))
