"""Random faults: the job always ends, with the bits of one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.soak import Soak, soak

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def test_one_job_under_random_faults(tmp_path: Path) -> None:
    # The seed of a quick look: a rank killed, and whatever else there is time for.
    (job,) = soak(Soak(tmp_path, num_steps=150, every=6.0, seed=3), seconds=0)
    assert job.state


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_minutes_of_random_faults(tmp_path: Path) -> None:
    jobs = soak(Soak(tmp_path, num_steps=1500, every=15.0), seconds=600)
    assert sum(len(job.faults) for job in jobs) >= 20
