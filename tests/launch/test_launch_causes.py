"""Who is named: the rank that failed by itself, not those that lost it; how it ended, and where it was."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from launch.jobs import RUN, report, signal_rank, summary, train, train_script, wait_for_first_step
from launching import Finished, Launch, run_command, write_script

pytestmark = pytest.mark.multirank


def run(folder: Path, *options: str, text: str | None = None, nproc: int = 2, env: dict | None = None) -> Finished:
    words = [*RUN, "--nproc", str(nproc), "--report-dir", folder / "reports", *options]
    if text is None:
        return run_command([*words, train_script(folder), "30", "0.01", folder], env=env)
    return run_command([*words, write_script(folder / "train.py", text)], env=env)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_killed_rank_is_the_cause_and_survivors_say_where_they_missed_it(tmp_path: Path, rank: int) -> None:
    done = run(tmp_path, "--inject", f"kill:rank={rank},step=7,moment=launch", nproc=3)
    assert done.exit_code == 137, done
    assert re.search(rf"FAILED: rank {rank} \(pid \d+\) was killed by SIGKILL; last seen in step 7: ", summary(done))
    (attempt,) = report(tmp_path)["attempts"]
    assert (attempt["rank"], attempt["step_reached"]) == (rank, 7)
    assert attempt["ranks"][rank]["last_seen"]["step"] == 7
    assert attempt["ranks"][rank]["last_seen"]["moment"] == "launch"
    assert attempt["ranks"][rank]["last_seen"]["bucket"] == 0
    assert "weight" in attempt["ranks"][rank]["last_seen"]["names"]
    for other in {0, 1, 2} - {rank}:
        facts = attempt["ranks"][other]
        assert facts["errors"], done
        assert "step 7" in facts["errors"][0]["text"]
        assert facts["last_seen"]["step"] == 7
    assert attempt["errors_in_order"][0]["rank"] == rank


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_a_killed_rank_is_the_cause_every_time(tmp_path: Path, number: int) -> None:
    moment = ("forward", "backward", "launch", "packed", "collect", "end")[number % 6]
    done = run(tmp_path, "--inject", f"kill:rank={number % 3},step={number},moment={moment}", nproc=3)
    assert done.exit_code == 137, done
    assert f"FAILED: rank {number % 3} (" in summary(done)


def test_a_kill_from_outside_is_the_cause(tmp_path: Path) -> None:
    launch = train(tmp_path)
    wait_for_first_step(tmp_path, launch)
    pid = signal_rank(launch, 0, signal.SIGKILL)
    done = launch.finish()
    assert done.exit_code == 137
    assert f"rank 0 (pid {pid}) was killed by SIGKILL" in summary(done)


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        pytest.param("sys.exit(3)", 3, r"sys\.exit\(3\) at .*train\.py:5", marks=pytest.mark.soak),
        (
            "import lockstep, torch; lockstep.DDP(torch.nn.Linear(1, 1), init_sync=False); sys.exit(3)",
            3,
            r"sys\.exit\(3\) at .*train\.py:5",
        ),
        ("sys.exit('no data')", 1, r"sys\.exit\('no data'\) at .*train\.py:5"),
        ("os._exit(5)", 5, r"ended with status 5, without a Python exception"),
        pytest.param("os.abort()", 134, r"was killed by SIGABRT", marks=pytest.mark.soak),
        ("raise ValueError('bad batch')", 1, r"raised ValueError: bad batch"),
        ("import ctypes; ctypes.string_at(0)", 139, r"was killed by SIGSEGV"),
    ],
)
def test_every_way_to_end_is_told(tmp_path: Path, line: str, status: int, words: str) -> None:
    text = f"""
        import os, sys, time
        import torch.distributed as dist
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 1: {line}
        time.sleep(600)
    """
    done = run(tmp_path, "--stop-grace", "1", text=text)
    assert done.exit_code == status, done
    assert re.search(rf"FAILED: rank 1 \(pid \d+\) {words}", summary(done)), done
    (attempt,) = report(tmp_path)["attempts"]
    facts = attempt["ranks"][1]
    if status in (134, 139):
        assert "train.py" in facts["stack"]  # written by the dying process itself
    assert "train.py" in attempt["ranks"][0]["stack"]  # of the one that was ended


def test_an_error_in_a_thread_is_in_the_report(tmp_path: Path) -> None:
    text = """
        import os, threading
        import torch.distributed as dist
        def work():
            raise KeyError("from the loader")
        thread = threading.Thread(target=work, name="loader")
        thread.start()
        thread.join()
        os._exit(4)
    """
    done = run(tmp_path, text=text, nproc=1)
    assert "ended with status 4, after thread 'loader' raised KeyError" in summary(done)


def test_an_error_before_anything_was_imported_is_told(tmp_path: Path) -> None:
    text = """
        import os
        if os.environ["RANK"] == "0":
            raise RuntimeError("no such file")
        import time
        time.sleep(600)
    """
    done = run(tmp_path, text=text)
    assert "FAILED: rank 0" in summary(done)
    assert "RuntimeError: no such file" in summary(done)


def test_rank_zeros_last_words_reach_the_others(tmp_path: Path) -> None:
    """It ends at once, and the store with its words lives on in the launcher."""
    text = """
        import os, sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        for step in range(5):
            if step == 3 and dist.get_rank() == 0:
                raise ValueError("the disk of rank 0 is on fire")
            model(torch.ones(1, 3)).sum().backward()
    """
    done = run(tmp_path, text=text)
    assert "FAILED: rank 0" in summary(done)
    (attempt,) = report(tmp_path)["attempts"]
    assert "the disk of rank 0 is on fire" in attempt["ranks"][1]["errors"][0]["text"]


def test_an_early_but_proper_end_is_told_when_others_fail_by_it(tmp_path: Path) -> None:
    text = """
        import sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        for step in range(3 + 2 * dist.get_rank()):
            model(torch.ones(1, 3)).sum().backward()
        sys.stdout.flush()
        import os
        os._exit(0)
    """
    done = run(tmp_path, text=text)
    assert done.exit_code != 0
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["ranks"][0]["how"] == "ended well"
    assert attempt["ranks"][0]["last_seen"]["step"] == 2
    assert attempt["ranks"][0]["last_seen"]["moment"] == "end"


# Out of memory


def cgroup(name: str) -> tuple[Path, str] | None:
    """A new memory cgroup and the name of its limit, where this machine lets us make one."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / name
        try:
            folder.mkdir()
            (folder / limit).write_text(str(1500 << 20))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        return folder, limit
    return None


def test_out_of_memory_by_the_cgroup_is_the_cause(tmp_path: Path) -> None:
    made = cgroup(f"lockstep-test-{os.getpid()}")
    if made is None:
        pytest.skip("no memory cgroup can be made here")
    folder, _ = made
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys, time
        import torch.distributed as dist
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 1:
            kept = []
            while True:
                kept.append(b"x" * (32 << 20))
        time.sleep(600)
        """,
    )
    inner = [*RUN, "--nproc", "2", "--stop-grace", "1", "--report-dir", str(tmp_path / "reports"), str(script)]
    launch = Launch(["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh", *inner])
    try:
        done = launch.finish()
    finally:
        launch.kill()
        folder.rmdir()
    assert done.exit_code == 137, done
    assert re.search(
        r"FAILED: rank 1 \(pid \d+\) was killed: out of memory, the memory limit of its cgroup", summary(done)
    )
