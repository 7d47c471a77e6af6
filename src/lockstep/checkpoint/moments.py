"""The moments of a save, each of which can be the last one of a process.

Nobody listens in production.  ``lockstep.testing.inject`` does, to kill a rank or to fill a disk at a moment by name.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path


class Moment(Enum):
    """A point on the way to a complete checkpoint; what was done just before it."""

    FOLDER_READY = "folder ready"
    PARTIAL_MADE = "partial directory made"
    FILE_OPENED = "file opened"
    BYTES_WRITTEN = "bytes written"
    FILE_SYNCED = "file synced"
    REPORTED = "rank reported"
    PARTIAL_SYNCED = "partial directory synced"
    RENAMED = "renamed"
    FOLDER_SYNCED = "folder synced"
    LATEST_REPLACED = "latest replaced"
    OLD_SET_ASIDE = "old checkpoint set aside"
    OLD_REMOVED = "old checkpoint removed"
    DONE = "done"


Listener = Callable[[Moment, Path], None]
listeners: list[Listener] = []


def reached(moment: Moment, path: Path) -> None:
    """Tell whoever listens that ``moment`` has come, for the file or directory at ``path``."""
    for listener in list(listeners):
        listener(moment, path)
