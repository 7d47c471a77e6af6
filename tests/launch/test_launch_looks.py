"""What the launcher looks for once a second, with ranks that are played."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import settings
from lockstep.agree.watch import Watch
from lockstep.launch import attempt as attempts
from lockstep.launch import processes
from lockstep.launch.attempt import Attempt, Limits
from lockstep.launch.facts import Ending, RankFacts
from lockstep.launch.signals import Signals


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(attempts, "say", lines.append)
    return lines


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "30")
    made: Any = Attempt(None, 0, tmp_path, Signals(""), Limits(), 0)  # type: ignore[arg-type]
    made._ranks = [RankFacts(rank, 100 + rank, "host") for rank in range(3)]
    yield made
    made._store.close()


def test_a_launcher_that_may_open_no_more_files_finds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what kept it from starting is what is told."""

    def fail(_: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "iterdir", fail)
    assert processes.kill_marked("LOCKSTEP_RUN_FOLDER=/nowhere") == []


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "is_frozen"),
    [
        ("0::/job", "job/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/job", "job/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("4:freezer:/job", "freezer/job/freezer.state", "FROZEN\n", True),
        ("4:freezer:/job", "freezer/job/freezer.state", "THAWED\n", False),
    ],
)
def test_a_process_in_a_frozen_cgroup_is_stopped(
    cgroup: str, file: str, text: str, is_frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    monkeypatch.setattr(processes, "_CGROUPS", tmp_path / "cgroups")
    for path, content in (("proc/7/cgroup", cgroup), ("proc/7/stat", "7 (python) S 1 1 1"), (f"cgroups/{file}", text)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{content}\n")
    assert processes.is_stopped(7) is is_frozen


def stop(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    monkeypatch.setattr(processes, "is_stopped", lambda pid: pid in pids)


def test_a_stopped_rank_is_told_of_and_then_the_cause(
    attempt: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(monkeypatch, 101)
    causes = [attempt._look_for_stopped() for _ in range(41)]
    (line,) = said
    assert "rank 1 (pid 101) is stopped, and the others wait for it; kill -CONT 101" in line
    assert causes[:39] == [None] * 39  # the ranks themselves come first
    assert causes[39].rank == 1
    assert "is stopped (SIGSTOP or a debugger) for 40 s" in causes[39].text


@pytest.mark.parametrize(
    ("said_by_ranks", "limit"), [(["5.0", "50.0"], 50), (["0.0", "50.0"], 0), (["", "nonsense"], 30), (["nan"], 0)]
)
def test_the_deadline_is_the_one_that_ranks_go_by(
    attempt: Any, said_by_ranks: list[str], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, text in enumerate(said_by_ranks):
        settings.silence_mark(tmp_path, rank).write_text(text)
    stop(monkeypatch, 101)
    causes = [attempt._look_for_stopped() for _ in range(200)]
    assert next((number for number, cause in enumerate(causes, 1) if cause), 0) == (limit + 10 if limit else 0)


def test_a_rank_leaves_word_of_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("RANK", "2")
    for seconds in ("7.5", "0"):
        monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", seconds)
        Watch(None, 0)
        assert float(settings.silence_mark(tmp_path, 2).read_text()) == float(seconds)


def test_a_rank_that_goes_on_in_time_or_a_job_that_is_paused_is_no_fault(
    attempt: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        stop(monkeypatch, 101)
        assert not any(attempt._look_for_stopped() for _ in range(39))
        stop(monkeypatch)
        assert attempt._look_for_stopped() is None
    stop(monkeypatch, 100, 101, 102)
    assert not any(attempt._look_for_stopped() for _ in range(1000))


def test_the_deadline_of_stopped_ranks_can_be_switched_off(
    attempt: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_HEARTBEAT_TIMEOUT", "0")
    stop(monkeypatch, 102)
    assert not any(attempt._look_for_stopped() for _ in range(1000))
    assert len(said) == 1


def test_a_rank_that_goes_on_long_after_the_others_is_told_of_once(attempt: Any, said: list[str]) -> None:
    for _ in range(200):
        attempt._look_for_left()
    assert not said  # all are running
    attempt._ranks[0].exit_code, attempt._ranks[0].ending = 0, Ending.DONE
    for _ in range(200):
        attempt._look_for_left()
    (line,) = said
    assert "still running 60 s after others have ended well: rank 1 (pid 101), last seen not started" in line
    assert "rank 2 (pid 102)" in line


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("the memory limit of its cgroup", "was killed: out of memory, the memory limit of its cgroup"),
        (processes.OF_THE_MACHINE, "was killed by SIGKILL (perhaps out of memory: the kernel killed a process of this"),
        ("", "was killed by SIGKILL"),
    ],
)
def test_memory_is_blamed_for_a_kill_as_far_as_it_is_known(
    attempt: Any, limit: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt._oom_before = {1: {limit: 4, "another": 2}}
    monkeypatch.setattr(processes, "num_oom_kills", lambda: {"another": 2, **({limit: 5} if limit else {})})
    facts = attempt._ranks[1]
    facts.ending, facts.exit_code = Ending.FAILED, -9
    attempt._read_all()
    assert facts.how().startswith(words)
    assert ("memory" in facts.how()) == bool(limit)
