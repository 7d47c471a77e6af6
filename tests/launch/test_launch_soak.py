"""Random faults: the job always ends, with the bits of one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.restart_time import measure, table
from launch.soak import Soak, soak

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def test_one_job_under_random_faults(tmp_path: Path) -> None:
    # The seed of a quick look: a rank is killed, then another stopped for a while, then the launcher killed.
    (job,) = soak(Soak(tmp_path, num_steps=110, seed=35, at_steps=(20, 50, 80)), seconds=0)
    assert job.state
    faults = ["rank 0 SIGKILL", "rank 2 SIGSTOP", "launcher killed"]
    # The job may end before the last of them on a machine that lets this process sleep meanwhile.
    # One that is due before ranks have come back finds none to harm.
    happened = [fault for fault in job.faults if "was not there" not in fault]
    assert happened == [fault for fault in faults if fault in happened]
    assert happened, job.faults
    assert job.num_launchers <= 1 + happened.count("launcher killed")


@pytest.mark.soak
def test_a_restart_is_measured_beside_the_start_of_its_job(tmp_path: Path) -> None:
    (restart,) = measure(tmp_path, 1)
    assert 0 < restart.to_ranks < restart.to_first_step
    assert "1 restarts after kill -9" in table([restart])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restarts = measure(tmp_path, 10)
    assert len(restarts) == 10
    with capsys.disabled():
        print(f"\n{table(restarts)}")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_minutes_of_random_faults(tmp_path: Path) -> None:
    jobs = soak(Soak(tmp_path, num_steps=1500, every=15.0), seconds=600)
    assert sum(len(job.faults) for job in jobs) >= 20
