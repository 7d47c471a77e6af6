"""A job under random faults: killed, stopped for a while, interrupted, crashed ranks, and now and then the launcher.

``python tests/launch/soak.py --minutes 10`` prints what happened and the goodput; ``make faults`` runs it as a test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from launch.jobs import RUN, process_of_rank
from launching import EXAMPLES, Finished, Launch
from lockstep.checkpoint.reading import Reader

SMALL = ["--batch", "4", "--context", "32", "--width", "32", "--layers", "2"]
LIMIT_S = 1500.0
STOPPED_S = 2.0


@dataclass
class Job:
    """One run of the demo from its first step to its last, however many attempts and launchers it took."""

    seconds: float = 0.0
    num_launchers: int = 0
    faults: list[str] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Soak:
    """How to run: the demo on ``nproc`` ranks, a fault every ``every`` seconds (0: none).

    Or one fault at the first checkpoint from each step of ``at_steps``: as many on a busy machine as on a quiet one,
    while by the clock a machine that needs longer to start a job than from fault to fault would never end it.
    """

    folder: Path
    nproc: int = 3
    num_steps: int = 300
    every: float = 15.0
    seed: int = 0
    at_steps: tuple[int, ...] = ()

    def job(self, name: str, *, with_faults: bool = True) -> Job:
        """Run one job to its end; a hang is an error."""
        folder, job, chance = self.folder / name, Job(), random.Random(f"{self.seed} {name}")
        by_clock = with_faults and self.every > 0 and not self.at_steps
        at_steps = list(self.at_steps) if with_faults else []
        began = time.monotonic()
        while True:
            job.num_launchers += 1
            launch = Launch(self._command(folder))
            results: list[Finished | AssertionError] = []
            waiting = threading.Thread(target=self._finish, args=(launch, results))  # reads what is printed meanwhile
            waiting.start()
            next_fault = time.monotonic() + self.every * chance.uniform(0.5, 1.5)
            while waiting.is_alive():
                waiting.join(0.02 if at_steps else 0.1)
                is_due = by_clock and time.monotonic() >= next_fault
                if at_steps and self._latest_step(folder) >= at_steps[0]:
                    is_due = bool(at_steps.pop(0))
                if is_due and waiting.is_alive():
                    job.faults.append(self._harm(launch, chance))
                    next_fault = time.monotonic() + self.every * chance.uniform(0.5, 1.5)
            (done,) = results
            if isinstance(done, AssertionError):
                raise done
            if done.exit_code == 0:
                break
            # Only a launcher that was killed itself may end without finishing the job.
            assert done.exit_code == -signal.SIGKILL, f"{job.faults}\n{done}"
            assert job.faults[-1] == "launcher killed", f"{job.faults}\n{done}"
        job.seconds = time.monotonic() - began
        reader = Reader(self._checkpoint(folder, self.num_steps))
        reader.verify()
        job.state = {name: reader.tensor(name) for name in reader.manifest.tensors}
        return job

    @staticmethod
    def _checkpoint(folder: Path, step: int) -> Path:
        return folder / "checkpoints" / f"step-{step:08d}"

    @staticmethod
    def _latest_step(folder: Path) -> int:
        return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????")), default=0)

    def _command(self, folder: Path) -> list[str | Path]:
        words: list[str | Path] = [*RUN, "--nproc", str(self.nproc), "--max-restarts", "1000"]
        words += ["--report-dir", folder / "reports", EXAMPLES / "train_gpt.py", *SMALL, "--steps", str(self.num_steps)]
        return [*words, "--save-every", "10", "--checkpoint", folder / "checkpoints", "--out", folder / "out"]

    @staticmethod
    def _finish(launch: Launch, results: list[Finished | AssertionError]) -> None:
        try:
            results.append(launch.finish(LIMIT_S))
        except AssertionError as error:
            results.append(error)

    def _harm(self, launch: Launch, chance: random.Random) -> str:
        """Do something to the job; says what."""
        kind = chance.choice(["KILL", "KILL", "KILL", "STOP", "STOP", "INT", "SEGV", "ABRT", "launcher"])
        rank = chance.randrange(self.nproc)
        if kind == "launcher":
            launch.process.kill()
            return "launcher killed"
        try:
            pid = process_of_rank(launch, rank)
        except AssertionError:
            return f"rank {rank} was not there"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, f"SIG{kind}"))
            if kind == "STOP":
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
        return f"rank {rank} SIG{kind}"


def differences(first: Job, second: Job) -> list[str]:
    """Names of the tensors whose bits differ."""
    assert first.state.keys() == second.state.keys()
    return [name for name in first.state if not torch.equal(first.state[name], second.state[name])]


def soak(plan: Soak, seconds: float) -> list[Job]:
    """Run jobs under faults until the time is up, at least one; all must end with the bits of one without."""
    straight = plan.job("straight", with_faults=False)
    jobs: list[Job] = []
    began = time.monotonic()
    while not jobs or time.monotonic() - began < seconds:
        job = plan.job(f"job-{len(jobs)}")
        wrong = differences(straight, job)
        assert not wrong, f"{wrong} differ after {job.faults}"
        jobs.append(job)
        print(
            f"job {len(jobs)}: {plan.num_steps} steps in {job.seconds:.0f} s (without faults {straight.seconds:.0f}); "
            f"{len(job.faults)} faults: {', '.join(job.faults)}; the same bits",
            flush=True,
        )
    total, faults = sum(job.seconds for job in jobs), sum(len(job.faults) for job in jobs)
    goodput = len(jobs) * straight.seconds / total
    print(
        f"goodput {100 * goodput:.0f} % with {faults} faults in {total:.0f} s, one per {total / max(1, faults):.0f} s"
    )
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo under random faults.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds from one fault to the next, on average")
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        plan = Soak(Path(folder), options.nproc, options.steps, options.every, options.seed)
        soak(plan, 60 * options.minutes)


if __name__ == "__main__":
    main()
