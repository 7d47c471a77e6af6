"""The page that a rank writes and the launcher reads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lockstep.launch.page import Page, Place, read_place
from lockstep.observe.moments import Reached, StepMoment


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    assert read_place(tmp_path / "page") == Place()
    page.write(Reached(StepMoment.STARTED, 0, -1, "", None))
    assert read_place(tmp_path / "page").step == -1  # no step yet, whatever number comes first
    page.write(Reached(StepMoment.JOINING, 0, -1, "", (1, 4, 90.0)))
    page.write(Reached(StepMoment.COLLECT, 12, 3, "größe.weight ... b.bias", None))
    place = read_place(tmp_path / "page")
    assert (place.pid, place.rank, place.world, place.patience) == (os.getpid(), 1, 4, 90.0)
    assert (place.step, place.bucket, place.moment) == (12, 3, "collect")
    assert str(place) == "step 12: waiting for a reduction, bucket 3 (größe.weight ... b.bias)"
    page.write(Reached(StepMoment.END, 12, -1, "", None))
    assert str(read_place(tmp_path / "page")) == "step 12: done"


def test_names_that_are_too_long_are_cut(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    page.write(Reached(StepMoment.LAUNCH, 1, 0, "ä" * 5000, None))
    place = read_place(tmp_path / "page")
    assert 0 < len(place.names) < 5000
    assert place.step == 1


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    page.write(Reached(StepMoment.FORWARD, 1, -1, "", None))
    child = os.fork()
    if child == 0:
        page.write(Reached(StepMoment.FORWARD, 2, -1, "", None))
        os._exit(0)
    os.waitpid(child, 0)
    assert read_place(tmp_path / "page").step == 1


@pytest.mark.parametrize("data", [b"", b"\x01", b"\0" * 4096, b"\xff" * 4096])
def test_a_page_that_makes_no_sense_is_no_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "page").write_bytes(data)
    assert isinstance(read_place(tmp_path / "page"), Place)
    assert read_place(tmp_path / "missing") == Place()


def test_a_rank_is_somewhere_at_every_moment(tmp_path: Path) -> None:
    """One that is killed as it writes is not "never heard of"."""
    child = os.fork()
    if child == 0:
        page = Page(tmp_path / "page")
        while True:
            page.write(Reached(StepMoment.FORWARD, 7, -1, "", None))
    try:
        while read_place(tmp_path / "page").step < 0:
            pass
        places = {(place.pid, place.step) for place in (read_place(tmp_path / "page") for _ in range(30_000))}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert places == {(child, 7)}
