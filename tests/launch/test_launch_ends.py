"""How a job ends: the launcher killed, interrupted or stopped, and ranks that do not want to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launch.jobs import (
    RUN,
    is_there,
    process_of_rank,
    report,
    signal_rank,
    summary,
    train,
    wait_for_first_step,
    wait_until,
)
from launching import Launch, write_script

pytestmark = pytest.mark.multirank

# A rank with a worker process as a data loader has them, and one that has left its session.
WITH_CHILDREN = """
    import os, subprocess, sys, time
    from multiprocessing import get_context

    def work():
        time.sleep(600)

    if __name__ == "__main__":
        get_context("fork").Process(target=work).start()
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
        time.sleep(600)
"""


def start_with_children(folder: Path) -> tuple[Launch, list[int]]:
    script = write_script(folder / "train.py", WITH_CHILDREN)
    launch = Launch([*RUN, "--nproc", "2", "--report-dir", folder / "reports", script, folder])
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in (0, 1)), launch)
    ranks = [process_of_rank(launch, rank) for rank in (0, 1)]
    # Two ranks, and two processes of each.
    wait_until(lambda: len(set(launch._marked()) - {launch.process.pid}) >= 6, launch)
    return launch, ranks


@pytest.mark.soak
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launch = train(tmp_path)
    wait_for_first_step(tmp_path, launch)
    ranks = [process_of_rank(launch, rank) for rank in (0, 1)]
    launch.process.kill()
    wait_until(lambda: not any(map(is_there, ranks)))
    assert launch.finish().exit_code == -signal.SIGKILL  # and finish asserts that nothing is left


def test_what_ranks_started_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launch, _ = start_with_children(tmp_path)
    launch.process.kill()
    assert launch.finish().exit_code == -signal.SIGKILL


def test_ranks_end_without_the_reaper_too(tmp_path: Path) -> None:
    launch = train(tmp_path)
    wait_for_first_step(tmp_path, launch)
    ranks = [process_of_rank(launch, rank) for rank in (0, 1)]
    (reaper,) = [pid for pid in launch._marked() if b"reaper.py" in _cmdline(pid)]
    os.kill(reaper, signal.SIGKILL)
    launch.process.kill()
    wait_until(lambda: not any(map(is_there, ranks)))
    launch.finish()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_signal_ends_all_and_is_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    launch = train(tmp_path)
    wait_for_first_step(tmp_path, launch)
    launch.process.send_signal(number)
    done = launch.finish()
    assert done.exit_code == 128 + number, done
    assert f"STOPPED: stopped by {number.name}" in summary(done)
    attempt = report(tmp_path)["attempts"][-1]
    assert attempt["outcome"] == "stopped"
    for rank in attempt["ranks"]:
        assert "train.py" in rank["stack"]  # where it was when the job was stopped
        assert rank["last_seen"]["step"] >= 0


def test_a_signal_ends_what_ranks_have_started(tmp_path: Path) -> None:
    launch, _ = start_with_children(tmp_path)
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish().exit_code == 130


def test_a_rank_that_is_stopped_is_killed_at_once(tmp_path: Path) -> None:
    # With a grace this long, only a kill that does not wait for it ends the job before the limit.
    launch = train(tmp_path, "--stop-grace", "100000")
    wait_for_first_step(tmp_path, launch)
    signal_rank(launch, 1, signal.SIGSTOP)
    launch.process.send_signal(signal.SIGTERM)
    done = launch.finish()
    assert done.exit_code == 143, done
    assert report(tmp_path)["attempts"][-1]["ranks"][1]["was_stopped"] is True


STUBBORN = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
    while True:
        time.sleep(1)
"""


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", STUBBORN)
    launch = Launch([*RUN, "--nproc", "2", "--stop-grace", "0.5", "--report-dir", tmp_path, script, tmp_path])
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)), launch)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish().exit_code == 143


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", STUBBORN)
    launch = Launch([*RUN, "--stop-grace", "100000", "--report-dir", tmp_path, script, tmp_path])
    wait_until((tmp_path / "ready-0").exists, launch)
    launch.process.send_signal(signal.SIGTERM)
    assert is_there(launch.process.pid)
    wait_until(lambda: launch.process.poll() is not None or launch.process.send_signal(signal.SIGTERM))
    assert launch.finish().exit_code == 143


def test_a_program_that_is_not_python_ends_with_the_launcher_too(tmp_path: Path) -> None:
    launch = Launch([*RUN, "--no-install", "--no-python", "--nproc", "2", "--report-dir", tmp_path, "sleep", "600"])
    wait_until(lambda: len([p for p in launch._marked() if b"sleep" in _cmdline(p)[:6]]) == 2, launch)
    launch.process.kill()
    assert launch.finish().exit_code == -signal.SIGKILL


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_pauses_all_ranks_and_continuing_goes_on(tmp_path: Path) -> None:
    launch = train(tmp_path, num_steps="300")
    wait_for_first_step(tmp_path, launch)
    processes = [launch.process.pid, *(process_of_rank(launch, rank) for rank in (0, 1))]
    launch.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: [state(pid) for pid in processes] == ["T"] * 3)
    launch.process.send_signal(signal.SIGCONT)
    done = launch.finish()
    assert done.exit_code == 0, done
    assert sorted(done.lines) == ["rank 0 done", "rank 1 done"]


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", STUBBORN)
    words = [*RUN, "--report-dir", tmp_path, "--stop-grace", "0.5", script, tmp_path]
    launch = Launch(["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *words])
    wait_until((tmp_path / "ready-0").exists, launch)
    launch.process.send_signal(signal.SIGHUP)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish().exit_code == 143


def test_ctrl_c_while_the_launcher_starts(tmp_path: Path) -> None:
    launch = train(tmp_path)
    wait_until(lambda: "libtorch" in Path(f"/proc/{launch.process.pid}/maps").read_text(), launch)
    launch.process.send_signal(signal.SIGINT)
    done = launch.finish()
    assert done.exit_code in (-signal.SIGINT, 130), done
    assert "Traceback" not in done.errors
    assert "Aborted" not in done.errors


def test_a_job_goes_on_when_nobody_reads_what_the_launcher_says(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "import os, sys\nos.close(2)\nsys.exit(7)\n")
    launch = Launch([*RUN, "--nproc", "2", "--max-restarts", "1", "--report-dir", tmp_path / "reports", script])
    assert launch.process.stderr is not None
    launch.process.stderr.close()
    launch.process.stderr = None
    assert launch.finish().exit_code == 7
    assert len(report(tmp_path)["attempts"]) == 2


def test_ranks_that_cannot_be_started_are_one_line(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('never')\n")
    done = Launch([*RUN, script], env={"PYTHON_EXEC": "/no/such/python"}).finish()
    assert done.exit_code == 2
    assert "the ranks cannot be started" in done.errors
    assert "Traceback" not in done.errors
