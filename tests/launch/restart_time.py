"""How long a restart takes: from a rank's death to the first step of the next attempt, beside the start of the job.

``python tests/launch/restart_time.py`` prints the table; ``make faults`` prints it too.  The start is taken from the
same job, so that what a restart adds to it is the launcher's: noticing, hearing the survivors, ending them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from launch.jobs import RUN
from launching import Launch, write_script

PROMISED_SECONDS = 6.0

# Each rank notes when its process was made, when its first step was done, and when it is about to be killed.
TRAIN = """
    import os, signal, sys, time
    def note(what, when=None):
        with open(f"{sys.argv[1]}/{what}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}", "w") as file:
            file.write(repr(time.time() if when is None else when))
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    up = float(open("/proc/uptime").read().split()[0])
    note("made", time.time() - up + ticks / os.sysconf("SC_CLK_TCK"))
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    last = int(sys.argv[2])
    dist.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(30):
        model(torch.ones(2, 64)).sum().backward()
        if step == 0:
            note("stepped")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if step == 15 + attempt % 10 and attempt < last and dist.get_rank() == 1:  # the same step is tried three times
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Restart:
    """Seconds: from the death to the processes of the next attempt, which is the launcher's own part, and to its first
    step; and of the job's own start."""

    to_ranks: float
    to_first_step: float
    start: float

    @property
    def beyond_start(self) -> float:
        return self.to_first_step - self.start


def measure(folder: Path, num_restarts: int, nproc: int = 3) -> list[Restart]:
    """Run a job in which rank 1 is killed once per attempt."""
    script = write_script(folder / "train.py", TRAIN)
    words = [*RUN, "--nproc", str(nproc), "--max-restarts", str(num_restarts), "--report-dir", folder / "reports"]
    launched = time.time()
    done = Launch([*words, script, folder, str(num_restarts)]).finish(120 + 90 * num_restarts)
    assert done.exit_code == 0, done

    def last(what: str, attempt: int) -> float:
        return max(float(path.read_text()) for path in folder.glob(f"{what}-{attempt}-*"))

    start = last("stepped", 0) - launched
    return [
        Restart(
            to_ranks=last("made", number + 1) - last("killed", number),
            to_first_step=last("stepped", number + 1) - last("killed", number),
            start=start,
        )
        for number in range(num_restarts)
    ]


def table(restarts: list[Restart]) -> str:
    """A line of the table of ``make faults``."""

    def shown(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"

    beyond, own = [restart.beyond_start for restart in restarts], [restart.to_ranks for restart in restarts]
    return (
        f"{len(restarts)} restarts after kill -9: the next processes are made after {shown(own)}, "
        f"the first step is done after {shown([r.to_first_step for r in restarts])}; the start of the job took "
        f"{restarts[0].start:.2f} s, so a restart takes {shown(beyond)} beyond it; at most {PROMISED_SECONDS:g} s is "
        f"promised on an idle machine: {'kept' if max(beyond) <= PROMISED_SECONDS else 'NOT KEPT'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure restarts.")
    parser.add_argument("--restarts", type=int, default=5)
    with tempfile.TemporaryDirectory(prefix="lockstep-restarts-") as folder:
        print(table(measure(Path(folder), parser.parse_args().restarts)))


if __name__ == "__main__":
    main()
