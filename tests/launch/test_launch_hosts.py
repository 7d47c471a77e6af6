"""Several hosts, through torch's launcher: who is missing, who came twice, and what is left when it is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.jobs import RUN, is_there, process_of_rank, report, train_script, wait_for_first_step, wait_until
from launching import Launch, free_port, run_command, write_script

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def words(folder: Path, host: int, port: int, *options: str) -> list[str | Path]:
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [
        *RUN,
        "--nnodes",
        "2",
        "--node-rank",
        str(host),
        *address,
        *options,
        "--report-dir",
        folder / f"reports-{host}",
    ]


def test_a_host_that_does_not_come_is_named(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('never')\n")
    done = run_command([*words(tmp_path, 0, free_port(), "--rdzv-conf", "timeout=6"), script])
    assert done.exit_code == 1, done
    assert "the hosts did not meet: host(s) [1] (--node-rank) of 2 did not come to 127.0.0.1:" in done.errors
    assert "Traceback" not in done.errors


def test_a_first_host_that_is_not_there_is_named(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('never')\n")
    done = run_command([*words(tmp_path, 1, free_port(), "--rdzv-conf", "timeout=6"), script])
    assert done.exit_code == 1, done
    assert "host 0 (--node-rank 0) does not answer at 127.0.0.1:" in done.errors


def test_two_hosts_with_the_same_number_are_named(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", "print('never')\n")
    port = free_port()
    options = ["--rdzv-conf", "timeout=200"]
    first = Launch([*words(tmp_path, 0, port, *options), script])
    twins = [Launch([*words(tmp_path, 1, port, "--nproc", str(1 + n), *options), script]) for n in range(2)]
    done = [launch.finish() for launch in (first, *twins)]
    assert any("two hosts say --node-rank 1: " in finished.errors for finished in done), "\n".join(map(str, done))


def test_two_launchers_train_together_and_the_one_that_fails_reports(tmp_path: Path) -> None:
    script, port = train_script(tmp_path), free_port()
    fault = ["--inject", "raise:rank=1,step=3"]
    launches = [Launch([*words(tmp_path, host, port, *fault), script, "100000", "0.01", tmp_path]) for host in (0, 1)]
    done = [launch.finish() for launch in launches]
    assert [finished.exit_code for finished in done] == [1, 1]
    assert "FAILED on this host: rank 1" in done[1].errors
    assert "Fault: injected at backward of step 3" in done[1].errors
    (path,) = (tmp_path / "reports-1").glob("*.json")
    path.parent.rename(tmp_path / "reports")
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["rank"] == 1
    assert attempt["ranks"][0]["last_seen"]["step"] == 3


def test_ranks_of_a_host_end_with_its_launcher(tmp_path: Path) -> None:
    script, port = train_script(tmp_path), free_port()
    launches = [Launch([*words(tmp_path, host, port), script, "100000", "0.01", tmp_path]) for host in (0, 1)]
    wait_for_first_step(tmp_path, launches[0])
    rank = process_of_rank(launches[1], 1)
    launches[1].process.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_there(rank))
    assert launches[1].finish().exit_code == -signal.SIGKILL
    assert launches[0].finish().exit_code != 0
