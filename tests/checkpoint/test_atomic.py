"""Complete or absent: killed, out of space or raising at every moment of a save, the one before it still loads."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from checkpoint.runs import Run, names_in
from lockstep.checkpoint.disk import in_use
from lockstep.checkpoint.moments import Moment
from lockstep.errors import CheckpointFailed, NoCheckpoint
from lockstep.testing import inject

OLD, FIRST, SECOND, THIRD = (f"step-{step:08d}" for step in (1, 2, 3, 4))


class History:
    """A run with two checkpoints that is about to save the third and to remove the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Run()
        self.bits: dict[str, Any] = {}
        for _ in range(2):
            self.run.train(1)
            self.run.save(folder)
            self.remember()
        self.run.train(1)
        self.remember()
        self.random_numbers = torch.get_rng_state()

    def at(self, folder: Path) -> History:
        """The same in another folder."""
        other = copy.copy(self)
        other.folder = Path(shutil.copytree(self.folder, folder))
        return other

    def remember(self) -> None:
        self.bits[f"step-{self.run.num_steps:08d}"] = self.run.bits()

    def save(self, **options: Any) -> Any:
        torch.set_rng_state(self.random_numbers)  # whatever was loaded in this process since
        return self.run.save(self.folder, keep=2, **options)

    def require_whole(self) -> str:
        """A fresh process finds a checkpoint that is whole, and every one that has the name of one is."""
        for name in names_in(self.folder):
            if name.startswith("step-"):
                lockstep.checkpoint.verify(self.folder / name)
        other = Run(seed=9)
        name = other.load(self.folder).path.name
        assert other.bits() == self.bits[name]
        return str(name)

    def require_next_save_is_clean(self) -> None:
        """The next save leaves two checkpoints, `latest`, and nothing else."""
        other = Run(seed=9)
        other.load(self.folder)
        other.train(THIRD_STEP - other.num_steps)
        path = other.save(self.folder, keep=2).path
        assert path.name == THIRD
        left = names_in(self.folder)
        assert len(left) == 3
        assert {THIRD, "latest"} < left


THIRD_STEP = 4


def num_moments(history: History, folder: Path) -> int:
    with inject.counting() as counted:
        history.at(folder).save()
    return counted.num_seen


def killed_at(history: History, number: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            with inject.fault(None, inject.kill, number=number):
                history.save()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_killed_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.disk.CHUNK_BYTES", 2000)  # several moments inside a file
    saved = History(tmp_path / "saved")
    total = num_moments(saved, tmp_path / "count")
    assert total >= 50
    found = []
    for number in range(1, total + 1):
        history = saved.at(tmp_path / str(number))
        killed_at(history, number)
        found.append(history.require_whole())
        history.require_next_save_is_clean()
    # Before some moment it is the one before, after it the new one; never anything else.
    assert set(found) == {FIRST, SECOND}
    assert found == sorted(found)


@pytest.mark.parametrize("action", [inject.disk_full, inject.read_only, inject.raises])
def test_an_error_at_every_moment(tmp_path: Path, action: inject.Action, caplog: pytest.LogCaptureFixture) -> None:
    saved = History(tmp_path / "saved")
    total = num_moments(saved, tmp_path / "count")
    outcomes = set()
    for number in range(1, total):  # at the last one all is done
        history = saved.at(tmp_path / str(number))
        failure = None
        with inject.fault(None, action, number=number) as fault:
            try:
                history.save()
            except CheckpointFailed as error:
                failure = str(error)
        outcomes.add("failed" if failure else "saved")
        if failure:
            assert "the one before it is untouched" in failure
            assert str(history.folder) in failure
            assert names_in(history.folder) == {OLD, FIRST, "latest"}  # no litter, at once
        assert fault.fired is inject.Fired.FIRED
        history.require_whole()
        history.require_next_save_is_clean()
    assert outcomes == {"saved", "failed"}


def test_the_message_of_a_full_disk(tmp_path: Path) -> None:
    history = History(tmp_path)
    with inject.fault(Moment.FILE_SYNCED, inject.disk_full), pytest.raises(CheckpointFailed) as caught:
        history.save()
    assert "Rank 0: OSError: [Errno 28] No space left on device" in str(caught.value)
    assert "rank-00000.safetensors" in str(caught.value)
    assert caught.value.rank == 0


def test_a_real_limit_of_the_operating_system(tmp_path: Path) -> None:
    history = History(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointFailed, match=os.strerror(errno.EFBIG)):
            history.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert history.require_whole() == FIRST
    assert names_in(tmp_path) == {OLD, FIRST, "latest"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, with room for two small checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    history = History(small_disk / "checkpoints")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(b"x" * 4096):
            pass
    with pytest.raises(CheckpointFailed, match=r"\[Errno 28\] No space left on device"):
        history.save()
    assert names_in(history.folder) == {OLD, FIRST, "latest"}
    assert history.require_whole() == FIRST
    filler.unlink()
    history.save()
    assert history.require_whole() == SECOND


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    history = History(small_disk / "checkpoints")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointFailed, match=r"\[Errno 30\] Read-only file system"):
        history.save()
    assert history.require_whole() == FIRST


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match=r"file/checkpoints|Not a directory|File exists"):
        Run().save(tmp_path / "file" / "checkpoints")


