"""``lockstep.stopping()``: all ranks leave at the same step, and the demo saves before it does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from launch.jobs import RUN, signal_rank, summary, wait_until
from launching import EXAMPLES, Launch, write_script
from lockstep.checkpoint import latest
from lockstep.checkpoint.reading import Reader

pytestmark = pytest.mark.multirank

# No gradients: nothing but the question itself keeps the ranks together, and they go at different paces. Workers of
# data loaders are there before the first question, and needed until the last one.
LOOP = """
    import os, sys, time
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    import lockstep

    dist.init_process_group()
    rank = dist.get_rank()
    for step, _ in enumerate(DataLoader(range(1_000_000), num_workers=1)):
        if step == 10:
            open(f"{sys.argv[1]}/ready-{rank}", "w").close()
        time.sleep(0.001 * (rank + 1))
        if lockstep.stopping():
            break
    assert lockstep.stopping()
    sys.stdout.write(f"{step}\\n")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "to_one_rank", [pytest.param(False, marks=pytest.mark.soak), True], ids=["the launcher is told", "one rank is told"]
)
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, to_one_rank: bool) -> None:
    script = write_script(tmp_path / "loop.py", LOOP)
    launch = Launch([*RUN, "--nproc", "3", "--stop-grace", "200", "--report-dir", tmp_path, script, tmp_path])
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(3)), launch)
    if to_one_rank:
        signal_rank(launch, 1, signal.SIGTERM)
    else:
        launch.process.send_signal(signal.SIGTERM)
    done = launch.finish()
    assert done.exit_code == 143, done
    assert "STOPPED: " in done.errors
    assert ("rank 1 (pid" in summary(done)) is to_one_rank
    assert len(done.lines) == 3
    assert len(set(done.lines)) == 1
    assert int(done.lines[0]) > 10


NUM_STEPS = 300
# The one checkpoint that is due is the last: what there is before, stopping has saved.
SMALL = ["--steps", str(NUM_STEPS), "--batch", "4", "--context", "32", "--width", "32", "--layers", "2"]
SMALL += ["--save-every", str(NUM_STEPS)]


def demo(folder: Path) -> Launch:
    words = [*RUN, "--nproc", "3", "--stop-grace", "200", "--report-dir", folder / "reports"]
    words += [EXAMPLES / "train_gpt.py", *SMALL, "--out", folder / "out"]
    return Launch([*words, "--checkpoint", folder / "checkpoints"])


def last_step(folder: Path) -> int:
    place = latest(folder / "checkpoints")
    assert place is not None
    return int(place.name[5:])


def state(folder: Path) -> dict[str, torch.Tensor]:
    reader = Reader(folder / "checkpoints" / f"step-{NUM_STEPS:08d}")
    reader.verify()
    return {name: reader.tensor(name) for name in reader.manifest.tensors}


@pytest.mark.slow
def test_the_demo_saves_when_it_is_stopped_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    stopped, alone = tmp_path / "stopped", tmp_path / "alone"
    launch = demo(stopped)
    output = launch.process.stdout
    assert output is not None
    while "step " not in output.readline():
        assert launch.process.poll() is None
    launch.process.send_signal(signal.SIGTERM)
    done = launch.finish()
    assert done.exit_code == 143, done
    num_done = last_step(stopped)
    assert 0 < num_done < NUM_STEPS
    assert f"stopped after step {num_done}; saved to" in done.output
    for folder in (stopped, alone):
        finished = demo(folder).finish(500)
        assert finished.exit_code == 0, finished
        assert (f"after step {num_done}" in finished.output) is (folder is stopped)
    straight, resumed = state(alone), state(stopped)
    assert straight.keys() == resumed.keys()
    assert [name for name in straight if not torch.equal(straight[name], resumed[name])] == []
