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
_NAME_BYTES = 400
# pid, claimed rank, claimed world, seconds it will wait, step, bucket, time in ns, moment, parameter names
_LAYOUT = struct.Struct(f"<qqqdqqQ16s{_NAME_BYTES}s")


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
    """The writing end."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, SIZE)
            self._memory = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._pid = os.getpid()
        self._claims: tuple[int, int, float] = (-1, -1, 0.0)
        self._has_stepped = False

    def write(self, reached: Reached) -> None:
        """Note a moment; in a forked child nothing is noted."""
        if os.getpid() != self._pid:
            return
        moment = reached.moment
        if moment is StepMoment.JOINING and isinstance(reached.subject, tuple):
            self._claims = reached.subject
        self._has_stepped |= moment not in _BEFORE_STEPS
        _LAYOUT.pack_into(
            self._memory,
            0,
            self._pid,
            *self._claims,
            reached.step if self._has_stepped else -1,
            reached.bucket,
            time.time_ns(),
            moment.value.encode(),
            reached.names.encode()[:_NAME_BYTES],
        )


_BEFORE_STEPS = (StepMoment.STARTED, StepMoment.JOINING, StepMoment.JOINED)


def read_place(path: Path) -> Place:
    """Read where a rank was seen last; a rank that has written nothing is nowhere yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return Place()
    if len(data) < _LAYOUT.size or not any(data[: _LAYOUT.size]):
        return Place()
    pid, rank, world, patience, step, bucket, when, moment, names = _LAYOUT.unpack_from(data)
    return Place(pid, rank, world, patience, step, bucket, when / 1e9, _text(moment), _text(names))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