def test_a_folder_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.checkpoint.disk import locked

    history = History(tmp_path)
    monkeypatch.setattr("lockstep.checkpoint.disk._LOCK_SECONDS", 0.2)
    with locked(tmp_path), pytest.raises(CheckpointFailed, match="another process is saving"):
        history.save()
    assert history.require_whole() == FIRST


def test_an_error_in_the_background_is_raised_at_the_next_save(tmp_path: Path) -> None:
    history = History(tmp_path)
    with inject.fault(Moment.FILE_SYNCED, inject.disk_full):
        handle = history.save(asynchronous=True)
        handle._done.wait(60)
    with pytest.raises(CheckpointFailed, match="No space left"):
        history.save()
    assert handle.state is lockstep.checkpoint.State.FAILED
    history.save()  # told once
    assert history.require_whole() == SECOND


def test_an_error_in_the_background_is_raised_by_wait(tmp_path: Path) -> None:
    history = History(tmp_path)
    with inject.fault(Moment.RENAMED, inject.disk_full):
        history.save(asynchronous=True)
        with pytest.raises(CheckpointFailed, match="No space left"):
            lockstep.checkpoint.wait()
    lockstep.checkpoint.wait()
    assert names_in(tmp_path) == {OLD, FIRST, "latest"}


def test_an_error_may_be_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(tmp_path)
    with inject.fault(Moment.FILE_SYNCED, inject.disk_full):
        assert history.save(on_error="warn", asynchronous=True).wait() is None
    assert "No space left" in caplog.text


def test_state_that_cannot_be_saved_may_be_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other ranks go on too, so this one must."""
    handle = Run().save(tmp_path, extra={"x": print}, on_error="warn", asynchronous=True)
    assert handle.wait() is None
    assert "extra/x is a builtins" in caplog.text


def test_the_state_is_that_of_the_call(tmp_path: Path) -> None:
    """Training goes on while the background writes, and does not reach what is written."""
    run = Run()
    run.train(2)
    bits = run.bits()

    def go_on(_: Path) -> None:
        run.train(1)

    with inject.fault(Moment.PARTIAL_MADE, go_on):
        run.save(tmp_path, asynchronous=True).wait()
    assert run.num_steps == 3
    other = Run(seed=3)
    other.load(tmp_path)
    assert other.bits() == bits


def test_a_line_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.checkpoint.saving._QUIET_SECONDS", 0.0)
    Run().save(tmp_path)
    assert "checkpoint of step 0: 0.00 of 0.00 GiB of rank 0" in capsys.readouterr().err


def test_the_copy_is_let_go(tmp_path: Path) -> None:
    handle = Run().save(tmp_path, asynchronous=True)
    handle.wait()
    assert handle._save._snapshot is None


def test_saving_again_and_again_leaves_nothing_open(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, asynchronous=True, keep=1).wait()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(20):
        run.save(tmp_path, asynchronous=True, keep=1)
        run.load(tmp_path)
    deadline = time.monotonic() + 120  # a thread that has said its last word may still be on its way out
    while threading.active_count() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    # Fewer, where something that a test before this one had left has ended meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before[0]
    assert threading.active_count() <= before[1]
    assert len(names_in(tmp_path)) == 2


def test_keep(tmp_path: Path) -> None:
    run = Run()
    for _ in range(5):
        run.train(1)
        run.save(tmp_path, keep=2)
    assert names_in(tmp_path) == {"step-00000004", "step-00000005", "latest"}
    run.save(tmp_path, keep=2)  # the same step again
    assert names_in(tmp_path) == {"step-00000005", "step-00000005.1", "latest"}
    assert Run().load(tmp_path).path.name == "step-00000005.1"
    for bad in ({"keep": 0}, {"on_error": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            run.save(tmp_path, **bad)


def test_what_has_the_name_of_litter_is_removed_whatever_it_is_and_followed_nowhere(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for made in (folder, elsewhere):
        made.mkdir()
    (elsewhere / "file").touch()
    names = [f".step-0000000{number}.0123456789abcdef.{kind}" for number in range(2) for kind in ("partial", "removed")]
    os.mkfifo(folder / names[0])  # to open it would wait for ever
    (folder / names[1]).symlink_to(elsewhere)
    (folder / names[2]).touch()
    (folder / names[3]).mkdir()
    (folder / names[3] / "link").symlink_to(elsewhere)
    Run().save(folder)
    assert names_in(folder) == {"step-00000000", "latest"}
    assert (elsewhere / "file").exists()


def test_what_someone_reads_is_not_removed(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path)
    with in_use(tmp_path / "step-00000000"):
        for _ in range(2):
            run.train(1)
            run.save(tmp_path, keep=1)
        assert names_in(tmp_path) == {"step-00000000", "step-00000002", "latest"}
    run.train(1)
    run.save(tmp_path, keep=1)
    assert names_in(tmp_path) == {"step-00000003", "latest"}


def test_loading_while_another_job_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen is gone before it is held: the one that came in its place is loaded."""
    run, num_saves = Run(), []
    run.save(tmp_path)

    def save_first(directory: Path) -> contextlib.AbstractContextManager[None]:
        if len(num_saves) < 2:
            num_saves.append(directory)
            run.train(1)
            run.save(tmp_path, keep=1)
        return in_use(directory)

    monkeypatch.setattr("lockstep.checkpoint.loading.in_use", save_first)
    other = Run(seed=3)
    assert other.load(tmp_path).path.name == "step-00000002"
    assert other.bits() == run.bits()
    with pytest.raises(NoCheckpoint):
        other.load(tmp_path / "step-00000001")
