"""The demo under the launcher survives ``kill -9`` of any rank, and ends with the bits of a run that was left alone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from launch.jobs import signal_rank
from launching import EXAMPLES, LOCKSTEP, Launch
from lockstep.checkpoint import latest
from lockstep.checkpoint.reading import Reader
from multirank.harness import lockstep_only

pytestmark = [
    lockstep_only,
    pytest.mark.slow,
    pytest.mark.soak,  # make test harms the demo at random: launch/test_launch_soak.py
]
SMALL = ["--steps", "60", "--batch", "4", "--context", "32", "--width", "32", "--layers", "2", "--save-every", "5"]


def command(folder: Path) -> list[str | Path]:
    launcher = [*LOCKSTEP, "run", "--nproc", "3", "--max-restarts", "3"]
    return [*launcher, EXAMPLES / "train_gpt.py", *SMALL, "--checkpoint", folder, "--out", folder.with_name("report")]


def wait_for_step(folder: Path, step: int, launch: Launch) -> None:
    deadline = time.monotonic() + 240
    while (place := latest(folder)) is None or int(place.name[5:]) < step:
        assert launch.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    place = latest(folder)
    assert place is not None
    assert place.name == "step-00000060"
    reader = Reader(place)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.manifest.tensors}


def test_the_demo_survives_kills(tmp_path: Path) -> None:
    alone = Launch(command(tmp_path / "alone" / "checkpoints")).finish(400)
    assert alone.exit_code == 0, alone
    folder = tmp_path / "killed" / "checkpoints"
    launch = Launch(command(folder))
    for rank, step in ((1, 5), (0, 25)):
        wait_for_step(folder, step, launch)
        signal_rank(launch, rank, signal.SIGKILL)
    done = launch.finish(400)
    assert done.exit_code == 0, done
    assert done.output.count("resumed from") == 2
    straight, killed = tensors(tmp_path / "alone" / "checkpoints"), tensors(folder)
    assert straight.keys() == killed.keys()
    assert [name for name in straight if not torch.equal(straight[name], killed[name])] == []
    assert all(entry.name == "latest" or entry.name.startswith("step-") for entry in folder.iterdir())
