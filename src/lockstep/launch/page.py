"""A page of memory that a rank writes and the launcher reads: where the rank is.

It is a file that both have mapped, so writing is a copy of a few bytes, and what was written last is still there when
the rank has been killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.observe.moments import Reached, StepMoment

SIZE = 4096
_NAME_BYTES = 200
_MAX_TEXTS = 10_000
# pid, claimed rank, claimed world, seconds it will wait, step, bucket, time in ns
_NUMBERS = struct.Struct("<qqqdqqQ")
# moment, parameter names
_TEXTS = struct.Struct(f"16s{_NAME_BYTES}s")
_SIZE = _NUMBERS.size + _TEXTS.size


@dataclass(frozen=True)
class Place:
    """Where a rank was seen last.  ``step`` is -1 before the first one, ``bucket`` -1 outside of any.

    ``rank`` and ``world`` are what it said when it joined a process group, -1 before that; ``patience`` is how many
    seconds the program said that joining may take, 0 if it did not.
    """

    pid: int = 0
    rank: int = -1
    world: int = -1
    patience: float = 0.0
    step: int = -1
    bucket: int = -1
    time: float = 0.0
    moment: str = "not started"
    names: str = ""

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def shown_step(self) -> str:
        return str(self.step) if self.step >= 0 else "-"

    @property
    def seen(self) -> str:
        """Where it was, as in "last seen in step 3: done" or "last seen before joining a process group"."""
        return f"in {self}" if self.step >= 0 or self.bucket >= 0 else str(self)

    def __str__(self) -> str:
        where = _WORDS.get(self.moment, self.moment)
        if self.bucket >= 0:
            where += f", bucket {self.bucket} ({self.names})"
        return f"step {self.step}: {where}" if self.step >= 0 else where


_WORDS = {
    "started": "before joining a process group",
    "joining": "in init_process_group",
    "joined": "after init_process_group, before a first step",
    "launch": "start of a reduction",
    "packed": "start of a reduction",
    "collect": "waiting for a reduction",
    "end": "done",
    "loaded": "checkpoint loaded",
    "saving": "saving a checkpoint",
}


def page_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.page"


class Page:
    """The writing end.  It is called many times in a step, so texts are packed once and kept."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _make_room(handle)
            self._memory = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._pid = os.getpid()
        self._is_parent = True
        self._claims: tuple[int, int, float] = (-1, -1, 0.0)
        self._has_stepped = False
        self._texts: dict[tuple[StepMoment, str], bytes] = {}
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child nothing is noted."""
        self._is_parent = False

    def write(self, reached: Reached) -> None:
        """Note a moment."""
        moment, step, bucket, names, subject = reached
        if not self._is_parent or moment is StepMoment.PACKED:  # the launch before it says where that is
            return
        if moment is StepMoment.JOINING and isinstance(subject, tuple):
            self._claims = subject
        if not self._has_stepped:
            self._has_stepped = moment not in _BEFORE_STEPS
            step = step if self._has_stepped else -1
        text = self._texts.get((moment, names))
        if text is None:
            text = self._text(moment, names)
        # One copy: packing in place begins by clearing it, and a rank that is killed then would be nowhere.
        self._memory[:_SIZE] = _NUMBERS.pack(self._pid, *self._claims, step, bucket, time.time_ns()) + text

    def _text(self, moment: StepMoment, names: str) -> bytes:
        if len(self._texts) >= _MAX_TEXTS:
            self._texts.clear()
        text = _TEXTS.pack(moment.value.encode(), names.encode(errors="replace")[:_NAME_BYTES])
        self._texts[moment, names] = text
        return text


def _make_room(handle: int) -> None:
    """Have the page on the disk before it is mapped: to write into one that a full disk has no room for is deadly."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, SIZE)
    else:
        os.ftruncate(handle, SIZE)


_BEFORE_STEPS = (StepMoment.STARTED, StepMoment.JOINING, StepMoment.JOINED)


def place_of(folder: Path, rank: int, pid: int) -> Place:
    """Where a rank was seen last; nowhere, if another process has written that."""
    place = read_place(page_path(folder, rank))
    return place if place.pid == pid else Place()


def read_place(path: Path) -> Place:
    """Read where a rank was seen last; a rank that has written nothing is nowhere yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return Place()
    if len(data) < _SIZE or not any(data[: _NUMBERS.size]):
        return Place()
    pid, rank, world, patience, step, bucket, when = _NUMBERS.unpack_from(data)
    moment, names = _TEXTS.unpack_from(data, _NUMBERS.size)
    return Place(pid, rank, world, patience, step, bucket, when / 1e9, _text(moment), _text(names))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
