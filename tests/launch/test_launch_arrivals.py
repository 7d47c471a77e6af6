"""Ranks that never come to the process group, and processes that claim the same one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.jobs import RUN, report, summary
from launching import run_command, write_script
from lockstep.launch.arrivals import Arrivals
from lockstep.launch.page import Place


@pytest.mark.multirank
def test_a_rank_that_never_comes_is_named_with_its_stack(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys, time
        import torch.distributed as dist

        def read_a_very_large_file():
            open(f"{sys.argv[1]}/reading", "w").close()
            time.sleep(600)

        if os.environ["RANK"] == "1":
            read_a_very_large_file()
        while not os.path.exists(f"{sys.argv[1]}/reading"):
            time.sleep(0.05)  # or a slow start of the other would be what is waited for
        dist.init_process_group()
        """,
    )
    words = [*RUN, "--nproc", "2", "--start-timeout", "2", "--report-dir", tmp_path / "reports"]
    done = run_command([*words, script, tmp_path])
    assert done.exit_code == 1, done
    assert re.search(
        r"FAILED: rank\(s\) 0 waited 2 s in init_process_group for rank 1 \(pid \d+\), which is before joining",
        summary(done),
    )
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["rank"] == 1
    assert "read_a_very_large_file" in attempt["ranks"][1]["stack"]


@pytest.mark.multirank
def test_two_processes_that_say_they_are_the_same_rank_are_named(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os
        import torch.distributed as dist
        dist.init_process_group(rank=min(1, int(os.environ["RANK"])), world_size=3)
        """,
    )
    done = run_command([*RUN, "--nproc", "3", "--report-dir", tmp_path / "reports", script])
    assert done.exit_code == 1, done
    assert re.search(
        r"duplicate rank: pid \d+ \(started as rank 1\) and pid \d+ \(started as rank 2\) both say they are rank 1",
        summary(done),
    )


def place(rank: int, world: int, moment: str = "joining", patience: float = 0.0) -> Place:
    return Place(pid=100 + rank, rank=rank, world=world, patience=patience, moment=moment, time=1.0)


def test_nobody_is_missed_while_all_are_on_their_way() -> None:
    arrivals = Arrivals(0.0001)
    assert arrivals.look({0: Place(), 1: Place()}, {0: 100, 1: 101}) is None
    assert arrivals.look({0: place(0, 2), 1: place(1, 2)}, {0: 100, 1: 101}) is None
    assert arrivals.look({0: place(0, 2), 1: place(1, 2, "forward")}, {0: 100, 1: 101}) is None


def test_a_world_larger_than_what_was_started_is_told() -> None:
    arrivals = Arrivals(1e-9)
    places = {0: place(0, 3), 1: place(1, 3)}
    arrivals.look(places, {0: 100, 1: 101})
    cause = arrivals.look(places, {0: 100, 1: 101})
    assert cause is not None
    assert "rank 2, which was not started here (WORLD_SIZE says 3)" in cause.text


def test_zero_switches_the_limit_off_and_not_the_duplicates() -> None:
    arrivals = Arrivals(0)
    assert arrivals.look({0: place(0, 2), 1: Place()}, {0: 100, 1: 101}) is None
    assert arrivals.look({0: place(0, 2), 1: place(0, 2)}, {0: 100, 1: 101}) is not None


ENDED = [(Place(), "without ever coming there"), (place(1, 2, "end"), "last seen")]


@pytest.mark.parametrize(("ended", "words"), ENDED)
def test_a_rank_that_has_ended_is_told_as_that(ended: Place, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = Arrivals(0)
    places = {0: place(0, 2), 1: ended}
    assert arrivals.look(places, {0: 100}) is None
    monkeypatch.setattr("lockstep.launch.arrivals._ENDED_SECONDS", 0.0)
    monkeypatch.setattr("lockstep.launch.arrivals._ENDED_AFTER_JOINING_SECONDS", 0.0)
    assert arrivals.look(places, {0: 100, 1: 101}) is None
    cause = arrivals.look(places, {0: 100})
    assert cause is not None
    assert cause.rank == 1
    assert f"for rank 1, which has ended, {words}" in cause.text


def test_a_rank_that_has_ended_is_not_missed_where_another_took_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.arrivals._ENDED_SECONDS", 0.0)
    arrivals = Arrivals(0)
    assert arrivals.look({0: Place(), 1: place(0, 2), 2: place(1, 2)}, {1: 101, 2: 102}) is None


@pytest.mark.multirank
def test_a_rank_that_ends_before_it_joins_is_named_soon(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import os, sys
        import torch.distributed as dist

        if os.environ["RANK"] == "1":
            sys.exit(0)
        dist.init_process_group()
        """,
    )
    words = [*RUN, "--nproc", "3", "--start-timeout", "0", "--report-dir", tmp_path / "reports"]
    done = run_command([*words, script])
    assert done.exit_code == 1, done
    assert "wait in init_process_group for rank 1, which has ended, without ever coming there" in summary(done)
    assert report(tmp_path)["attempts"][0]["rank"] == 1


def test_the_programs_own_patience_counts_if_it_is_longer() -> None:
    arrivals = Arrivals(1e-9)
    places = {0: place(0, 2, patience=3600.0), 1: Place()}
    for _ in range(2):
        assert arrivals.look(places, {0: 100, 1: 101}) is None


def test_a_long_wait_is_told_once_before_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lockstep.launch.arrivals._TELL_AFTER_SECONDS", 0.0)
    arrivals = Arrivals(3600, told.append)
    for _ in range(3):
        assert arrivals.look({0: place(0, 2), 1: Place()}, {0: 100, 1: 101}) is None
    assert len(told) == 1
    assert "in init_process_group for rank 1 (pid 101), which is not started" in told[0]


def test_a_launcher_that_was_paused_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lockstep.launch.arrivals.time.monotonic", lambda: clock[0])
    arrivals = Arrivals(10.0)
    causes = []
    for passed in (1.0, 1.0, 3600.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        clock[0] += passed
        causes.append(arrivals.look({0: place(0, 2), 1: Place()}, {0: 100, 1: 101}))
    assert [cause is None for cause in causes] == [True] * 8 + [False] * 2
