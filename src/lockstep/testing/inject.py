"""Faults at a named moment: a process that is killed, an exception, a disk that is full.

with inject.fault(Moment.FILE_SYNCED, inject.disk_full):            # the first time this moment comes
    lockstep.checkpoint.save(...)
with inject.fault(None, inject.kill, number=17, rank=2): ...        # whichever moment is the 17th, on rank 2 only

"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from lockstep.checkpoint.moments import Moment, listeners

Action = Callable[[Path], None]


class Fault(Exception):
    """What ``raises`` raises."""


class Fired(Enum):
    """Whether a fault has happened."""

    NOT_YET = "not yet"
    FIRED = "fired"


def kill(path: Path) -> None:
    """End this process at once, as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def raises(path: Path) -> None:
    """Raise an exception that nobody expects."""
    raise Fault(f"injected at {path}")


def disk_full(path: Path) -> None:
    """Raise what the operating system raises when a disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_only(path: Path) -> None:
    """Raise what the operating system raises on a file system that cannot be written to."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


class Injection:
    """A fault that waits for its moment; ``num_seen`` counts the moments that have come."""

    def __init__(self, moment: Moment | None, action: Action, number: int, rank: int | None) -> None:
        self._moment, self._action, self._number, self._rank = moment, action, number, rank
        self.num_seen = 0
        self.fired = Fired.NOT_YET

    def __call__(self, moment: Moment, path: Path) -> None:
        if self._moment not in (None, moment) or not self._is_here():
            return
        self.num_seen += 1
        if self.num_seen == self._number:
            self.fired = Fired.FIRED
            self._action(path)

    def _is_here(self) -> bool:
        return self._rank is None or self._rank == int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def fault(moment: Moment | None, action: Action, *, number: int = 1, rank: int | None = None) -> Iterator[Injection]:
    """Let a fault happen the ``number``-th time a moment comes (any moment for None), on one rank or on all."""
    injection = Injection(moment, action, number, rank)
    listeners.append(injection)
    try:
        yield injection
    finally:
        listeners.remove(injection)


@contextlib.contextmanager
def counting() -> Iterator[Injection]:
    """Count the moments that come, and let nothing happen."""
    with fault(None, kill, number=-1) as injection:
        yield injection
