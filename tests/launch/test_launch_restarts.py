"""Restarts: each attempt clean, a table at the end, and no fourth try of a step that failed three times."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from launch.jobs import RUN, report, summary, train_script, wait_until
from launching import Finished, Launch, run_command, write_script
from lockstep.launch import signals
from lockstep.launch import supervise as supervising
from lockstep.launch.attempt import Ended, Limits, Outcome
from lockstep.launch.cause import Cause
from lockstep.launch.facts import RankFacts
from lockstep.launch.spawn import Program
from lockstep.launch.store import PortTaken
from lockstep.launch.supervise import Job

pytestmark = pytest.mark.multirank

# Goes on from the step where the attempt before was killed, so that every attempt comes one step further.
RESUMING = """
    import os, sys
    import torch
    import torch.distributed as dist
    import lockstep
    from torch.nn.parallel import DistributedDataParallel

    num_steps, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    loaded = lockstep.checkpoint.load(folder, model, missing_ok=True)
    first = loaded.step if loaded else 0
    for step in range(first, num_steps):
        model(torch.ones(2, 4)).sum().backward()
        lockstep.checkpoint.save(folder, model, step=step + 1, keep=2, asynchronous=False)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {os.environ['RANK']} did {num_steps} steps\\n")
"""


def resuming(folder: Path, num_restarts: int) -> Finished:
    script = write_script(folder / "train.py", RESUMING)
    faults = [f"kill:rank={n % 2},step={n + 1},moment=backward,attempt={n}" for n in range(num_restarts)]
    words = [*RUN, "--nproc", "2", "--report-dir", folder / "reports", "--max-restarts", str(num_restarts)]
    words += ["--inject", ";".join(faults)]
    return run_command([*words, script, str(num_restarts + 2), folder / "checkpoints"], limit_s=3000)


def check(done: Finished, folder: Path, num_restarts: int) -> None:
    assert done.exit_code == 0, done
    assert sorted(done.lines) == [f"rank {rank} did {num_restarts + 2} steps" for rank in (0, 1)]
    rows = re.findall(r"^  (\d+) +([\d-]) +([\d-]+) +([\d.]+) +(.*)$", done.errors, re.M)
    assert [int(row[0]) for row in rows] == list(range(num_restarts + 1))
    for number, (_, rank, step, _, cause) in enumerate(rows[:-1]):
        assert (rank, step) == (str(number % 2), str(number + 1)), done
        assert "was killed by SIGKILL" in cause, done
    assert rows[-1][4] == "all ranks ended well"
    attempts = report(folder)["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["failed"] * num_restarts + ["done"]


def test_two_restarts_each_from_where_the_last_one_ended(tmp_path: Path) -> None:
    check(resuming(tmp_path, 2), tmp_path, 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_restarts(tmp_path: Path) -> None:
    check(resuming(tmp_path, 50), tmp_path, 50)


def test_the_same_step_is_not_tried_a_fourth_time(tmp_path: Path) -> None:
    words = [*RUN, "--nproc", "2", "--report-dir", tmp_path / "reports", "--max-restarts", "9"]
    fault = ["--inject", "raise:rank=1,step=4,attempt=any"]
    done = run_command([*words, *fault, train_script(tmp_path), "20", "0.01", tmp_path], limit_s=500)
    assert done.exit_code == 1
    assert "step 4 failed 3 times; it is not tried again" in done.errors
    attempts = report(tmp_path)["attempts"]
    assert [attempt["step_reached"] for attempt in attempts] == [4, 4, 4]
    assert all(
        attempt["rank"] == 1 and "Fault: injected at backward of step 4" in attempt["cause"] for attempt in attempts
    )


def test_a_job_that_is_stopped_between_attempts_begins_no_other(tmp_path: Path) -> None:
    """Rank 0 has failed, and rank 1 does not want to end, when the signal comes."""
    script = write_script(
        tmp_path / "train.py",
        """
        import os, signal, sys, time
        folder, rank = sys.argv[1], os.environ["RANK"]
        if rank == "1":
            signal.signal(signal.SIGTERM, lambda *_: open(f"{folder}/told", "w").close())
            open(f"{folder}/ready", "w").close()
            while True:
                time.sleep(0.1)
        while not os.path.exists(f"{folder}/ready"):
            time.sleep(0.05)
        sys.exit(9)
        """,
    )
    words = [
        *RUN,
        "--nproc",
        "2",
        "--stop-grace",
        "100000",
        "--max-restarts",
        "3",
        "--report-dir",
        tmp_path / "reports",
    ]
    launch = Launch([*words, script, tmp_path])
    wait_until((tmp_path / "told").exists, launch)
    launch.process.send_signal(signal.SIGINT)
    done = launch.finish()
    assert done.exit_code == 130, done
    assert "STOPPED: stopped by SIGINT, after an attempt that failed: rank 0 (pid" in summary(done)
    assert "starting attempt" not in done.errors
    (attempt,) = report(tmp_path)["attempts"]
    assert (attempt["outcome"], attempt["rank"]) == ("stopped", 0)


def test_a_program_without_steps_gets_all_its_restarts(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py", "import os, sys\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(9)\n"
    )
    done = run_command([*RUN, "--report-dir", tmp_path / "reports", "--max-restarts", "3", script])
    assert done.exit_code == 9
    assert done.lines == ["0", "1", "2", "3"]  # a step would not be tried a fourth time


def test_an_attempt_that_cannot_be_begun_does_not_hide_how_the_one_before_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Played:
        def __init__(self, program: object, number: int, *_: object) -> None:
            if number:
                raise PortTaken("port 80 of 127.0.0.1 cannot be used: Address already in use")

        def run(self) -> Ended:
            return Ended(0, Outcome.FAILED, Cause(1, "rank 1 was killed", 3, -9), 1.0, [RankFacts(1, 100, "host")])

    monkeypatch.setattr(supervising, "Attempt", Played)
    monkeypatch.setattr(signals.Signals, "ignore", lambda self: None)
    program = Program(None, "python", [], max_restarts=3, run_id="x")
    job = Job(program, "train.py", ["lockstep", "run"], tmp_path / "reports", Limits(), "", 80)
    assert supervising.supervise(job) == 137
    said = capsys.readouterr().err
    assert "attempt 1 cannot be begun: port 80 of 127.0.0.1 cannot be used" in said
    assert "train.py FAILED: rank 1 was killed" in said
    assert report(tmp_path)["attempts"][0]["rank"] == 1
